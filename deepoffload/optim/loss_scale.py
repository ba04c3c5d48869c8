"""The loss scale of fp16 training, with DeepSpeed's rules.

fp16 has 5 bits of exponent, and small gradients would become zero. The loss is multiplied by the scale before backward,
the gradients by its inverse inside the update (Micikevicius et al. 2018, "Mixed Precision Training"). A step whose
gradients hold an infinity or NaN is not made; the rules here say what the scale does then.

Source: DeepSpeed 0.19, ``runtime/fp16/loss_scaler.py``; a test has its sequences of scales in a table. One difference
is not in the sequence. We divide the gradients of a step by the scale that their loss was multiplied by. DeepSpeed's
ZeRO optimizers divide them by the scale after the step, which is another one only if the step doubles it.
"""

from __future__ import annotations

from collections.abc import Mapping

from deepoffload.config import Fp16Config
from deepoffload.errors import LossScaleError

SCALE_FACTOR = 2.0


class LossScale:
    """A static scale.

    Attributes:
        value: what the next loss is multiplied by.
    """

    def __init__(self, value: float) -> None:
        self.value = value

    def update(self, overflow: bool) -> None:
        """Note how a step went: ``overflow`` when its gradients held an infinity or NaN."""

    def state_dict(self) -> dict[str, float]:
        """What changes while training; nothing of a static scale does."""
        return {}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Take over what :meth:`state_dict` gave; what a static scale gave changes nothing."""


class DynamicLossScale(LossScale):
    """A scale that is halved when gradients overflow and doubled when they have not for a while.

    Args:
        value: the first scale.
        window: steps without an overflow after which the scale is doubled, and after which the patience is renewed.
        hysteresis: the scale is halved from this overflow on (1: from the first one); those before only use it up.
        consecutive_hysteresis: every step without an overflow renews it, not only the one that doubles the scale.
        least: the scale is never below it. An overflow there is an error.
    """

    def __init__(
        self, value: float, *, window: int, hysteresis: int, consecutive_hysteresis: bool, least: float
    ) -> None:
        super().__init__(value)
        self.window = window
        self.hysteresis = hysteresis
        self.consecutive_hysteresis = consecutive_hysteresis
        self.least = least
        self._left = hysteresis
        self._steps = 0
        self._last_overflow = -1

    def update(self, overflow: bool) -> None:
        """As above.

        Raises:
            LossScaleError: an overflow, and the scale is at its least already. Nothing has been changed.
        """
        if overflow:
            self._shrink()
            self._last_overflow = self._steps
        else:
            self._grow()
        self._steps += 1

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value, "left": self._left, "steps": self._steps, "last_overflow": self._last_overflow}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        if state:
            self.value = float(state["value"])
            self._left, self._steps = int(state["left"]), int(state["steps"])
            self._last_overflow = int(state["last_overflow"])

    def _shrink(self) -> None:
        if self._left > 1:
            self._left -= 1
            return
        if self.value == self.least:
            raise LossScaleError(
                f"gradients hold an infinity or NaN with the loss scale at its minimum (fp16.min_loss_scale = "
                f"{self.least:g}), so it cannot be lowered: the model diverges (lower the learning rate, look at the "
                "data) or its activations exceed fp16's 65504 (use bf16)"
            )
        self.value = max(self.value / SCALE_FACTOR, self.least)

    def _grow(self) -> None:
        if self.consecutive_hysteresis:
            self._left = self.hysteresis
        stable = self._steps - self._last_overflow - 1
        if stable > 0 and stable % self.window == 0:
            self._left = self.hysteresis
            self.value *= SCALE_FACTOR


def configured_loss_scale(config: Fp16Config) -> LossScale:
    """The scale that ``fp16`` of a configuration asks for."""
    if config.loss_scale:
        return LossScale(config.loss_scale)
    return DynamicLossScale(
        2.0**config.initial_scale_power,
        window=config.loss_scale_window,
        hysteresis=config.hysteresis,
        consecutive_hysteresis=config.consecutive_hysteresis,
        least=float(config.min_loss_scale),
    )
