"""The walks in ARCHITECTURE.md lead through functions that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
STOP = re.compile(r"((?:[a-z_]+/)+[a-z_]+\.(?:py|cpp|c))(?::(\w+(?:, \w+)*))?")
STOPS_MAX = 10
"""Of one walk."""


def walks() -> list[list[str]]:
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    section = page.partition("## Walks\n")[2].partition("\n## ")[0]
    return [block.strip().splitlines() for block in re.findall(r"```\n(.*?)```", section, re.S)]


def defines(path: Path, name: str) -> bool:
    text = path.read_text(encoding="utf-8")
    pattern = rf"^\s*(?:async )?(?:def|class) {name}\b" if path.suffix == ".py" else rf"^[\w:*<>\s]*\b{name}\("
    return re.search(pattern, text, re.M) is not None


def missing(line: str) -> list[str]:
    """The files and names of a line that do not exist."""
    found = []
    for file, names in STOP.findall(line):
        path = next((p for p in (ROOT / "deepoffload" / file, ROOT / file) if p.is_file()), None)
        if path is None:
            found.append(file)
        else:
            found += [f"{file}:{name}" for name in filter(None, names.split(", ")) if not defines(path, name)]
    return found


def test_stops_exist() -> None:
    assert len(walks()) == 5
    assert all(len(walk) <= STOPS_MAX and all(STOP.match(line) for line in walk) for walk in walks())
    assert not [name for walk in walks() for line in walk for name in missing(line)]


def test_what_is_gone_is_found() -> None:
    assert missing("memory/tier_manager.py:acquire, brought   asks") == ["memory/tier_manager.py:brought"]
    assert missing("memory/tiers.py:acquire") == ["memory/tiers.py"]
    assert missing("csrc/aio/engine.c:doff_submitted") == ["csrc/aio/engine.c:doff_submitted"]


FOLDERS = "checkpoint inference moe monitor ops profiling runtime sequence utils".split()
GROUPS = tuple(f"deepspeed/{folder}/" for folder in FOLDERS)
"""Folders whose files have DeepSpeed's names, and are in the house together."""


def test_every_file_is_in_the_house_by_its_name_or_its_group() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    house = page.partition("## The house\n")[2]
    words = {name.lower() for name in re.findall(r"\w+", house)}
    package = ROOT / "deepoffload"
    files = [path.relative_to(package).as_posix() for path in sorted(package.rglob("*.py"))]
    alone = [file for file in files if not file.startswith(GROUPS) and "/__" not in file and file[:2] != "__"]
    assert [file for file in alone if Path(file).stem not in words] == []
