"""``set_z3_leaf_modules`` and its like: which modules DeepSpeed fetches as one.

Here a unit is what fits the budget, and a weight that a call uses comes when it is used, so nothing has to be marked.
The calls find the modules and return them, as DeepSpeed's, so that a wrong class or name is noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from deepoffload.errors import UsageError


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """The modules of these classes, given as classes, or as their names with or without the module they are from.

    Raises:
        UsageError: there is none (a ValueError, as DeepSpeed's).
    """

    def wanted(_: str, module: nn.Module) -> object:
        kind = type(module)
        known = (kind, kind.__name__, f"{kind.__module__}.{kind.__qualname__}")
        return next((one for one in leaf_module_classes if one in known), None)

    return _found(model, wanted, leaf_module_classes, "class", raise_if_not_found)[0]


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """See :func:`set_z3_leaf_modules`."""
    return set_z3_leaf_modules(model, leaf_module_classes, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """The modules of these names, and the names that were found."""
    return _found(
        model, lambda name, _: name if name in module_names else None, module_names, "name", raise_if_not_found
    )


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """The modules whose names end so, and the endings that were found."""

    def wanted(name: str, _: nn.Module) -> str | None:
        return next((end for end in module_name_suffixes if name.endswith(end)), None)

    return _found(model, wanted, module_name_suffixes, "suffix", raise_if_not_found)


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Accepted, unnecessary."""
    _checked(model)


def _checked(model: nn.Module) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise UsageError(f"a torch.nn.Module is wanted, not {type(model).__name__}")
    return model


def _found(
    model: nn.Module,
    wanted: Callable[[str, nn.Module], object],
    asked: Sequence[object],
    what: str,
    raise_if_not_found: bool,
) -> tuple[list[nn.Module], list[str]]:
    pairs = [(wanted(name, module), module) for name, module in _checked(model).named_modules()]
    modules = [module for match, module in pairs if match is not None]
    if not modules and raise_if_not_found:
        raise UsageError(f"{type(model).__name__} has no module of {what} {list(asked)}")
    return modules, list(dict.fromkeys(str(match) for match, _ in pairs if match is not None))
