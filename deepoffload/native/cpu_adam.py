"""Host kernels: fused optimizer steps, gradient landing, norms, splitting of fp32, parallel fill and copy.

Everything here takes addresses as integers and counts in elements (bytes where the name says so), releases the GIL, and
checks all arguments before it writes anything: a wrong one raises ``ValueError`` naming the field. The caller keeps the
memory alive. Addresses need no alignment. 0 stands for an absent buffer where a buffer is optional.

Instruction set: the best that the CPU has, or the one named by ``DEEPOFFLOAD_CPU_CAPABILITY`` (``scalar``, ``avx2``,
``avx512``, ``avx512_bf16``, ``neon``). All of them, and any number of threads, give the same bits (NaN payloads aside).
Subnormal numbers are kept; ``torch.set_flush_denormal`` has no effect.

Threads are those of torch's OpenMP team when torch is loaded, else an own pool; pass ``torch.get_num_threads()``.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import NamedTuple

from deepoffload.native import _cpu_adam


class DType(enum.IntEnum):
    """Element types of gradients and weights."""

    FP32 = 0
    BF16 = 1
    FP16 = 2


class StateDType(enum.IntEnum):
    """What the optimizer's states (the moments) are stored in; the update computes in fp32 from all of them."""

    FP32 = 0
    BF16 = 1
    """Rounded to nearest even after each step. Adam without amsgrad, and Lion."""
    EIGHT_BIT = 2
    """One byte per element, blocks of :data:`STATE_BLOCK` with a scale: see :func:`quantize`. Adam without amsgrad."""


CHUNK = 16384
"""Elements that one thread takes at a time: fewer than that are one thread's."""

SUM_BLOCK = 4096
"""Elements whose squares are added in float64; the sums of such blocks are added exactly: see :func:`land`."""

SUM_UNIT = 1 << 352
"""A sum of squares is an integer: so many of it are 1.0."""

SUM_BYTES = 88
"""No sum of squares of fp32 numbers is longer."""

STATE_BLOCK = 256
"""Elements of 8-bit state that share a scale, counted from the start of the parameter."""


class StateLayout(enum.IntEnum):
    """Where the fp32 value of a weight lives."""

    FP32 = 0
    """``weight`` is the fp32 value itself; nothing else is written."""
    SPLIT_BF16 = 1
    """``weight`` is bf16 and ``remainder`` int16: see :func:`split_fp32`."""
    MASTER = 2
    """``master`` is fp32; ``weight``, when not 0, is a bf16 or fp16 copy rounded to nearest even in the same pass."""
    BF16 = 3
    """``weight`` is bf16 and there is nothing else: each update is rounded to nearest even, small ones are lost."""


