"""Checkpoints that somebody made: a clear error, soon and in little memory, and nothing else is touched."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepoffload
from deepoffload.checkpoint.source import open_checkpoint
from deepoffload.errors import DeepOffloadError, UsageError
from deepoffload.io.checksums import crc32c_of
from tests.checkpoint.damaged import BYTES_MAX, CPU_SECONDS_MAX, Opener, Watched, built, deep, nodes, recorded, sealed
from tests.checkpoint.training import ALL
from tests.support.file_watch import FileWatch

INDEX = "model.safetensors.index.json"

COUNTS = {
    "manifest.json": 4000 if ALL else 60,
    "training.json": 2000 if ALL else 40,
    "header": 3000 if ALL else 50,
    INDEX: 1000 if ALL else 12,
}


def nasty(outside: Path) -> list[Any]:
    """What has no business where numbers, names and lists belong."""
    return [
        None, True, -1, 2**63, 2**64 + 1, 10**300, 10**4000, 1.5, 1e308, "", "x", "..", "../outside", "/etc/passwd",
        "a/b", "manifest.json", "\0", "x" * 100_000, [], {}, [[]], [-1], [2**62, 2**62], [0, 0, 0], [1] * 10_000,
        {"$": "tensor", "name": "../x"}, {"$": "tuple", "items": 3}, {"$": "eval"}, "NaN", deep(300),
        "../../outside/secret.safetensors", str(outside / "secret.safetensors"),
    ]  # fmt: skip


def mutated(text: bytes, dice: random.Random, outside: Path) -> bytes:
    """The same JSON with something wrong in it."""
    tree = json.loads(text)
    names = ["..", "../x", "/etc/passwd", "", "a" * 300, "model.safetensors", "x", str(outside / "secret.safetensors")]
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        found = list(nodes(tree))
        if not found:
            break
        where, key = dice.choice(found)
        action = dice.randrange(4)
        if action == 0:
            del where[key]
        elif action == 1 and isinstance(where, dict):
            where[dice.choice(names)] = where.pop(key)
        elif action == 2 and isinstance(where[key], int):
            where[key] += dice.choice((-1, 1, 8, 2**40, 2**70))
        else:
            where[key] = dice.choice(nasty(outside))
    return json.dumps(tree).encode()


def change(target: str, folder: Path, originals: dict[str, bytes], dice: random.Random, outside: Path) -> None:
    """Make one file another one, with the right checksums in the manifest."""
    if dice.random() < 0.05:
        path = folder / dice.choice(sorted(originals))
        path.unlink()
        path.symlink_to(outside / "secret.safetensors")
    elif target == "manifest.json":
        body = json.loads(mutated(originals[target].split(b"\n", 1)[1].join([b"{", b""]), dice, outside))
        sealed(folder, body if isinstance(body, dict) else {"": body})
    elif target == "header":
        name = dice.choice([name for name in originals if name.endswith(".safetensors")])
        data = originals[name]
        length = int.from_bytes(data[:8], "little")
        header = mutated(data[8 : 8 + length], dice, outside)
        said = len(header) + dice.choice((0, 0, 0, 1, -9, 2**40, 2**63 - len(header)))
        recorded(folder, name, said.to_bytes(8, "little") + header + data[8 + length :])
    else:
        recorded(folder, target, mutated(originals[target], dice, outside))


def load(folder: Path, opener: Opener, outside: Path) -> str:
    """What becomes of loading: an error of ours within the limits, or success."""
    model, optimizer = built(1)
    with FileWatch(outside) as watch, Watched() as taken:
        try:
            opener.open(folder, data=True)
            deepoffload.TrainingState(model, optimizer).load(folder.parent, "one")
        except DeepOffloadError as error:
            message = str(error)
        else:
            message = ""
        assert watch.seen() == []
    assert taken.cpu_s < CPU_SECONDS_MAX and taken.more_bytes < BYTES_MAX
    assert len(message) < 3000
    return message


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    made = tmp_path / "outside"
    made.mkdir()
    (made / "secret.safetensors").write_bytes(bytes(100))
    return made


@pytest.mark.parametrize("target", COUNTS)
def test_files_that_somebody_made(target: str, folder: Path, opener: Opener, outside: Path) -> None:
    dice = random.Random(target)
    index = {"metadata": {"total_size": 8}, "weight_map": {"0.weight": "model.safetensors"}}
    recorded(folder, INDEX, json.dumps(index).encode())
    originals = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert load(folder, opener, outside) == ""
    refused = 0
    for _ in range(COUNTS[target]):
        change(target, folder, originals, dice, outside)
        refused += bool(load(folder, opener, outside))
        for path in folder.iterdir():
            path.unlink()
        for name, data in originals.items():
            (folder / name).write_bytes(data)
    if target != INDEX:  # only other programs read that
        assert refused > 0.8 * COUNTS[target], "most of them are wrong in a way that matters"


LARGE: dict[str, bytes] = {
    "open": b"[" * 100_000,
    "deep": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "nested": b"[" * 800 + b"]" * 800,
    "long": b"1" * 100_000,
    "bytes": b"\xff",
    "empty": b"",
    "nan": b"NaN",
    "twice": b'{"a":1,"a":2}',
    "many": b"[" + b"{}," * 1_000_000 + b"{}]",
    "words": b'{"a":"' + b"x" * (8 << 20) + b'"}',
}


NONE = [
    (name, case)
    for name in ("manifest.json", "training.json", "header")
    for case in LARGE
    if (name, case) != ("training.json", "words")  # an object, which a training state could have
]


@pytest.mark.parametrize(("name", "case"), NONE)
def test_json_that_is_none(name: str, case: str, folder: Path) -> None:
    text = LARGE[case]
    if name == "manifest.json":
        (folder / name).write_bytes(b'{"crc32c": "%08x",\n' % crc32c_of(text) + text)
    elif name == "header":
        recorded(folder, "model.safetensors", len(text).to_bytes(8, "little") + text)
    else:
        recorded(folder, name, text)
    with Watched() as taken:
        with (
            pytest.raises(UsageError, match="damaged|no manifest|too many|more values"),
            open_checkpoint(str(folder), lambda nbytes: None),
        ):
            pass
    assert taken.cpu_s < CPU_SECONDS_MAX
    assert taken.more_bytes < BYTES_MAX or name == "training.json", "a program's own state may be large"


def test_many_tensors_of_one_element_are_no_attack(tmp_path: Path) -> None:
    class Scalars(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.values = nn.ParameterList(nn.Parameter(torch.ones(1)) for _ in range(1500))

    model = Scalars()
    optimizer = deepoffload.CPUAdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones(1)
    optimizer.step()
    optimizer.zero_grad()
    state = deepoffload.TrainingState(model, optimizer)
    state.save(tmp_path)
    state.load(tmp_path)
