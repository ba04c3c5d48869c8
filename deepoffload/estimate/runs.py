"""Forward and backward on shapes, as they are run in each order of micro-batches."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

from torch import nn

from deepoffload.config import ActivationMode, Config
from deepoffload.estimate.blocks import BlockPlan
from deepoffload.estimate.lengths import ByLength
from deepoffload.estimate.machine import MachineSpec
from deepoffload.estimate.progress import Report
from deepoffload.estimate.recording import DryRun
from deepoffload.estimate.repeats import dry_run_quickly
from deepoffload.estimate.subject import Subject
from deepoffload.runtime.compute_types import ComputeTypes
from deepoffload.schedule.activation_room import ActivationRoom
from deepoffload.schedule.cost_model import AccumulationOrder, Workload


def together_in(config: Config, order: AccumulationOrder) -> int:
    """How many micro-batches go through the model side by side."""
    return Workload(config.gradient_accumulation_steps, order=order).together


def shared_gradient_bytes(module: nn.Module, types: ComputeTypes) -> int:
    """Of the gradients of weights that are registered in several places, such as tied embeddings. In vertical order
    each micro-batch has such a gradient under way."""
    times = Counter(param for _, param in module.named_parameters(remove_duplicate=False) if param.requires_grad)
    return sum(param.numel() * types.of(param).itemsize for param, count in times.items() if count > 1)


class RunsByOrder:
    """Forward and backward of a micro-batch, on shapes, in each order: in vertical order units may run again in
    backward. None where only model states are asked for."""

    def __init__(
        self,
        subject: Subject,
        blocks: BlockPlan,
        types: ComputeTypes,
        config: Config,
        machine: MachineSpec,
        progress: Report,
    ) -> None:
        self._run = partial(_run, subject, blocks, types, progress)
        self._blocks, self._config, self._machine = blocks, config, machine
        self._usual = self._run()

    def of(self, order: AccumulationOrder) -> DryRun | None:
        usual, together = self._usual, together_in(self._config, order)
        if usual is None or together == 1 or not self._recomputes(usual, together):
            return usual
        return self._run(recompute=True)

    def _recomputes(self, usual: DryRun, together: int) -> bool:
        """As :class:`deepoffload.accumulation.activations.Activations` decides it."""
        mode = self._config.activations
        if mode is not ActivationMode.AUTO:
            return mode is ActivationMode.RECOMPUTE
        machine, room = self._machine, ActivationRoom()
        room.measured(usual.saved_bytes - usual.head_bytes)
        free_bytes = machine.host_memory_bytes // machine.ranks_per_node
        free_bytes -= machine.process_bytes + self._blocks.placement.capacity_bytes
        if machine.has_device:
            free_bytes = machine.device_share_bytes - self._blocks.device_bytes
        return not room.holds(together, lambda: free_bytes)


def _run(
    subject: Subject, blocks: BlockPlan, types: ComputeTypes, progress: Report, *, recompute: bool = False
) -> DryRun | None:
    if subject.loss_of is None:
        return None
    # nobody else uses a model that has no bytes, so it may lack layers for a while
    bare = all(param.is_meta for param in subject.module.parameters())
    said: dict[str, Any] = {"windows": blocks.modules, "unit_of": blocks.unit_of, "types": types, "progress": progress}
    said |= {"recompute": recompute, "known": subject.known}
    by_length = None if subject.loss_at is None else ByLength(subject.batch.length, subject.loss_at)
    return dry_run_quickly(subject.module, subject.loss_of, may_shorten=bare, by_length=by_length, **said)