class AdamHyper(NamedTuple):
    """Settings of one parameter group for one step, as in ``torch.optim.Adam`` and ``AdamW``."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    """True: ``p *= 1 - lr * weight_decay`` (AdamW). False: ``grad += weight_decay * p`` (Adam)."""
    step: int
    """Number of the step being taken, from 1."""
    bias_correction: bool = True
    maximize: bool = False
    amsgrad: bool = False
    state_dtype: StateDType = StateDType.FP32


class LionHyper(NamedTuple):
    """Settings of one parameter group for one step of Lion (Chen et al. 2023)."""

    lr: float
    beta1: float
    beta2: float
    weight_decay: float
    maximize: bool = False
    state_dtype: StateDType = StateDType.FP32


class AdagradHyper(NamedTuple):
    """Settings of one parameter group for one step, with the meaning they have in ``torch.optim.Adagrad``."""

    lr: float
    lr_decay: float
    eps: float
    weight_decay: float
    step: int
    """Number of the step being taken, from 1."""
    maximize: bool = False


class SgdHyper(NamedTuple):
    """Settings of one parameter group for one step, with the meaning they have in ``torch.optim.SGD``."""

    lr: float
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    first: bool
    """True in the step that gives the momentum buffer its first value; the buffer is then only written."""
    maximize: bool = False


class Segment(NamedTuple):
    """A contiguous piece of one parameter: ``numel`` elements at every address that is not 0.

    ``exp_avg`` is also the state of Lion and the ``momentum_buffer`` of SGD, ``exp_avg_sq`` the ``sum`` of Adagrad; a
    state that the optimizer does not have (SGD without momentum has none) is neither read nor written. 8-bit states
    have one fp32 at ``exp_avg_absmax`` and ``exp_avg_sq_absmax`` for each block, the last of which may be shorter.
    """

    numel: int
    hyper_index: int
    grad: int
    grad_dtype: DType
    weight: int
    weight_dtype: DType
    remainder: int = 0
    master: int = 0
    exp_avg: int = 0
    exp_avg_sq: int = 0
    max_exp_avg_sq: int = 0
    exp_avg_absmax: int = 0
    exp_avg_sq_absmax: int = 0


class Elsewhere(NamedTuple):
    """A range whose old values lie in another one, which it does not overlap: they are read there, and stay so."""

    begin: int
    nbytes: int
    old: int
    """Address of the value that belongs to ``begin``."""


def adam_step(
    segments: Sequence[Segment],
    hypers: Sequence[AdamHyper],
    layout: StateLayout,
    *,
    grad_factor: float,
    num_threads: int,
    elsewhere: Sequence[Elsewhere] = (),
) -> None:
    """One Adam or AdamW step over ``segments`` in one pass: scale the gradient, update moments and weight, convert.

    Per element, in fp32 with fused multiply-adds, scalars derived in double (Kingma and Ba 2015, Loshchilov and Hutter
    2019, Reddi et al. 2018; torch's single-tensor formulas)::

        g = grad * grad_factor            (negated when maximizing; + weight_decay * p when not decoupled)
        m = lerp(m, g, 1 - beta1);  v = beta2 * v + (1 - beta2) * g * g;  s = max(s, v) when amsgrad
        p = p * (1 - lr * weight_decay) - lr / (1 - beta1**step) * m / (sqrt(v or s) / sqrt(1 - beta2**step) + eps)

    ``grad_factor`` is unscale times clip factor, finite. The gradient is only read. Segments must not overlap. What of
    a segment lies in one of ``elsewhere`` is written there and read in its other place, with the same traffic.
    Against ``torch.optim.Adam`` and ``AdamW`` on fp32, one step from equal state: ``exp_avg_sq`` within 1 ulp,
    ``exp_avg`` within 1 ulp of the larger of itself and the gradient, the weight within 1 ulp of itself + 4 ulp of its
    change. With ``fused=True`` nearly every element is equal bit for bit (all but 3 in 100,000, measured); torch's
    other variants take their square roots from a library that rounds differently.

    Raises ``ValueError`` before anything is written when an argument is wrong, or when ``DEEPOFFLOAD_CPU_CAPABILITY``
    names an instruction set that this CPU lacks.
    """
    _cpu_adam.adam_step(segments, hypers, layout, grad_factor, num_threads, elsewhere)


def lion_step(
    segments: Sequence[Segment],
    hypers: Sequence[LionHyper],
    layout: StateLayout,
    *,
    grad_factor: float,
    num_threads: int,
    elsewhere: Sequence[Elsewhere] = (),
) -> None:
    """One Lion step: ``p = p * (1 - lr * weight_decay) - lr * sign(lerp(m, g, 1 - beta1)); m = lerp(m, g, 1 - beta2)``.

    Gradients, layouts, threads and errors as in :func:`adam_step`.
    """
    _cpu_adam.lion_step(segments, hypers, layout, grad_factor, num_threads, elsewhere)


def adagrad_step(
    segments: Sequence[Segment],
    hypers: Sequence[AdagradHyper],
    layout: StateLayout,
    *,
    grad_factor: float,
    num_threads: int,
    elsewhere: Sequence[Elsewhere] = (),
) -> None:
    """One Adagrad step: ``sum += g * g; p -= lr / (1 + (step - 1) * lr_decay) * g / (sqrt(sum) + eps)``.

    Gradients, layouts, threads and errors as in :func:`adam_step`. Against ``torch.optim.Adagrad`` on fp32, one step
    from equal state: ``sum`` within 1 ulp, the weight within 1 ulp of itself + 4 ulp of its change.
    """
    _cpu_adam.adagrad_step(segments, hypers, layout, grad_factor, num_threads, elsewhere)


def sgd_step(
    segments: Sequence[Segment],
    hypers: Sequence[SgdHyper],
    layout: StateLayout,
    *,
    grad_factor: float,
    num_threads: int,
    elsewhere: Sequence[Elsewhere] = (),
) -> None:
    """One SGD step: ``b = momentum * b + (1 - dampening) * g; p -= lr * (b, or g + momentum * b with nesterov)``.

    Gradients, layouts, threads and errors as in :func:`adam_step`. Against ``torch.optim.SGD`` on fp32, one step from
    equal state: buffer and weight within 1 ulp of the largest term of their sums.
    """
    _cpu_adam.sgd_step(segments, hypers, layout, grad_factor, num_threads, elsewhere)


def land(
    dst: int,
    src: int,
    numel: int,
    *,
    dst_dtype: DType,
    src_dtype: DType,
    accumulate: bool,
    num_threads: int,
) -> tuple[int, bool]:
    """``dst = src``, or ``dst = dst + src`` as ``Tensor.add_`` does it: in fp32, rounded to nearest even.

    Returns the sum of squares of what ``dst`` then holds, in units of 1 / :data:`SUM_UNIT`, and whether it holds an
    infinity or NaN; the sum then is without their blocks. Blocks of :data:`SUM_BLOCK` elements, counted from ``dst``,
    are summed in float64, in 32 lanes that are added in one order. The sums of the blocks are added exactly, as
    integers. So the result does not depend on threads, and what is landed part by part has the sum of its parts, if
    each part but the last consists of whole blocks. :func:`norm_of` makes a norm of it. ``dst`` and ``src`` are equal
    or disjoint.
    """
    return _exact(_cpu_adam.land(dst, src, numel, dst_dtype, src_dtype, accumulate, num_threads))


def land_parts(
    dst: int,
    parts: Sequence[int],
    numel: int,
    *,
    dtype: DType,
    scale: float,
    accumulate: bool,
    num_threads: int,
) -> tuple[int, bool]:
    """``dst = dst + scale * part`` for each of ``parts``, in their order; without ``accumulate`` the first one starts,
    ``dst = scale * part``. ``dst`` is fp32, ``parts`` are of ``dtype``.

    Each part is multiplied and added in fp32 with one rounding, to nearest even, so that a sum of many parts has the
    same bits as many sums of one. ``scale`` is rounded to fp32 first. Where it is a power of two the products are
    exact, as long as they are no subnormal numbers: the bits are then those of :func:`land` of parts that were
    multiplied before. All are added in one pass over ``dst``, which overlaps with none of them. Returns what
    :func:`land` returns.
    """
    return _exact(_cpu_adam.land_parts(dst, parts, numel, dtype, scale, accumulate, num_threads))


def sum_of_squares(src: int, numel: int, *, dtype: DType, num_threads: int) -> tuple[int, bool]:
    """The result of :func:`land` for what is already in place."""
    return _exact(_cpu_adam.sum_of_squares(src, numel, dtype, num_threads))


def _exact(found: tuple[bytes, bool]) -> tuple[int, bool]:
    total, non_finite = found
    return int.from_bytes(total, "little"), non_finite


def norm_of(sum_sq: int) -> float:
    """The square root of a sum of squares as :func:`land` gives it: rounded to float64, and its root again."""
    return math.sqrt(sum_sq / SUM_UNIT)  # the quotient of two integers is rounded once, however long they are


def split_fp32(src: int, hi: int, lo: int, numel: int, *, num_threads: int) -> None:
    """Split fp32 into bf16 ``hi``, x rounded to nearest even, and int16 ``lo = x - (hi << 16)``, modulo 2**32.

    Lossless with two exceptions. An x halfway between two bf16 numbers of which the even one is nearer to zero would
    need the remainder 2**15: it is first moved towards zero by one unit in its last place, which leaves ``hi`` as it
    is. And NaNs whose ``hi`` would be an infinity or a zero become the quiet NaN of their sign.
    """
    _cpu_adam.split_fp32(src, hi, lo, numel, num_threads)


def merge_fp32(hi: int, lo: int, dst: int, numel: int, *, num_threads: int) -> None:
    """The inverse of :func:`split_fp32`: ``(hi << 16) + lo`` modulo 2**32."""
    _cpu_adam.merge_fp32(hi, lo, dst, numel, num_threads)


def quantize(src: int, codes: int, absmax: int, numel: int, *, signed: bool, num_threads: int) -> None:
    """8-bit codes of an fp32 array, as the update stores ``exp_avg`` (``signed``) and ``exp_avg_sq``.

    Block-wise as in Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization", with a power law instead of
    their table: for each block of :data:`STATE_BLOCK` elements ``absmax = max(abs(x))``, and

    - signed: int8 ``q = round(copysign((abs(x) / absmax) ** 0.25, x) * 127)``
    - unsigned: uint8 ``q = round((x / absmax) ** 0.25 * 255)``, at least 1 where ``x > 0``

    rounded to nearest even, in fp32. A block with a NaN or an infinity becomes NaN as a whole; one whose absmax is
    below 2**-126 becomes zeros. Unsigned values must not be negative.
    """
    _cpu_adam.quantize(src, codes, absmax, numel, signed, num_threads)


def dequantize(codes: int, absmax: int, dst: int, numel: int, *, signed: bool, num_threads: int) -> None:
    """The values of 8-bit codes: ``(q / 127) ** 4 * absmax`` with the sign of ``q``, or ``(q / 255) ** 4 * absmax``.

    :func:`quantize` gives the same codes and scales again when absmax is at least 2**-93 (below that the smallest
    values may fall together).
    """
    _cpu_adam.dequantize(codes, absmax, dst, numel, signed, num_threads)


def fill(dst: int, nbytes: int, byte: int, num_threads: int) -> None:
    """Set ``nbytes`` bytes to ``byte`` (0 to 255) in parallel."""
    _cpu_adam.fill(dst, nbytes, byte, num_threads)


def copy(dst: int, src: int, nbytes: int, num_threads: int) -> None:
    """Copy bytes in parallel; overlapping ranges are copied right as well (``memmove``), on one thread."""
    _cpu_adam.copy(dst, src, nbytes, num_threads)


def capability() -> str:
    """The instruction set in use."""
    return _cpu_adam.capability()


def available_capabilities() -> list[str]:
    """Instruction sets that this build and CPU have, best last."""
    return _cpu_adam.available_capabilities()


def threading_backend() -> str:
    """``"openmp: <path of the runtime>"``, or ``"own pool"`` when no OpenMP runtime is loaded in this process."""
    return _cpu_adam.threading_backend()
