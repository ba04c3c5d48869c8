"""A bit that changed inside of a tensor of DeepSpeed's or torch's files is noticed, and the error says in which."""

from __future__ import annotations

import random
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from deepoffload.checkpoint.convert.archive import ByteSource
from deepoffload.checkpoint.convert.commands import run as command
from deepoffload.checkpoint.convert.dcp import read_dcp
from deepoffload.checkpoint.convert.tensors import pieces_of
from deepoffload.checkpoint.convert.torch_reader import TorchFile
from deepoffload.checkpoint.convert.training_run import TrainingRun
from deepoffload.checkpoint.convert.universal import read_universal
from deepoffload.checkpoint.convert.zero import read_zero
from deepoffload.errors import UsageError
from tests.checkpoint.training import ALL
from tests.support.deepspeed_peer import STEPS
from tests.support.loops import assert_same_bits

CASES = {
    "zero1": (f"global_step{STEPS}", read_zero),
    "zero2": (f"global_step{STEPS}", read_zero),
    "zero3": (f"global_step{STEPS}", read_zero),
    "zero2 universal": (f"global_step{STEPS}_universal", read_universal),
    "zero3 universal": (f"global_step{STEPS}_universal", read_universal),
}


def everything(run: TrainingRun) -> dict[str, Tensor]:
    arrays = {f"{name}.{key}": values for name, held in run.arrays.items() for key, values in held.items()}
    return {name: torch.cat(list(pieces_of(values))) for name, values in {**run.weights, **arrays}.items()}


def storages(file: Path) -> Iterator[tuple[str, int, int]]:
    """Names of the records that hold bytes of tensors, where these begin, and how many there are."""
    with zipfile.ZipFile(file) as archive, file.open("rb") as content:
        for info in archive.infolist():
            content.seek(info.header_offset + 26)
            name_bytes, extra_bytes = (int.from_bytes(content.read(2), "little") for _ in range(2))
            if "/data/" in info.filename and info.file_size:
                yield info.filename, info.header_offset + 30 + name_bytes + extra_bytes, info.file_size


@pytest.mark.parametrize("name", CASES)
def test_every_tensor_that_is_read_is_compared(name: str, fixtures: Path, tmp_path: Path) -> None:
    tag, read = CASES[name]
    folder = tmp_path / "copy"
    shutil.copytree(fixtures / name.split()[0] / tag, folder)
    expected = everything(read(str(folder)))
    places = [(file, *each) for file in sorted(folder.rglob("*.pt")) for each in storages(file)]
    dice = random.Random(name)
    noticed = set()
    for file, entry, begin, nbytes in places if ALL else dice.sample(places, min(len(places), 60)):
        content = file.read_bytes()
        changed = bytearray(content)
        changed[begin + dice.randrange(nbytes)] ^= 1 << dice.randrange(8)
        file.write_bytes(changed)
        try:
            assert_same_bits(expected, everything(read(str(folder))))  # of no tensor that is used
        except UsageError as error:
            assert f"{file} is damaged: " in str(error) and f"entry '{entry}'" in str(error), error
            noticed.add(file.name)
        file.write_bytes(content)
    assert len(noticed) > 1, "not in one kind of file alone"
    assert_same_bits(expected, everything(read(str(folder))))


def test_the_error_names_the_tensor(fixtures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "theirs"
    shutil.copytree(fixtures / "zero3", folder)
    file = next((folder / f"global_step{STEPS}").glob("*zero_pp_rank_1_*_optim_states.pt"))
    value = TorchFile(ByteSource(str(file))).value
    moments = value["optimizer_state_dict"]["optimizer_state_dict"]["state"][1]["exp_avg_sq"]
    _, begin, nbytes = next(found for found in storages(file) if found[0] == moments.storage.entry)
    content = bytearray(file.read_bytes())
    content[begin + nbytes // 2] ^= 1
    file.write_bytes(content)
    assert command(["from-deepspeed", str(folder), str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err
    named = "['optimizer_state_dict']['optimizer_state_dict']['state'][1]['exp_avg_sq']"
    assert f"{file} is damaged: the tensor {named}, its entry '{moments.storage.entry}', has other bytes" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["theirs"]


def test_distributed_files(tmp_path: Path) -> None:
    folder = tmp_path / "dcp"
    dcp.save({"model": {"up": torch.arange(4000.0), "down": torch.ones(3000)}}, checkpoint_id=folder)
    (file,) = folder.glob("*.distcp")
    content = file.read_bytes()
    begin = content.index(torch.arange(1000.0, 1100.0).numpy().tobytes())
    changed = bytearray(content)
    changed[begin] ^= 16
    file.write_bytes(changed)
    with pytest.raises(UsageError, match=r"distcp is damaged: the tensor model\.up, its entry '.*data/0', has other"):
        everything(read_dcp([str(folder)]))
    file.write_bytes(content)
    assert_same_bits(torch.arange(4000.0), everything(read_dcp([str(folder)]))["up"])


def test_files_without_checksums_are_read(tmp_path: Path) -> None:
    """As torch writes them when it is told so."""
    value = {"a": torch.arange(100.0), "b": torch.ones(3)}
    with torch.utils.serialization.config.patch({"save.compute_crc32": False}):
        torch.save(value, tmp_path / "file.pt")
    found = TorchFile(ByteSource(str(tmp_path / "file.pt"))).value
    assert_same_bits(value, {name: torch.cat(list(pieces_of(values))) for name, values in found.items()})


def test_a_description_with_a_changed_bit(tmp_path: Path) -> None:
    file = tmp_path / "file.pt"
    torch.save({"learning_rate": 0.5, "a": torch.ones(3)}, file)
    content = file.read_bytes()
    file.write_bytes(content.replace(b"learning_rate", b"learning_rata", 1))
    with pytest.raises(UsageError, match=r"its entry 'file/data\.pkl', has other bytes"):
        TorchFile(ByteSource(str(file)))


def test_records_that_overlap_are_refused(tmp_path: Path) -> None:
    """The bytes of one record would be read as often as it is named."""
    file = tmp_path / "file.pt"
    torch.save({"a": torch.zeros(50), "b": torch.zeros(50)}, file)
    content = file.read_bytes()
    with zipfile.ZipFile(file) as archive:
        headers = {info.filename: info.header_offset for info in archive.infolist()}
        directory = archive.start_dir
    first, second = (headers[f"file/data/{key}"].to_bytes(4, "little") for key in "01")
    assert content.count(second, directory) == 1
    file.write_bytes(content[:directory] + content[directory:].replace(second, first))
    with pytest.raises(UsageError, match="overlap"):
        TorchFile(ByteSource(str(file)))
