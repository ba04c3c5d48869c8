"""Files that are damaged or made by somebody else: recognised, and nothing else is touched."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import deepoffload
from deepoffload.checkpoint.source import open_checkpoint
from deepoffload.errors import DeepOffloadError, UsageError
from tests.checkpoint.damaged import Opener, recorded, trained
from tests.checkpoint.training import ALL, adamw, snapshot
from tests.support.loops import assert_same_bits


def flipped(path: Path, position: int, bit: int) -> None:
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1 << bit]))


def test_each_byte_of_manifest_and_headers(folder: Path, opener: Opener) -> None:
    """In the short form each seventeenth, which is in another place of every line and entry."""
    stride = 1 if ALL else 17
    opener.open(folder, data=True)
    dice = random.Random(1)
    length = (folder / "manifest.json").stat().st_size
    places = [(folder / "manifest.json", at) for at in range(0, length, stride)]
    for path in sorted(folder.glob("*.safetensors")):
        header = 8 + int.from_bytes(path.read_bytes()[:8], "little")
        places += [(path, at) for at in range(0, header, stride)]
    places += [(folder / "training.json", at) for at in range(0, (folder / "training.json").stat().st_size, stride)]
    for path, at in places:
        bit = dice.randrange(8)
        flipped(path, at, bit)
        with pytest.raises(DeepOffloadError):
            opener.open(folder)
        flipped(path, at, bit)
    opener.open(folder, data=True)


def test_a_file_for_other_programs(folder: Path, opener: Opener) -> None:
    """``config.json`` is read by ``from_pretrained`` only."""
    recorded(folder, "config.json", b'{"vocab_size": 512, "model_type": "llama"}')
    opener.open(folder)
    for at in range(len((folder / "config.json").read_bytes())):
        flipped(folder / "config.json", at, at % 8)
        with pytest.raises(UsageError, match=r"config\.json is damaged"):
            opener.open(folder)
        flipped(folder / "config.json", at, at % 8)
    opener.open(folder)


def test_random_bits_of_data(folder: Path, opener: Opener) -> None:
    dice = random.Random(2)
    files = [path for path in sorted(folder.glob("*.safetensors")) if path.stat().st_size]
    for _ in range(1000 if ALL else 100):
        path = dice.choice(files)
        at, bit = dice.randrange(path.stat().st_size), dice.randrange(8)
        flipped(path, at, bit)
        with pytest.raises(UsageError, match="damaged"):
            opener.open(folder, data=True)
        flipped(path, at, bit)


def test_links_and_other_things_in_the_place_of_files(folder: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside.safetensors"
    for name in ("model.safetensors", "manifest.json"):
        path = folder / name
        path.rename(outside)
        for make, message in (
            (lambda path: path.symlink_to(outside), "link"),
            (lambda path: path.mkdir(), "no ordinary file|directory"),
            (lambda path: None, "missing"),
        ):
            make(path)
            with pytest.raises(UsageError, match=message), open_checkpoint(str(folder), lambda nbytes: None):
                pass
            if path.is_symlink():
                path.unlink()
            elif path.is_dir():
                path.rmdir()
        outside.rename(path)
    with open_checkpoint(str(folder), lambda nbytes: None):
        pass


def test_a_load_that_fails_on_its_way_refuses_to_train(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1024, 700))
    optimizer = adamw(model)
    state = deepoffload.TrainingState(model, optimizer)

    def train() -> None:
        model(torch.ones(1024)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    train()
    expected = snapshot(model, optimizer)
    state.save(tmp_path, "good")
    path = Path(state.save(tmp_path, "bad")) / "optimizer-00001-of-00001.safetensors"
    flipped(path, path.stat().st_size - 5, 3)
    train()
    with pytest.raises(UsageError, match=r"optimizer-.*is damaged between offset \d+"):
        state.load(tmp_path, "bad")
    for use in (
        lambda: model(torch.ones(1024)),
        lambda: model[0](torch.ones(1024)),
        optimizer.step,
        lambda: state.save(tmp_path),
    ):
        with pytest.raises(UsageError, match="half loaded: .*load a checkpoint"):
            use()
    state.load(tmp_path, "good")
    assert_same_bits(expected, snapshot(model, optimizer))
    train()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ["mp_rank_00_model_states.pt", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"],
            "from-deepspeed {0} --tag a",
        ),
        (["zero_pp_rank_1_mp_rank_00_model_states.pt"], "from-deepspeed {0} --tag a"),
        (["mp_rank_00_model_states.pt", "zero"], "from-universal {0} --tag a"),
        ([".metadata", "__0_0.distcp"], "from-dcp {0}/a"),
        (["config.json", "model-00001-of-00002.safetensors"], "weights alone"),
        (["notes.txt"], "manifest.json is missing"),
    ],
    ids=["zero", "zero3", "universal", "dcp", "weights", "other"],
)
def test_folders_of_other_programs(names: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "latest").write_text("a")
    for name in names:
        (tmp_path / "a" / name).touch()
    model = nn.Linear(2, 2)
    with pytest.raises(UsageError, match=re.escape(message.format(tmp_path))):
        deepoffload.TrainingState(model).load(tmp_path)


def test_a_newest_checkpoint_that_is_gone(folder: Path) -> None:
    (folder.parent / "latest").write_text("two")
    model, optimizer = trained()
    state = deepoffload.TrainingState(model, optimizer)
    with pytest.raises(UsageError, match=r"latest names 'two', which is not there; name the tag .*\(there are: one\)"):
        state.load(folder.parent)
    with pytest.raises(UsageError, match="there is no checkpoint 'three'"):
        state.load(folder.parent, "three")
    state.load(folder.parent, "one")
