"""bf16 weights are their fp32 masters rounded as torch rounds, and a master is moved only where its remainder would not
fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from deepoffload.native import cpu_adam
from deepoffload.native.cpu_adam import AdagradHyper, DType, LionHyper, SgdHyper, StateDType, StateLayout
from tests.native.cpu_adam_scenario import HYPER, AdamBuffers, Stored, bf16_bits, bf16_values
from tests.native.every_split import BORDERS, UPPER_HALVES, check, is_lost_tie, kept, numbers, split


def test_a_split_rounds_as_torch_does_and_keeps_the_master() -> None:
    """Every bf16 number at every border of rounding, and random numbers; ``every_split`` as a program does them all."""
    for bits in numbers(BORDERS, UPPER_HALVES // 4):
        check(bits)
    check(np.random.default_rng(11).integers(0, 1 << 32, 2_000_003, dtype=np.uint32))


def test_a_nan_stays_one_with_its_sign() -> None:
    """Its bits are kept unless the upper half would show an infinity or a zero: then it is the quiet NaN."""
    bits = np.concatenate(list(numbers(BORDERS, UPPER_HALVES)))
    bits = bits[(bits & 0x7FFFFFFF) > 0x7F800000]
    _, _, back = split(bits)
    nudged = kept(bits).view(np.uint32)
    natural = ((nudged.astype(np.uint64) + 0x8000) >> 16).astype(np.uint16)
    replaced = (natural & 0x7FFF) <= 0x7F80
    assert replaced.any() and not replaced.all()
    assert np.array_equal(back[~replaced], nudged[~replaced])
    assert np.array_equal(back[replaced], (bits[replaced] & 0x80000000) | 0x7FC00000)


def odd_weights(n: int) -> np.ndarray:
    """bf16 numbers of both signs whose last bit is one."""
    values = np.random.default_rng(n).standard_normal(n).astype(np.float32)
    return bf16_bits(values) | np.uint16(1)


@pytest.mark.parametrize(
    ("step", "hyper"),
    [
        (cpu_adam.adam_step, HYPER),
        (cpu_adam.adam_step, HYPER._replace(decoupled=False, amsgrad=True)),
        (cpu_adam.adam_step, HYPER._replace(state_dtype=StateDType.BF16)),
        (cpu_adam.adam_step, HYPER._replace(state_dtype=StateDType.EIGHT_BIT)),
        (cpu_adam.lion_step, LionHyper(0.0, 0.9, 0.99, 0.0)),
        (cpu_adam.lion_step, LionHyper(0.0, 0.9, 0.99, 0.0, state_dtype=StateDType.BF16)),
        (cpu_adam.adagrad_step, AdagradHyper(0.0, 0.0, 1e-10, 0.0, 3)),
        (cpu_adam.sgd_step, SgdHyper(0.0, 0.9, 0.0, 0.0, False, False)),
        (cpu_adam.sgd_step, SgdHyper(0.0, 0.0, 0.0, 0.0, False, False)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, tuple) else None,
)
def test_a_master_halfway_above_an_even_weight_is_moved_by_one_ulp(step: Any, hyper: Any) -> None:
    """In every rule: the master is read as that tie, with a learning rate of zero, and stored."""
    for n in (*range(1, 36), 1003):
        for grad in DType:
            buffers = AdamBuffers(n, StateLayout.SPLIT_BF16, grad, DType.BF16, seed=n)
            buffers.weight[:], buffers.remainder[:] = odd_weights(n), -(1 << 15)
            tie = buffers.value().copy()
            segment = buffers.segment()
            if getattr(hyper, "state_dtype", StateDType.FP32) is not StateDType.FP32:
                stored = Stored(buffers, hyper.state_dtype)
                segment = stored.segment(buffers)
            idle = hyper._replace(lr=0.0, weight_decay=0.0)
            step([segment], [idle], StateLayout.SPLIT_BF16, grad_factor=1.0, num_threads=1)
            assert is_lost_tie(tie.view(np.uint32)).all()
            assert np.array_equal(buffers.weight, bf16_bits(tie))
            assert (buffers.remainder == (1 << 15) - 1).all()
            assert buffers.value().tobytes() == kept(tie).tobytes()


def test_updates_onto_ties_round_to_even() -> None:
    """SGD by half a unit in the weight's last place; up from odd and even weights, and down."""
    n = 1003
    for direction in (-1.0, 1.0):
        for weights in (odd_weights(n), odd_weights(n) - np.uint16(1)):
            buffers = AdamBuffers(n, StateLayout.SPLIT_BF16, DType.FP32, DType.BF16)
            buffers.weight[:], buffers.remainder[:] = weights, 0
            before = bf16_values(weights)
            buffers.grad[:] = -direction * np.sign(before) * np.exp2(np.floor(np.log2(np.abs(before))) - 8)
            expected = before - buffers.grad
            sgd = SgdHyper(1.0, 0.0, 0.0, 0.0, False, False)
            cpu_adam.sgd_step([buffers.segment()], [sgd], StateLayout.SPLIT_BF16, grad_factor=1.0, num_threads=1)
            assert np.mean((expected.view(np.uint32) & 0xFFFF) == 0x8000) > 0.9  # not below a power of two
            assert np.array_equal(buffers.weight, bf16_bits(expected))
            assert buffers.value().tobytes() == kept(expected).tobytes()
