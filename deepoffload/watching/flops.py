"""The profile of one step: operations, time, waits and bytes of each module.

Operations are counted by torch's ``FlopCounterMode``, so they are those of the plain model.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.flop_counter import FlopCounterMode

from deepoffload.params.unit import Unit
from deepoffload.runtime.engine import Engine
from deepoffload.timeline import TRANSFERS


@dataclass
class ModuleCost:
    """What one module has cost, with all modules in it. Of one forward, except for the bytes, which are those of the
    whole step.

    Attributes:
        kind: the name of its class.
        flops: of its forward.
        seconds: from its call to its end, ``waited_s`` of them for transfers.
        moved_bytes: of its weights, gradients and optimizer state, read and written; 0 where nothing is recorded.
    """

    kind: str
    parameters: int
    flops: int = 0
    seconds: float = 0.0
    waited_s: float = 0.0
    moved_bytes: int = 0

    @property
    def macs(self) -> int:
        """Multiply-accumulate operations: FlopCounterMode counts each as two."""
        return self.flops // 2


@dataclass
class Profile:
    """Of one micro-batch and its update.

    Attributes:
        modules: by name, the model itself first, under the empty name.
        backward_flops: None where the backward was not made by ``engine.backward``.
        bytes_known: whether the timeline has said which bytes have moved.
    """

    modules: dict[str, ModuleCost]
    backward_flops: int | None = None
    backward_s: float = 0.0
    step_s: float = 0.0
    read_bytes: int = 0
    written_bytes: int = 0
    waited_s: float = 0.0
    bytes_known: bool = False


class FlopsProfiler:
    """Profiles the first micro-batch that begins after :meth:`start`, until :meth:`finish`.

    Args:
        module: the model. engine: moves its bytes; with ``timeline`` set, modules have their bytes.
    """

    def __init__(self, module: nn.Module, engine: Engine) -> None:
        self._module = module
        self._engine = engine
        self._profile: Profile | None = None
        self._thread = 0
        self._before: dict[str, float] = {}
        self._begin_s = 0.0

    def start(self) -> None:
        """The step that begins is profiled."""
        params = {name: sum(p.numel() for p in module.parameters()) for name, module in self._module.named_modules()}
        self._profile = Profile(
            {name: ModuleCost(type(m).__name__, params[name]) for name, m in self._module.named_modules()}
        )
        self._thread = 0
        self._before, self._begin_s = self._engine.stats(), time.perf_counter()

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around a forward of the model. Of several micro-batches the first one is profiled."""
        profile = self._profile
        if profile is None or self._thread:
            yield
            return
        self._thread = threading.get_ident()
        clock = _ModuleClock(profile, self._module, self._engine, self._thread)
        counter = FlopCounterMode(display=False)
        try:
            with clock.running(), counter:
                yield
        except BaseException:
            self.start()  # the next forward is the first one of the step
            raise
        root = type(self._module).__name__
        counts = {name: sum(by_operator.values()) for name, by_operator in counter.get_flop_counts().items()}
        for name, cost in profile.modules.items():
            cost.flops = counts.get(f"{root}.{name}" if name else root, 0)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around the backward of that micro-batch."""
        profile = self._profile
        if profile is None or profile.backward_flops is not None or self._thread != threading.get_ident():
            yield
            return
        begin_s = time.perf_counter()
        with FlopCounterMode(display=False) as counter:
            yield
        profile.backward_flops, profile.backward_s = counter.get_total_flops(), time.perf_counter() - begin_s

    def finish(self, step_s: float) -> Profile | None:
        """The update was made, in ``step_s`` seconds. Returns the profile; None where no forward has come."""
        profile, self._profile = self._profile, None
        if profile is None or not self._thread:
            return None
        now, before = self._engine.stats(), self._before
        _fill_containers(profile.modules)
        profile.step_s = step_s
        profile.read_bytes = int(now["disk_bytes_read"] - before["disk_bytes_read"])
        profile.written_bytes = int(now["disk_bytes_written"] - before["disk_bytes_written"])
        profile.waited_s = now["wait_s"] - before["wait_s"]
        timeline = self._engine.timeline
        if timeline is not None:
            profile.bytes_known = True
            moved: dict[str, int] = {}
            for span in timeline.spans():
                if span.lane in TRANSFERS and span.end_s > self._begin_s:
                    moved[span.name] = moved.get(span.name, 0) + span.nbytes
            for unit in self._engine.pager.units:
                _add_bytes(profile, unit, moved)
        return profile


def _fill_containers(modules: dict[str, ModuleCost]) -> None:
    """A module that is never called itself, such as a list of layers, costs what the modules in it do."""
    for name, cost in reversed(modules.items()):  # those inside come later
        if not cost.seconds:
            inside = [each for other, each in modules.items() if other and other.rpartition(".")[0] == name != other]
            cost.flops = sum(each.flops for each in inside)
            cost.seconds = sum(each.seconds for each in inside)
            cost.waited_s = sum(each.waited_s for each in inside)


def _add_bytes(profile: Profile, unit: Unit, moved: dict[str, int]) -> None:
    """Add a unit's bytes to the modules that have all of it."""
    nbytes = sum(moved.get(name, 0) for name in {block.name for block in unit.blocks()})
    owners = [name for name in profile.modules if all(_is_in(handle.name, name) for handle in unit.handles)]
    for name in owners:
        profile.modules[name].moved_bytes += nbytes


def _is_in(param: str, module: str) -> bool:
    return not module or param.startswith(f"{module}.")


class _ModuleClock:
    """Times the calls of modules, with what was waited in them, on one thread."""

    def __init__(self, profile: Profile, module: nn.Module, engine: Engine, thread: int) -> None:
        device = engine.pager.memory.device
        self._synchronize = (
            (lambda: None) if engine.pager.memory.on_host else torch.get_device_module(device).synchronize
        )
        self._costs = {id(found): profile.modules[name] for name, found in module.named_modules()}
        self._counters = engine.pager.tiers.counters
        self._thread = thread
        self._open: list[tuple[int, float, float]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        hooks = (
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        )
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, module: nn.Module, args: Any) -> None:
        if id(module) in self._costs and threading.get_ident() == self._thread:
            self._synchronize()
            self._open.append((id(module), time.perf_counter(), self._counters.wait_s))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._open or self._open[-1][0] != id(module) or threading.get_ident() != self._thread:
            return
        self._synchronize()
        _, begin_s, waited_s = self._open.pop()
        cost = self._costs[id(module)]
        cost.seconds += time.perf_counter() - begin_s
        cost.waited_s += self._counters.wait_s - waited_s
