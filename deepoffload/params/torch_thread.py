"""What torch keeps per thread, where several forwards share one thread: each finds its own when it goes on.

[Note: one thread] Whether gradients are recorded, autocast, the hooks on saved tensors, the stacks of modes: torch
keeps each of these once per thread, and the ``with`` blocks of a program change them for what runs inside. Now let a
forward stop inside such blocks, so that another one runs in the same thread::

    with torch.autocast("cpu"):      # of the first forward
        x = layer(x)                 # stops at the beginning of the layer; the second forward begins, outside the block

So a forward that stops sets aside what its blocks have changed, and everything is as it was at the beginning. It puts
it back when it goes on. A ``with`` block, in Python or in C++, restores at its end what it has found at its begin. Both
belong to the same forward, so that is right, too.

So it is with what torch keeps once for the whole process, and blocks change for a while: the default type, the kernels
that attention may use (``sdpa_kernel``), the search for anomalies. Two such blocks that end in the order in which they
have begun would leave the change of the one behind for good.

What has no switch is compared: the sets of dispatch keys that C++ guards include and exclude. Where these differ from
those at the beginning, the forward does not stop. So it is inside a transform of ``torch.func`` and forward-mode
differentiation, inside ``parametrize.cached()``, whose cache is one for all, and in a coroutine: a thread runs one
event loop at a time. It does not stop inside an operator of ``torch.ops`` whose kernel is a Python function: pybind11
keeps a list of its calls for each thread, and ends the process where they do not end in the reverse order.
"""

from __future__ import annotations

import sys
from asyncio import _get_running_loop
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.nn.utils import parametrize

from deepoffload.params.torch_private import (
    disable_current_modes,
    in_functorch,
    len_dispatch_stack,
    len_function_stack,
    need,
    pop_saved_tensors_hooks,
    push_saved_tensors_hooks,
    saved_tensors_hooks_enabled,
    top_saved_tensors_hooks,
)

_autograd = torch._C._autograd
_disabled_message = need(_autograd, "_saved_tensors_hooks_get_disabled_error_message")
_disable_hooks = need(_autograd, "_saved_tensors_hooks_disable")
_enable_hooks = need(_autograd, "_saved_tensors_hooks_enable")
_set_grad_enabled = need(torch._C, "_set_grad_enabled")
_fwd_grad_enabled = need(torch._C, "_is_fwd_grad_enabled")
_set_fwd_grad_enabled = need(torch._C, "_set_fwd_grad_enabled")
_pop_function_mode = need(torch._C, "_pop_torch_function_stack")
_push_function_mode = need(torch._C, "_push_on_torch_function_stack")
_torch_function_enabled = need(torch._C, "_is_torch_function_enabled")
_enable_torch_function = need(torch._C, "_EnableTorchFunction")
_included_keys = need(torch._C, "_dispatch_tls_local_include_set")
_excluded_keys = need(torch._C, "_dispatch_tls_local_exclude_set")
_swap_compiler = need(torch._C._dynamo.eval_frame, "set_eval_frame")
_set_anomaly_enabled = need(torch._C, "set_anomaly_enabled")
need(parametrize, "_cache_enabled")


def in_cached_blocks() -> int:
    """How many blocks of ``parametrize.cached()`` the process is in."""
    found: int = parametrize._cache_enabled
    return found


_OPERATOR_CALLS = (torch._ops.OpOverload.__call__.__code__, torch._ops.OpOverloadPacket.__call__.__code__)


