"""A random program: which model, which operations, how it is paged; and what became of it when it ran."""

from __future__ import annotations

import gc
import random
import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from deepoffload.errors import BudgetError, DeepOffloadError
from tests.fuzz.blocks import BLOCKS
from tests.fuzz.operations import FOR_IN_BACKWARD, NOT_REENTRANT, OPERATIONS, pick
from tests.fuzz.subject import OPTIMIZERS, Net, Subject
from tests.support.paging import Paging, Setting

RARE = ("edits_what_is_saved", "clamps_itself", "clamps_data", "casts")
"""Blocks after which many programs end in an error that plain PyTorch raises, too."""

NOT_IN_BACKWARD = frozenset({"reentrant_closure", "three_times", "recomputes"})
"""Blocks whose weights get their gradients in parts, which updates inside backward refuse."""


@dataclass(frozen=True)
class Program:
    """Everything that a run depends on.

    Attributes:
        room: budget as a multiple of the least one that the model is accepted with.
        twin: what it is compared with: plain PyTorch, or (bf16, which plain PyTorch trains without a master) the same
            program with everything in memory and nothing overlapped.
    """

    seed: int
    kinds: tuple[str, ...]
    checkpoints: tuple[bool | None, ...]
    order: tuple[int, ...]
    tied: bool
    operations: tuple[str, ...]
    optimizer: str
    setting: Setting
    backend: str
    twin: str

    def __str__(self) -> str:
        layers = ", ".join(
            kind if how is None else f"{kind} behind a {'reentrant ' if how else ''}checkpoint"
            for kind, how in zip(self.kinds, self.checkpoints, strict=True)
        )
        return (
            f"program {self.seed}: [{layers}] called as {list(self.order)}{', tied head' if self.tied else ''}; "
            f"{self.optimizer}, {self.setting.precision}, budget x {self.setting.room}, {self.setting.step_overlap}, "
            f"evict_always={self.setting.evict_always}, prefetch={self.setting.prefetch}, {self.backend}, against "
            f"{self.twin}: {' -> '.join(self.operations)}"
        )

    def net(self) -> Net:
        return Net(self.kinds, self.checkpoints, self.order, self.tied)


def generate(seed: int) -> Program:
    """The program of that number, always the same."""
    draw = random.Random(seed)
    overlap = draw.choice(["deferred", "deferred", "deferred", "none", "none", "in_backward"])
    common = sorted(set(BLOCKS) - set(RARE) - (NOT_IN_BACKWARD if overlap == "in_backward" else set()))
    count = draw.randint(2, 6)
    kinds = tuple(draw.choice(RARE) if draw.random() < 0.04 else draw.choice(common) for _ in range(count))
    if overlap == "in_backward":
        order, tied = tuple(range(count)), False
        checkpoints: tuple[bool | None, ...] = tuple(draw.choice([None, None, False]) for _ in kinds)
    else:
        order = tuple(range(count)) + tuple(draw.randrange(count) for _ in range(draw.choice([0, 0, 1, 2])))
        checkpoints = tuple(draw.choice([None, None, None, False, True]) for _ in kinds)
        tied = draw.random() < 0.3
    allowed = FOR_IN_BACKWARD if overlap == "in_backward" else frozenset(OPERATIONS)
    if (True in checkpoints or "reentrant_closure" in kinds) and draw.random() < 0.9:
        allowed -= NOT_REENTRANT
    optimizers = sorted(name for name in OPTIMIZERS if overlap != "in_backward" or name in ("CPUAdamW", "CPULion"))
    precision = draw.choice(["keep", "keep", "keep", "bf16"])
    return Program(
        seed=seed,
        kinds=kinds,
        checkpoints=checkpoints,
        order=order,
        tied=tied,
        operations=("train", *pick(draw, draw.randint(3, 12), allowed)),
        optimizer="CPUAdamW" if draw.random() < 0.5 else draw.choice(optimizers),
        setting=Setting(
            "random",
            draw.choice([1.3, 1.6, 2.5, 4.0, None]),
            prefetch=draw.random() < 0.7,
            evict_always=draw.random() < 0.5,
            step_overlap=overlap,
            precision=precision,
        ),
        backend=draw.choice(["libaio", "io_uring", "pool"]),
        twin="plain PyTorch" if precision == "keep" else "the resident serial run",
    )


def speculative(program: Program) -> Program:
    """The same program with updates on a guess. It begins with steps that are alike: the third one guesses."""
    room = 4.0 if program.setting.room is None else program.setting.room
    operations = ("train", "train", "train", *program.operations, "train")
    optimizer = "CPUAdamW" if program.setting.step_overlap == "none" else program.optimizer
    setting = replace(program.setting, step_overlap="speculative", room=room)
    return replace(program, operations=operations, setting=setting, optimizer=optimizer)


@dataclass
class Seen:
    """What a run showed: an entry for each operation, and the error that ended it, if one did."""

    values: list[Any]
    error: Exception | None = None


def run(model: Any, program: Program) -> Seen:
    """Do the program's operations with a model until one raises."""
    torch.manual_seed(program.seed)
    subject = Subject(model, program.optimizer, program.seed)
    seen = Seen([])
    for index, name in enumerate(program.operations):
        torch.manual_seed(1000 * program.seed + index)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                seen.values.append(frozen_copy(OPERATIONS[name](subject)))
        except Exception as error:
            seen.error = error.with_traceback(None)
            return seen
    try:
        seen.values.append(frozen_copy([kept.detach().clone() for kept in subject.kept]))
        seen.values.append(frozen_copy({name: value.detach() for name, value in model.state_dict().items()}))
    except Exception as error:
        seen.error = error.with_traceback(None)
    return seen


def frozen_copy(value: Any) -> Any:
    """The value with every tensor in it copied, as it is now."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: frozen_copy(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [frozen_copy(part) for part in value]
    return value


def run_twin(paging: Paging, program: Program) -> Seen:
    if program.twin == "plain PyTorch":
        torch.manual_seed(program.seed)
        return run(program.net(), program)
    serial = replace(program.setting, room=None, prefetch=False, evict_always=False, step_overlap="none")
    return run_paged(paging, replace(program, setting=serial))


def run_paged(paging: Paging, program: Program) -> Seen:
    key = (program.kinds, program.checkpoints, program.tied)
    model = paging.build(program.net, program.setting, seed=program.seed, key=key, aio={"backend": program.backend})
    seen = run(model, program)
    del model
    gc.collect()
    return seen


def is_ours(error: Exception) -> bool:
    return isinstance(error, DeepOffloadError)


def is_shortage(error: Exception) -> bool:
    return isinstance(error, BudgetError)
