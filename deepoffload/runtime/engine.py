"""The engine of one or more models: it owns the memory, the units, the hooks, and their end."""

from __future__ import annotations

import gc
import logging
import os
import threading
import weakref
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from deepoffload import machine
from deepoffload.config import Config, StepOverlap
from deepoffload.config.resolve import Budgets, resolve_budgets
from deepoffload.device import Device
from deepoffload.errors import PlacementError, UsageError
from deepoffload.io.swap_files import check_paths
from deepoffload.memory.arena import Arena
from deepoffload.memory.lock import SHIELD
from deepoffload.optim.device_landing import DeviceLandings
from deepoffload.optim.gradients import Gradients
from deepoffload.optim.in_backward import EarlyUpdates
from deepoffload.params.open_graphs import OpenGraphs
from deepoffload.params.outer_window import OuterWindow
from deepoffload.params.pager import Pager
from deepoffload.params.root_watch import RootWatch
from deepoffload.params.unit import ParamHandle
from deepoffload.params.use_order import UseOrder
from deepoffload.params.window import Window
from deepoffload.ranks.group import RankGroup
from deepoffload.ranks.places import RankMap
from deepoffload.runtime.agreement import Agreement
from deepoffload.runtime.announce import OutsideWatch, announce, summary, warn_of_settings
from deepoffload.runtime.choice import Room
from deepoffload.runtime.compute_types import convert_buffers
from deepoffload.runtime.construct import Assembly, adoptable, bring_residents
from deepoffload.runtime.cuts import PIECES_PER_BUDGET, UNITS_PER_BUDGET
from deepoffload.runtime.device import find_accelerator, open_memory, take_device_memory
from deepoffload.runtime.disk import EngineDisk, measure_machine
from deepoffload.runtime.durability import Durability
from deepoffload.runtime.kept_views import budget_for_kept
from deepoffload.runtime.plan import ModelPlan, plan_model
from deepoffload.runtime.refusals import Refusals
from deepoffload.runtime.registration import ConstructionHooks, ShortageError, refuse_meta, take
from deepoffload.runtime.unit_finder import find_units
from deepoffload.schedule.cost_model import BlockKind
from deepoffload.schedule.durable import every_of, written_for_durability
from deepoffload.schedule.placement import Placement
from deepoffload.timeline import Summary, Timeline

log = logging.getLogger("deepoffload")


