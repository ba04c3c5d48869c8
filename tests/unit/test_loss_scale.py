"""The loss scale against sequences recorded from DeepSpeed 0.19.8's ``DynamicLossScaler``."""

from __future__ import annotations

from typing import Any

import pytest

from deepoffload.config import parse_config
from deepoffload.errors import LossScaleError
from deepoffload.optim.loss_scale import DynamicLossScale, LossScale, configured_loss_scale


def rules(window: int, least: int, hysteresis: int, consecutive: bool) -> dict[str, Any]:
    return {"window": window, "least": least, "hysteresis": hysteresis, "consecutive_hysteresis": consecutive}


# Scale before the first step, rules, one letter per step ("x": overflow), scale after each step. Where there are fewer
# scales than letters, DeepSpeed raised an exception in the next step.
RECORDED = [
    (16, rules(3, 1, 1, False), "....x....x.x......xx.xx.x",
     [16, 16, 16, 32, 16, 16, 16, 16, 32, 16, 16, 8, 8, 8, 8, 16, 16, 16, 8, 4, 4, 2, 1, 1]),
    (256, rules(3, 1, 2, False), "xx.x..x...x.xxx...x.....x.x",
     [256, 128, 128, 64, 64, 64, 32, 32, 32, 32, 16, 16, 8, 4, 2, 2, 2, 2, 1, 1, 1, 1, 2, 2, 2, 2, 1]),
    (256, rules(3, 1, 2, True), "xx.x..x...x.xxx...x.....x.x",
     [256, 128, 128, 128, 128, 128, 128, 128, 128, 128, 128, 128, 128, 64, 32, 32, 32, 32, 32, 32, 32, 32, 64, 64, 64,
      64, 64]),
    (65536, rules(1, 2, 3, False), "...xxxx..x.xxxxx..x",
     [65536, 131072, 262144, 262144, 262144, 131072, 65536, 65536, 131072, 131072, 131072, 131072, 65536, 32768, 16384,
      8192, 8192, 16384, 16384]),
    (8, rules(1000, 1, 2, False), "..xxxxxx", [8, 8, 8, 4, 2, 1]),
    (4, rules(2, 3, 1, False), "x..x...x.xx", [3, 3, 3]),
    (32, rules(4, 8, 4, True), "xxx.xxxx.x....xxxxxxx",
     [32, 32, 32, 32, 32, 32, 32, 16, 16, 16, 16, 16, 16, 16, 16, 16, 16, 8]),
]  # fmt: skip


@pytest.mark.parametrize(("first", "settings", "steps", "scales"), RECORDED)
def test_the_scale_goes_where_deepspeeds_goes(first: int, settings: Any, steps: str, scales: list[int]) -> None:
    scale = DynamicLossScale(first, **settings)
    got = []
    for letter in steps[: len(scales)]:
        scale.update(letter == "x")
        got.append(scale.value)
    assert got == scales
    if len(scales) < len(steps):
        assert steps[len(scales)] == "x"
        for _ in range(2):
            with pytest.raises(LossScaleError, match=rf"at its minimum \(fp16.min_loss_scale = {settings['least']}\)"):
                scale.update(True)
        assert scale.value == settings["least"]
        scale.update(False)


def test_a_static_scale_stays() -> None:
    scale = configured_loss_scale(parse_config({"fp16": {"enabled": True, "loss_scale": 100.5}}).fp16)
    assert type(scale) is LossScale
    for overflow in (True, True, True, False):
        scale.update(overflow)
        assert scale.value == 100.5


def test_the_configuration_sets_every_rule() -> None:
    scale = configured_loss_scale(parse_config({"fp16": {"enabled": True}}).fp16)
    assert isinstance(scale, DynamicLossScale)
    assert (scale.value, scale.window, scale.hysteresis, scale.consecutive_hysteresis, scale.least) == (
        65536.0, 1000, 2, False, 1.0,
    )  # fmt: skip
    said = {"initial_scale_power": 5, "loss_scale_window": 7, "hysteresis": 3, "min_loss_scale": 4}
    scale = configured_loss_scale(parse_config({"fp16": {"consecutive_hysteresis": True, **said}}).fp16)
    assert isinstance(scale, DynamicLossScale)
    assert (scale.value, scale.window, scale.hysteresis, scale.consecutive_hysteresis, scale.least) == (
        32.0, 7, 3, True, 4.0,
    )  # fmt: skip
