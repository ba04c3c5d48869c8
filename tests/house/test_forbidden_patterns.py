"""Patterns that are kept out of the source, each found in the syntax tree so that words in texts do not count."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.house.trees import tree_of, walked

ROOT = Path(__file__).parents[2]
PACKAGE = sorted((ROOT / "deepoffload").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
OTHERS = sorted(
    path for folder in ("examples", "benchmarks", "tools", "csrc") for path in (ROOT / folder).rglob("*.py")
)
NATIVE = sorted(path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".c", ".h", ".cpp"))

FILE_LINES_MAX = 450
FUNCTION_LINES_MAX = 80
METHODS_MAX = 25
ATTRIBUTES_MAX = 20
NATIVE_CALLERS = ("memory", "copies", "optim", "checkpoint", "ranks")
"""Parts of the package that give native code the addresses of their own tensors."""
PRINTING_PARTS = ("cli", "estimate")
"""Parts of the package whose job is to print."""
TORCH_PRIVATE = [ROOT / "deepoffload" / "params" / f"torch_{what}.py" for what in ("private", "thread", "compiler")]
PROGRAMS_GROUPS = ROOT / "deepoffload" / "deepspeed" / "comm.py"
"""Gives a program torch's process groups by other names; the engine uses none of them."""
FOREACH = "_foreach_"
"""torch's documentation names these functions, though with an underscore."""


def statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """The statements of the module itself, also those under ``if`` and ``try``."""
    todo: list[ast.stmt] = list(tree.body)
    while todo:
        node = todo.pop()
        yield node
        if isinstance(node, (ast.If, ast.Try, ast.With)):
            todo.extend(child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt))


