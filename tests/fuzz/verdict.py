"""Whether what a paged program showed can be explained: it is equal, or plain PyTorch raises too, or we say why not."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.fuzz.program import Program, Seen, is_ours, is_shortage
from tests.support.loops import assert_same_bits

REFUSALS: tuple[tuple[str, str], ...] = (
    # (what the message says, why that is right)
    (r"still referred to by the program|must stay|in use", "the program holds more than the budget has room for"),
)
"""Errors of ours in programs that plain PyTorch runs. Each is a BudgetError, or stands in docs/what_works.md."""


@dataclass(frozen=True)
class Verdict:
    """``kind``: equal, raises (as plain PyTorch does), refused (with the reason), or wrong."""

    kind: str
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.reason}" if self.reason else self.kind


def judge(program: Program, expected: Seen, got: Seen) -> Verdict:
    """Compare a paged run with its twin."""
    for index, (one, other) in enumerate(zip(expected.values, got.values, strict=False)):
        name = program.operations[index] if index < len(program.operations) else "at the end"
        try:
            assert_same_bits(one, other, f"operation {index} ({name})", nan_is_wrong=False)
        except AssertionError as difference:
            return Verdict("wrong", str(difference))
    if got.error is None and expected.error is None:
        return Verdict("equal")
    where = f"operation {len(got.values)} of {list(program.operations)}"
    if got.error is None or len(expected.values) < len(got.values):
        return Verdict("wrong", f"no error where the twin raises {expected.error!r} ({where})")
    told = f"{type(got.error).__name__}: {got.error}"
    if len(expected.values) == len(got.values) and expected.error is not None:
        alike = type(got.error) is type(expected.error) or (is_ours(got.error) and not is_shortage(got.error))
        return Verdict("raises" if alike else "wrong", f"{told}; the twin: {expected.error!r} ({where})")
    return _explain(told, where, got.error)


def _explain(told: str, where: str, error: Exception) -> Verdict:
    for message, reason in REFUSALS:
        if re.search(message, told) and (is_ours(error) or not is_shortage(error)):
            return Verdict("refused", f"{reason}: {told}")
    return Verdict("wrong", f"{told} ({where})")
