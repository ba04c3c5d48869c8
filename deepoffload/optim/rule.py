"""What tells one optimizer from another: its native kernel, and the arrays it keeps per parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from deepoffload.native.cpu_adam import AdagradHyper, AdamHyper, LionHyper, SgdHyper, StateDType

Hyper = AdamHyper | LionHyper | AdagradHyper | SgdHyper

SCALE_SUFFIX = "_absmax"
"""An 8-bit array's scales are a field, and a key of ``optimizer.state``, of its name with this behind it."""


def step_count(step: float) -> Tensor:
    """What ``state["step"]`` holds: fp32, as torch's optimizers have it. A program's default dtype may be bf16, which
    does not tell step 256 from step 257."""
    return torch.tensor(float(step), dtype=torch.float32, device="cpu")


@dataclass(frozen=True)
class Rule:
    """An update rule.

    Attributes:
        name: of the optimizer, for messages.
        kernel: one of the ``*_step`` functions of :mod:`deepoffload.native.cpu_adam`.
        counts_steps: whether ``state["step"]`` is part of the optimizer's state.
        foreign: a class of another package makes the update, of whole parameters, and all of the state. There is no
            kernel then.
    """

    name: str
    kernel: Callable[..., None]
    counts_steps: bool = True
    foreign: bool = False


@dataclass(frozen=True)
class UpdateJob:
    """The update of one parameter in one step; parameters of a group that are alike share one.

    Attributes:
        step: number of the parameter's update, from 1.
        arrays: key in ``optimizer.state`` of each array that is used, to the field of ``Segment`` that names it.
        initial: what arrays that do not exist yet are filled with, by key.
        first: the arrays do not exist yet.
        master_weights: bf16 weights have an fp32 master.
        whole: the update needs all elements of the parameter at once.
    """

    step: int
    hyper: Any
    arrays: Mapping[str, str]
    initial: Mapping[str, float]
    first: bool
    master_weights: bool = True
    whole: bool = False

    @cached_property
    def state_dtype(self) -> StateDType:
        """What the arrays are stored in."""
        dtype: StateDType = getattr(self.hyper, "state_dtype", StateDType.FP32)
        return dtype

    @cached_property
    def fields(self) -> tuple[str, ...]:
        """The fields of ``arrays``."""
        return tuple(self.arrays.values())

    @cached_property
    def addressed(self) -> Mapping[str, str]:
        """``arrays``, and for 8-bit ones also their scales."""
        if self.state_dtype is not StateDType.EIGHT_BIT:
            return self.arrays
        scales = {key + SCALE_SUFFIX: field + SCALE_SUFFIX for key, field in self.arrays.items()}
        return {**self.arrays, **scales}
