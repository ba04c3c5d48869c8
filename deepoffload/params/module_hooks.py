"""The hooks that windows put on modules, as torch's compilers and pickle see them.

[Note: the name of a hook] ``torch.jit.script(model)`` compiles the hooks of every module, too. Ours cannot be compiled,
and torch's error would speak of our code instead of the program's. Before it reads a hook's source it asks for one
thing only, ``hook.__name__``. So :class:`ModuleHook` has a property of this name, which looks who asks::

    torch.jit.script(model)    # asked by code of torch.jit: an UnsupportedError that says what to script instead
    hook.__name__              # asked by anybody else, for example a profiler: "enter"

Dynamo is the other compiler. It traces the hooks of modules inside of a compiled region, unless it is told to leave
one to Python (``leave_to_python``): then the graph breaks there, and the hook runs as it is written.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from deepoffload.errors import UnsupportedError
from deepoffload.params.sharding import NO_WRAPPER
from deepoffload.params.torch_compiler import NOT_CAPTURED, leave_to_python
from deepoffload.params.torch_private import active_ddp_module


class NoWindow:
    """What a pickled window becomes: hooks that do nothing."""

    def enter(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        return None

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        return None


class ModuleHook:
    """A bound hook that Dynamo leaves alone when it compiles the module around it. See [Note: the name of a hook]."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method

    def __call__(self, *args: Any) -> Any:
        return self._method(*args)

    @property
    def __name__(self) -> str:
        if sys._getframe(1).f_globals.get("__name__", "").startswith("torch.jit"):
            raise UnsupportedError(
                "torch.jit.script cannot compile a paged model; script a plain copy (copy.deepcopy(model))"
            )
        return self._method.__name__


leave_to_python(ModuleHook.__call__, NOT_CAPTURED)


def refuse_wrappers() -> None:
    if active_ddp_module() is not None:
        raise UnsupportedError(NO_WRAPPER)
