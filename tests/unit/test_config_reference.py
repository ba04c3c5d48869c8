from __future__ import annotations

from pathlib import Path

from deepoffload.config.collect import KEYS
from deepoffload.config.reference import markdown

PAGE = Path(__file__).parents[2] / "docs" / "config.md"


def test_the_page_in_the_repository_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == markdown(), (
        "run: python -m deepoffload.config.reference > docs/config.md"
    )


def test_every_key_has_one_row():
    lines = [line for line in markdown().splitlines() if line.startswith("| `")]
    for path in KEYS:
        assert sum(line.startswith(f"| `{path}` |") for line in lines) == 1, path
