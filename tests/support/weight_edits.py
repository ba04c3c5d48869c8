"""A function that edits a weight, for modules that import it when they run."""

from __future__ import annotations

from torch import Tensor


def clamp_imported(weight: Tensor) -> None:
    weight.data.clamp_(-0.05, 0.05)
