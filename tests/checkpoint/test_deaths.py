"""Saves that are killed or that fail: earlier checkpoints stay, ``latest`` names a complete one, nothing is left."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import deepoffload
from deepoffload.checkpoint.manifest import read_manifest
from deepoffload.errors import IoFailure
from tests.checkpoint.training import ALL, adamw, snapshot
from tests.support.disks import largest_file, tmpfs
from tests.support.loops import assert_same_bits
from tests.support.programs import Programs

KILLS = 200 if ALL else 4

PROGRAM = """
import random, sys, time
from pathlib import Path
import torch
from torch import nn
import deepoffload
from deepoffload.checkpoint.source import open_checkpoint
from tests.checkpoint.kill_moments import Moment, life_of

directory, swap, kills, waits = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4] == "waits"

def build():
    with deepoffload.offload_context(host_budget="1MiB", nvme_path=swap, step_overlap="none") as context:
        model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)])
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=0.0, weight_decay=0.0, betas=(0.0, 0.9))
    return model, optimizer, context.engine

def become(model, optimizer, number):  # every weight and, as the first beta is 0, every exp_avg
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(float(number))
    sum((param * float(number)).sum() for param in model.parameters()).backward()
    optimizer.step()
    optimizer.zero_grad()

def save_for_ever(first, tell):
    model, optimizer, engine = build()
    state = deepoffload.TrainingState(model, optimizer)
    for number in range(first, first + 10_000):
        become(model, optimizer, number)
        state.save(directory, tag=f"tag{number % 4}", keep_last=3, wait=waits)
        tell("saved")

model, optimizer, engine = build()  # what is imported now need not be imported by every child
become(model, optimizer, 0)
assert engine.stats()["disk_bytes_written"] > 0
engine.close()
started = time.perf_counter()
model, optimizer, engine = build()
become(model, optimizer, 0)
deepoffload.TrainingState(model, optimizer).save(directory, "tag0")
engine.close()
round_s = time.perf_counter() - started  # of a child, before it is killed
dice = random.Random(7)
seen = 0
for kill in range(kills):
    moment = Moment(dice.uniform(0.0, 4.0) * round_s)
    if kill % 2:  # however slow the machine has become, something has been saved
        moment = Moment(dice.uniform(0.0, 2.0) * round_s, "saved", dice.randint(1, 3))
    assert life_of(lambda tell: save_for_ever(1000 * (kill + 1), tell), moment).killed
    latest = (directory / "latest").read_text()
    for folder in directory.iterdir():
        if folder.name == "latest" or folder.name.startswith("."):
            continue
        with open_checkpoint(str(folder), lambda nbytes: None) as source:
            for file in source.manifest.files:
                source.reader.verify(file)
    model, optimizer, engine = build()
    deepoffload.TrainingState(model, optimizer).load(directory)
    number = float(model[0].weight[0, 0])
    assert all(bool((param == number).all()) for param in model.parameters()), "of one save"
    moments = [state["exp_avg"] for state in optimizer.state_dict()["state"].values()]
    assert len(moments) == 16 and all(bool((value == number).all()) for value in moments), "of the same"
    engine.close()
    assert number >= seen, (number, seen)
    seen = number
print("newest", seen)
model, optimizer, engine = build()
deepoffload.TrainingState(model, optimizer).save(directory, "last", keep_last=1)
engine.close()
print(sorted(path.name for path in directory.iterdir()))
"""


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("how", ["waits", "trains_on"])
def test_kills_at_random_moments(how: str, programs: Programs, tmp_path: Path, nvme_path: Path) -> None:
    done = programs.run(PROGRAM, str(tmp_path), str(nvme_path), str(KILLS), how, timeout_s=1400)
    assert done.returncode == 0, done.stderr[-3000:]
    newest, names = done.stdout.splitlines()[-2:]
    assert float(newest.split()[1]) >= 1000, "no save of a child was ever complete"
    assert names == "['last', 'latest']"


def trained(value: float = 1.0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(int(value))
    model = nn.Sequential(nn.Linear(600, 600), nn.Linear(600, 600))
    optimizer = adamw(model)
    model(torch.ones(600)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize("limit_bytes", [10, 3_000, 500_000, 3_500_000])
@pytest.mark.parametrize("tag", ["one", "two"])
def test_a_file_that_cannot_grow(limit_bytes: int, tag: str, tmp_path: Path) -> None:
    model, optimizer = trained()
    state = deepoffload.TrainingState(model, optimizer)
    state.save(tmp_path, "one")
    before, expected = contents(tmp_path), snapshot(model, optimizer)
    with largest_file(limit_bytes), pytest.raises(IoFailure) as caught:
        state.save(tmp_path, tag)
    assert caught.value.errno in (errno.EFBIG, errno.ENOSPC) and str(tmp_path) in caught.value.filename
    assert contents(tmp_path) == before
    assert_same_bits(expected, snapshot(model, optimizer))
    state.save(tmp_path, tag)
    assert read_manifest(str(tmp_path / tag)).step == 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB."""
    with tmpfs(tmp_path / "small", 24) as where:
        yield where


def test_a_full_disk_is_seen_before_anything_is_written(small_disk: Path) -> None:
    model, optimizer = trained()
    state = deepoffload.TrainingState(model, optimizer)
    state.save(small_disk, "one")
    state.save(small_disk, "two")
    before = contents(small_disk)
    with pytest.raises(IoFailure, match="ENOSPC.*Nothing has been written"):
        state.save(small_disk, "three")
    assert contents(small_disk) == before
    shutil.rmtree(small_disk / "one")
    state.save(small_disk, "three", keep_last=1)
    assert sorted(path.name for path in small_disk.iterdir()) == ["latest", "three"]