def root_name(node: ast.expr) -> str:
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def targets(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return node.targets
    return [node.target] if isinstance(node, (ast.AnnAssign, ast.AugAssign)) and node.target else []


def global_statements(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in walked(tree):
        if isinstance(node, ast.Global):
            yield node.lineno, f"global {', '.join(node.names)}"


def module_level_mutable_state(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """A list, dict or set bound to a name that is not a constant's."""
    makers = ("list", "dict", "set", "defaultdict", "deque", "OrderedDict", "Counter", "WeakValueDictionary", "WeakSet")
    for node in statements(tree):
        value = getattr(node, "value", None)
        display = isinstance(value, (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp))
        called = value.func if isinstance(value, ast.Call) else None
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        if display or name in makers:
            for target in targets(node):
                if isinstance(target, ast.Name) and not re.fullmatch(r"_?[A-Z][A-Z0-9_]*|__all__", target.id):
                    yield node.lineno, f"module-level mutable state {target.id}"


def changes_to_torch(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in walked(tree):
        for target in targets(node):
            if isinstance(target, ast.Attribute) and root_name(target) == "torch":
                yield node.lineno, f"assignment to {ast.unparse(target)}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
            if node.args and root_name(node.args[0]) == "torch":
                yield node.lineno, ast.unparse(node)


def swallowed_exceptions(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """``except:`` or ``except Exception:`` whose body only passes."""
    for node in walked(tree):
        if isinstance(node, ast.ExceptHandler):
            broad = node.type is None or root_name(node.type) in ("Exception", "BaseException")
            if broad and all(isinstance(child, (ast.Pass, ast.Continue)) for child in node.body):
                yield node.lineno, "a swallowed exception"


def asserts_that_act(tree: ast.Module) -> Iterator[tuple[int, str]]:
    acting = ("pop", "append", "add", "remove", "discard", "update", "setdefault", "wait", "acquire", "close", "write")
    for node in walked(tree):
        if isinstance(node, ast.Assert):
            for inner in ast.walk(node.test):
                called = inner.func if isinstance(inner, ast.Call) else None
                if isinstance(inner, ast.NamedExpr) or getattr(called, "attr", "") in acting:
                    yield node.lineno, f"an assert with a side effect: {ast.unparse(node)}"


def stubs(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in walked(tree):
        if isinstance(node, ast.Raise) and node.exc is not None:
            raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            if root_name(raised) == "NotImplementedError":
                yield node.lineno, "NotImplementedError"


def prints(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in walked(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            yield node.lineno, "print in the library"


def mocks(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in walked(tree):
        names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{name}" for name in names]
        if any("mock" in name for name in names):
            yield node.lineno, f"import of {', '.join(names)}"


def relative_imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in walked(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            yield node.lineno, f"a relative import: {ast.unparse(node)}"


def long_functions(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in walked(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES_MAX:
                yield node.lineno, f"{node.name} has {lines} lines, more than {FUNCTION_LINES_MAX}"


def private_names_of_torch(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """``torch._x``, ``nn.Module._x`` and the like, and imports of private names or modules of torch."""
    for node in walked(tree):
        if isinstance(node, ast.Attribute) and re.match(r"_[a-z]", node.attr) and not node.attr.endswith("__"):
            if root_name(node) in ("torch", "nn", "distributed") and not node.attr.startswith(FOREACH):
                yield node.lineno, ast.unparse(node)
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            if any(name.startswith("_") for name in names):
                yield node.lineno, ast.unparse(node)
        if isinstance(node, ast.Attribute) and node.attr == "__code__" and root_name(node) in ("torch", "nn"):
            yield node.lineno, ast.unparse(node)


def tensors_of_the_default_dtype(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """``torch.zeros(n)`` has the dtype that the program has set, and native code counts on fp32."""
    factories = ("empty", "empty_strided", "zeros", "ones", "full", "tensor")
    for node in walked(tree):
        called = node.func if isinstance(node, ast.Call) else None
        if isinstance(called, ast.Attribute) and called.attr in factories and root_name(called) == "torch":
            if not any(keyword.arg == "dtype" for keyword in node.keywords):
                yield node.lineno, ast.unparse(node)


def process_groups(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """``torch.distributed``, but for its ``checkpoint``, which knows formats of files."""
    for node in walked(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
            names = ["torch.distributed"]
        for name in names:
            if re.match(r"torch\.distributed(?!\.checkpoint\b)(\.|$)", name):
                yield node.lineno, name


Rule = Callable[[ast.Module], Iterator[tuple[int, str]]]
EVERYWHERE: tuple[Rule, ...] = (stubs, swallowed_exceptions, changes_to_torch, global_statements, relative_imports)
RULES: tuple[tuple[Rule, list[Path]], ...] = (
    *((rule, [*PACKAGE, *TESTS, *OTHERS]) for rule in EVERYWHERE),
    (module_level_mutable_state, PACKAGE),
    (asserts_that_act, [*PACKAGE, *OTHERS]),
    (prints, [path for path in PACKAGE if path.relative_to(ROOT).parts[1] not in PRINTING_PARTS]),
    (mocks, [*PACKAGE, *TESTS]),
    (private_names_of_torch, [path for path in PACKAGE if path not in TORCH_PRIVATE]),
    (long_functions, [*PACKAGE, *OTHERS]),
    (
        process_groups,
        [path for path in PACKAGE if path.relative_to(ROOT).parts[1] != "ranks" and path != PROGRAMS_GROUPS],
    ),
    (tensors_of_the_default_dtype, [path for path in PACKAGE if path.relative_to(ROOT).parts[1] in NATIVE_CALLERS]),
)


def test_patterns_are_absent():
    """All in one process, which reads each file once."""
    found = [
        f"{path.relative_to(ROOT)}:{line}: {what} ({rule.__name__})"
        for rule, paths in RULES
        for path in paths
        for line, what in rule(tree_of(path))
    ]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("rule", "source"),
    [
        (global_statements, "def f():\n    global x"),
        (module_level_mutable_state, "seen = {}"),
        (module_level_mutable_state, "import weakref\ncache: object = weakref.WeakValueDictionary()"),
        (changes_to_torch, "torch.nn.Linear.forward = f"),
        (changes_to_torch, "setattr(torch.nn, 'Linear', f)"),
        (swallowed_exceptions, "try:\n    f()\nexcept Exception:\n    pass"),
        (asserts_that_act, "assert queue.pop()"),
        (stubs, "def f():\n    raise NotImplementedError"),
        (prints, "print(1)"),
        (mocks, "from unittest import mock"),
        (private_names_of_torch, "torch._C._storage_Use_Count(1)"),
        (private_names_of_torch, "from torch.utils._pytree import tree_map"),
        (private_names_of_torch, "code = nn.Module.forward.__code__"),
        (tensors_of_the_default_dtype, "scales = torch.zeros(n, device='cpu')"),
        (process_groups, "import torch.distributed as dist"),
        (process_groups, "from torch import distributed"),
        (process_groups, "from torch.distributed import barrier"),
        (process_groups, "torch.distributed.is_initialized()"),
        (relative_imports, "from .engine import IoEngine"),
        (long_functions, "def f():\n" + "    x = 1\n" * (FUNCTION_LINES_MAX + 1)),
    ],
)
def test_each_rule_finds_its_pattern(rule, source):
    assert list(rule(ast.parse(source)))


def test_files_are_not_too_long():
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in (*PACKAGE, *OTHERS, *NATIVE)}
    found = [f"{path.relative_to(ROOT)}: {length} lines" for path, length in lengths.items() if length > FILE_LINES_MAX]
    assert not found, found


def test_nothing_is_left_to_do():
    marker = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in (*PACKAGE, *TESTS, *OTHERS, *NATIVE)
        if path != Path(__file__)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if marker.search(line)
    ]
    assert not found, "\n" + "\n".join(found)


def test_modules_start_alike():
    found = []
    for path in (*PACKAGE, *TESTS):
        tree = tree_of(path)
        body = tree.body[1:] if ast.get_docstring(tree) is not None else tree.body
        first = body[0] if body else None
        if body and not (isinstance(first, ast.ImportFrom) and first.module == "__future__"):
            found.append(str(path.relative_to(ROOT)))
    assert not found, f"`from __future__ import annotations` is missing in {found}"


def test_no_two_classes_have_one_name():
    homes: dict[str, list[str]] = {}
    for path in PACKAGE:
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    found = {name: paths for name, paths in homes.items() if len(paths) > 1}
    assert not found, found


def attributes_of(node: ast.ClassDef) -> set[str]:
    """What its methods assign to ``self``."""
    return {
        inner.attr
        for inner in ast.walk(node)
        if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store) and root_name(inner) == "self"
    }


def test_large_classes_say_why_they_are_large():
    found = []
    for path in PACKAGE:
        for node in walked(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                methods = sum(isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)) for child in node.body)
                attributes = len(attributes_of(node))
                said = re.search(
                    r"\b(methods|attributes)\b.*\b(because|as many|are)\b", ast.get_docstring(node) or "", re.S
                )
                if (methods > METHODS_MAX or attributes > ATTRIBUTES_MAX) and not said:
                    found.append(f"{path.relative_to(ROOT)}: {node.name}: {methods} methods, {attributes} attributes")
    assert not found, found
