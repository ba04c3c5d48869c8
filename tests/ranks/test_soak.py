"""A short soak; ``python -m tests.ranks.soak`` makes a thousand steps."""

from __future__ import annotations

from pathlib import Path

from tests.ranks import soak


def test_a_short_soak(nvme_path: Path) -> None:
    soak.check(soak.Soak(steps=24), nvme_path)
