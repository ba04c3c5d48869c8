"""CUDA graphs around paged weights, which are refused: a graph replays fixed addresses, past all Python, and the bytes
of a paged weight come and go.

A capture by the program is known from the device. ``torch.compile`` with ``mode="reduce-overhead"`` or
``backend="cudagraphs"`` captures inside of what it has compiled, where nothing of ours runs; so it is known from the
settings and the backend that torch keeps with a compiled function, before the first call.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from torch import nn

from deepoffload.copies.shown import ShownMemory
from deepoffload.errors import UnsupportedError

SETTING = "triton.cudagraphs"
"""What the modes "reduce-overhead" and "max-autotune" switch on, by its name in the settings of torch's Inductor."""

BACKEND = "cudagraphs"
"""The backend of torch's that captures what it is given, in any mode."""

_BELOW = "_torchdynamo_orig_backend"
"""Where a backend that torch has wrapped names the one inside."""

_COMPILED_CALL = "compile_wrapper"
"""The code that runs for as long as a function that torch has compiled is called; its ``self`` has the settings."""


def refuse_capture(memory: ShownMemory) -> None:
    """Raise UnsupportedError where the program captures a graph on the current stream."""
    if memory.is_captured():
        raise UnsupportedError(
            "a paged weight is used while a CUDA graph is captured: a graph replays fixed addresses, and the bytes of "
            "paged weights come and go. Capture only what uses no paged weights, or train without torch.cuda.graph"
        )


def refuse_graph_modes(module: nn.Module, memory: ShownMemory) -> None:
    """Raise UnsupportedError where something at or below ``module`` was compiled to run as CUDA graphs."""
    if memory.device.type == "cpu":
        return  # torch captures nothing there, in any mode
    for name, child in module.named_modules():
        attributes = child.__dict__
        for compiled in (attributes.get("forward"), attributes.get("_compiled_call_impl"), child):
            ask = getattr(compiled, "get_compiler_config", None)
            if ask is not None and _captures(_compiler_of(ask)):
                raise UnsupportedError(_words(name or type(child).__name__))


def refuse_graph_mode_outside(memory: ShownMemory) -> None:
    """The same where this call of a module is part of something that was compiled so, such as the whole model."""
    if memory.device.type == "cpu" or "torch._dynamo" not in sys.modules:
        return
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == _COMPILED_CALL:
            if _captures(frame.f_locals.get("self")):
                raise UnsupportedError(_words("what calls it"))
        frame = frame.f_back


def _compiler_of(ask: Any) -> Any:
    """What a compiled function was compiled by: torch's ``get_compiler_config`` is a function inside of its method."""
    names, cells = getattr(getattr(ask, "__code__", None), "co_freevars", ()), getattr(ask, "__closure__", None) or ()
    return next((cell.cell_contents for name, cell in zip(names, cells, strict=True) if name == "self"), None)


def _captures(compiler: Any) -> bool:
    settings = getattr(compiler, "compiler_config", None)
    if isinstance(settings, dict) and settings.get(SETTING):
        return True
    backend = getattr(compiler, "callback", None)
    while hasattr(backend, _BELOW):
        backend = getattr(backend, _BELOW)
    return getattr(backend, "compiler_name", None) == BACKEND


def _words(what: str) -> str:
    return (
        f'{what} is compiled with CUDA graphs (torch.compile with mode="reduce-overhead" or "max-autotune", or '
        'backend="cudagraphs"): a graph replays fixed addresses, and the bytes of paged weights come and go. Compile '
        'it with the default mode or "max-autotune-no-cudagraphs" (docs/compile.md)'
    )
