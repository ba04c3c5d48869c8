"""The engine of one or more models: it owns the memory, the units, the hooks, and their end."""

from __future__ import annotations

import gc
import logging
import os
import sys
import weakref
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from torch import Tensor, nn

from deepoffload import machine
from deepoffload.activations.offload import open_activations
from deepoffload.config import Config, StepOverlap
from deepoffload.copies.accelerator import ComputeDevice
from deepoffload.copies.copy_memory import CopyMemory
from deepoffload.copies.rank_link import RankLink
from deepoffload.errors import PlacementError, RankError, UsageError
from deepoffload.io.swap_files import check_paths
from deepoffload.memory.arena import Arena
from deepoffload.memory.lock import SHIELD
from deepoffload.memory.tier_manager import TierManager
from deepoffload.optim.device_landing import DeviceLandings
from deepoffload.optim.gradients import Gradients
from deepoffload.optim.in_backward import EarlyUpdates
from deepoffload.optim.rank_gradients import RankGradients
from deepoffload.optim.rank_speculation import speculate
from deepoffload.params.forward_passes import ForwardPasses
from deepoffload.params.graph_modes import refuse_graph_modes
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
from deepoffload.runtime.construct import Assembly, adoptable, pin_residents
from deepoffload.runtime.cuts import PIECES_PER_BUDGET, UNITS_PER_BUDGET
from deepoffload.runtime.departure import Departure, end_unasked, failure_under_way, finish_saves
from deepoffload.runtime.device import find_accelerator, open_arena, open_memory, open_rank_memory, take_device_memory
from deepoffload.runtime.disk import EngineDisk
from deepoffload.runtime.durability import Durability
from deepoffload.runtime.host_share import find_budgets
from deepoffload.runtime.inference import begin_inference, read_in_place
from deepoffload.runtime.kept_views import budget_for_kept
from deepoffload.runtime.newcomers import Newcomers
from deepoffload.runtime.plan import ModelPlan, plan_model
from deepoffload.runtime.process_end import close_at_exit, forked
from deepoffload.runtime.rank_facts import (
    ValueSums,
    compare_models,
    compare_settings,
    refuse_distributed,
    refuse_ordinary,
)
from deepoffload.runtime.rank_units import join_units
from deepoffload.runtime.refusals import Refusals
from deepoffload.runtime.registration import ConstructionHooks, ShortageError, refuse_meta, take
from deepoffload.runtime.statistics import run_stats, timeline_of
from deepoffload.runtime.trained_apart import TrainedApart, watch_ordinary
from deepoffload.runtime.unit_finder import find_units
from deepoffload.schedule.durable import every_of, written_for_durability
from deepoffload.schedule.placement import Placement
from deepoffload.timeline import Summary, Timeline

log = logging.getLogger("deepoffload")


