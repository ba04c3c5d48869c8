"""Adam and AdamW on a device in torch's operators, with the bits of the host's kernels (``csrc/cpu_adam/rules.inc.h``).

The host's kernels use fused multiply-adds, which torch has no operator for. Here one is made of float64: the product of
two fp32 numbers is exact there; the sum with the third one is rounded to an odd last bit, which makes the second
rounding, to fp32, the only one that counts (Boldo and Melquiond 2008, "Emulation of FMA and Correctly Rounded Sums:
Proved Algorithms Using Rounding to Odd"). Everything runs in memory that the caller gives, element by element.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deepoffload.native.cpu_adam import AdamHyper

SCRATCH_BYTES_PER_ELEMENT = 48
"""Four float64, three fp32 and three flags, padded."""


def _fp32(value: float) -> float:
    return float(np.float32(value))


@dataclass(frozen=True)
class AdamCoefficients:
    """The numbers of one step, derived in double and rounded to fp32 once (``coefficients_of`` in ``hypers.cpp``)."""

    grad_factor: float
    weight_factor: float
    l2: float
    neg_step_size: float
    eps: float
    lerp_weight: float
    lerp_rest: float
    lerp_from_new: bool
    beta2: float
    one_minus_beta2: float
    root_correction2: float

    @classmethod
    def of(cls, hyper: AdamHyper, grad_factor: float) -> AdamCoefficients:
        correction1 = 1.0 - math.pow(hyper.beta1, hyper.step) if hyper.bias_correction else 1.0
        correction2 = 1.0 - math.pow(hyper.beta2, hyper.step) if hyper.bias_correction else 1.0
        lerp_weight = 1.0 - hyper.beta1
        return cls(
            grad_factor=_fp32(-grad_factor if hyper.maximize else grad_factor),
            weight_factor=_fp32(1.0 - (hyper.lr * hyper.weight_decay if hyper.decoupled else 0.0)),
            l2=0.0 if hyper.decoupled else _fp32(hyper.weight_decay),
            neg_step_size=_fp32(-(hyper.lr / correction1)),
            eps=_fp32(hyper.eps),
            lerp_weight=_fp32(lerp_weight),
            lerp_rest=_fp32(1.0 - lerp_weight),
            lerp_from_new=_fp32(lerp_weight) >= 0.5,
            beta2=_fp32(hyper.beta2),
            one_minus_beta2=_fp32(1.0 - hyper.beta2),
            root_correction2=_fp32(math.sqrt(correction2)),
        )


class Arithmetic:
    """Works on ``numel`` elements at once.

    Args:
        scratch: uint8 on the device, aligned to 8 bytes, :data:`SCRATCH_BYTES_PER_ELEMENT` for each element.

    Attributes:
        master, grad: fp32, for the caller: the weights and gradients of :meth:`adam`.
    """

    def __init__(self, scratch: Tensor, numel: int) -> None:
        parts, at = [], 0
        for dtype, count in ((torch.float64, 4), (torch.float32, 3), (torch.bool, 3)):
            for _ in range(count):
                parts.append(scratch[at : at + numel * dtype.itemsize].view(dtype))
                at += numel * dtype.itemsize
        self._product, self._sum, self._error, self._rest = parts[:4]
        self.master, self.grad, self._change = parts[4:7]
        self._inexact, self._flag, self._other_flag = parts[7:]
        self._sum_bits, self._rest_bits = self._sum.view(torch.int64), self._rest.view(torch.int64)

    def fma(self, a: Tensor, b: Tensor | float, c: Tensor, out: Tensor) -> None:
        """``out = a * b + c`` with one rounding. All are fp32, or numbers of fp32; ``out`` may be one of them."""
        product, total, error, rest = self._product, self._sum, self._error, self._rest
        product.copy_(a).mul_(b)
        torch.add(product, c, out=total)
        # What the sum has lost, exactly (Knuth's TwoSum).
        torch.sub(total, product, out=rest)
        torch.sub(total, rest, out=error)
        torch.sub(product, error, out=error)
        torch.sub(c, rest, out=rest)
        error.add_(rest)
        self._round_to_odd()
        out.copy_(total)

    def _round_to_odd(self) -> None:
        """Move an inexact sum with an even last bit by one bit towards what it has lost."""
        total, error, rest = self._sum, self._error, self._rest
        inexact, flag, other = self._inexact, self._flag, self._other_flag
        torch.ne(error, 0.0, out=inexact)
        torch.abs(total, out=rest)
        torch.le(rest, torch.finfo(torch.float64).max, out=flag)  # neither infinite nor NaN
        inexact.logical_and_(flag)
        torch.bitwise_and(self._sum_bits, 1, out=self._rest_bits)
        torch.eq(self._rest_bits, 0, out=flag)
        inexact.logical_and_(flag)
        torch.gt(error, 0.0, out=flag)
        torch.gt(total, 0.0, out=other)
        torch.eq(flag, other, out=flag)  # one bit more where it has lost something of its own sign, else one less
        self._rest_bits.copy_(flag).mul_(2).sub_(1).mul_(inexact)
        self._sum_bits.add_(self._rest_bits)

    def adam(self, exp_avg: Tensor, exp_avg_sq: Tensor, c: AdamCoefficients, root_correction2: Tensor) -> None:
        """One step: ``master`` and the moments become the new ones; ``grad`` is used up.

        Args:
            exp_avg, exp_avg_sq: fp32, flat.
            root_correction2: that of ``c``, a tensor of one element on the device. torch divides by a number that the
                host has by multiplying with its reciprocal, which has other bits.
        """
        master, grad, change = self.master, self.grad, self._change
        grad.mul_(c.grad_factor)
        if c.l2:
            self.fma(master, c.l2, grad, grad)
        torch.sub(grad, exp_avg, out=change)
        if c.lerp_from_new:
            self.fma(change, -c.lerp_rest, grad, exp_avg)
        else:
            self.fma(change, c.lerp_weight, exp_avg, exp_avg)
        torch.mul(grad, c.one_minus_beta2, out=change)
        exp_avg_sq.mul_(c.beta2)
        self.fma(change, grad, exp_avg_sq, exp_avg_sq)
        # float64 has more than twice the bits: its root, rounded again, is fp32's. Libraries round fp32's roots
        # otherwise.
        self._product.copy_(exp_avg_sq).sqrt_()
        denominator = change.copy_(self._product).div_(root_correction2).add_(c.eps)
        torch.mul(exp_avg, c.neg_step_size, out=grad)
        grad.div_(denominator)
        master.mul_(c.weight_factor).add_(grad)

    def join(self, weight: Tensor, lead: Tensor | None, *, stale: bool) -> None:
        """Make ``master`` of what is stored.

        Args:
            weight: fp32, bf16 or fp16, flat.
            lead: what completes it: the remainder of a bf16 weight (int16), the master of an fp16 one (fp32).
            stale: the program has changed the weight, so that the master is its exact value.
        """
        if lead is None or stale:
            self.master.copy_(weight)
        elif lead.dtype is torch.float32:
            self.master.copy_(lead)
        else:
            bits = self.master.view(torch.int32)
            bits.copy_(weight.view(torch.int16)).mul_(1 << 16).add_(lead)

    def split(self, weight: Tensor, lead: Tensor | None) -> None:
        """Store ``master``. A NaN loses what of it a bf16 weight does not show."""
        if lead is not None and lead.dtype is not torch.float32:
            self._split_bf16(weight, lead)
            return
        if lead is not None:
            lead.copy_(self.master)
        weight.copy_(self.master)

    def _split_bf16(self, weight: Tensor, remainder: Tensor) -> None:
        """``cpu_adam.split_fp32``."""
        bits, upper, lower = (floats.view(torch.int32) for floats in (self.master, self.grad, self._change))
        flag = self._flag
        torch.ne(self.master, self.master, out=self._inexact)  # a NaN: to add 0x8000 could carry into its sign
        torch.bitwise_and(bits, 0x1FFFF, out=lower)
        torch.eq(lower, 0x8000, out=flag)
        lower.copy_(flag)
        bits.sub_(lower)  # the tie whose remainder would not fit
        torch.bitwise_right_shift(bits, 16, out=lower)
        lower.bitwise_or_(0x40)
        torch.add(bits, 0x8000, out=upper).bitwise_right_shift_(16)
        torch.where(self._inexact, lower, upper, out=upper)
        weight.view(torch.int16).copy_(upper)
        upper.mul_(1 << 16)
        torch.sub(bits, upper, out=lower)
        lower.masked_fill_(self._inexact, 0)
        remainder.copy_(lower)
