"""Which part of a unit's weights a forward pass reads, where nothing is trained: tables are read by rows, and stacked
experts by those that tokens are routed to."""

from __future__ import annotations

from collections import Counter

from torch import nn

from deepoffload.params.routed import ROUTED_SHARE, num_experts
from deepoffload.params.rows import is_table
from deepoffload.runtime.cuts import Cut


def read_shares(cut: Cut) -> dict[int, float]:
    """By number of a draft that one module alone uses, in parts: the part that one token reads."""
    division = cut.division
    uses = Counter(number for _, numbers in division.window_units for number in numbers)
    shares = {}
    for (_, module), (_, numbers) in zip(division.windows, division.window_units, strict=True):
        share = _share(module)
        if share < 1 and all(uses[number] == 1 for number in numbers):
            own = {id(param) for param in module.parameters()}
            for number in numbers:
                if all(id(handle.tensor) in own for handle in division.drafts[number].handles):
                    shares[number] = share
    return shares


def _share(module: nn.Module) -> float:
    if is_table(module):
        return 0.0
    experts = num_experts(module)
    routed = getattr(getattr(module, "config", None), "num_experts_per_tok", None)
    if not experts or not isinstance(routed, int) or ROUTED_SHARE * routed > experts:
        return 1.0
    return routed / experts
