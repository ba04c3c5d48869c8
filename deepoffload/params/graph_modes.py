"""CUDA graphs around paged weights, which are refused: a graph replays fixed addresses, past all Python, and the bytes
of a paged weight come and go.

A capture by the program is known from the device. ``torch.compile(mode="reduce-overhead")`` captures inside of what it
has compiled, where nothing of ours runs; so it is known from the settings that torch keeps with a compiled function,
before the first call.
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
            if ask is not None and _uses_graphs(ask()):
                raise UnsupportedError(_words(name or type(child).__name__))


def refuse_graph_mode_outside(memory: ShownMemory) -> None:
    """The same where this call of a module is part of something that was compiled so, such as the whole model."""
    if memory.device.type == "cpu" or "torch._dynamo" not in sys.modules:
        return
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == _COMPILED_CALL:
            if _uses_graphs(getattr(frame.f_locals.get("self"), "compiler_config", None)):
                raise UnsupportedError(_words("what calls it"))
        frame = frame.f_back


def _uses_graphs(settings: Any) -> bool:
    return isinstance(settings, dict) and bool(settings.get(SETTING))


def _words(what: str) -> str:
    return (
        f'{what} is compiled with CUDA graphs (torch.compile with mode="reduce-overhead" or "max-autotune"): a graph '
        "replays fixed addresses, and the bytes of paged weights come and go. Compile it with the default mode or "
        '"max-autotune-no-cudagraphs" (docs/compile.md)'
    )