def _in_operator() -> bool:
    """Whether this is called by the kernel of an operator."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in _OPERATOR_CALLS:
            return True
        frame = frame.f_back
    return False


def _set_deterministic(found: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(found[0], warn_only=found[1])


def _set_anomalies(found: tuple[bool, bool]) -> None:
    _set_anomaly_enabled(*found)


_ATTENTION = ("flash", "mem_efficient", "math", "cudnn")
_OF_PROCESS: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    *((need(torch._C, f"_get_{kind}_sdp_enabled"), need(torch._C, f"_set_sdp_use_{kind}")) for kind in _ATTENTION),
    (need(torch._C, "_get_sdp_priority_order"), need(torch._C, "_set_sdp_priority_order")),
    (need(torch._C, "_get_mkldnn_enabled"), need(torch._C, "_set_mkldnn_enabled")),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        _set_deterministic,
    ),
    (lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()), _set_anomalies),
)
"""What torch keeps once for the process, and how it is set."""


def process_now() -> list[Any]:
    """What torch keeps once for the process."""
    return [read() for read, _ in _OF_PROCESS]


def lend_process(then: list[Any], back: ExitStack) -> None:
    """The process is as it was ``then``, until ``back`` closes."""
    for (read, write), before in zip(_OF_PROCESS, then, strict=True):
        found = read()
        if found != before:
            back.callback(write, found)
            write(before)


class _Devices:
    """The current device and streams of this thread, at the moment in which it is made.

    Args:
        device: one of their kind.
    """

    def __init__(self, device: torch.device) -> None:
        self._module: Any = torch.get_device_module(device)
        self._count = int(self._module.device_count())
        self._then = self._now()

    def _now(self) -> tuple[int, list[Any]]:
        return self._module.current_device(), [self._module.current_stream(index) for index in range(self._count)]

    def _set(self, found: tuple[int, list[Any]]) -> None:
        index, streams = found
        for now, stream in zip(self._now()[1], streams, strict=True):
            if now != stream:
                self._module.set_stream(stream)
        self._module.set_device(index)  # the stream that is set makes its device the current one

    def lend(self, back: ExitStack) -> None:
        """They are as they were, until ``back`` closes."""
        now = self._now()
        if now != self._then:
            back.callback(self._set, now)
            self._set(self._then)


class TorchThread:
    """What torch keeps for this thread, at the moment in which it is made. See [Note: one thread] at the top.

    Args:
        device: that computes. Its autocast counts together with the CPU's; the current device of its kind, and the
            current streams, are this thread's, too.
    """

    def __init__(self, device: torch.device) -> None:
        self._inference = torch.is_inference_mode_enabled()
        self._grad, self._fwd_grad = torch.is_grad_enabled(), _fwd_grad_enabled()
        self._kinds = tuple(dict.fromkeys(("cpu", device.type)))
        self._devices = None if device.type == "cpu" else _Devices(device)
        self._autocast = self._autocast_now()
        self._function_modes = len_function_stack()
        self._process = process_now()
        self._loop = _get_running_loop()
        self._caches = in_cached_blocks()
        self._keys = self._keys_now()

    def set_aside(self) -> ExitStack | None:
        """Everything is as it was at the beginning. Closing what is returned puts back what was set aside. None, with
        nothing done, where a forward cannot stop."""
        if in_functorch() or forward_ad._current_level >= 0 or _get_running_loop() is not self._loop:
            return None
        if in_cached_blocks() != self._caches or _in_operator():
            return None
        back = ExitStack()
        try:
            self._set_aside(back)
            stops = self._keys_now() == self._keys
        except BaseException:
            back.close()
            raise
        if stops:
            return back
        back.close()
        return None

    def _set_aside(self, back: ExitStack) -> None:
        compiler = _swap_compiler(None)
        if compiler is not None:
            back.callback(_swap_compiler, compiler)
        if not _torch_function_enabled():
            back.enter_context(_enable_torch_function())
        if len_dispatch_stack():
            back.enter_context(disable_current_modes())
        while len_function_stack() > self._function_modes:
            back.callback(_push_function_mode, _pop_function_mode())
        self._set_hooks_aside(back)
        if torch.is_inference_mode_enabled() != self._inference:
            back.enter_context(torch.inference_mode(self._inference))
        if torch.is_grad_enabled() != self._grad:
            back.callback(_set_grad_enabled, not self._grad)
            _set_grad_enabled(self._grad)
        if _fwd_grad_enabled() != self._fwd_grad:
            back.callback(_set_fwd_grad_enabled, not self._fwd_grad)
            _set_fwd_grad_enabled(self._fwd_grad)
        now = self._autocast_now()
        if now != self._autocast:
            back.callback(self._set_autocast, now)
            self._set_autocast(self._autocast)
        if self._devices is not None:
            self._devices.lend(back)
        lend_process(self._process, back)

    @staticmethod
    def _set_hooks_aside(back: ExitStack) -> None:
        if not saved_tensors_hooks_enabled():
            back.callback(_disable_hooks, _disabled_message())
            _enable_hooks()
        hooks = top_saved_tensors_hooks(True)
        while hooks is not None:
            pop_saved_tensors_hooks()
            back.callback(push_saved_tensors_hooks, *hooks)
            hooks = top_saved_tensors_hooks(True)

    def _autocast_now(self) -> tuple[Any, ...]:
        of_kinds = ((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in self._kinds)
        return torch.is_autocast_cache_enabled(), *of_kinds

    @staticmethod
    def _set_autocast(state: tuple[Any, ...]) -> None:
        cache, *of_kinds = state
        torch.set_autocast_cache_enabled(cache)
        for kind, enabled, dtype in of_kinds:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)

    @staticmethod
    def _keys_now() -> tuple[int, int]:
        return _included_keys().raw_repr(), _excluded_keys().raw_repr()
