"""Buffers and scenarios shared by the kernel tests, on numpy only, so that it also runs where torch is not loaded.

As a program (``python cpu_adam_scenario.py NUM_THREADS``) it runs every kernel on fixed inputs and prints a digest of
all outputs: two instruction sets or thread counts agree exactly when the digests do. NaN payloads are left out.
"""

from __future__ import annotations

import hashlib
import sys

import numpy as np

from deepoffload.native import cpu_adam
from deepoffload.native.cpu_adam import (
    STATE_BLOCK,
    AdagradHyper,
    AdamHyper,
    DType,
    LionHyper,
    Segment,
    SgdHyper,
    StateDType,
    StateLayout,
)

HYPER = AdamHyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, decoupled=True, step=3)
SPECIAL = np.array(
    [
        0.0,
        -0.0,
        1e-45,
        -1e-45,
        1.1e-38,
        -3e-39,
        3.4e38,
        -3.4e38,
        np.inf,
        -np.inf,
        np.nan,
        65504.0,
        65520.0,
        6e-8,
        2.0**-25,
    ],
    dtype=np.float32,
)


def at_offset(values: np.ndarray, offset_bytes: int) -> np.ndarray:
    """A copy of ``values`` ``offset_bytes`` beyond a 64-byte boundary, between guard bytes of its own array."""
    raw = np.full(values.nbytes + 192, 0xA5, dtype=np.uint8)
    start = -raw.ctypes.data % 64 + 64 + offset_bytes
    view = raw[start : start + values.nbytes].view(values.dtype)
    view[:] = values
    return view


def guards_intact(view: np.ndarray) -> bool:
    """Whether all bytes around a view made by :func:`at_offset` are as they were."""
    raw = view
    while raw.base is not None:
        raw = raw.base
    start = view.ctypes.data - raw.ctypes.data
    return bool((raw[:start] == 0xA5).all() and (raw[start + view.nbytes :] == 0xA5).all())


def bf16_bits(values: np.ndarray) -> np.ndarray:
    """Round to nearest even, NaN kept quiet."""
    u = values.astype(np.float32).view(np.uint32)
    rounded = ((u.astype(np.uint64) + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), ((u >> 16) | 0x40).astype(np.uint16), rounded)


