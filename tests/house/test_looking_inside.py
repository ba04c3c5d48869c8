"""Tests look into engines through one door, ``tests/support/inspect.py``, so that a move inside changes one file."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.house.test_forbidden_patterns import PACKAGE, ROOT, TESTS
from tests.house.trees import tree_of, walked

SUPPORT = ROOT / "tests" / "support"

OF_PYTHON_AND_TORCH = {"_exit", "_step_supports_amp_scaling"}
"""Names that the package has, too, or sets for torch to find."""

TESTED_THERE = {
    "tests/checkpoint/test_background_ends.py": {"_process"},
    "tests/copies/test_copies_on_the_cpu.py": {"_bytes"},
    "tests/gpu/test_memory_and_streams.py": {"_in_flight"},
    "tests/optim/test_step_failures.py": {"_interrupted"},
    "tests/unit/test_gradient_state.py": {"_records"},
    "tests/unit/test_schedule_trace.py": {"_history", "_last_seen"},
}
"""What a test looks at because that is its subject: that a record is forgotten, or a buffer given back."""


def private_names() -> set[str]:
    """Attributes and methods of our classes with an underscore."""
    names = {"_slot"}
    for path in PACKAGE:
        for kind in (node for node in walked(tree_of(path)) if isinstance(node, ast.ClassDef)):
            for node in ast.walk(kind):
                if isinstance(node, ast.FunctionDef):
                    names.add(node.name)
                elif isinstance(node, ast.Attribute) and is_of_this_object(node):
                    names.add(node.attr)
    return {name for name in names if name.startswith("_") and not name.startswith("__")}


def is_of_this_object(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def looks(path: Path, private: set[str]) -> set[tuple[int, str]]:
    """Line and name of each look past the door."""
    allowed = OF_PYTHON_AND_TORCH | TESTED_THERE.get(path.relative_to(ROOT).as_posix(), set())
    found = set()
    for node in walked(tree_of(path)):
        if isinstance(node, ast.Attribute) and not is_of_this_object(node):
            if node.attr in (private | {"pager"}) - allowed:
                found.add((node.lineno, node.attr))
        elif isinstance(node, ast.Constant) and node.value == "_slot":
            found.add((node.lineno, "_slot"))
    return found


def test_tests_look_into_engines_through_one_door() -> None:
    private = private_names()
    assert {"_disk", "_records", "_running"} <= private, "this finds nothing"
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in TESTS
        if SUPPORT not in path.parents and path != Path(__file__)
        for line, name in sorted(looks(path, private))
    ]
    assert not found, "tests/support/inspect.py has, or gets, a function for it:\n" + "\n".join(found)


def test_no_exception_is_left_over() -> None:
    unused = []
    for name, names in TESTED_THERE.items():
        path = ROOT / name
        seen = {node.attr for node in walked(tree_of(path)) if isinstance(node, ast.Attribute)}
        unused += [f"{name}: {attribute}" for attribute in names - seen]
    assert not unused, unused
