"""Builds models under a budget, the same way in every test: poison always on, budgets from comfortable to the least."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import deepoffload
from deepoffload import offload_context, stats
from deepoffload.errors import BudgetError
from deepoffload.optim.device_landing import SLOT_BYTES_MIN, SLOTS
from tests.support.loops import assert_same_bits, in_dtype, to_bf16

PLENTY_BYTES = 64 << 20

QUICK_BACKEND = "pool"
"""The kernel takes 35 ms to close a queue of the others, which is most of the time of a small test."""

PACKAGE = os.path.join(os.path.dirname(deepoffload.__file__), "")
"""Where the files of deepoffload's own code lie. The folder of the checkout may have the package's name, too."""


@dataclass(frozen=True)
class Setting:
    """One way to page a model.

    Attributes:
        room: budget as a multiple of the least that this model is accepted with; None for one that holds everything.
        evict_always: everything that may be evicted is, after every use.
        backend: of transfers; the tests of ``io`` hold that all do the same.
    """

    name: str
    room: float | None
    prefetch: bool = True
    evict_always: bool = False
    step_overlap: str | None = "deferred"
    precision: str = "keep"
    backend: str = "auto"

    def __str__(self) -> str:
        return self.name


RESIDENT = Setting("resident", None, backend=QUICK_BACKEND)
TIGHT = Setting("tight", 1.6, backend=QUICK_BACKEND)
SERIAL = Setting("serial", 1.6, prefetch=False, step_overlap="none", backend=QUICK_BACKEND)
ROOMY = Setting("roomy", 3.0)
EVICTING = Setting("evicting", 1.8, prefetch=False, evict_always=True, backend=QUICK_BACKEND)
STRICT = (EVICTING, TIGHT)
EVERY = (RESIDENT, ROOMY, TIGHT, SERIAL, EVICTING)


class Paging:
    """Makes paged models with their swap files in ``nvme_path``."""

    def __init__(self, nvme_path: Path) -> None:
        self.nvme_path = nvme_path
        self._least: dict[object, int] = {}

    @contextmanager
    def context(self, setting: Setting, host_budget: int, **config: Any) -> Iterator[offload_context]:
        debug = {"poison": True, "evict_always": setting.evict_always}
        with offload_context(
            host_budget=host_budget,
            nvme_path=str(self.nvme_path),
            step_overlap=setting.step_overlap,
            prefetch=setting.prefetch,
            precision=setting.precision,
            debug=debug,
            **{"aio": {"backend": setting.backend}, **config},
        ) as context:
            yield context

    def build(
        self, build: Callable[[], Any], setting: Setting, *, seed: int = 0, key: object = None, **config: Any
    ) -> Any:
        """What ``build`` makes, paged. ``key`` names the model among those whose least budget is known already."""
        budget = self._budget_bytes(build, setting, seed, key)
        with self.context(setting, budget, **config):
            torch.manual_seed(seed)
            return build()

    def least_bytes(self, build: Callable[[], Any], setting: Setting, *, seed: int = 0, key: object = None) -> int:
        """The least budget, to within a seventh, that is accepted for this model. The first test that asks draws the
        same random numbers afterwards as the others. Two files of tests may call different models by one name."""
        key = (key or build, setting.precision, _asker())
        quick = replace(setting, evict_always=False, backend=QUICK_BACKEND)
        if key not in self._least:
            with torch.random.fork_rng(devices=[]):
                budget = _ring_bytes() + (16 << 10)
                enough = self._enough_bytes(build, quick, budget, seed)
                while enough is not None:
                    budget = max(enough, budget + max(4096, (budget - _ring_bytes()) // 7))
                    enough = self._enough_bytes(build, quick, budget, seed)
            self._least[key] = budget
        return self._least[key]

    def _budget_bytes(self, build: Callable[[], Any], setting: Setting, seed: int, key: object) -> int:
        if setting.room is None:
            return PLENTY_BYTES
        least, ring = self.least_bytes(build, setting, seed=seed, key=key), _ring_bytes()
        return int(setting.room * (least - ring)) + ring

    def _enough_bytes(self, build: Callable[[], Any], setting: Setting, budget: int, seed: int) -> int | None:
        """None when the budget is accepted; else what the refusal says would be enough, 0 when it does not know."""
        torch.manual_seed(seed)
        try:
            with self.context(setting, budget):
                model = build()
        except BudgetError as error:
            return getattr(error, "enough_bytes", None) or 0
        del model
        return None


def _asker() -> str:
    """The module that calls this one."""
    frame = sys._getframe(1)
    while frame.f_globals is globals() and frame.f_back is not None:
        frame = frame.f_back
    return str(frame.f_globals["__name__"])


def _ring_bytes() -> int:
    """What of a small budget gradients from a device take on their way."""
    return SLOTS * SLOT_BYTES_MIN if torch.accelerator.is_available() else 0


def plain(build: Callable[[], Any], *, precision: str = "keep", seed: int = 0) -> Any:
    """The same model in plain PyTorch."""
    torch.manual_seed(seed)
    model = build()
    if precision == "fp16":
        return in_dtype(model, torch.float16)
    return to_bf16(model) if precision == "bf16" else model


class Same:
    """Runs a program on a plain and on a paged model and wants the same bits of everything it returns."""

    def __init__(self, paging: Paging, setting: Setting) -> None:
        self.paging = paging
        self.setting = setting

    def __call__(
        self,
        build: Callable[[], nn.Module],
        program: Callable[[nn.Module], Any],
        *,
        key: object = None,
        room: float | None = None,
    ) -> None:
        """``room`` is for programs that hold much of the model themselves: a budget with more in it than the
        setting's."""
        setting = self.setting if room is None else replace(self.setting, room=room)
        reference = plain(build, precision=setting.precision)
        torch.manual_seed(1)
        expected = program(reference)
        model = self.paging.build(build, setting, key=key)
        torch.manual_seed(1)
        assert_same_bits(expected, program(model))
        if room is None:
            assert stats(model)["evictions"] > 0, "nothing was evicted: this tested nothing"
