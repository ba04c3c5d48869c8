# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc"
"""Adam and sums of squares on a device, each in one kernel (Triton), with the bits of the host's kernels.

Triton comes with torch's builds for CUDA. Who imports this module has found out that it is there
(:mod:`deepoffload.optim.device_kernels`); nothing else does.

Each operation is rounded once, as on the host: products and sums are not contracted (``enable_fp_fusion=False``), what
the host fuses is :func:`_fma`, and roots and quotients are those of IEEE 754, subnormal numbers included. Triton's own
``div_rn`` and ``sqrt_rn`` flush these to zero, because it links NVIDIA's library so. A bf16 number is taken as its 16
bits, so no device needs instructions for it. Arguments of kernels have no types: Triton would read them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepoffload.native.cpu_adam import SUM_BLOCK
from deepoffload.optim.device_arithmetic import AdamCoefficients
from deepoffload.optim.device_sums import LANES

CHUNK_NUMEL_MAX = 16 << 20
"""Elements that one launch updates at most: 32 bits count them."""

BLOCK = 1024
"""Elements that one program updates."""

SUMS_AT_ONCE = 8
"""Blocks of :data:`SUM_BLOCK` elements that one program sums up."""

BF16 = tl.constexpr(1)
FP16 = tl.constexpr(2)
FP32 = tl.constexpr(0)
_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

ROWS = tl.constexpr(SUM_BLOCK // LANES)
ROWS_AT_ONCE = tl.constexpr(8)
"""Rows of a block whose loads are under way together."""
ROW = tl.constexpr(LANES)

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Triton's interpreter rounds a product and a sum one after the other. There a fused multiply-add is made of float64,
as torch's operators make one (:class:`~deepoffload.optim.device_arithmetic.Arithmetic`)."""
PTX = tl.constexpr(torch.version.cuda is not None and not triton.knobs.runtime.interpret)
"""Instructions can be named."""


@triton.jit
def _fma(a, b, c):
    """``a * b + c``, rounded once."""
    if not INTERPRETED:
        return tl.fma(a, b, c)
    product, c = a.to(tl.float64) * b.to(tl.float64), c.to(tl.float64)
    total = product + c
    rest = total - product
    error = (product - (total - rest)) + (c - rest)
    bits = total.to(tl.int64, bitcast=True)
    inexact = (error != 0.0) & (tl.abs(total) < float("inf")) & ((bits & 1) == 0)
    bits += tl.where(inexact, tl.where((error > 0.0) == (total > 0.0), 1, -1), 0)
    return bits.to(tl.float64, bitcast=True).to(tl.float32)