class Engine:
    """Everything deepoffload holds for the models of one context. Made by :class:`offload_context` or ``initialize``.

    Args:
        group: the ranks that train together, which this closes in the end; None with one rank.

    Attributes:
        agreement: with the other ranks, on what is set up.
        ranks: who this process is among its ranks.
        training_state: the one that saves and loads the models, while there is one.
        placement: what went where and why; None until the context has ended. ``placement.table()`` is for people.
    """

    def __init__(self, config: Config, group: RankGroup | None = None) -> None:
        if SHIELD.is_engaged():
            gc.collect()  # models that are gone, but kept by reference cycles, give their budgets back first
        self.config = config
        self.agreement = Agreement(group)
        self.ranks = RankMap(0, (0,)) if group is None else group.ranks
        paths = check_paths(config.nvme_path, config.path_key) if config.nvme_path else []
        accelerator = find_accelerator(config)
        device = Device.parse("cpu" if accelerator is None else str(accelerator.device))
        free_bytes = 0 if accelerator is None else accelerator.free_bytes()
        measured = replace(config, nvme_path=tuple(paths))  # relative paths and links have become what they lead to
        self.budgets: Budgets = resolve_budgets(
            measured, measure_machine(paths, durable=config.durability is not None), device, free_bytes
        )
        self.placement: Placement | None = None
        self.training_state: weakref.ref[Any] | None = None
        self._windows: list[Window] = []
        self._outer: list[OuterWindow] = []
        self._watches: list[RootWatch] = []
        self._outside: OutsideWatch | None = None
        self._building: ConstructionHooks | None = None
        self._disk = EngineDisk()
        self.durability: Durability | None = None
        self._grain_bytes = self.budgets.host_bytes
        try:
            self._disk.open(config, paths, self.budgets.nvme_bytes, self.agreement)
            arena = Arena(self.budgets.host_bytes, lends=accelerator is None)
            self.timeline = Timeline() if config.timeline else None
            graphs = OpenGraphs()
            order = UseOrder(graphs, prefetch=config.prefetch)
            tiers, memory = open_memory(
                arena,
                self._disk.space,
                order,
                accelerator,
                self.budgets.device_bytes,
                poison=config.debug.poison,
                timeline=self.timeline,
            )
            landings = None if memory is None else DeviceLandings(memory)
        except BaseException:
            self._disk.close()
            raise
        self.pager = Pager(
            tiers,
            order,
            graphs,
            memory,
            self,
            prefetch=config.prefetch,
            evict_always=config.debug.evict_always,
            defer_updates=config.step_overlap is StepOverlap.DEFERRED,
        )
        in_backward = config.step_overlap is StepOverlap.IN_BACKWARD
        early = EarlyUpdates(on_device=accelerator is not None) if in_backward else None
        self.gradients = Gradients(self.pager, early=early, from_device=landings)
        self._exit = weakref.finalize(self, _close_at_exit, weakref.ref(self.pager), self._disk, os.getpid())
        SHIELD.engage()
        os.register_at_fork(after_in_child=partial(_forked, weakref.ref(self)))
        for note in config.notes:
            log.info(note)
        warn_of_settings(config)

    # -- set-up ----------------------------------------------------------------------------------------------------

    def _capacity_bytes(self) -> int:
        """Of the arena, for blocks."""
        landings = self.gradients.from_device
        return self.pager.tiers.arena.capacity_bytes - (0 if landings is None else landings.ring_bytes)

    def assemble(self, roots: Sequence[nn.Module], handles: Iterable[ParamHandle]) -> None:
        """End of construction: find units, place them, move every parameter's bytes into its unit, put hooks on.

        Raises:
            PlacementError: the budgets cannot run this model; the message carries the table.
            BudgetError: the host budget does not hold the way of gradients from the device, and there is no model.
            UsageError: parameters on the meta device, or ``keep_fp32`` names something that no model has.
        """
        for root in roots:
            refuse_meta(root)
        registered = list(handles)
        landings = self.gradients.from_device
        if landings is not None and landings.no_room is not None:
            raise landings.no_room
        try:
            plan = self._plan(roots, registered, self._capacity_bytes())
        except PlacementError as error:
            raise self._refusals().for_host(error) from None
        self._grain_bytes = plan.grain_bytes
        memory = self.pager.memory
        take_device_memory(memory, plan)
        self._reserve(plan.placement, roots)
        kept = {block.id for block in plan.on_device}
        for draft in plan.drafts:
            plan.assembly.fill(draft)
            for piece in draft.unit.pieces:
                if piece.block.id in kept:
                    memory.keep(piece.block)
        if not self.pager.evict_always:
            self._pin_residents(plan.placement)
        for root in roots:
            convert_buffers(root, memory.device, plan.assembly.types)
        self._building = None
        self.pager.assembled()
        for unit in self.pager.units:
            for handle in unit.handles:
                self.gradients.track(handle)
        self._windows = [Window(self.pager, module, name) for name, module in plan.windows]
        self._watches = [RootWatch(root, self.refresh, self._windows) for root in roots]
        self._outer = [OuterWindow(self.pager, module, name) for name, module in plan.outer]
        machine.return_free_memory()  # what construction used and freed
        log.info("placement\n%s", plan.placement.table())
        num_parameters = sum(handle.numel for unit in self.pager.units for handle in unit.handles)
        self.durability = self._durability(plan.placement)
        every = None if self.durability is None else self.durability.every
        announce(summary(plan.placement, num_parameters, self.config.nvme_path, memory.device, every))
        self._outside = OutsideWatch(self.budgets.host_bytes)

    def _durability(self, placement: Placement) -> Durability | None:
        said, disk = self.config.durability, self._disk
        if said is None or disk.space is None or disk.store is None:
            return None
        every = every_of(placement, disk.bandwidths) if said.every is None else said.every
        extra_s = written_for_durability(placement) / disk.bandwidths.write_bytes_per_s if said.every is None else 0.0
        return Durability(self.pager, disk.space, disk.store, every, extra_s)

    def _refusals(self) -> Refusals:
        return Refusals(
            self.pager,
            self.config,
            self.budgets,
            capacity_bytes=self._capacity_bytes(),
            nvme_bytes=self._nvme_bytes(),
            bandwidths=self._disk.bandwidths,
        )

    def _nvme_bytes(self) -> int | None:
        return self.budgets.nvme_bytes if self._disk.space is not None else None

    def _plan(self, roots: Sequence[nn.Module], handles: list[ParamHandle], capacity_bytes: int) -> ModelPlan:
        memory = self.pager.memory
        return plan_model(
            self.pager,
            self.gradients,
            self.config,
            roots,
            handles,
            capacity_bytes=capacity_bytes,
            nvme_bytes=self._nvme_bytes(),
            bandwidths=self._disk.bandwidths,
            device_bytes=memory.capacity_bytes,
        )

    def _reserve(self, placement: Placement, roots: Sequence[nn.Module]) -> None:
        self.placement = placement
        if self._disk.space is not None and placement.nvme_bytes:
            self._disk.space.reserve(placement.nvme_bytes)  # what is there now goes while the units are filled
        room = Room(placement.capacity_bytes, self._nvme_bytes(), self._disk.bandwidths)
        self.pager.placed(placement, budget_for_kept(self.pager, self.config, roots, room))

    def _pin_residents(self, placement: Placement) -> None:
        """From now on resident blocks stay. Not before: while bytes move into units, all memory is needed for that."""
        for block_id in placement.resident:
            self.pager.tiers.keep(self.pager.tiers.block(block_id))
        bring_residents(self.pager.tiers, placement)

    def adopt_model(self, model: nn.Module) -> None:
        """Take a model that was built before: its parameters move into the arena one by one."""
        handles = []
        for name, param in model.named_parameters():
            if adoptable(self.pager, param):
                try:
                    handles.append(take(self.pager, param, name, self._capacity_bytes()))
                except ShortageError as error:
                    raise self._refusals().of_shortage([model], error, 0) from None
        if not handles:
            where = "the CPU" if self.pager.memory.on_host else f"the CPU or {self.pager.memory.device}"
            raise UsageError(f"{type(model).__name__} has no parameters on {where} that could be offloaded")
        self.assemble([model], handles)

    def construction(self) -> ConstructionHooks:
        """What adopts parameters while models are being built."""
        self._building = ConstructionHooks(self.pager, self._capacity_bytes(), self._refusals().of_shortage)
        return self._building

    def adopt_late(self, param: Tensor, name: str) -> ParamHandle | None:
        """A parameter that arrived after the context ended becomes a separate unit; None for what is not
        adoptable."""
        if self.pager.gradients is None:
            building = self._building
            return building.adopt(param, name) if building is not None and building.is_on() else None
        if not adoptable(self.pager, param):
            return None
        with self.pager.lock:
            assembly = Assembly(self.pager, self.gradients, self._grain_bytes // PIECES_PER_BUDGET)
            return assembly.take_in(name, [(name, param)])[0]

    def refresh(self, root: nn.Module) -> None:
        """Adopt parameters that came to ``root`` after the context ended, open windows on new modules, and move their
        buffers to the device."""
        assembly = Assembly(self.pager, self.gradients, self._grain_bytes // PIECES_PER_BUDGET)
        plan = find_units(root, self._grain_bytes // UNITS_PER_BUDGET, assembly.target_nbytes)
        with self.pager.lock:
            for unit in plan.units:
                assembly.take_in(
                    unit.name, [(name, param) for name, param in unit.params if adoptable(self.pager, param)]
                )
        watched = {id(window.module()) for window in self._windows}
        fresh = [(name, module) for name, module in plan.windows if id(module) not in watched]
        self._windows += [Window(self.pager, module, name) for name, module in fresh]
        for _, module in fresh:
            convert_buffers(module, self.pager.memory.device, assembly.types)
        watched |= {id(window.module()) for window in self._outer}
        outer = [(name, module) for name, module in plan.outer if id(module) not in watched]
        self._outer += [OuterWindow(self.pager, module, name) for name, module in outer]

    # -- report ----------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, float]:
        """Numbers of the run so far: bytes per tier and their peaks, disk bytes, faults, waits. All flat, all
        numeric."""
        tiers = self.pager.tiers
        space = self._disk.space
        trace = self.pager.order.trace.stats()
        counters = tiers.counters
        return {
            **self.pager.memory.stats(),
            "host_budget_bytes": tiers.arena.capacity_bytes,
            "host_bytes": tiers.arena.used_bytes,
            "host_peak_bytes": tiers.arena.peak_bytes,
            "host_weight_bytes": tiers.resident_bytes(BlockKind.WEIGHT),
            "host_gradient_bytes": tiers.resident_bytes(BlockKind.GRADIENT),
            "host_state_bytes": tiers.resident_bytes(BlockKind.STATE),
            "nvme_budget_bytes": self.budgets.nvme_bytes,
            "nvme_bytes": space.used_bytes if space is not None else 0,
            "nvme_capacity_bytes": space.capacity_bytes if space is not None else 0,
            "disk_bytes_read": space.bytes_read if space is not None else 0,
            "disk_bytes_written": space.bytes_written if space is not None else 0,
            "faults": counters.faults,
            "waits": counters.waits,
            "wait_s": counters.wait_s,
            "prefetches": counters.prefetches,
            "evictions": counters.evictions,
            "compactions": counters.compactions,
            "order_mismatches": trace.mismatches,
            "units": len(self.pager.units),
            "parameters": sum(h.numel for unit in self.pager.units for h in unit.handles),
        }

    def export_trace(self, path: str | os.PathLike[str]) -> None:
        """Write what happened when as a Chrome trace; open it at https://ui.perfetto.dev.

        Raises:
            UsageError: the configuration does not say ``timeline = true``.
        """
        self._recorded().export(path)

    def summary(self, last_steps: int = 10) -> Summary:
        """What the last steps were made of; ``summary().table()`` is for people. Raises as :meth:`export_trace`."""
        return self._recorded().summary(last_steps)

    def _recorded(self) -> Timeline:
        if self.timeline is None:
            raise UsageError("nothing was recorded: set timeline = true in the configuration")
        return self.timeline

    # -- end -------------------------------------------------------------------------------------------------------

    def all_dead(self) -> None:
        """The last parameter is gone: the engine of models that were built ends with them."""
        if self.pager.gradients is not None:
            self.close("its model was deleted")

    def close(self, because: str = "engine.close() was called") -> None:
        """Give everything back: hooks, memory, swap files, threads. Idempotent. Parameters then raise
        ``ClosedError``. A save that is under way is finished first, as far as it needs the engine, and so is the step
        that was committed last.

        Raises:
            IoFailure, BudgetError: it could not be made durable; everything is closed all the same.
        """
        if self.pager.life.closed_because is not None:
            return
        if not self.pager.lock.is_mine():
            self.pager.tiers.guards.finish()
        with ExitStack() as last:
            last.callback(self._close, because)
            if self.durability is not None:
                self.durability.finish()

    def _close(self, because: str) -> None:
        with self.pager.lock:
            self.pager.close(because)
            self._building = None
            for window in (*self._windows, *self._outer):
                window.remove()
            for watch in self._watches:
                watch.remove()
            if self._outside is not None:
                self._outside.remove()
            self._windows.clear()
            self._outer.clear()
            self._watches.clear()
            with ExitStack() as last:  # each runs, even if the one before raised
                last.callback(SHIELD.disengage)
                last.callback(self._exit.detach)
                last.callback(self._disk.close)
                last.callback(self.pager.tiers.close)
                self.pager.memory.close()

    def __deepcopy__(self, memo: dict[int, object]) -> Engine:
        return self


_LAST_USE_S = 5.0
"""How long the process waits at its end for what another thread does with the memory at that moment."""


def _close_at_exit(reference: weakref.ref[Pager], disk: EngineDisk, pid: int) -> None:
    pager = reference()
    if pager is not None:
        pager.life.ignore_deaths()
    if os.getpid() != pid:
        return  # a forked child: the files and threads are the parent's
    if pager is not None and threading.active_count() > 1:
        pager.lock.acquire(timeout=_LAST_USE_S)  # for good: a daemon thread that trains stops here and sees no error
    disk.close()
    SHIELD.disengage()


def _forked(reference: weakref.ref[Engine]) -> None:
    """In a forked child, which inherits neither the memory nor the transfers: every use is refused from now on."""
    engine = reference()
    if engine is not None and engine.pager.life.closed_because is None:
        engine.pager.life.close("it is the parent process's; a forked child cannot use it (start it with spawn)")
