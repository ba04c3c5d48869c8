"""Files of other libraries with bytes changed, and with descriptions that somebody made: a value, or our error."""

from __future__ import annotations

import io
import os
import pickle
import random
import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from deepoffload.checkpoint.convert.dcp import METADATA, read_dcp
from deepoffload.checkpoint.convert.tensors import numel_of
from deepoffload.checkpoint.convert.training_run import TrainingRun
from deepoffload.checkpoint.convert.universal import read_universal
from deepoffload.checkpoint.convert.zero import read_zero
from deepoffload.errors import DeepOffloadError
from tests.checkpoint.damaged import (
    BYTES_MAX,
    CPU_SECONDS_MAX,
    Stub,
    Watched,
    inert,
    nested,
    nodes,
    round_list,
    without_checksums,
)
from tests.checkpoint.training import ALL
from tests.support.deepspeed_peer import STEPS


def read_all(run: TrainingRun) -> None:
    arrays = [values for held in run.arrays.values() for values in held.values()]
    for values in (*run.weights.values(), *arrays):
        values.read(0, min(numel_of(values), 100))


def read_or_refuse(read: Callable[[str], TrainingRun], folder: Path) -> bool:
    """Whether it was refused."""
    with Watched() as taken:
        try:
            read_all(read(str(folder)))
        except DeepOffloadError as error:
            message = str(error)
        else:
            message = ""
    assert taken.cpu_s < CPU_SECONDS_MAX and taken.more_bytes < BYTES_MAX
    assert len(message) < 3000
    return bool(message)


CASES: dict[str, tuple[str, Callable[[str], TrainingRun]]] = {
    "zero2": (f"global_step{STEPS}", read_zero),
    "zero3": (f"global_step{STEPS}", read_zero),
    "zero2 universal": (f"global_step{STEPS}_universal", read_universal),
    "zero3 universal": (f"global_step{STEPS}_universal", read_universal),
}


@pytest.mark.parametrize("name", CASES)
def test_changed_bytes(name: str, fixtures: Path, tmp_path: Path) -> None:
    tag, read = CASES[name]
    folder = tmp_path / "copy"
    shutil.copytree(fixtures / name.split()[0] / tag, folder)
    files = sorted(folder.rglob("*.pt"))
    draw = random.Random(name)
    refused = 0
    for _ in range(2500 if ALL else 60):
        file = draw.choice(files)
        content = file.read_bytes()
        changed = bytearray(without_checksums(content))
        middle = content.find(b"data.pkl")  # the description is what decides
        places = range(max(middle, 0), len(content)) if draw.random() < 0.3 else range(min(len(content), 6000))
        for _ in range(draw.choice((1, 1, 2, 8))):
            changed[draw.choice(places)] = draw.randrange(256)
        file.write_bytes(changed[: draw.choice((len(changed), len(changed), draw.randrange(len(changed))))])
        refused += read_or_refuse(read, folder)
        file.write_bytes(content)
    assert refused
    assert not read_or_refuse(read, folder)


def resaved(file: Path, change: Callable[[Any], None]) -> None:
    """The same file with another description; its tensors stay as they are."""
    value = torch.load(file, weights_only=False, pickle_module=inert())
    change(value)
    out = io.BytesIO()
    torch.save(value, out)
    file.write_bytes(out.getvalue())


HUGE = 2**50


def optimizer(value: Any) -> Any:
    return value["optimizer_state_dict"]


def step_of(value: Any) -> Any:
    return optimizer(value)["optimizer_state_dict"]["state"][0]


