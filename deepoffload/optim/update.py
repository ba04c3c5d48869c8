"""The host update, unit by unit and piece by piece: load the state, one native pass, mark for writing.

This is the serial order (``step_overlap="none"``), which every overlap must equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack

import torch

from deepoffload.errors import UnsupportedError
from deepoffload.memory.block import Block
from deepoffload.native import cpu_adam
from deepoffload.native.cpu_adam import AdamHyper, DType, Segment, StateLayout
from deepoffload.optim.gradients import NATIVE_DTYPES, Gradients
from deepoffload.optim.state import PieceView, follow_weight
from deepoffload.params.pager import Pager
from deepoffload.params.torch_private import get_grad
from deepoffload.params.unit import GradientState, ParamHandle, StatePiece, Unit


class HostUpdate:
    """Applies one Adam or AdamW step to the paged parameters of one pager."""

    def __init__(self, pager: Pager, gradients: Gradients) -> None:
        self.pager = pager
        self.tiers = pager.tiers
        self.gradients = gradients

    def run(self, hypers: Mapping[ParamHandle, AdamHyper], grad_factor: float) -> None:
        """Update every parameter in ``hypers`` from its gradient times ``grad_factor``; others stay as they are."""
        for handle in hypers:
            self._check(handle)
        for unit in self.pager.units:
            if any(handle in hypers for handle in unit.handles):
                self._run_unit(unit, hypers, grad_factor)

    def _check(self, handle: ParamHandle) -> None:
        param = handle.tensor
        raw = get_grad(param) if param is not None else None
        if raw is not None and raw.is_sparse:
            raise UnsupportedError(
                f"{handle.name} has a sparse gradient; CPUAdam needs dense ones (nn.Embedding(sparse=False))"
            )
        if handle.dtype not in NATIVE_DTYPES:
            raise UnsupportedError(
                f"{handle.name} is {handle.dtype}; CPUAdam updates float32, bfloat16 and float16 weights"
            )

    def _run_unit(self, unit: Unit, hypers: Mapping[ParamHandle, AdamHyper], grad_factor: float) -> None:
        with self.pager.lock, ExitStack() as leases:
            blocks = self._blocks(unit, hypers)
            started = False
            for number, piece in enumerate(unit.pieces):
                if not any(piece.handles[s.tensor] in hypers for s in piece.layout.segments):
                    continue
                self.pager.use_update(unit, number, (*(b.id for b in blocks), piece.block.id))
                if not started:
                    started = True
                    self._lease(leases, blocks)
                    unit.owner.changed()  # what the program wrote into the weights must land in the master first
                    self.tiers.will_change(unit.weights)
                with ExitStack() as piece_lease:
                    self._lease(piece_lease, [piece.block])
                    self._run_piece(piece, hypers, grad_factor)
            for handle in unit.handles:
                if handle in hypers:
                    handle.updated()

    def _blocks(self, unit: Unit, hypers: Mapping[ParamHandle, AdamHyper]) -> list[Block]:
        """Weights and landed gradients that the update of a unit needs."""
        blocks = {unit.weights.id: unit.weights}
        for handle in unit.handles:
            slot = handle.grad_slot
            if (
                handle in hypers
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

    def _run_piece(self, piece: StatePiece, hypers: Mapping[ParamHandle, AdamHyper], grad_factor: float) -> None:
        view = PieceView(self.tiers, piece)
        self.tiers.will_change(piece.block)
        indexed: list[AdamHyper] = []
        segments: list[Segment] = []
        keep: list[torch.Tensor] = []
        for part in piece.layout.segments:
            handle = piece.handles[part.tensor]
            hyper = hypers.get(handle)
            if hyper is None:
                continue
            if handle.master_stale:
                follow_weight(self.tiers, piece, part, handle)
            if not indexed or indexed[-1] != hyper:
                indexed.append(hyper)
            grad, grad_dtype = self._gradient(handle, keep)
            lead = view.lead(part)
            segments.append(
                Segment(
                    numel=part.numel,
                    hyper_index=len(indexed) - 1,
                    grad=grad + part.start * (4 if grad_dtype is DType.FP32 else 2),
                    grad_dtype=grad_dtype,
                    weight=handle.address() + part.start * handle.itemsize,
                    weight_dtype=NATIVE_DTYPES[handle.dtype],
                    remainder=lead if piece.kind is StateLayout.SPLIT_BF16 else 0,
                    master=lead if piece.kind is StateLayout.MASTER else 0,
                    exp_avg=view.exp_avg(part),
                    exp_avg_sq=view.exp_avg_sq(part),
                )
            )
        cpu_adam.adam_step(segments, indexed, piece.kind, grad_factor=grad_factor, num_threads=torch.get_num_threads())

    def _gradient(self, handle: ParamHandle, keep: list[torch.Tensor]) -> tuple[int, DType]:
        """Address and type of a parameter's gradient, in the order of the weight's bytes."""
        if handle.grad_state is GradientState.LANDED and handle.grad_slot is not None:
            return handle.grad_slot.address(), NATIVE_DTYPES[handle.grad_slot.dtype]
        return self.gradients.user_gradient(handle, keep)
