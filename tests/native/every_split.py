"""Whether split and merge round as ``Tensor.to(torch.bfloat16)`` does, for whole sets of fp32 numbers.

As a program it looks at all 2**32 of them (some minutes), in the instruction set that ``DEEPOFFLOAD_CPU_CAPABILITY``
names; the tests look at every upper half with the lower halves around the borders of rounding::

    python -m tests.native.every_split
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from deepoffload.native import cpu_adam

BORDERS = np.array([0x0000, 0x0001, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF], np.uint32)
"""Lower halves next to where the upper half, the remainder's sign or its range change."""

UPPER_HALVES = 1 << 16


def split(bits: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Upper halves and remainders of fp32 numbers given as bits, and what they merge to."""
    hi, lo, back = np.zeros(bits.size, np.uint16), np.zeros(bits.size, np.int16), np.zeros(bits.size, np.uint32)
    cpu_adam.split_fp32(bits.ctypes.data, hi.ctypes.data, lo.ctypes.data, bits.size, num_threads=2)
    cpu_adam.merge_fp32(hi.ctypes.data, lo.ctypes.data, back.ctypes.data, bits.size, num_threads=2)
    return hi, lo, back


def numbers(lower: np.ndarray, uppers_at_once: int) -> Iterator[np.ndarray]:
    """Every upper half with each of ``lower``, as bits, in parts."""
    for start in range(0, UPPER_HALVES, uppers_at_once):
        upper = np.arange(start, start + uppers_at_once, dtype=np.uint32) << 16
        yield (upper[:, None] | lower[None, :]).ravel()


def is_lost_tie(bits: np.ndarray) -> np.ndarray:
    """Halfway above an even bf16 number: its remainder would be 2**15, one more than 16 bits hold."""
    return (bits & 0x1FFFF) == 0x8000


def kept(values: np.ndarray) -> np.ndarray:
    """The fp32 values that a split keeps of fp32 values: these, one ulp nearer to zero where they are that tie."""
    bits = values.view(np.uint32)
    return (bits - is_lost_tie(bits)).view(np.float32)


def check(bits: np.ndarray) -> None:
    """The weight is what torch makes; the master is kept, or is moved towards zero by one ulp where it is that tie."""
    hi, lo, back = split(bits)
    values, weight = torch.from_numpy(bits.view(np.float32)), torch.from_numpy(hi.view(np.int16)).view(torch.bfloat16)
    number = ~torch.isnan(values)
    assert torch.equal(weight.isnan(), ~number)
    wanted = values.to(torch.bfloat16).view(torch.int16)
    assert torch.equal(weight.view(torch.int16)[number], wanted[number])
    of_numbers = number.numpy()
    assert np.array_equal(back[of_numbers], kept(bits).view(np.uint32)[of_numbers])
    assert bool(torch.from_numpy(back.view(np.float32)).isnan()[~number].all())
    again_hi, again_lo, again = split(back)
    assert np.array_equal(again_hi, hi) and np.array_equal(again_lo, lo) and np.array_equal(again, back)


def main() -> None:
    everything = np.arange(1 << 16, dtype=np.uint32)
    for done, bits in enumerate(numbers(everything, 64), 1):
        check(bits)
        if done % 128 == 0:
            print(f"{cpu_adam.capability()}: {done * 64:,} of {UPPER_HALVES:,} upper halves", flush=True)


if __name__ == "__main__":
    main()
