"""Gradients outside of their unit's block: tensors that the program assigned to ``.grad``, or that autograd keeps."""

from __future__ import annotations

import torch
from torch import Tensor

from deepoffload.io.checksums import crc32c
from deepoffload.native import cpu_adam
from deepoffload.native.cpu_adam import DType
from deepoffload.optim.dtypes import NATIVE_DTYPES
from deepoffload.optim.threads import num_threads
from deepoffload.params.slot import TensorSlot
from deepoffload.params.torch_private import get_grad, outside_user_modes
from deepoffload.params.unit import ParamHandle


def sum_of_squares(handle: ParamHandle) -> tuple[int, bool]:
    """Sum of squares (see :func:`~deepoffload.native.cpu_adam.land`) of the dense tensor in ``.grad`` as an update
    uses it, and whether it holds a non-finite value."""
    if _raw(handle) is None:
        return 0, False
    keep: list[Tensor] = []
    source, dtype = address(handle, keep)
    return cpu_adam.sum_of_squares(source, handle.numel, dtype=dtype, num_threads=num_threads())


def checksum(handle: ParamHandle) -> int:
    """Of the bytes that :func:`address` gives."""
    keep: list[Tensor] = []
    source, _ = address(handle, keep)
    return crc32c(source, keep[0].nbytes)


def address(handle: ParamHandle, keep: list[Tensor]) -> tuple[int, DType]:
    """Host memory address and type of what is in ``.grad``, in the order of the weight's bytes; ``keep`` holds the
    memory, a copy if one is needed."""
    raw = _raw(handle)
    if raw is None:
        raise RuntimeError(f"{handle.name} has no gradient")
    if raw.dtype not in NATIVE_DTYPES or raw.stride() != handle.stride or raw.is_neg():
        raw = with_stride(raw if raw.dtype in NATIVE_DTYPES else raw.to(handle.dtype), handle)
    raw = raw.to("cpu")  # a copy where a device computes
    keep.append(raw)
    return raw.data_ptr(), NATIVE_DTYPES[raw.dtype]


def with_stride(grad: Tensor, like: TensorSlot) -> Tensor:
    """A copy with the order of elements that ``like`` has."""
    with outside_user_modes():
        copy = torch.empty_strided(like.shape, like.stride, dtype=grad.dtype, device=grad.device)
        return copy.copy_(grad)


def _raw(handle: ParamHandle) -> Tensor | None:
    param = handle.tensor
    return get_grad(param) if param is not None else None
