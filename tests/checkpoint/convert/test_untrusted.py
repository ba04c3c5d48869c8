"""Files that somebody made to harm: refused within a second and 64 MB, and nothing that they name is run."""

from __future__ import annotations

import io
import os
import pickle
import random
import struct
import subprocess
import sys
import time
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from deepoffload.checkpoint.convert.archive import ByteSource
from deepoffload.checkpoint.convert.dcp import METADATA, read_dcp
from deepoffload.checkpoint.convert.deepspeed_files import read_file
from deepoffload.checkpoint.convert.pickle_reader import Record, read_pickle
from deepoffload.checkpoint.convert.torch_reader import TorchFile, TorchTensor
from deepoffload.checkpoint.convert.universal import read_universal
from deepoffload.errors import DeepOffloadError, UsageError
from tests.checkpoint.damaged import without_checksums
from tests.checkpoint.training import ALL

RAN = "DEEPOFFLOAD_TEST_RAN"


class Calls:
    """Pickles as a call of a function with arguments."""

    def __init__(self, function: Any, *args: Any, state: Any = None) -> None:
        self.reduced = (function, args) if state is None else (function, args, state)

    def __reduce__(self) -> Any:
        return self.reduced


class WithState:
    def __setstate__(self, state: Any) -> None:
        os.environ[RAN] = "setstate"


class Made:
    def __new__(cls, *args: Any) -> Made:
        os.environ[RAN] = "new"
        return super().__new__(cls)

    def __getnewargs__(self) -> tuple[int]:
        return (1,)


def dangerous() -> list[Any]:
    mark = f"{RAN}=1"
    with_state = WithState()
    with_state.value = 1  # type: ignore[attr-defined]
    return [
        Calls(os.system, f"export {mark}; touch ran"),
        Calls(eval, "__import__('os').environ.__setitem__('DEEPOFFLOAD_TEST_RAN', '1')"),
        Calls(exec, "import os; os.environ['DEEPOFFLOAD_TEST_RAN'] = '1'"),
        Calls(os.putenv, RAN, "1"),
        Calls(subprocess.Popen, ["touch", "ran"]),
        Calls(__import__, "antigravity"),
        Calls(torch.load, "ran"),
        with_state,
        Made(),
        Calls(dict, state={"__class__": "x"}),
    ]


def ran() -> bool:
    return RAN in os.environ or Path("ran").exists()


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(RAN, raising=False)


@pytest.mark.parametrize("number", range(10))
@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_nothing_is_run(number: int, protocol: int) -> None:
    value = dangerous()[number]
    try:
        data = pickle.dumps({"value": value}, protocol=protocol)
    finally:
        os.environ.pop(RAN, None)
    try:
        found = read_pickle(data, "a file")
        assert isinstance(found["value"], (Record, OrderedDict))
    except UsageError:
        pass
    assert not ran()


def test_a_class_becomes_a_record_of_what_the_pickle_says() -> None:
    found = read_pickle(pickle.dumps({"path": Path("/a/b"), "value": 1 + 2j}), "a file")
    assert isinstance(found["path"], Record)
    assert "Path" in str(found["path"].kind)
    assert found["path"].args == ("/", "a", "b")
    assert found["value"].args == (1.0, 2.0)


PLAIN = [
    {"a": 1, "b": [1.5, None, True, False, -3, 2**40, -(2**70)], "c": ("x", b"y", ()), 4: {"d": {}}, (1, "e"): "f"},
    OrderedDict([("one", [1] * 2000), ("two", {str(n): n for n in range(2000)})]),
    {"set": {1, 2, 3}, "long": "ü" * 70000, "bytes": b"x" * 70000, "": ""},
]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_values_come_back(protocol: int) -> None:
    shared = [1, 2]
    for value in (*PLAIN, [shared, shared]):
        found = read_pickle(pickle.dumps(value, protocol=protocol), "a file")
        assert found == value
        assert type(found) is type(value)
    assert found[0] is found[1]


def deep(count: int) -> bytes:
    return b"\x80\x02" + b"]" * count + b"a" * (count - 1) + b"."


def deep_tuple_as_key(count: int) -> bytes:
    return b"\x80\x02}" + b")" + b"\x85" * count + b"Ns."


def many(opcode: bytes, count: int) -> bytes:
    return b"\x80\x02](" + opcode * count + b"e."


