"""Arrays of optimizer state in the types they are stored in: fp32, bf16, or 8-bit codes with a scale per block."""

from __future__ import annotations

import torch
from torch import Tensor

from deepoffload.native import cpu_adam
from deepoffload.native.cpu_adam import STATE_BLOCK, StateDType
from deepoffload.optim.threads import num_threads

SIGNED_FIELDS = frozenset({"exp_avg"})
"""States that may be negative; the codes of the others have no sign."""

CHUNK_NUMEL = 1 << 16
"""Elements that are converted at a time; a multiple of the block."""

_PLAIN = {StateDType.FP32: torch.float32, StateDType.BF16: torch.bfloat16}


def torch_dtype(dtype: StateDType, field: str) -> torch.dtype:
    """Element type of the tensor that holds a state."""
    return _PLAIN.get(dtype, torch.int8 if field in SIGNED_FIELDS else torch.uint8)


def num_blocks(numel: int) -> int:
    """Scales that ``numel`` elements of 8-bit state have."""
    return -(-numel // STATE_BLOCK)


def encode(values: Tensor, field: str) -> tuple[Tensor, Tensor]:
    """8-bit codes (the shape of ``values``) and scales (fp32, one per block) of a dense fp32 array."""
    codes = torch.empty(values.shape, dtype=torch_dtype(StateDType.EIGHT_BIT, field), device="cpu")
    scales = torch.zeros(num_blocks(values.numel()), dtype=torch.float32, device="cpu")
    if values.numel():
        cpu_adam.quantize(
            values.data_ptr(),
            codes.data_ptr(),
            scales.data_ptr(),
            values.numel(),
            signed=field in SIGNED_FIELDS,
            num_threads=num_threads(),
        )
    return codes, scales


def decode(codes: Tensor, scales: Tensor, field: str) -> Tensor:
    """The fp32 values of what :func:`encode` gave."""
    values = torch.empty(codes.shape, dtype=torch.float32, device="cpu")
    if codes.numel():
        cpu_adam.dequantize(
            codes.data_ptr(),
            scales.data_ptr(),
            values.data_ptr(),
            codes.numel(),
            signed=field in SIGNED_FIELDS,
            num_threads=num_threads(),
        )
    return values
