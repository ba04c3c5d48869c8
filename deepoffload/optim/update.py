"""The host update, unit by unit and piece by piece: load the state, one native pass, mark for writing.

This is the serial order (``step_overlap="none"``), which every overlap must equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack

import torch

from deepoffload.errors import UnsupportedError
from deepoffload.memory.block import Block
from deepoffload.native.cpu_adam import DType, Segment, StateLayout
from deepoffload.optim.gradients import NATIVE_DTYPES, Gradients
from deepoffload.optim.rule import Hyper, Job, Rule
from deepoffload.optim.state import LEAD_KEYS, PieceView, ensure_pieces, follow_weight
from deepoffload.params.layout import PieceSegment
from deepoffload.params.pager import Pager
from deepoffload.params.torch_private import get_grad
from deepoffload.params.unit import GradientState, ParamHandle, StatePiece, Unit


class HostUpdate:
    """Applies one step of an update rule to the paged parameters of one pager."""

    def __init__(self, pager: Pager, gradients: Gradients, rule: Rule) -> None:
        self.pager = pager
        self.tiers = pager.tiers
        self.gradients = gradients
        self.rule = rule

    def run(self, jobs: Mapping[ParamHandle, Job], grad_factor: float) -> None:
        """Update every parameter in ``jobs`` from its gradient times ``grad_factor``; others stay as they are."""
        for handle in jobs:
            ensure_pieces(self.tiers, handle)
        for unit in self.pager.units:
            if any(handle in jobs for handle in unit.handles):
                self._run_unit(unit, jobs, grad_factor)

    def _run_unit(self, unit: Unit, jobs: Mapping[ParamHandle, Job], grad_factor: float) -> None:
        with self.pager.lock, ExitStack() as leases:
            blocks = self._blocks(unit, jobs)
            started = False
            for number, piece in enumerate(unit.pieces):
                used = [jobs[piece.handles[s.tensor]] for s in piece.layout.segments if piece.handles[s.tensor] in jobs]
                if not used:
                    continue
                # SGD without momentum on fp32 weights has no state: its pieces stay where they are.
                needed = [piece.block] if piece.kind is not StateLayout.FP32 or any(job.arrays for job in used) else []
                self.pager.use_update(unit, number, tuple(b.id for b in (*blocks, *needed)))
                if not started:
                    started = True
                    self._lease(leases, blocks)
                    unit.owner.changed()  # what the program wrote into the weights must land in the master first
                    self.tiers.will_change(unit.weights)
                with ExitStack() as piece_lease:
                    self._lease(piece_lease, needed)
                    for block in needed:
                        self.tiers.will_change(block)
                    self._run_piece(piece, PieceView(self.tiers, piece) if needed else None, jobs, grad_factor)
            for handle in unit.handles:
                if handle in jobs:
                    handle.updated()

    def _blocks(self, unit: Unit, jobs: Mapping[ParamHandle, Job]) -> list[Block]:
        """Weights and landed gradients that the update of a unit needs."""
        blocks = {unit.weights.id: unit.weights}
        for handle in unit.handles:
            slot = handle.grad_slot
            if (
                handle in jobs
                and handle.grad_state is GradientState.LANDED
                and slot is not None
                and slot.block is not None
            ):
                blocks[slot.block.id] = slot.block
        return list(blocks.values())

    def _lease(self, stack: ExitStack, blocks: list[Block]) -> None:
        for block in blocks:
            self.tiers.acquire(block)
            stack.callback(self.tiers.release, block)

    def _run_piece(
        self, piece: StatePiece, view: PieceView | None, jobs: Mapping[ParamHandle, Job], grad_factor: float
    ) -> None:
        hypers: list[Hyper] = []
        segments: list[Segment] = []
        keep: list[torch.Tensor] = []
        for part in piece.layout.segments:
            handle = piece.handles[part.tensor]
            job = jobs.get(handle)
            if job is None:
                continue
            if not hypers or (hypers[-1] is not job.hyper and hypers[-1] != job.hyper):
                hypers.append(job.hyper)
            grad, grad_dtype = self._gradient(handle, keep)
            segments.append(
                Segment(
                    numel=part.numel,
                    hyper_index=len(hypers) - 1,
                    grad=grad + part.start * (4 if grad_dtype is DType.FP32 else 2),
                    grad_dtype=grad_dtype,
                    weight=handle.address() + part.start * handle.itemsize,
                    weight_dtype=NATIVE_DTYPES[handle.dtype],
                    **(self._state(piece, view, part, handle, job) if view is not None else {}),
                )
            )
        threads = torch.get_num_threads()
        self.rule.kernel(segments, hypers, piece.kind, grad_factor=grad_factor, num_threads=threads)

    def _state(
        self, piece: StatePiece, view: PieceView, part: PieceSegment, handle: ParamHandle, job: Job
    ) -> dict[str, int]:
        """Addresses of a segment's arrays by field, up to date with the weight and, in a first step, filled."""
        if handle.master_stale:
            follow_weight(self.tiers, piece, part, handle)
        if job.first:
            for key, field in job.arrays.items():
                view.fill(field, part, job.initial.get(key, 0.0))
        state = {field: view.array(field, part) for field in job.arrays.values()}
        lead = LEAD_KEYS.get(piece.kind)
        if lead is not None:
            state[lead] = view.lead(part)
        return state

    def _gradient(self, handle: ParamHandle, keep: list[torch.Tensor]) -> tuple[int, DType]:
        """Address and type of a parameter's gradient, in the order of the weight's bytes."""
        if handle.grad_state is GradientState.LANDED and handle.grad_slot is not None:
            return handle.grad_slot.address(), NATIVE_DTYPES[handle.grad_slot.dtype]
        return self.gradients.user_gradient(handle, keep)


def check_paged(handle: ParamHandle, name: str) -> None:
    """Raise ``UnsupportedError`` for a gradient or parameter that the kernels do not take."""
    param = handle.tensor
    raw = get_grad(param) if param is not None else None
    if raw is not None and raw.is_sparse:
        raise UnsupportedError(
            f"{handle.name} has a sparse gradient; {name} needs dense ones (nn.Embedding(sparse=False))"
        )
    if handle.dtype not in NATIVE_DTYPES:
        raise UnsupportedError(f"{handle.name} is {handle.dtype}; {name} updates float32, bfloat16 and float16 weights")
