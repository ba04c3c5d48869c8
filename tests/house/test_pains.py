"""docs/pains.md: each pain has a row, and each test that a row names is there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAINS = 48
ROW = re.compile(r"^\| (\d+) \|.*\| \*\*(Avoided|Partly|Not avoided|Not offered)\b.*\|$", re.MULTILINE)
TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def test_every_pain_has_a_row_that_says_what_became_of_it():
    numbers = [int(match[1]) for match in ROW.finditer((ROOT / "docs" / "pains.md").read_text())]
    assert numbers == list(range(1, PAINS + 1))


def test_the_tests_that_the_page_names_are_there():
    named = TEST.findall((ROOT / "docs" / "pains.md").read_text())
    missing = [
        f"{path}::{name}"
        for path, name in named
        if not (ROOT / path).is_file() or f"def {name}(" not in (ROOT / path).read_text()
    ]
    assert len(named) > PAINS and not missing
