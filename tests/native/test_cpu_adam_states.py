"""States in bf16 and in 8 bits: the quantizer against float64, the update against the fp32 one between conversions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepoffload.native import cpu_adam
from deepoffload.native.cpu_adam import STATE_BLOCK, DType, Elsewhere, LionHyper, StateDType, StateLayout
from tests.native.cpu_adam_scenario import (
    HYPER,
    STORED_FORMS,
    AdamBuffers,
    Stored,
    at_offset,
    bf16_bits,
    canonical,
    dequantize,
    guards_intact,
    quantize,
)

LENGTHS = (1, 2, 15, 16, 17, 63, 70, 255, 256, 257, 300, 511, 512, 777)
SIGNS = pytest.mark.parametrize("signed", [True, False], ids=["signed", "unsigned"])


def wide(n: int, signed: bool, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal(n) * 10.0 ** rng.integers(-12, 2, n)).astype(np.float32)
    return values if signed else np.abs(values)


def room(n: int, signed: bool, offset_bytes: int = 0) -> tuple[np.ndarray, np.ndarray]:
    codes = at_offset(np.zeros(n, np.int8 if signed else np.uint8), offset_bytes)
    return codes, at_offset(np.zeros(-(-n // STATE_BLOCK), np.float32), offset_bytes * 3)


def reference(values: np.ndarray, signed: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes before rounding, as float64, whole scales, and values of the rounded codes: the docstring of quantize."""
    top = 127 if signed else 255
    exact, decoded = np.zeros(values.size), np.zeros(values.size)
    scales = []
    for start in range(0, values.size, STATE_BLOCK):
        block = slice(start, start + STATE_BLOCK)
        x = values[block].astype(np.float64)
        absmax = np.abs(x).max()
        scales.append(absmax)
        root = (np.abs(x) / absmax) ** 0.25 * top if absmax else np.zeros(x.size)
        codes = np.rint(root) if signed else np.maximum(np.rint(root), x > 0)
        exact[block] = np.copysign(root, x)
        decoded[block] = np.copysign((codes / top) ** 4 * absmax, x)
    return exact, np.array(scales), decoded


@SIGNS
@pytest.mark.parametrize("num_threads", [1, 3])
def test_quantizer_against_float64(signed: bool, num_threads: int) -> None:
    values = wide(200_003, signed)
    values[1000:1300] = 0.0
    codes, scales = room(values.size, signed)
    quantize(values, codes, scales, num_threads)
    exact, expected_scales, decoded = reference(values, signed)
    assert (scales == expected_scales).all()
    # Within fp32 rounding of a tie either neighbour will do.
    assert (np.abs(codes - exact) <= 0.5 + 1e-4)[signed | (values == 0) | (np.abs(exact) >= 1)].all()
    assert (codes[values > 0] >= (0 if signed else 1)).all()
    near = np.abs(np.abs(exact % 1) - 0.5) > 1e-4
    back = dequantize(codes, scales, num_threads)
    assert np.allclose(back[near], decoded[near], rtol=1e-6, atol=1e-42)


@SIGNS
def test_error_is_as_documented(signed: bool) -> None:
    """Half a step of the fourth root: at most 3.2 % (1.6 %) of absmax, 5 % of a value at a hundredth of it."""
    values = wide(100_096, signed, seed=3)
    codes, scales = room(values.size, signed)
    quantize(values, codes, scales)
    error = np.abs(dequantize(codes, scales).astype(np.float64) - values)
    absmax = np.repeat(scales.astype(np.float64), STATE_BLOCK)
    assert (error <= (0.016 if signed else 0.008) * absmax).all()
    upper = np.abs(values) >= 0.01 * absmax
    assert (error[upper] <= (0.051 if signed else 0.026) * np.abs(values[upper])).all()