class Engine:
    """Everything deepoffload holds for the models of one context. Made by :class:`offload_context` or ``initialize``.

    Args:
        group: the ranks that train together, which this closes in the end; None with one rank.

    It has more attributes than other classes, because each of its parts is one.

    Attributes:
        activations: those that have left for backward; None where they stay.
        agreement: with the other ranks, on what is set up.
        ranks: who this process is among its ranks.
        training_states: those that save and load its models, each model by one.
        placement: what went where and why; None until the context has ended. ``placement.table()`` is for people.
    """

    def __init__(self, config: Config, group: RankGroup | None = None) -> None:
        if SHIELD.is_engaged():
            gc.collect()  # models that are gone, but kept by reference cycles, give their budgets back first
        self.config = config
        self._error_before = id(sys.exc_info()[1])  # the program handles it: it is not why this engine ends
        self.agreement = Agreement(group)
        self.ranks = RankMap(0, (0,)) if group is None else group.ranks
        self.placement: Placement | None = None
        self.training_states: weakref.WeakSet[Any] = weakref.WeakSet()
        self._windows, self._outer, self._watches = list[Window](), list[OuterWindow](), list[RootWatch]()
        self._outside = list[OutsideWatch | TrainedApart]()
        self._building: ConstructionHooks | None = None
        self._disk = EngineDisk()
        self._departure: Departure | None = None
        self.durability: Durability | None = None
        self.link: RankLink | None = None
        self.gradients: Gradients
        self.timeline = timeline_of(config)
        try:
            with self.agreement.together("the start of its engine"):
                self._open()
        except BaseException:
            self._disk.close()
            self._leave_ranks()
            raise
        self._exit = weakref.finalize(self, close_at_exit, weakref.ref(self.pager), self._disk, os.getpid())
        SHIELD.engage()
        os.register_at_fork(after_in_child=partial(forked, weakref.ref(self.pager)))
        if self.ranks.rank == 0:
            for note in config.notes:
                log.info(note)
            warn_of_settings(config)

    # -- set-up ----------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        """The budgets, the disks, the memory, and what lies in it."""
        config = self.config
        compare_settings(self.agreement, config)
        paths = check_paths(config.nvme_path, config.path_key) if config.nvme_path else []
        accelerator = find_accelerator(config, self.ranks)
        self.budgets = find_budgets(self.agreement, config, paths, accelerator)
        self._grain_bytes = self.budgets.block_bytes
        self._disk.open(config, paths, self.budgets.nvme_bytes, self.agreement)
        arena = open_arena(self.budgets, lends=accelerator is None)
        graphs = OpenGraphs()
        order = UseOrder(graphs, prefetch=config.prefetch)
        tiers, memory = self._open_memory(arena, order, accelerator)
        self.pager = Pager(
            tiers,
            order,
            graphs,
            memory,
            self,
            prefetch=config.prefetch,
            evict_always=config.debug.evict_always,
            defer_updates=config.step_overlap in (None, StepOverlap.DEFERRED, StepOverlap.SPECULATIVE),
            link=self.link,
            inference=config.inference,
        )
        read_in_place(self.pager)
        self.activations = open_activations(self.pager, config, self.budgets, self._disk.space, accelerator)
        in_backward = config.step_overlap is StepOverlap.IN_BACKWARD
        if self.link is not None:
            self.gradients = RankGradients(self.pager, self.link, in_backward=in_backward)
        else:
            early = EarlyUpdates(on_device=accelerator is not None) if in_backward else None
            landings = None if memory is None else DeviceLandings(memory)
            self.gradients = Gradients(self.pager, early=early, from_device=landings)
        if config.step_overlap is StepOverlap.SPECULATIVE:
            speculate(self.pager, self.gradients, self._disk.bandwidths.mixed_bytes_per_s)

    def _open_memory(
        self, arena: Arena, order: UseOrder, accelerator: ComputeDevice | None
    ) -> tuple[TierManager, CopyMemory | None]:
        config, group, space = self.config, self.agreement.group, self._disk.space
        poison, device_bytes = config.debug.poison, self.budgets.device_bytes
        if group is None:
            return open_memory(arena, space, order, accelerator, device_bytes, poison=poison, timeline=self.timeline)
        self.agreement.gather(None, "its memory")  # what has failed until here is known before the ranks are joined
        tiers, memory, self.link = open_rank_memory(
            arena,
            space,
            order,
            group,
            accelerator,
            device_bytes,
            transport=config.ranks.transport,
            timeout_s=config.ranks.timeout_s,
            poison=poison,
            timeline=self.timeline,
        )
        return tiers, memory

    def _capacity_bytes(self) -> int:
        """Of the arena, for blocks."""
        landings = self.gradients.from_device
        return self.pager.tiers.arena.capacity_bytes - (0 if landings is None else landings.ring_bytes)

    def assemble(self, roots: Sequence[nn.Module], handles: Iterable[ParamHandle]) -> None:
        """End of construction: find units, place them, move every parameter's bytes into its unit, put hooks on.

        Raises:
            PlacementError: the budgets cannot run this model; the message carries the table.
            BudgetError: the host budget does not hold the way of gradients from the device, and there is no model.
            UsageError: parameters on the meta device, or ``keep_fp32`` names something that no model has. With several
                ranks: they have built different models.
            RankError: another rank has failed.
        """
        with self.agreement.together("placing the model"):
            self._assemble(roots, list(handles))

    def _assemble(self, roots: Sequence[nn.Module], registered: list[ParamHandle]) -> None:
        for root in roots:
            refuse_meta(root)
        refuse_distributed(roots)
        if self.link is not None:
            refuse_ordinary(roots, registered)
            self.link.trains(roots)
        compare_models(self.agreement, roots)
        landings = self.gradients.from_device
        if landings is not None and landings.no_room is not None:
            raise landings.no_room
        parts = None if self._building is None else self._building.begin_placing(registered, self.agreement)
        try:
            plan = self._plan(roots, registered, self._capacity_bytes()).agreed(self.agreement)
        except PlacementError as error:
            raise self._refusals().for_host(error, roots) from None
        self._grain_bytes = plan.grain_bytes
        if self.config.step_overlap is None and plan.placement.step_overlap is StepOverlap.SPECULATIVE:
            speculate(self.pager, self.gradients, self._disk.bandwidths.mixed_bytes_per_s, asked_for=False)
        memory = self.pager.memory
        take_device_memory(memory, plan, self.gradients.from_device)
        self._reserve(plan.placement, roots)
        kept = {block.id for block in plan.on_device}
        values = ValueSums(parts)
        if parts is not None:
            plan.assembly.building, plan.assembly.on_value = parts, values.take
        for draft in plan.drafts:
            plan.assembly.fill(draft)
            for block in (block for block in draft.unit.blocks() if block.id in kept):
                memory.keep(block)
        join_units(memory, self.gradients, self.pager.units)  # now handles have the types that they compute in
        values.compare(self.agreement, roots)
        if not self.pager.evict_always:
            pin_residents(self.pager.tiers, plan.placement)
        for root in roots:
            convert_buffers(root, memory.device, plan.assembly.types)
        self._building = None
        self.pager.assembled()
        for unit in self.pager.units:
            for handle in unit.handles:
                self.gradients.track(handle)
        self._windows = [Window(self.pager, module, name) for name, module in plan.windows]
        self.pager.order.visits.guess((window, 0) for window in self._windows)
        passes = ForwardPasses(self.pager) if self.config.inference else None
        self._watches = [RootWatch(root, self.refresh, self._windows, passes) for root in roots]
        self._outer = [OuterWindow(self.pager, module, name) for name, module in plan.outer]
        machine.return_free_memory()  # what construction used and freed
        log.info("placement\n%s", plan.table(len(self.ranks.host_ranks), self.config.gradient_accumulation_steps))
        num_parameters = sum(handle.numel for unit in self.pager.units for handle in unit.handles)
        begin_inference(self.pager, self._windows)
        self.durability = self._durability(plan.placement)
        every = None if self.durability is None else self.durability.every
        if self.ranks.rank == 0:
            ranks = self.ranks.world_size
            announce(summary(plan.placement, num_parameters, self.config.nvme_path, memory.device, every, ranks))
        self._outside = [OutsideWatch(self.budgets.host_bytes, roots), *watch_ordinary(self.agreement.group, roots)]

    def _durability(self, placement: Placement) -> Durability | None:
        said, disk = self.config.durability, self._disk
        if said is None or disk.space is None or disk.store is None:
            return None
        every = every_of(placement, disk.bandwidths) if said.every is None else said.every
        extra_s = written_for_durability(placement) / disk.bandwidths.write_bytes_per_s if said.every is None else 0.0
        return Durability(self.pager, disk.space, disk.store, every, extra_s, self.link)

    def _refusals(self) -> Refusals:
        host, nvme, rates = self._capacity_bytes(), self._nvme_bytes(), self._disk.bandwidths
        return Refusals(self.pager, self.config, self.budgets, capacity_bytes=host, nvme_bytes=nvme, bandwidths=rates)

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
            device_bytes=memory.device_bytes,
            activations=self.budgets.activations,
        )

    def _reserve(self, placement: Placement, roots: Sequence[nn.Module]) -> None:
        self.placement = placement
        if self._disk.space is not None and placement.nvme_bytes:
            self._disk.space.reserve(placement.nvme_bytes)  # what is there now goes while the units are filled
        room = Room(placement.capacity_bytes, self._nvme_bytes(), self._disk.bandwidths)
        self.pager.placed(placement, budget_for_kept(self.pager, self.config, roots, room))

    def adopt_model(self, model: nn.Module) -> None:
        """Take a model that was built before: its parameters move into the arena one by one."""
        handles, building = [], self.construction()
        for name, param in model.named_parameters():
            if adoptable(self.pager, param):
                try:
                    handles.append(take(self.pager, param, name, self._capacity_bytes(), building.kept))
                except ShortageError as error:
                    raise self._refusals().of_shortage([model], error, 0) from None
        if not handles:
            where = "the CPU" if self.pager.memory.on_host else f"the CPU or {self.pager.memory.device}"
            raise UsageError(f"{type(model).__name__} has no parameters on {where} that could be offloaded")
        self.assemble([model], handles)

    def construction(self) -> ConstructionHooks:
        """What adopts parameters while models are being built."""
        self._building = ConstructionHooks(self.pager, self._capacity_bytes(), self._refusals().of_shortage, self.link)
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
            return Newcomers(assembly, self.link).take_in([(name, [(name, param)])])[0]

    def adopt_newcomers(self) -> None:
        """Page what has come to the models since they were last called. With several ranks all of them call it."""
        for watch in self._watches:
            watch.look()

    def refresh(self, root: nn.Module) -> None:
        """Adopt parameters that have come to ``root``, open windows on new modules, and move buffers to the device."""
        refuse_graph_modes(root, self.pager.memory)
        refuse_distributed([root])
        assembly = Assembly(self.pager, self.gradients, self._grain_bytes // PIECES_PER_BUDGET)
        plan = find_units(root, self._grain_bytes // UNITS_PER_BUDGET, assembly.target_nbytes)
        with self.pager.lock:
            found = ((u.name, [(n, p) for n, p in u.params if adoptable(self.pager, p)]) for u in plan.units)
            Newcomers(assembly, self.link).take_in([(name, params) for name, params in found if params])
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
        """Numbers of the run so far, of this rank: bytes per tier and their peaks, disk bytes, faults, waits; with
        several ranks rounds, bytes from other ranks, and waits for them. All flat, all numeric."""
        return {
            **run_stats(self.pager, self._disk.space, self.budgets, self.activations),
            "rank": self.ranks.rank,
            "world_size": self.ranks.world_size,
            **(self._watches[0].stats() if self._watches else {}),
            **({} if self.link is None else self.link.stats()),
            **({} if self.gradients.speculation is None else self.gradients.speculation.stats()),
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
        if self.pager.gradients is not None and self._departure is None:
            self._departure = end_unasked(self._end_unasked, self.pager.lock, self.link)

    def _end_unasked(self) -> None:
        self._outside = []  # torch may be going through its global hooks just now
        self._end("its model was deleted")

    def close(self, because: str = "engine.close() was called") -> None:
        """Give everything back: hooks, memory, swap files, threads. Idempotent. Parameters then raise
        ``ClosedError``. A save that is under way is finished first, as far as it needs the engine, and so is the step
        that was committed last. With several ranks it waits until all of them close.

        Raises:
            IoFailure, BudgetError: it could not be made durable; everything is closed all the same.
            RankError: other ranks train on. It is raised there, too.
        """
        if self._departure is not None:
            self._departure.close_within(self.config.ranks.timeout_s)
        self.pager.life.ignore_deaths()
        self._end(because)

    def _end(self, because: str) -> None:
        if self.pager.life.closed_because is not None:
            return
        finish_saves(self.pager, self.link, failure_under_way(self._error_before))
        with ExitStack() as last:
            last.callback(self._close, because)
            last.callback(self._leave_ranks)
            if self.durability is not None:
                self.durability.finish()

    def _leave_ranks(self) -> None:
        """End together with the other ranks. They are told of an error on its way out, and theirs do not replace it."""
        group, failure = self.agreement.group, failure_under_way(self._error_before)
        with suppress(*() if failure is None else (RankError,)), ExitStack() as last:
            if group is not None:
                last.callback(group.close)
            if self.link is not None:
                last.callback(self.link.close)
                if failure is not None and not self.link.rounds.has_failed:
                    self.link.fail(failure)

    def _close(self, because: str) -> None:
        with self.pager.lock:
            self.pager.close(because)
            self._building = None
            for hooked in (*self._windows, *self._outer, *self._watches, *self._outside):
                hooked.remove()
            self._windows, self._outer, self._watches = [], [], []
            with ExitStack() as last:  # each runs, even if the one before raised
                last.callback(SHIELD.disengage)
                last.callback(self._exit.detach)
                last.callback(self._disk.close)
                last.callback(self.pager.tiers.close)
                if self.activations is not None:
                    last.callback(self.activations.close)
                self.pager.memory.close()

    def __deepcopy__(self, memo: dict[int, object]) -> Engine:
        return self
