"""Weights of bitsandbytes' linear layers in 8 and 4 bits: their numbers and scales are paged.

These layers ask their weight for what it carries (``CB`` and ``SCB``, ``quant_state``), and keep it in themselves. On
processors with bf16 instructions a layer in 4 bits lays its weight out again at its first evaluation, for good. That is
done when the context ends, weight by weight: the bits are then those of the same layer in memory.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from deepoffload.errors import UnsupportedError
from deepoffload.params.torch_private import make_subclass


def _copied(state: Any) -> Any:
    """The same object with the same attributes; quicker than ``copy.copy``."""
    made = object.__new__(type(state))
    made.__dict__.update(state.__dict__)
    return made


class _Fixed:
    """A weight that the program does not replace."""

    def inner_of(self, weight: Any) -> tuple[Tensor, ...]:
        raise UnsupportedError(
            "another weight for a layer of bitsandbytes' with inference=True: build it inside the offload_context"
        )


@dataclass(frozen=True)
class EightBits(_Fixed):
    """How a weight of ``Linear8bitLt`` is put together. ``kind``: its class."""

    kind: Any

    def together(self, inner: Sequence[Tensor]) -> Tensor:
        numbers, scales = inner
        made: Any = make_subclass(self.kind, numbers, False)
        made.CB, made.SCB, made.has_fp16_weights = numbers, scales, False
        return made

    def prepare(self, layer: Any) -> None:
        layer.state.reset_grads()
        layer.register_forward_pre_hook(_refuse_gradients)
        layer.register_forward_hook(_forget, always_call=True)
        layer.register_state_dict_pre_hook(_refuse_state_dict)


@dataclass(frozen=True)
class FourBits(_Fixed):
    """How a weight of ``Linear4bit`` is put together.

    Attributes:
        kind: its class.
        attributes: of the weight.
        state: its ``quant_state`` without scales.
        laid_out_early: for evaluation, before the layer has evaluated.
    """

    kind: Any
    attributes: dict[str, Any]
    state: Any
    laid_out_early: bool

    def together(self, inner: Sequence[Tensor]) -> Tensor:
        numbers, scales = inner
        made: Any = make_subclass(self.kind, numbers, False)
        made.__dict__.update(self.attributes)
        made.quant_state = _copied(self.state)
        made.quant_state.absmax = scales
        return made

    def prepare(self, layer: Any) -> None:
        layer.quant_state = None  # it has the scales; the weight has another one
        if self.laid_out_early:
            layer.register_forward_pre_hook(_EvaluationFirst())
        layer.register_forward_pre_hook(_refuse_gradients)
        layer.register_state_dict_pre_hook(_refuse_state_dict)


def take_apart(layer: nn.Module, weight: Any) -> tuple[EightBits | FourBits, tuple[Tensor, Tensor]] | None:
    """How the weight of a layer of bitsandbytes' is put together of numbers and scales, and these. None for others, and
    for those that cannot be taken apart: they stay in memory."""
    library = sys.modules.get("bitsandbytes")
    if library is None or not isinstance(weight, nn.Parameter) or weight.device.type != "cpu":
        return None
    if type(layer).forward is library.nn.Linear8bitLt.forward and type(weight) is library.nn.Int8Params:
        return _eight_bits(layer, weight)
    if type(layer).forward is library.nn.Linear4bit.forward and type(weight) is library.nn.Params4bit:
        return _four_bits(layer, weight, library.functional)
    return None


def _eight_bits(layer: Any, weight: Any) -> tuple[EightBits, tuple[Tensor, Tensor]] | None:
    scales = layer.state.SCB if weight.SCB is None else weight.SCB
    if weight.has_fp16_weights or layer.state.has_fp16_weights or scales is None:
        return None  # not quantised yet
    return EightBits(type(weight)), (weight.data, scales)


def _four_bits(layer: Any, weight: Any, functional: Any) -> tuple[FourBits, tuple[Tensor, Tensor]] | None:
    lays_out_again = getattr(layer, "support_avx512bf16_for_cpu", None)
    if weight.quant_state is None or not weight.bnb_quantized or lays_out_again is None:
        return None
    numbers, state = weight.data, _copied(weight.quant_state)
    early = lays_out_again and not getattr(state, "packing_format_for_cpu", False)
    if early:
        if layer.training:
            return None  # it computes in another way until it evaluates
        try:
            numbers, state = functional._convert_weight_packed_for_cpu(numbers, state)
        except AssertionError:
            return None  # a number of rows that it does not take, and its call says so
    attributes = {**weight.__dict__, "quant_state": None, "module": None}
    scales, state.absmax = state.absmax, None
    return FourBits(type(weight), attributes, state, early), (numbers, scales)


def _forget(layer: Any, args: Any, output: Any) -> None:
    """The layer has kept the weight that it computed with."""
    layer.state.reset_grads()


class _EvaluationFirst:
    """Refuses calls of a layer in ``train()`` until it has evaluated: before that it would compute with scales in fp32,
    which the weight as it is laid out for evaluation does not have any more."""

    def __init__(self) -> None:
        self._has_evaluated = False

    def __call__(self, layer: nn.Module, args: tuple[Any, ...]) -> None:
        if layer.training and not self._has_evaluated:
            raise UnsupportedError(
                f"a call of {type(layer).__name__} in train() before its first one in eval(): with inference=True the "
                "weights of bitsandbytes are laid out for evaluation when the offload_context ends; call the model in "
                "eval() first, or leave inference=True out"
            )
        self._has_evaluated = True


def _refuse_gradients(layer: nn.Module, args: tuple[Any, ...]) -> None:
    if args and isinstance(args[0], Tensor) and args[0].requires_grad:
        raise UnsupportedError(
            f"gradients of the inputs of {type(layer).__name__}: bitsandbytes keeps such weights for backward, or "
            "computes without a graph; leave inference=True out to train around them, in memory"
        )


def _refuse_state_dict(layer: nn.Module, prefix: str, keep_vars: bool) -> None:
    raise UnsupportedError(
        f"state_dict of {prefix}weight: with inference=True the weights of bitsandbytes are laid out for evaluation; "
        "save the model before, or copy the checkpoint"
    )