@triton.jit
def _quotient(a, b):
    """``a / b``, rounded once. The second rounding of a float64 changes nothing: that has more than twice the bits."""
    if PTX:
        return tl.inline_asm_elementwise("div.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], tl.float32, True, 1)
    return (a.to(tl.float64) / b.to(tl.float64)).to(tl.float32)


@triton.jit
def _root(a):
    """The square root, rounded once, likewise."""
    if PTX:
        return tl.inline_asm_elementwise("sqrt.rn.f32 $0, $1;", "=f,f", [a], tl.float32, True, 1)
    return tl.sqrt(a.to(tl.float64)).to(tl.float32)


@triton.jit
def _bf16(bits):
    """The fp32 number of which ``bits`` (int16) is the upper half."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _loaded(address, here, TYPE: tl.constexpr):
    found = tl.load(address, mask=here, other=0)
    if TYPE == BF16:
        return _bf16(found)
    return found.to(tl.float32)


@triton.jit
def _adam(
    weight,
    lead,
    grad,
    exp_avg,
    exp_avg_sq,
    numel,
    grad_factor,
    weight_factor,
    l2,
    neg_step_size,
    eps,
    lerp,
    beta2,
    one_minus_beta2,
    root_correction2,
    WEIGHT: tl.constexpr,
    GRAD: tl.constexpr,
    FIRST: tl.constexpr,
    STALE: tl.constexpr,
    COUPLED: tl.constexpr,
    FROM_NEW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = at < numel
    if WEIGHT == BF16:
        bits = tl.load(weight + at, mask=here, other=0).to(tl.int32) << 16
        if not STALE:
            bits += tl.load(lead + at, mask=here, other=0).to(tl.int32)
        master = bits.to(tl.float32, bitcast=True)
    elif WEIGHT == FP16 and not STALE:
        master = tl.load(lead + at, mask=here, other=0.0)
    else:
        master = tl.load(weight + at, mask=here, other=0.0).to(tl.float32)

    g = _loaded(grad + at, here, GRAD) * grad_factor
    if COUPLED:
        g = _fma(master, l2 + tl.full([BLOCK], 0.0, tl.float32), g)
    if FIRST:
        m = tl.full([BLOCK], 0.0, tl.float32)
        v = tl.full([BLOCK], 0.0, tl.float32)
    else:
        m = tl.load(exp_avg + at, mask=here, other=0.0)
        v = tl.load(exp_avg_sq + at, mask=here, other=0.0)
    factor = lerp + tl.full([BLOCK], 0.0, tl.float32)
    if FROM_NEW:
        m = _fma(g - m, factor, g)
    else:
        m = _fma(g - m, factor, m)
    v = _fma(g * one_minus_beta2, g, v * beta2)
    root = _quotient(_root(v), root_correction2 + tl.full([BLOCK], 0.0, tl.float32))
    master = master * weight_factor + _quotient(m * neg_step_size, root + eps)
    tl.store(exp_avg + at, m, mask=here)
    tl.store(exp_avg_sq + at, v, mask=here)

    if WEIGHT == BF16:  # ``cpu_adam.split_fp32``
        bits = master.to(tl.int32, bitcast=True)
        bits -= ((bits & 0x1FFFF) == 0x8000).to(tl.int32)  # the tie whose remainder would not fit
        is_nan = master != master
        upper = tl.where(is_nan, (bits >> 16) | 0x40, (bits + 0x8000) >> 16)
        tl.store(weight + at, upper.to(tl.int16), mask=here)
        tl.store(lead + at, tl.where(is_nan, 0, bits - (upper << 16)).to(tl.int16), mask=here)
    elif WEIGHT == FP16:
        tl.store(lead + at, master, mask=here)
        tl.store(weight + at, master.to(tl.float16), mask=here)
    else:
        tl.store(weight + at, master, mask=here)


@triton.jit
def _halved(lanes, COUNT: tl.constexpr, HALF: tl.constexpr):
    """Of each row the upper half added to the lower one."""
    lower, upper = tl.split(tl.permute(tl.reshape(lanes, [COUNT, 2, HALF]), (0, 2, 1)))
    return lower + upper


@triton.jit
def _sums(values, sums, numel, blocks, TYPE: tl.constexpr, COUNT: tl.constexpr, SIZE: tl.constexpr):
    block = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    at = block[:, None].to(tl.int64) * SIZE + tl.arange(0, ROW)[None, :]
    lanes = tl.full([COUNT, ROW], 0.0, tl.float64)
    for row in range(0, ROWS, ROWS_AT_ONCE):
        for ahead in tl.static_range(ROWS_AT_ONCE):
            here = at + (row + ahead) * ROW
            value = _loaded(values + here, here < numel, TYPE).to(tl.float64)
            lanes += value * value  # exact: 24 bits have become 48
    lanes = _halved(lanes, COUNT, ROW // 2)
    lanes = _halved(lanes, COUNT, ROW // 4)
    lanes = _halved(lanes, COUNT, ROW // 8)
    lanes = _halved(lanes, COUNT, ROW // 16)
    lanes = _halved(lanes, COUNT, ROW // 32)
    tl.store(sums + block, tl.reshape(lanes, [COUNT]), mask=block < blocks)


def update(
    weight: Tensor,
    lead: Tensor | None,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    coefficients: AdamCoefficients,
    *,
    first: bool,
    stale: bool,
) -> None:
    """One step of Adam or AdamW, in the current stream of the current device. All are flat and of equal length.

    Args:
        weight: fp32, bf16 or fp16.
        lead: int16 remainders of a bf16 weight, fp32 masters of an fp16 one, None for fp32.
        grad: fp32, bf16 or fp16.
        first: the moments have no values yet.
        stale: the program has changed the weight, so that the master is its exact value.
    """
    c, numel = coefficients, weight.numel()
    factor = -c.lerp_rest if c.lerp_from_new else c.lerp_weight
    codes = _CODES[weight.dtype], _CODES[grad.dtype]
    weight, grad = _as_bits(weight), _as_bits(grad)
    lead = weight if lead is None else lead
    for start in range(0, numel, CHUNK_NUMEL_MAX):
        chunk = slice(start, min(start + CHUNK_NUMEL_MAX, numel))
        count = chunk.stop - start
        _adam[(triton.cdiv(count, BLOCK),)](
            *(part[chunk] for part in (weight, lead, grad, exp_avg, exp_avg_sq)),
            count,
            c.grad_factor,
            c.weight_factor,
            c.l2,
            c.neg_step_size,
            c.eps,
            factor,
            c.beta2,
            c.one_minus_beta2,
            c.root_correction2,
            *codes,
            first,
            stale,
            c.l2 != 0.0,
            c.lerp_from_new,
            BLOCK,
            num_warps=4,
            enable_fp_fusion=False,
        )


def block_sums(values: Tensor, sums: Tensor) -> None:
    """The sum of squares of each block of :data:`SUM_BLOCK` elements of ``values`` (flat; fp32, bf16 or fp16).

    Args:
        sums: float64, one for each block; overwritten.
    """
    blocks = sums.numel()
    grid = (triton.cdiv(blocks, SUMS_AT_ONCE),)
    code = _CODES[values.dtype]
    _sums[grid](
        _as_bits(values),
        sums,
        values.numel(),
        blocks,
        code,
        SUMS_AT_ONCE,
        SUM_BLOCK,
        num_warps=4,
        enable_fp_fusion=False,
    )


def _as_bits(values: Tensor) -> Tensor:
    return values.view(torch.int16) if values.dtype is torch.bfloat16 else values