def bf16_values(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def encode(values: np.ndarray, dtype: DType) -> np.ndarray:
    with np.errstate(over="ignore"):
        return (
            bf16_bits(values)
            if dtype is DType.BF16
            else values.astype(np.float16 if dtype is DType.FP16 else np.float32)
        )


def decode(array: np.ndarray) -> np.ndarray:
    return bf16_values(array) if array.dtype == np.uint16 else array.astype(np.float32)


class AdamBuffers:
    """All streams of one segment, each at its own misalignment, with random or special contents."""

    def __init__(
        self,
        n: int,
        layout: StateLayout,
        grad: DType,
        copy: DType,
        *,
        seed: int = 0,
        offset_bytes: int = 0,
        special: bool = False,
    ) -> None:
        rng = np.random.default_rng(seed)
        weight = (rng.standard_normal(n) * 10.0 ** rng.integers(-6, 2, n)).astype(np.float32)
        gradient = (rng.standard_normal(n) * 10.0 ** rng.integers(-8, 2, n)).astype(np.float32)
        exp_avg = (rng.standard_normal(n) * 10.0 ** rng.integers(-8, 1, n)).astype(np.float32)
        exp_avg_sq = (rng.random(n) * 10.0 ** rng.integers(-12, 1, n)).astype(np.float32)
        if special:
            for array in (weight, gradient, exp_avg):
                array[:] = np.where(rng.random(n) < 0.3, rng.choice(SPECIAL, n), array)
            exp_avg_sq[:] = np.where(rng.random(n) < 0.3, np.abs(rng.choice(SPECIAL, n)), exp_avg_sq)
        self.n, self.layout, self.grad_dtype, self.copy_dtype = n, layout, grad, copy
        self.grad = at_offset(encode(gradient, grad), offset_bytes)
        self.exp_avg = at_offset(exp_avg, offset_bytes * 2)
        self.exp_avg_sq = at_offset(exp_avg_sq, offset_bytes * 3)
        with np.errstate(over="ignore"):
            maxima = (exp_avg_sq * rng.choice([0.5, 2.0], n)).astype(np.float32)
        self.max_exp_avg_sq = at_offset(maxima, offset_bytes * 5)
        self.master = at_offset(weight, offset_bytes * 7)
        self.weight = at_offset(np.zeros(n, np.float16 if copy is DType.FP16 else np.uint16), offset_bytes)
        self.remainder = at_offset(np.zeros(n, np.int16), offset_bytes * 3)
        if layout is StateLayout.SPLIT_BF16:
            hi, lo = self.weight.ctypes.data, self.remainder.ctypes.data
            cpu_adam.split_fp32(weight.ctypes.data, hi, lo, n, num_threads=1)
        elif layout is StateLayout.BF16:
            self.weight[:] = bf16_bits(weight)

    def segment(self, hyper_index: int = 0) -> Segment:
        whole = self.layout is StateLayout.FP32
        return Segment(
            numel=self.n,
            hyper_index=hyper_index,
            grad=self.grad.ctypes.data,
            grad_dtype=self.grad_dtype,
            weight=(self.master if whole else self.weight).ctypes.data,
            weight_dtype=DType.FP32 if whole else self.copy_dtype,
            remainder=self.remainder.ctypes.data if self.layout is StateLayout.SPLIT_BF16 else 0,
            master=self.master.ctypes.data if self.layout is StateLayout.MASTER else 0,
            exp_avg=self.exp_avg.ctypes.data,
            exp_avg_sq=self.exp_avg_sq.ctypes.data,
            max_exp_avg_sq=self.max_exp_avg_sq.ctypes.data,
        )

    def value(self) -> np.ndarray:
        """The fp32 value of the weight."""
        if self.layout is StateLayout.BF16:
            return bf16_values(self.weight)
        if self.layout is not StateLayout.SPLIT_BF16:
            return self.master.copy()
        merged = (self.weight.astype(np.uint32) << 16) + self.remainder.astype(np.int32).view(np.uint32)
        return merged.view(np.float32)

    def outputs(self) -> list[np.ndarray]:
        return [self.master, self.weight, self.remainder, self.exp_avg, self.exp_avg_sq, self.max_exp_avg_sq]

    def step(self, hyper: AdamHyper = HYPER, *, grad_factor: float = 1.0, num_threads: int = 1) -> None:
        cpu_adam.adam_step([self.segment()], [hyper], self.layout, grad_factor=grad_factor, num_threads=num_threads)


FORMS = [
    (StateLayout.FP32, DType.FP32),
    (StateLayout.SPLIT_BF16, DType.BF16),
    (StateLayout.MASTER, DType.BF16),
    (StateLayout.MASTER, DType.FP16),
]


def canonical(array: np.ndarray) -> bytes:
    """The bytes of an array with one NaN for all: which of two NaNs an operation returns is the compiler's choice."""
    result = array.copy()
    if array.dtype in (np.float32, np.float16):
        result[np.isnan(result)] = np.nan
    elif array.dtype == np.uint16:
        result[(result & 0x7FFF) > 0x7F80] = 0x7FC0
    return result.tobytes()


def _update_with_sisters(digest: hashlib._Hash, num_threads: int) -> None:
    lion = LionHyper(lr=1e-3, beta1=0.9, beta2=0.3, weight_decay=0.1)
    adagrad = AdagradHyper(lr=0.05, lr_decay=0.01, eps=1e-10, weight_decay=0.01, step=3)
    sgd = SgdHyper(lr=0.05, momentum=0.9, dampening=0.1, weight_decay=0.01, nesterov=False, first=False)
    steps = [
        (cpu_adam.lion_step, lion),
        (cpu_adam.adagrad_step, adagrad),
        (cpu_adam.sgd_step, sgd),
        (cpu_adam.sgd_step, sgd._replace(dampening=0.0, nesterov=True)),
        (cpu_adam.sgd_step, sgd._replace(momentum=0.0)),
    ]
    for layout, copy in FORMS:
        for step, hyper in steps:
            buffers = AdamBuffers(10_007, layout, DType.BF16, copy, seed=3, special=True)
            step([buffers.segment()], [hyper], layout, grad_factor=0.37, num_threads=num_threads)
            buffers.remainder[np.isnan(buffers.value())] = 0
            for array in buffers.outputs():
                digest.update(canonical(array))


class Stored:
    """The moments of ``buffers`` stored as ``dtype``, each at its own misalignment."""

    def __init__(self, buffers: AdamBuffers, dtype: StateDType, *, offset_bytes: int = 0) -> None:
        self.dtype, n = dtype, buffers.n
        self.scales = [at_offset(np.zeros(-(-n // STATE_BLOCK), np.float32), offset_bytes * 3) for _ in range(2)]
        self.arrays = []
        for values, scales, signed in zip(
            (buffers.exp_avg, buffers.exp_avg_sq), self.scales, (True, False), strict=True
        ):
            if dtype is StateDType.BF16:
                self.arrays.append(at_offset(bf16_bits(values), offset_bytes))
                continue
            codes = at_offset(np.zeros(n, np.int8 if signed else np.uint8), offset_bytes)
            quantize(values, codes, scales)
            self.arrays.append(codes)

    def values(self) -> list[np.ndarray]:
        """The moments in fp32."""
        if self.dtype is StateDType.BF16:
            return [bf16_values(array) for array in self.arrays]
        return [dequantize(codes, scales) for codes, scales in zip(self.arrays, self.scales, strict=True)]

    def segment(self, buffers: AdamBuffers) -> Segment:
        first, second = (array.ctypes.data for array in self.arrays)
        scales = {}
        if self.dtype is StateDType.EIGHT_BIT:
            scales = dict(
                zip(("exp_avg_absmax", "exp_avg_sq_absmax"), (s.ctypes.data for s in self.scales), strict=True)
            )
        return buffers.segment()._replace(exp_avg=first, exp_avg_sq=second, **scales)

    def outputs(self) -> list[np.ndarray]:
        return [*self.arrays, *self.scales]


def quantize(values: np.ndarray, codes: np.ndarray, scales: np.ndarray, num_threads: int = 1) -> None:
    """Codes whose dtype says whether they are signed."""
    addresses = (values.ctypes.data, codes.ctypes.data, scales.ctypes.data)
    cpu_adam.quantize(*addresses, values.size, signed=codes.dtype == np.int8, num_threads=num_threads)


def dequantize(codes: np.ndarray, scales: np.ndarray, num_threads: int = 1) -> np.ndarray:
    values = np.empty(codes.size, np.float32)
    addresses = (codes.ctypes.data, scales.ctypes.data, values.ctypes.data)
    cpu_adam.dequantize(*addresses, codes.size, signed=codes.dtype == np.int8, num_threads=num_threads)
    return values


STORED_FORMS = [*FORMS, (StateLayout.BF16, DType.BF16)]


def _update_stored(digest: hashlib._Hash, num_threads: int) -> None:
    lion = LionHyper(lr=1e-3, beta1=0.9, beta2=0.3, weight_decay=0.1, state_dtype=StateDType.BF16)
    for layout, copy in STORED_FORMS:
        for grad in DType:
            for n, special in ((40_003, False), (20_011, True), (71, True)):
                for dtype in (StateDType.BF16, StateDType.EIGHT_BIT):
                    buffers = AdamBuffers(n, layout, grad, copy, seed=n, offset_bytes=2, special=special)
                    stored = Stored(buffers, dtype, offset_bytes=1)
                    hyper = HYPER._replace(state_dtype=dtype)
                    for step, settings in ((cpu_adam.adam_step, hyper), (cpu_adam.lion_step, lion)):
                        if dtype is StateDType.BF16 or step is cpu_adam.adam_step:
                            segments = [stored.segment(buffers)]
                            step(segments, [settings], layout, grad_factor=0.37, num_threads=num_threads)
                    buffers.remainder[np.isnan(buffers.value())] = 0
                    for array in (*buffers.outputs(), *stored.outputs()):
                        digest.update(canonical(array))


def run_all(num_threads: int) -> str:
    """Every kernel of the table on inputs with special values; the digest of all that they wrote and returned."""
    digest = hashlib.sha256()
    hypers = [
        HYPER,
        HYPER._replace(decoupled=False, maximize=True),
        HYPER._replace(amsgrad=True, beta1=0.3, bias_correction=False),
    ]
    for layout, copy in FORMS:
        for grad in DType:
            for index, hyper in enumerate(hypers):
                for n, special in ((40_003, False), (20_011, True), (71, True)):
                    buffers = AdamBuffers(n, layout, grad, copy, seed=index + 10 * n, offset_bytes=2, special=special)
                    buffers.step(hyper, grad_factor=0.37, num_threads=num_threads)
                    remainder_of_nan = np.isnan(buffers.value())
                    buffers.remainder[remainder_of_nan] = 0
                    for array in buffers.outputs():
                        digest.update(canonical(array))
    _update_with_sisters(digest, num_threads)
    _update_stored(digest, num_threads)
    rng = np.random.default_rng(5)
    for dst_dtype in DType:
        for src_dtype in DType:
            for accumulate in (False, True):
                for special in (False, True):
                    values = (rng.standard_normal(70_013) * 10.0 ** rng.integers(-8, 4, 70_013)).astype(np.float32)
                    if special:
                        values[::7] = rng.choice(SPECIAL[:8] if dst_dtype is DType.FP32 else SPECIAL, values[::7].size)
                    dst, src = encode(values[::-1], dst_dtype), encode(values, src_dtype)
                    total, bad = cpu_adam.land(
                        dst.ctypes.data,
                        src.ctypes.data,
                        values.size,
                        dst_dtype=dst_dtype,
                        src_dtype=src_dtype,
                        accumulate=accumulate,
                        num_threads=num_threads,
                    )
                    digest.update(canonical(dst))
                    digest.update(f"{total!r} {bad}".encode())
                    parts = [encode(np.roll(values, shift), src_dtype) for shift in (0, 1, 300)]
                    summed = encode(values[::-1], DType.FP32)
                    total, bad = cpu_adam.land_parts(
                        summed.ctypes.data,
                        [part.ctypes.data for part in parts],
                        values.size,
                        dtype=src_dtype,
                        scale=1 / 3,
                        accumulate=accumulate,
                        num_threads=num_threads,
                    )
                    digest.update(canonical(summed))
                    digest.update(f"{total!r} {bad}".encode())
    return digest.hexdigest()


if __name__ == "__main__":
    print(cpu_adam.capability(), "torch" in sys.modules, cpu_adam.threading_backend(), run_all(int(sys.argv[1])))
