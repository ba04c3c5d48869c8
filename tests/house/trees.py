"""Syntax trees of all files, each parsed and walked once for the rules that look at it."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def walked(tree: ast.Module) -> tuple[ast.AST, ...]:
    """All its nodes: to find them takes longer than most rules do."""
    return tuple(ast.walk(tree))


def forget() -> None:
    walked.cache_clear()
    tree_of.cache_clear()
