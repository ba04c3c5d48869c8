"""Memory that all contenders share, on pages of one kind."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

from deepoffload.native.cpu_adam import STATE_BLOCK, DType, Segment, StateDType, StateLayout

HUGE_PAGE_BYTES = 2 << 20


def huge(n: int, dtype: torch.dtype) -> Tensor:
    """An uninitialised tensor that starts on a huge page and consists of them, as far as the kernel has any."""
    nbytes = n * dtype.itemsize
    memory = mmap.mmap(-1, nbytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE_PAGE_BYTES
    return whole[start : start + nbytes].view(dtype)


class Buffers:
    """One set of streams. Values stay positive and of their usual size with all that runs on them, and with
    the C stream: gradients are, and steps are tiny."""

    def __init__(self, n: int, *, huge_pages: bool) -> None:
        self.n = n
        make = huge if huge_pages else lambda n, dtype: torch.empty(n, dtype=dtype)
        self.weight, self.grad, self.exp_avg, self.exp_avg_sq = (make(n, torch.float32) for _ in range(4))
        self.weight.uniform_(0.5, 1.0)
        self.grad.uniform_(1e-4, 1e-3)
        self.exp_avg.uniform_(1e-4, 1e-3)
        self.exp_avg_sq.uniform_(1e-7, 1e-6)
        fp32 = (self.weight, self.grad, self.exp_avg, self.exp_avg_sq)
        self.weight16, self.grad16, self.exp_avg16, self.exp_avg_sq16 = (
            make(n, torch.bfloat16).copy_(array) for array in fp32
        )
        self.landed16, self.bucket16 = (make(n, torch.bfloat16).zero_() for _ in range(2))
        self.remainder = make(n, torch.int16).zero_()
        self.codes = [make(n, torch.int8).zero_(), make(n, torch.uint8).zero_()]
        self.scales = [torch.zeros(-(-n // STATE_BLOCK)) for _ in range(2)]

    def segment(self, layout: StateLayout, states: StateDType = StateDType.FP32) -> Segment:
        grad, grad_dtype = (self.grad, DType.FP32) if layout is StateLayout.FP32 else (self.grad16, DType.BF16)
        whole = layout is StateLayout.FP32
        first, second = {
            StateDType.FP32: (self.exp_avg, self.exp_avg_sq),
            StateDType.BF16: (self.exp_avg16, self.exp_avg_sq16),
            StateDType.EIGHT_BIT: self.codes,
        }[states]
        return Segment(
            numel=self.n,
            hyper_index=0,
            grad=grad.data_ptr(),
            grad_dtype=grad_dtype,
            weight=(self.weight if whole else self.weight16).data_ptr(),
            weight_dtype=DType.FP32 if whole else DType.BF16,
            remainder=self.remainder.data_ptr(),
            master=self.weight.data_ptr(),
            exp_avg=first.data_ptr(),
            exp_avg_sq=second.data_ptr(),
            exp_avg_absmax=self.scales[0].data_ptr(),
            exp_avg_sq_absmax=self.scales[1].data_ptr(),
        )