CHANGES: dict[str, tuple[str, Callable[[Any], None]]] = {
    "no stage": ("optim", lambda value: optimizer(value).update(zero_stage="x")),
    "huge stage": ("optim", lambda value: optimizer(value).update(zero_stage=HUGE)),
    "no partitions": ("optim", lambda value: optimizer(value).update(partition_count=None)),
    "no weights": ("optim", lambda value: optimizer(value).pop("fp32_flat_groups")),
    "weights of another kind": ("optim", lambda value: optimizer(value).update(fp32_flat_groups=[1, 2, 3])),
    "weights in a matrix": (
        "optim",
        lambda value: optimizer(value).update(fp32_flat_groups=[torch.zeros(3, 4)] * 3),
    ),
    "large matrices": ("optim", lambda value: optimizer(value).update(fp32_flat_groups=[torch.zeros(999, 1)] * 3)),
    "numbers as weights": ("optim", lambda value: optimizer(value).update(fp32_flat_groups=[torch.tensor(1.0)] * 3)),
    "short moments": ("optim", lambda value: step_of(value).update(exp_avg=torch.zeros(1))),
    "parameters that are away": ("model", lambda value: value.update(param_shapes=value["param_shapes"][:1])),
    "no state": ("optim", lambda value: optimizer(value)["optimizer_state_dict"].update(state=[])),
    "no groups": ("optim", lambda value: optimizer(value)["optimizer_state_dict"].update(param_groups={})),
    "strange groups": (
        "optim",
        lambda value: optimizer(value)["optimizer_state_dict"].update(param_groups=[{"params": [HUGE]}]),
    ),
    "no shapes": ("model", lambda value: value.update(param_shapes=None)),
    "huge shapes": ("model", lambda value: value.update(param_shapes=[{"a": torch.Size([HUGE, HUGE])}] * 3)),
    "negative shapes": ("model", lambda value: value.update(param_shapes=[{"a": (-5,)}] * 3)),
    "strange names": ("model", lambda value: value.update(param_shapes=[{1: (5,)}] * 3)),
    "strange steps": ("model", lambda value: value.update(global_steps="x")),
    "infinite steps": ("model", lambda value: value.update(global_steps=float("inf"))),
    "no number of steps": ("optim", lambda value: step_of(value).update(step=float("nan"))),
    "steps that double": ("optim", lambda value: step_of(value).update(step=doubling(60))),
    "settings that double": (
        "optim",
        lambda value: optimizer(value)["optimizer_state_dict"]["param_groups"][0].update(lr=doubling(60)),
    ),
    "stage that doubles": ("optim", lambda value: optimizer(value).update(zero_stage=doubling(60))),
    "steps in a matrix": ("optim", lambda value: step_of(value).update(step=torch.zeros(3, 4))),
    "frozen that is away": ("model", lambda value: value.update(frozen_param_fragments={})),
    "frozen that is huge": ("model", lambda value: value.update(frozen_param_shapes={"frozen.bias": (HUGE,)})),
    "shared that doubles": ("model", lambda value: value.update(shared_params={"a": doubling(60)})),
    "shared in a list": ("model", lambda value: value.update(shared_params=[1])),
    "deep client state": ("model", lambda value: value.update(deep=nested(100))),
    "round client state": ("model", lambda value: value.update(deep=round_list())),
    "doubling client state": ("model", lambda value: value.update(deep=doubling(60))),
}


def doubling(depth: int) -> Any:
    value: Any = [1]
    for _ in range(depth):
        value = [value, value]
    return value


@pytest.mark.parametrize("name", CHANGES)
def test_descriptions_that_somebody_made(name: str, fixtures: Path, tmp_path: Path) -> None:
    kind, change = CHANGES[name]
    folder = tmp_path / "copy"
    shutil.copytree(fixtures / "zero3" / f"global_step{STEPS}", folder)
    for file in sorted(folder.glob(f"*{kind}_states.pt")):
        resaved(file, change)
    assert read_or_refuse(read_zero, folder), name


def test_a_description_that_is_changed_and_changed_back_reads(fixtures: Path, tmp_path: Path) -> None:
    """The changes above are what is refused, not the way in which the files are written again."""
    folder = tmp_path / "copy"
    shutil.copytree(fixtures / "zero3" / f"global_step{STEPS}", folder)
    for file in sorted(folder.glob("*_model_states.pt")):
        resaved(file, lambda value: value.update(extra=OrderedDict(a=1)))
    assert not read_or_refuse(read_zero, folder)
    assert os.listdir(folder)


