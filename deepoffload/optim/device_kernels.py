"""What updates optimizer state that lives on a device, and sums up squares of gradients there: one kernel each where
Triton is installed, which comes with torch's builds for CUDA, and torch's operators elsewhere. Both have the bits of
the host's kernels.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from deepoffload.native.cpu_adam import SUM_BLOCK, AdamHyper
from deepoffload.optim import device_sums
from deepoffload.optim.device_arithmetic import SCRATCH_BYTES_PER_ELEMENT, AdamCoefficients, Arithmetic
from deepoffload.params.torch_private import outside_user_modes

log = logging.getLogger("deepoffload")

CHUNK_NUMEL_MAX = 16 << 20
"""Elements that torch's operators update at once, at most; fewer where the budget has less memory for what they need
meanwhile."""

CONSTANT_BYTES = 256
"""Of the scratch memory, for the one number that an update has on the device."""

TRIED_NUMEL = 3 * SUM_BLOCK + 77
"""Elements of the update by which a kernel is tried."""

TRIED_HYPER = AdamHyper(1e-3, 0.9, 0.95, 1e-8, 0.1, True, 3)


@dataclass(frozen=True)
class DeviceSegment:
    """What of one parameter lies in a piece of state, flat, on a device.

    Attributes:
        weight: fp32, bf16 or fp16.
        grad: fp32, bf16 or fp16.
        exp_avg, exp_avg_sq: fp32.
        lead: what completes the weight to its master: remainders (int16) of bf16, masters (fp32) of fp16.
        first: the moments have no values yet.
        stale: the program has changed the weight, so that the master is its exact value.
    """

    weight: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    lead: Tensor | None
    first: bool
    stale: bool


class DeviceKernels(Protocol):
    """Launches on the current stream. ``scratch``: uint8 on the device, to be overwritten."""

    def update(self, segment: DeviceSegment, coefficients: AdamCoefficients, scratch: Tensor) -> None:
        """One step of Adam or AdamW."""

    def block_sums(self, parts: Sequence[Tensor], sums: Tensor, scratch: Tensor) -> None:
        """The sums of squares of the blocks of each part, one after the other, into ``sums``: see
        :func:`~deepoffload.optim.device_sums.block_sums`."""


class OperatorKernels:
    """torch's operators: some 80 launches for a chunk of an update, 140 for the sums of a few million elements."""

    def update(self, segment: DeviceSegment, coefficients: AdamCoefficients, scratch: Tensor) -> None:
        root = scratch[:4].view(torch.float32).fill_(coefficients.root_correction2)
        work_bytes = scratch[CONSTANT_BYTES:]
        chunk_numel = min(CHUNK_NUMEL_MAX, work_bytes.numel() // SCRATCH_BYTES_PER_ELEMENT)
        if segment.first:
            segment.exp_avg.zero_()
            segment.exp_avg_sq.zero_()
        numel = segment.weight.numel()
        for start in range(0, numel, chunk_numel):
            chunk = slice(start, min(start + chunk_numel, numel))
            work = Arithmetic(work_bytes, chunk.stop - chunk.start)
            work.grad.copy_(segment.grad[chunk])
            weight, lead = segment.weight[chunk], None if segment.lead is None else segment.lead[chunk]
            work.join(weight, lead, stale=segment.stale)
            work.adam(segment.exp_avg[chunk], segment.exp_avg_sq[chunk], coefficients, root)
            work.split(weight, lead)

    def block_sums(self, parts: Sequence[Tensor], sums: Tensor, scratch: Tensor) -> None:
        device_sums.block_sums(parts, sums, scratch)


class FusedKernels:
    """Triton's: one launch for 16 M elements of an update, one for the sums of a gradient, and no memory meanwhile.

    Args:
        device: with its index. Triton launches on the current device, which need not be this one.
    """

    def __init__(self, device: torch.device) -> None:
        self._kernels: Any = importlib.import_module("deepoffload.optim.fused_kernels")
        self._device, self._module = device, torch.get_device_module(device)

    def update(self, segment: DeviceSegment, coefficients: AdamCoefficients, scratch: Tensor) -> None:
        one = segment
        with self._current():
            self._kernels.update(
                *(one.weight, one.lead, one.grad, one.exp_avg, one.exp_avg_sq, coefficients),
                first=one.first,
                stale=one.stale,
            )

    def block_sums(self, parts: Sequence[Tensor], sums: Tensor, scratch: Tensor) -> None:
        at = 0
        with self._current():
            for part in parts:
                count = device_sums.blocks_of(part.numel())
                self._kernels.block_sums(part, sums[at : at + count])
                at += count

    def _current(self) -> AbstractContextManager[Any]:
        found: AbstractContextManager[Any] = self._module.device(self._device)
        return found


def choose_kernels(device: torch.device, dtypes: Iterable[torch.dtype]) -> DeviceKernels:
    """The kernels for weights of ``dtypes`` on a device. Triton's are taken where they compile and have the bits of
    torch's operators in a small update of each type. The log says which were taken, and why."""
    operators = OperatorKernels()
    if importlib.util.find_spec("triton") is None:
        why = "Triton is not installed"
    else:
        try:
            fused = FusedKernels(device)
            with outside_user_modes():
                wrong = [str(dtype) for dtype in dict.fromkeys(dtypes) if not _agree(device, dtype, fused, operators)]
        except Exception as error:  # Triton's compiler fails in many ways, and the operators work all the same
            why = f"Triton's kernels cannot be used: {type(error).__name__}: {error}"
        else:
            if not wrong:
                log.info("optimizer state on %s is updated by one kernel of Triton", device)
                return fused
            why = f"Triton's kernels have other bits with weights of {', '.join(wrong)}"
    log.info("optimizer state on %s is updated by torch's operators: %s", device, why)
    return operators


def _agree(device: torch.device, dtype: torch.dtype, *kernels: DeviceKernels) -> bool:
    """Whether kernels give the same bits in two steps and in sums of squares. Everything is small, and gone after."""
    found = []
    for each in kernels:
        segment, scratch = _tried_segment(device, dtype)
        sums = scratch[: 8 * device_sums.blocks_of(TRIED_NUMEL)].view(torch.float64)
        each.block_sums([segment.grad], sums, scratch[CONSTANT_BYTES:])
        kept = [sums.clone()]
        each.update(segment, AdamCoefficients.of(TRIED_HYPER, 0.37), scratch)
        each.update(replace(segment, first=False), AdamCoefficients.of(TRIED_HYPER, 1.0), scratch)
        lead = [] if segment.lead is None else [segment.lead]
        found.append([*kept, segment.weight, segment.exp_avg, segment.exp_avg_sq, *lead])
    return all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def _tried_segment(device: torch.device, dtype: torch.dtype) -> tuple[DeviceSegment, Tensor]:
    generator = torch.Generator().manual_seed(0)
    weight, grad, exp_avg, exp_avg_sq = (
        torch.randn(TRIED_NUMEL, generator=generator)
        * torch.randint(-30, 4, (TRIED_NUMEL,), generator=generator).float().exp2()
        for _ in range(4)
    )
    leads = {
        torch.bfloat16: torch.randint(-(1 << 15), 1 << 15, (TRIED_NUMEL,), generator=generator).to(torch.int16),
        torch.float16: weight,
    }
    lead = leads.get(dtype)
    segment = DeviceSegment(
        weight.to(dtype).to(device),
        grad.to(dtype).to(device),
        exp_avg.to(device),
        exp_avg_sq.square().to(device),
        None if lead is None else lead.to(device),
        first=False,
        stale=False,
    )
    nbytes = CONSTANT_BYTES + TRIED_NUMEL * SCRATCH_BYTES_PER_ELEMENT
    return segment, torch.empty(nbytes, dtype=torch.uint8, device=device)