@SIGNS
@settings(max_examples=60)
@given(st.integers(1, 700), st.integers(-93, 120), st.integers(0, 2**32 - 1))
def test_values_of_codes_give_the_codes_again(signed: bool, n: int, exponent: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    codes, scales = room(n, signed)
    codes[:] = rng.integers(-127 if signed else 0, 128 if signed else 256, n)
    codes[::STATE_BLOCK] = 127 if signed else 255
    scales[:] = np.float32(2.0**exponent) * (1 + rng.random(scales.size, dtype=np.float32))
    again, scales_again = room(n, signed)
    quantize(dequantize(codes, scales), again, scales_again)
    assert again.tobytes() == codes.tobytes() and scales_again.tobytes() == scales.tobytes()


@SIGNS
def test_special_blocks(signed: bool) -> None:
    values = wide(6 * STATE_BLOCK, signed)
    blocks = values.reshape(6, STATE_BLOCK)
    blocks[0] = 0.0
    blocks[1] *= np.float32(1e-40) / blocks[1].max()  # subnormal as a whole
    blocks[2, 17] = np.nan
    blocks[3, 200] = np.inf
    blocks[4, 5] = np.finfo(np.float32).max
    codes, scales = room(values.size, signed)
    quantize(values, codes, scales)
    back = dequantize(codes, scales).reshape(6, STATE_BLOCK)
    assert not back[0].any() and not back[1].any()
    assert np.isnan(back[2]).all() and np.isnan(back[3]).all()
    assert np.isfinite(back[4]).all() and back[4, 5] == np.finfo(np.float32).max
    assert np.isfinite(back[5]).all()


@pytest.mark.parametrize("grad", DType)
@pytest.mark.parametrize(("layout", "copy"), STORED_FORMS)
@pytest.mark.parametrize("dtype", [StateDType.BF16, StateDType.EIGHT_BIT])
def test_an_update_is_the_fp32_one_between_conversions(
    dtype: StateDType, layout: StateLayout, copy: DType, grad: DType
) -> None:
    """Same bits in the moments, for every length and at odd addresses; nothing outside is touched. A weight's change
    is within 8 ulp: bias_correction2 is folded into step size and epsilon here."""
    for n in LENGTHS:
        for offset_bytes in (0, 1, 6):
            buffers = AdamBuffers(n, layout, grad, copy, seed=n, offset_bytes=offset_bytes)
            stored = Stored(buffers, dtype, offset_bytes=offset_bytes)
            plain = AdamBuffers(n, StateLayout.FP32, grad, DType.FP32, seed=n)
            plain.master[:] = buffers.value()
            plain.exp_avg[:], plain.exp_avg_sq[:] = stored.values()
            before, hyper = buffers.value(), HYPER._replace(state_dtype=dtype)
            cpu_adam.adam_step([stored.segment(buffers)], [hyper], layout, grad_factor=0.5, num_threads=1)
            plain.step(grad_factor=0.5)
            expected = Stored(plain, dtype)
            for got, wanted in zip(stored.outputs(), expected.outputs(), strict=True):
                assert got.tobytes() == wanted.tobytes()
            spacing = np.spacing(np.maximum(np.abs(before), np.abs(plain.master)))
            bound = spacing + 8 * np.spacing(np.abs(plain.master - before)).astype(np.float64)
            if layout is StateLayout.BF16:  # its rounding may fall to the other side
                bound = 65536.0 * spacing
            assert (np.abs(buffers.value().astype(np.float64) - plain.master) <= bound).all()
            assert all(guards_intact(array) for array in (*stored.outputs(), *buffers.outputs()))


@pytest.mark.parametrize("dtype", [StateDType.BF16, StateDType.EIGHT_BIT])
@pytest.mark.parametrize("num_threads", [2, 3, 64])
def test_any_number_of_threads_and_segments(dtype: StateDType, num_threads: int) -> None:
    layout, hyper = StateLayout.SPLIT_BF16, HYPER._replace(state_dtype=dtype)
    sizes = (1, 70_001, 255, 300_000)
    together = [AdamBuffers(n, layout, DType.BF16, DType.BF16, seed=n, special=True) for n in sizes]
    alone = [AdamBuffers(n, layout, DType.BF16, DType.BF16, seed=n, special=True) for n in sizes]
    stored, stored_alone = ([Stored(b, dtype) for b in group] for group in (together, alone))
    segments = [s.segment(b) for s, b in zip(stored, together, strict=True)]
    cpu_adam.adam_step(segments, [hyper], layout, grad_factor=0.5, num_threads=num_threads)
    for s, b in zip(stored_alone, alone, strict=True):
        cpu_adam.adam_step([s.segment(b)], [hyper], layout, grad_factor=0.5, num_threads=1)
    for got, wanted in zip((*together, *stored), (*alone, *stored_alone), strict=True):
        assert all(canonical(x) == canonical(y) for x, y in zip(got.outputs(), wanted.outputs(), strict=True))


@pytest.mark.parametrize(("layout", "copy"), STORED_FORMS)
@pytest.mark.parametrize("dtype", StateDType)
def test_what_is_old_elsewhere_is_read_there_and_stays(dtype: StateDType, layout: StateLayout, copy: DType) -> None:
    """The bits of an update in place, at any address and length; what is not said to lie elsewhere changes in place."""
    hyper = HYPER._replace(state_dtype=dtype)
    for n, offset_bytes, threads in ((1, 1, 1), (255, 0, 1), (4097, 6, 1), (70_001, 0, 3), (20_480, 6, 2)):
        made = [AdamBuffers(n, layout, DType.BF16, copy, seed=n, offset_bytes=offset_bytes) for _ in range(3)]
        fp32 = dtype is StateDType.FP32
        stored = [] if fp32 else [Stored(buffers, dtype, offset_bytes=offset_bytes) for buffers in made]
        old, new, plain = ([*made[i].outputs(), *([] if fp32 else stored[i].outputs())] for i in range(3))
        before = [array.tobytes() for array in old]
        for array in new[1:]:
            array.view(np.uint8)[:] = 0x5A
        pairs = list(zip(new[1:], old[1:], strict=True))
        elsewhere = [Elsewhere(to.ctypes.data, to.nbytes, at.ctypes.data) for to, at in pairs]
        one, other = (made[i].segment() if fp32 else stored[i].segment(made[i]) for i in (1, 2))
        common: dict[str, Any] = {"grad_factor": 0.5, "num_threads": threads}
        cpu_adam.adam_step([one], [hyper], layout, **common, elsewhere=elsewhere)
        cpu_adam.adam_step([other], [hyper], layout, **common)
        assert [array.tobytes() for array in old[1:]] == before[1:]
        for field in ("weight", "remainder", "master", "exp_avg", "exp_avg_sq", "exp_avg_absmax", "exp_avg_sq_absmax"):
            addresses = [array.ctypes.data for array in plain]
            if getattr(other, field) in addresses:
                index = addresses.index(getattr(other, field))
                assert new[index].tobytes() == plain[index].tobytes(), (field, n)
        assert all(guards_intact(array) for array in (*old, *new))


def test_lion_with_a_bf16_momentum() -> None:
    hyper = LionHyper(lr=1e-3, beta1=0.9, beta2=0.99, weight_decay=0.1)
    buffers = AdamBuffers(10_007, StateLayout.BF16, DType.BF16, DType.BF16, seed=2)
    stored = Stored(buffers, StateDType.BF16)
    plain = AdamBuffers(10_007, StateLayout.FP32, DType.BF16, DType.FP32, seed=2)
    plain.master[:], plain.exp_avg[:] = buffers.value(), stored.values()[0]
    segments, layout = [stored.segment(buffers)], StateLayout.BF16
    stored_hyper = hyper._replace(state_dtype=StateDType.BF16)
    cpu_adam.lion_step(segments, [stored_hyper], layout, grad_factor=1.0, num_threads=2)
    cpu_adam.lion_step([plain.segment()], [hyper], StateLayout.FP32, grad_factor=1.0, num_threads=1)
    assert stored.arrays[0].tobytes() == bf16_bits(plain.exp_avg).tobytes()
    assert buffers.weight.tobytes() == bf16_bits(plain.master).tobytes()


@pytest.mark.parametrize(
    ("changes", "fields", "message"),
    [
        ({"state_dtype": 3}, {}, r"hypers\[0\]\.state_dtype = 3 is not a StateDType"),
        ({"amsgrad": True}, {}, r"hypers\[0\]\.state_dtype = EIGHT_BIT is for Adam without amsgrad"),
        ({"amsgrad": True, "state_dtype": StateDType.BF16}, {}, r"hypers\[0\]\.state_dtype = BF16"),
        ({}, {"exp_avg_absmax": 0}, r"segments\[0\]\.exp_avg_absmax is 0"),
        ({}, {"exp_avg_sq_absmax": 0}, r"segments\[0\]\.exp_avg_sq_absmax is 0"),
        ({}, {"exp_avg_sq": 0}, r"segments\[0\]\.exp_avg_sq is 0"),
    ],
)
def test_wrong_arguments_are_named_before_anything_changes(
    changes: dict[str, Any], fields: dict[str, int], message: str
) -> None:
    buffers = AdamBuffers(300, StateLayout.FP32, DType.FP32, DType.FP32)
    stored = Stored(buffers, StateDType.EIGHT_BIT)
    before = [array.tobytes() for array in (*buffers.outputs(), *stored.outputs())]
    hyper = HYPER._replace(**{"state_dtype": StateDType.EIGHT_BIT, **changes})
    with pytest.raises(ValueError, match=message):
        segments = [stored.segment(buffers)._replace(**fields)]
        cpu_adam.adam_step(segments, [hyper], StateLayout.FP32, grad_factor=1.0, num_threads=1)
    with pytest.raises(ValueError, match=r"hypers\[0\]\.state_dtype = EIGHT_BIT"):
        lion = LionHyper(1e-3, 0.9, 0.99, 0.0, state_dtype=StateDType.EIGHT_BIT)
        cpu_adam.lion_step([stored.segment(buffers)], [lion], StateLayout.FP32, grad_factor=1.0, num_threads=1)
    for name, arguments in (
        ("src", (0, 8, 8, 4)),
        ("codes", (8, 0, 8, 4)),
        ("absmax", (8, 8, 0, 4)),
        ("numel", (8,) * 3),
    ):
        with pytest.raises(ValueError, match=rf"\b{name}\b"):
            cpu_adam.quantize(*(*arguments, 0)[:4], signed=True, num_threads=1)
    assert before == [array.tobytes() for array in (*buffers.outputs(), *stored.outputs())]