NASTY: tuple[Callable[[], Any], ...] = (
    *(lambda value=value: value for value in (None, True, -1, 2**63, 2**200, 10**4000, 1.5, float("nan"), 1e308)),
    *(lambda value=value: value for value in ("", "x", "..", "../outside", "/etc/passwd", "a/b", "\0", "x" * 100_000)),
    *(lambda value=value: value for value in ([], {}, (), [[]], {"a": 1}, (1, 2), [-1], [2**62] * 3, torch.Size([3]))),
    lambda: [1] * 10_000,
    lambda: torch.zeros(3),
    lambda: torch.zeros(3, 4, dtype=torch.int8),
    lambda: torch.tensor(float("nan")),
    lambda: torch.zeros(1).expand(5),
    lambda: nested(90),
    lambda: doubling(60),
    round_list,
    lambda: Stub(1, 2),
)


def spoil(value: Any, dice: random.Random) -> None:
    """Put something wrong somewhere into a description."""
    found = list(nodes(value))
    for where, key in dice.sample(found, min(len(found), dice.choice((1, 1, 1, 2, 3)))):
        if (isinstance(where, list) and key >= len(where)) or (isinstance(where, dict) and key not in where):
            continue  # gone with what was changed before
        action = dice.randrange(4)
        if action == 0:
            del where[key]
        elif action == 1 and isinstance(where, dict):
            where[dice.choice(("..", "../x", "/etc", "", "a" * 300, "x", 7, None))] = where.pop(key)
        elif action == 2 and type(where[key]) is int:
            where[key] += dice.choice((-1, 1, 8, 2**40, 2**70))
        else:
            where[key] = dice.choice(NASTY)()


@pytest.mark.parametrize("name", CASES)
def test_anything_in_the_place_of_anything(name: str, fixtures: Path, tmp_path: Path) -> None:
    tag, read = CASES[name]
    folder = tmp_path / "copy"
    shutil.copytree(fixtures / name.split()[0] / tag, folder)
    files = [*folder.glob("*_states.pt"), *folder.glob("zero/*.pt"), *folder.glob("zero/up.weight/*.pt")]
    dice = random.Random(name)
    refused = 0
    for _ in range(1000 if ALL else 50):
        file = dice.choice(sorted(files))
        content = file.read_bytes()
        resaved(file, lambda value: spoil(value, dice))
        refused += read_or_refuse(read, folder)
        file.write_bytes(content)
    assert refused
    assert not read_or_refuse(read, folder)


def test_anything_in_the_metadata_of_distributed_files(tmp_path: Path) -> None:
    folder = tmp_path / "dcp"
    weights = {"up": torch.arange(12.0).view(3, 4), "down": torch.ones(3), "count": torch.tensor(2)}
    state = {"up": {"step": torch.tensor(1.0), "exp_avg": torch.ones(3, 4), "exp_avg_sq": torch.ones(3, 4)}}
    groups = [{"lr": 0.1, "betas": (0.9, 0.99), "params": ["up"]}]
    dcp.save({"model": weights, "optimizer": {"state": state, "param_groups": groups}}, checkpoint_id=folder)
    file = folder / METADATA
    content = file.read_bytes()
    dice = random.Random(1)
    refused = 0
    for _ in range(1000 if ALL else 50):
        metadata = pickle.loads(content)
        items = list(metadata.state_dict_metadata.values())
        chunks = [chunk for item in items for chunk in getattr(item, "chunks", ())]
        places = [*metadata.storage_data, *metadata.storage_data.values()]
        spoil([metadata.__dict__, *(vars(item) for item in (*items, *chunks, *places))], dice)
        try:
            file.write_bytes(pickle.dumps(metadata))
        except (RuntimeError, AttributeError, TypeError, RecursionError):
            continue  # what cannot be pickled cannot be in a file
        refused += read_or_refuse(lambda place: read_dcp([place]), folder)
    assert refused
    file.write_bytes(content)
    assert not read_or_refuse(lambda place: read_dcp([place]), folder)
