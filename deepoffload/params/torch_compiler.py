"""What ``torch.compile`` does with our functions, said without loading it, which takes two seconds and 70 MB."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from deepoffload.params.torch_private import need

NOT_CAPTURED = (
    "the bytes of a paged weight come and go, which Python has to see to; torch.cond, while_loop, scan and map capture "
    "all that is in them: use if and for of Python, or give them weight.clone() as an operand (docs/compile.md)"
)


def not_captured(function: Callable[..., Any], why: str) -> None:
    """Have Dynamo capture no call of ``function``. Where it has to capture everything, torch's error says ``why``."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = why  # type: ignore[attr-defined]


def leave_to_python(function: Callable[..., Any], why: str) -> None:
    """Have Dynamo run ``function``, and all it calls, as Python: what ``torch._dynamo.disable`` does, without importing
    Dynamo, which takes seconds. A torch that lacks the names compiles our hooks, which is slow and not wrong."""
    not_captured(function, why)
    frames = torch._C._dynamo.eval_frame
    with contextlib.suppress(AttributeError):
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))


def is_compiling_callers() -> bool:
    """Whether Dynamo is at work around a function that it does not capture: it compiles what that calls. Only for
    callers that :func:`seen_by_compiler` has named."""
    frames = torch._C._dynamo.eval_frame
    ask = getattr(frames, "get_eval_frame_callback", None)  # not in every torch
    return ask is not None and ask() not in (None, False)


def seen_by_compiler(function: Callable[..., Any], why: str) -> None:
    """As :func:`leave_to_python`, without what ``function`` calls: it can ask :func:`is_compiling_callers`."""
    not_captured(function, why)
    frames = torch._C._dynamo.eval_frame
    with contextlib.suppress(AttributeError):
        actions = frames._FrameAction
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(actions.SKIP, actions.DEFAULT))


seen_by_compiler(is_compiling_callers, "Python is asked, not Dynamo")


def without_compiler(method: Callable[..., Any]) -> Callable[..., Any]:
    """A bound method of torch's without the wrapper that keeps it out of compiled functions. At its first call the
    wrapper loads the compiler, also in a program that compiles nothing. Only for a caller that is itself left to
    Python. Any other method is given back as it is."""
    function = getattr(method, "__func__", None)
    if getattr(function, "__code__", None) is not _WRAPPER:
        return method
    return partial(function.__wrapped__, method.__self__)  # type: ignore[union-attr, attr-defined]


_WRAPPER = need(torch, "_disable_dynamo")(without_compiler).__code__
"""All functions that torch wraps so share this code."""