BOMBS = {
    "memo far out": b"\x80\x02]r" + struct.pack("<I", 2**32 - 1) + b".",
    "many memos": b"\x80\x04]" + b"\x94" * 4_000_000 + b".",
    "long integer": b"\x80\x02\x8b" + struct.pack("<I", 2**31 - 1) + b"\xff" * 100 + b".",
    "announced bytes": b"\x80\x04\x8e" + struct.pack("<Q", 2**62) + b".",
    "announced text": b"\x80\x02X" + struct.pack("<I", 2**32 - 1) + b".",
    "frame": b"\x80\x04\x95" + struct.pack("<Q", 2**63) + b"}\x94.",
    "deep list": deep(1_500_000),
    "deep key": deep_tuple_as_key(1_000_000),
    "many lists": many(b"]", 5_000_000),
    "many dicts": many(b"}", 5_000_000),
    "many names": b"\x80\x02(" + b"cos\nsystem\n" * 1_000_000 + b"l.",
    "many marks": b"\x80\x02" + b"(" * 6_000_000 + b".",
    "marks and pops": b"\x80\x02" + b"(0" * 8_000_000 + b"N.",
    "no end": b"\x80\x02N" * 1000,
    "nothing": b"",
    "stack underflow": b"\x80\x02R.",
    "mark as value": b"\x80\x02(.",
    "mark in a tuple": b"\x80\x02(\x85.",
    "append to a number": b"\x80\x02K\x01Na.",
    "update of a name": b"\x80\x02cos\nenviron\n(X\x01\x00\x00\x00aK\x01u.",
    "build a name": b"\x80\x02cos\nenviron\n}X\x01\x00\x00\x00aK\x01sb.",
    "build a list": b"\x80\x02]}b.",
    "build a dict": b"\x80\x02}}X\x01\x00\x00\x00aK\x01sb.",
    "call a record": b"\x80\x02cos\nsystem\n)R)R.",
    "instance": b"\x80\x02(S'id'\nios\nsystem\n.",
    "extension": b"\x80\x02\x82\x01.",
    "persistent": b"\x80\x02PX\n.",
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused(name: str) -> None:
    data = BOMBS[name]
    script = (
        "import resource, sys, time\n"
        "from deepoffload.checkpoint.convert.pickle_reader import read_pickle\n"
        "data = sys.stdin.buffer.read()\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "try:\n"
        "    read_pickle(data, 'a file')\n"
        "    print('read')\n"
        "except ValueError as error:\n"
        "    print('refused', str(error)[:60])\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], input=data, capture_output=True, timeout=120)
    lines = done.stdout.decode().splitlines()
    assert done.returncode == 0, done.stderr.decode()[-500:]
    if name in ("memo far out", "frame"):  # harmless: the memo is a dict, and frames are not needed
        assert lines[0] == "read"
    else:
        assert lines[0].startswith("refused"), lines
    assert int(lines[1]) < (64 << 10), f"{int(lines[1]) >> 10} MiB"


# -- archives --------------------------------------------------------------------------------------------------------


def torch_file(value: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def archive_of(records: dict[str, bytes], **compression: Any) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", **compression) as archive:
        for name, data in records.items():
            archive.writestr(name, data)
    return out.getvalue()


def described(shape: tuple[int, ...], stride: tuple[int, ...], offset: int, numel: int, nbytes: int) -> bytes:
    """A file with one tensor that is described so, and a storage of ``nbytes``."""

    class Storage:
        pass

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            return ("storage", torch.FloatStorage, "0", "cpu", numel) if isinstance(value, Storage) else None

    out = io.BytesIO()
    made = Calls(torch._utils._rebuild_tensor_v2, Storage(), offset, shape, stride, False, OrderedDict())
    Pickler(out, protocol=2).dump({"a": made})
    return archive_of({"archive/data.pkl": out.getvalue(), "archive/data/0": b"\0" * nbytes})


TENSORS = {
    "behind the storage": described((4,), (1,), 1, 4, 16),
    "huge expanded": described((2**40,), (0,), 0, 1, 4),
    "huge shape": described((2**40, 2**40), (2**40, 1), 0, 4, 16),
    "large storage": described((4,), (1,), 0, 2**50, 16),
    "negative": described((-4,), (1,), 0, 4, 16),
    "negative stride": described((4,), (-1,), 3, 4, 16),
    "many dimensions": described((1,) * 1000, (1,) * 1000, 0, 4, 16),
    "float shape": described((1.5,), (1,), 0, 4, 16),  # type: ignore[arg-type]
    "compressed": archive_of({"archive/data.pkl": pickle.dumps({}, 2)}, compression=zipfile.ZIP_DEFLATED),
    "two pickles": archive_of({"a/data.pkl": pickle.dumps({}, 2), "b/data.pkl": pickle.dumps({}, 2)}),
    "no pickle": archive_of({"a/other": b""}),
    "big endian": archive_of({"a/data.pkl": pickle.dumps({}, 2), "a/byteorder": b"big"}),
    "no zip": b"PK" + b"\0" * 100,
    "empty": b"",
    "old format": b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.",
}


@pytest.mark.parametrize("name", TENSORS)
def test_impossible_tensors_and_archives(name: str, tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    path.write_bytes(TENSORS[name])
    with pytest.raises(UsageError, match="file.pt"):
        TorchFile(ByteSource(str(path)))


def test_tensors_of_every_kind_are_read(tmp_path: Path) -> None:
    base = torch.arange(24.0).view(4, 6)
    value = {
        "plain": base,
        "transposed": base.t(),
        "part": base[1:3, 2:5],
        "parameter": torch.nn.Parameter(base),
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 5),
        **{str(dtype): torch.ones(3, dtype=dtype) for dtype in (torch.bfloat16, torch.bool, torch.int8, torch.uint16)},
    }
    path = tmp_path / "file.pt"
    torch.save(value, path)
    found = TorchFile(ByteSource(str(path))).value
    assert found.keys() == value.keys()
    for name, tensor in value.items():
        held = found[name]
        assert isinstance(held, TorchTensor)
        assert torch.equal(held.read(0, tensor.numel()).view(tensor.shape), tensor.detach()), name
        if tensor.numel() > 4:
            assert torch.equal(held.read(2, 2), tensor.detach().reshape(-1)[2:4])


@pytest.mark.parametrize("seed", range(4))
def test_damaged_files_are_read_or_refused(seed: int, tmp_path: Path) -> None:
    """Bytes that are changed anywhere never lead to anything but a value or an error of ours."""
    content = torch_file({"a": torch.arange(5.0), "b": {"c": [1, "x", None]}, "d": torch.Size([3, 4])})
    content = without_checksums(content) if seed else content
    path = tmp_path / "file.pt"
    draw = random.Random(seed)
    for _ in range(5000 if ALL else 300):
        changed = bytearray(content)
        for _ in range(draw.choice((1, 1, 2, 8))):
            changed[draw.randrange(len(changed))] = draw.randrange(256)
        path.write_bytes(changed[: draw.choice((len(changed), draw.randrange(len(changed))))])
        start = time.monotonic()
        try:
            found = read_file(str(path))
            for value in found.values():
                if isinstance(value, TorchTensor):
                    value.read(0, min(10, value.shape[0] if value.shape else 1))
        except DeepOffloadError as error:
            assert "file.pt" in str(error)
        assert time.monotonic() - start < 100
    assert not ran()


# -- directories -----------------------------------------------------------------------------------------------------


def universal(tmp_path: Path, name: str) -> Path:
    """A universal checkpoint with one parameter of a name."""
    folder = tmp_path / "universal"
    (folder / "zero").mkdir(parents=True)
    groups = [{"lr": 1.0, "params": [0]}]
    torch.save({"param_groups": groups, "ds_version": "0.19.8"}, folder / "zero" / "optimizer_state.pt")
    model = {"module": {}, "param_shapes": [{name: torch.Size([4])}], "global_steps": 1}
    torch.save(model, folder / "mp_rank_00_model_states.pt")
    return folder


@pytest.mark.parametrize("name", ["../outside", "/etc", "..", "a/../../b", "", "x\0y", "a" * 300])
def test_names_that_lead_outside(name: str, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    torch.save({"param": torch.ones(4)}, outside / "fp32.pt")
    with pytest.raises(UsageError, match="it names a folder"):
        read_universal(str(universal(tmp_path, name)))


def test_links_are_not_followed(tmp_path: Path) -> None:
    folder = universal(tmp_path, "weight")
    (folder / "zero" / "weight").mkdir()
    torch.save({"param": torch.ones(4)}, tmp_path / "elsewhere.pt")
    (folder / "zero" / "weight" / "fp32.pt").symlink_to(tmp_path / "elsewhere.pt")
    with pytest.raises(UsageError, match="link"):
        read_universal(str(folder))


def distributed(tmp_path: Path, change: Callable[[Any], None]) -> Path:
    import torch.distributed.checkpoint as dcp

    folder = tmp_path / "dcp"
    dcp.save({"model": {"weight": torch.arange(8.0).view(2, 4)}}, checkpoint_id=folder)
    metadata = pickle.loads((folder / METADATA).read_bytes())
    change(metadata)
    (folder / METADATA).write_bytes(pickle.dumps(metadata))
    return folder


def moved(metadata: Any, **changes: Any) -> None:
    for place in metadata.storage_data.values():
        place.__dict__.update(changes)


DISTRIBUTED: dict[str, Callable[[Any], None]] = {
    "another folder": lambda metadata: moved(metadata, relative_path="../x.distcp"),
    "absolute": lambda metadata: moved(metadata, relative_path="/etc/passwd"),
    "behind the end": lambda metadata: moved(metadata, offset=2**40),
    "negative": lambda metadata: moved(metadata, offset=-5),
    "long": lambda metadata: moved(metadata, length=2**62),
    "nowhere": lambda metadata: metadata.storage_data.clear(),
    "large": lambda metadata: setattr(metadata.state_dict_metadata["model.weight"], "size", torch.Size([2**40, 4])),
    "chunk outside": lambda metadata: setattr(
        metadata.state_dict_metadata["model.weight"].chunks[0], "offsets", torch.Size([1, 0])
    ),
    "compressed": lambda metadata: moved(metadata, transform_descriptors=["zstd"]),
}


@pytest.mark.parametrize("name", DISTRIBUTED)
def test_distributed_metadata_of_anybody(name: str, tmp_path: Path) -> None:
    with pytest.raises(DeepOffloadError):
        run = read_dcp([str(distributed(tmp_path, DISTRIBUTED[name]))])
        run.weights["weight"].read(0, 8)


def test_metadata_that_calls(tmp_path: Path) -> None:
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / METADATA).write_bytes(pickle.dumps(Calls(os.system, "touch ran")))
    with pytest.raises(UsageError, match="no metadata"):
        read_dcp([str(tmp_path / "dcp")])
    assert not ran()
