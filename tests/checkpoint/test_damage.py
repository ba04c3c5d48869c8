"""Files that are damaged or made by somebody else: recognised, and nothing else is touched."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepoffload
from deepoffload.checkpoint.block_pool import BLOCK_BYTES, BlockPool, crc32c_of
from deepoffload.checkpoint.block_reader import BlockReader
from deepoffload.checkpoint.manifest import read_manifest
from deepoffload.checkpoint.source import CheckpointSource, open_checkpoint
from deepoffload.errors import DeepOffloadError, UsageError
from deepoffload.io.engine import IoEngine
from tests.checkpoint.training import ALL, adamw, snapshot
from tests.support.loops import assert_same_bits
from tests.support.models import mlp, rows

SECONDS_MAX = 1.0


def step(model: Any, optimizer: Any) -> None:
    model(rows()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = mlp(depth=3).to(torch.bfloat16)
    optimizer = adamw(model)
    model(rows().bfloat16()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    state = deepoffload.TrainingState(model, optimizer)
    return Path(state.save(tmp_path_factory.mktemp("saved"), "one"))


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy" / "one"))


class Opener:
    """Opens a checkpoint again and again with one I/O engine."""

    def __init__(self) -> None:
        self.io, self.pool = IoEngine(block_bytes=BLOCK_BYTES), BlockPool()

    def open(self, folder: Path, *, data: bool = False) -> None:
        manifest = read_manifest(str(folder))
        reader = BlockReader(self.io, self.pool, str(folder), manifest, lambda nbytes: None)
        try:
            CheckpointSource(str(folder), manifest, reader)
            if data:
                for file in manifest.files:
                    reader.verify(file)
        finally:
            reader.close()


@pytest.fixture
def opener() -> Iterator[Opener]:
    made = Opener()
    yield made
    made.io.close()
    made.pool.close()


def flipped(path: Path, position: int, bit: int) -> None:
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1 << bit]))


def test_each_byte_of_manifest_and_headers(folder: Path, opener: Opener) -> None:
    opener.open(folder, data=True)
    dice = random.Random(1)
    places = [(folder / "manifest.json", at) for at in range((folder / "manifest.json").stat().st_size)]
    for path in sorted(folder.glob("*.safetensors")):
        header = 8 + int.from_bytes(path.read_bytes()[:8], "little")
        places += [(path, at) for at in range(0, header, 1 if ALL else 5)]
    places += [(folder / "training.json", at) for at in range(0, (folder / "training.json").stat().st_size, 5)]
    for path, at in places:
        bit = dice.randrange(8)
        flipped(path, at, bit)
        with pytest.raises(DeepOffloadError):
            opener.open(folder)
        flipped(path, at, bit)
    opener.open(folder, data=True)


def test_random_bits_of_data(folder: Path, opener: Opener) -> None:
    dice = random.Random(2)
    files = [path for path in sorted(folder.glob("*.safetensors")) if path.stat().st_size]
    for _ in range(1000 if ALL else 200):
        path = dice.choice(files)
        at, bit = dice.randrange(path.stat().st_size), dice.randrange(8)
        flipped(path, at, bit)
        with pytest.raises(UsageError, match="damaged"):
            opener.open(folder, data=True)
        flipped(path, at, bit)


NASTY: list[Any] = [
    None, True, -1, 2**63, 2**64 + 1, 10**300, 1.5, "", "x", "..", "../outside", "/etc/passwd", "a/b", "manifest.json",
    "\0", [], {}, [[]], [-1], [2**62, 2**62], [0, 0, 0], {"$": "tensor", "name": "../x"}, {"$": "tuple", "items": 3},
    {"$": "eval"}, "NaN",
]  # fmt: skip


def nodes(tree: Any) -> Iterator[tuple[Any, Any]]:
    items = list(tree.items()) if isinstance(tree, dict) else list(enumerate(tree)) if isinstance(tree, list) else []
    for key, value in items:
        yield tree, key
        yield from nodes(value)


def mutated(text: bytes, dice: random.Random) -> bytes:
    """The same JSON with something wrong in it."""
    tree = json.loads(text)
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        found = list(nodes(tree))
        where, key = dice.choice(found)
        action = dice.randrange(4)
        if action == 0:
            del where[key]
        elif action == 1 and isinstance(where, dict):
            where[dice.choice(["..", "../x", "/etc/passwd", "", "a" * 300, "model.safetensors", "x"])] = where.pop(key)
        elif action == 2 and isinstance(where[key], int):
            where[key] += dice.choice((-1, 1, 8, 2**40, 2**70))
        else:
            where[key] = dice.choice(NASTY)
    return json.dumps(tree).encode()


def sealed(folder: Path, body: dict[str, Any]) -> None:
    """Write a manifest whose own checksum is right."""
    rest = json.dumps(body)[1:].encode() + b"\n"
    (folder / "manifest.json").write_bytes(b'{"crc32c": "%08x",\n' % crc32c_of(rest) + rest)


def recorded(folder: Path, name: str, data: bytes) -> None:
    """Replace a small file, with its length and checksums in the manifest."""
    (folder / name).write_bytes(data)
    body = json.loads((folder / "manifest.json").read_bytes())
    del body["crc32c"]
    sums = "".join(f"{crc32c_of(data[at : at + BLOCK_BYTES]):08x}" for at in range(0, len(data), BLOCK_BYTES))
    body["files"][name] = {"bytes": len(data), "crc32c": sums}
    sealed(folder, body)


def load_all(folder: Path, opener: Opener) -> str:
    """What becomes of loading: an error of ours within the time, or success."""
    torch.manual_seed(1)
    model = mlp(depth=3).to(torch.bfloat16)
    optimizer = adamw(model)
    started = time.perf_counter()
    try:
        opener.open(folder, data=True)
        deepoffload.TrainingState(model, optimizer).load(folder.parent, "one")
    except DeepOffloadError as error:
        message = str(error)
    else:
        message = ""
    assert time.perf_counter() - started < SECONDS_MAX * 10  # a loaded machine
    return message


@pytest.mark.parametrize("target", ["manifest.json", "training.json", "header"])
def test_files_that_somebody_made(target: str, folder: Path, opener: Opener, tmp_path: Path) -> None:
    dice = random.Random(target)
    outside = {path for path in tmp_path.rglob("*") if path.is_file() and folder not in path.parents}
    refused = 0
    originals = {path.name: path.read_bytes() for path in folder.iterdir()}
    count = (3000 if ALL else 150) if target != "header" else (3000 if ALL else 60)
    for _ in range(count):
        if target == "manifest.json":
            body = json.loads(mutated(originals[target].split(b"\n", 1)[1].join([b"{", b""]), dice))
            sealed(folder, body if isinstance(body, dict) else {"": body})
        elif target == "training.json":
            recorded(folder, target, mutated(originals[target], dice))
        else:
            name = dice.choice([name for name in originals if name.endswith(".safetensors")])
            data = originals[name]
            length = int.from_bytes(data[:8], "little")
            header = mutated(data[8 : 8 + length], dice)
            said = len(header) + dice.choice((0, 0, 0, 1, -9, 2**40, 2**63 - len(header)))
            recorded(folder, name, said.to_bytes(8, "little") + header + data[8 + length :])
        refused += bool(load_all(folder, opener))
        for name, data in originals.items():
            (folder / name).write_bytes(data)
        for path in folder.iterdir():
            if path.name not in originals:
                path.unlink()
    assert refused > 0.8 * count, "most of them are wrong in a way that matters"
    assert {path for path in tmp_path.rglob("*") if path.is_file() and folder not in path.parents} == outside


@pytest.mark.parametrize(
    "text",
    [b"[" * 100_000, b'{"a":' * 50_000 + b"1" + b"}" * 50_000, b"[" * 800 + b"]" * 800, b"1" * 100_000, b"\xff", b"",
     b"NaN", b'{"a":1,"a":2}'],
    ids=["open", "deep", "nested", "long", "bytes", "empty", "nan", "twice"],
)  # fmt: skip
@pytest.mark.parametrize("name", ["manifest.json", "training.json"])
def test_json_that_is_none(name: str, text: bytes, folder: Path) -> None:
    if name == "manifest.json":
        (folder / name).write_bytes(b'{"crc32c": "%08x",\n' % crc32c_of(text) + text)
    else:
        recorded(folder, name, text)
    with pytest.raises(UsageError, match="damaged|no manifest"), open_checkpoint(str(folder), lambda nbytes: None):
        pass


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
        with pytest.raises(UsageError, match="half loaded: load a checkpoint"):
            use()
    state.load(tmp_path, "good")
    assert_same_bits(expected, snapshot(model, optimizer))
    train()
