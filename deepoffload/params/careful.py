"""Which modules may write to their weights where neither a version counter nor a class-swapped door would show it.

``self.weight.data.clamp_()`` inside a forward moves no version. Windows over such modules keep the doors: every
access is then seen. The code is asked, not run: a module counts when one of its methods names ``data``, ``numpy``
and the like.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType, FunctionType

from torch import nn

_TELLING_NAMES = frozenset(
    {"data", "grad", "zero_grad", "numpy", "data_ptr", "untyped_storage", "storage", "set_", "__array__", "dlpack"}
)
_NOT_IN_FORWARD = ("__init__", "_init", "init_", "reset_parameters", "extra_repr", "_load_from_state_dict")


def needs_doors(module: nn.Module) -> bool:
    """True when a module at or below ``module`` has code that may change weights without a trace."""
    return any(_telling(kind) for kind in {type(child) for child in module.modules()})


def _telling(kind: type) -> bool:
    for base in kind.__mro__:
        if base is nn.Module:
            return False
        if base.__module__.startswith("torch.nn.modules."):
            continue  # torch's own layers leave weights alone in forward
        for name, method in vars(base).items():
            function = method.__func__ if isinstance(method, (staticmethod, classmethod)) else method
            if isinstance(function, FunctionType) and not name.startswith(_NOT_IN_FORWARD):
                if any(_TELLING_NAMES & set(code.co_names) for code in _codes(function.__code__)):
                    return True
    return False


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
