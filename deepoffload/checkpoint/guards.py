"""When a state may be saved, and how a run that is half loaded is kept from going on."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from deepoffload.checkpoint.values import clipped
from deepoffload.errors import UsageError
from deepoffload.optim.rank_gradients import RankGradients
from deepoffload.params.pager import Pager
from deepoffload.params.torch_private import MODULE_CALL, in_backward
from deepoffload.params.unit import ParamHandle


class GradientWatch:
    """Knows whether gradients that are there have gone into a step already: many loops clear them only before the next
    backward.

    Attributes:
        steps: calls of the optimizer's ``step`` that have returned.
    """

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self._module = module
        self.steps = 0
        self._paged: dict[int, int] = {}
        self._ordinary: dict[int, tuple[int, int]] = {}
        if optimizer is not None:
            mine = weakref.ref(self)

            def stepped(*_: Any) -> None:
                watch = mine()
                if watch is not None:
                    watch._stepped()

            hook = optimizer.register_step_post_hook(stepped)
            weakref.finalize(self, hook.remove).atexit = False

    def _stepped(self) -> None:
        self.steps += 1
        self._paged.clear()
        self._ordinary.clear()
        for param in self._module.parameters():
            handle = param.__dict__.get("_slot")
            if isinstance(handle, ParamHandle):
                pager: Any = handle.pager
                if id(pager) not in self._paged and pager.gradients is not None:
                    self._paged[id(pager)] = pager.gradients.changes
            elif param.grad is not None:
                self._ordinary[id(param)] = (id(param.grad), param.grad._version)

    def waiting(self) -> str | None:
        """The name of a parameter whose gradient no step has used yet; None where there is none."""
        for name, param in self._module.named_parameters():
            handle = param.__dict__.get("_slot")
            if isinstance(handle, ParamHandle):
                pager: Any = handle.pager
                gradients = pager.gradients
                coming = isinstance(gradients, RankGradients) and gradients.is_coming(handle)
                if (coming or gradients.present(handle)) and gradients.changed_since(
                    self._paged.get(id(pager), -1), [handle]
                ):
                    return name
            elif param.grad is not None and self._ordinary.get(id(param)) != (id(param.grad), param.grad._version):
                return name
        return None


def refuse_in_forward(pagers: Sequence[Pager], what: str) -> None:
    """Raise where a model cannot be looked at as a whole: its engine is closed, or the call comes from its forward."""
    for pager in pagers:
        if pager.life.closed_because is not None:
            pager.life.refuse_closed("")
        if pager.gradients is None:
            raise UsageError(f"{what} inside offload_context: call it after the context has ended")
        pager.hooks.close_stale()
        if pager.hooks.opened():
            raise UsageError(f"{what} inside a forward of the model: call it between steps")


def refuse_during_calls(module: nn.Module, what: str, *, of_all_threads: bool) -> None:
    """Raise where the call comes from a forward of the model, also between two of its layers, or from a backward.

    Args:
        of_all_threads: a forward that runs in another thread hinders, too.
    """
    if in_backward():
        raise UsageError(f"{what} inside a backward: call it between steps")
    parts = {id(part) for part in module.modules()}
    me = threading.get_ident()
    frames = sys._current_frames()
    called = {thread for thread in frames if not parts.isdisjoint(_called_modules(frames[thread]))}
    frames.clear()  # this frame's own is among them: they would keep each other alive, and all that the callers hold
    if me in called:
        raise UsageError(f"{what} inside a forward of the model: call it between steps")
    if called and of_all_threads:
        raise UsageError(f"{what} while another thread is inside a forward of the model: wait for its end first")


def _called_modules(frame: FrameType | None) -> Iterator[int]:
    """The ``id`` of every module whose call is on a thread's stack, innermost first."""
    while frame is not None:
        if frame.f_code is MODULE_CALL:
            yield id(frame.f_locals.get("self"))
        frame = frame.f_back


class OneAtATime:
    """Lets one call at a time save or load a state."""

    def __init__(self) -> None:
        self._free = threading.Lock()
        self._call: tuple[str, int] = ("", 0)

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Nobody else may save or load while the context lasts.

        Args:
            what: the call that wants it, for errors.

        Raises:
            UsageError: another call has not ended.
        """
        if not self._free.acquire(blocking=False):
            other, thread = self._call
            if thread == threading.get_ident():
                raise UsageError(
                    f"{what} inside a {other} of the same state, from {_CALLED_BACK}: call it after that {other}"
                )
            raise UsageError(f"{what} while another thread saves or loads the same state: wait for that first")
        self._call = (what, threading.get_ident())
        try:
            yield
        finally:
            self._free.release()


_CALLED_BACK = "custom_load_fn, or from state_dict() or load_state_dict() of one of its objects"
"""Code of the program's that a save or a load runs."""


class HalfLoaded:
    """Refuses forwards, steps and saves from the moment that a load changes something until one has succeeded."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self._module = module
        self._optimizer = optimizer
        self._hooks: list[RemovableHandle] = []
        self._folder = ""
        self._thread: int | None = None
        self._failure = ""

    @contextmanager
    def during(self, folder: str) -> Iterator[None]:
        """What changes the state. While the context lasts, and when it fails, the state is of no step."""
        self._folder, self._thread = folder, threading.get_ident()
        self._refuse_calls()
        try:
            yield
        except BaseException as error:
            self._failure = clipped(f"{type(error).__name__}: {error}")
            raise
        finally:
            self._thread = None
        self._failure = ""
        while self._hooks:
            self._hooks.pop().remove()

    def _refuse_calls(self) -> None:
        if self._hooks:
            return
        for module in self._module.modules():  # a part of the model may be called by itself
            self._hooks.append(module.register_forward_pre_hook(self._refuse))
        if self._optimizer is not None:
            self._hooks.append(self._optimizer.register_step_pre_hook(self._refuse))

    def refuse(self) -> None:
        """Raise UsageError where the state is of no step, and say why."""
        if self._thread == threading.get_ident():
            raise UsageError(
                f"{self._folder} is being loaded, and this call comes from inside of that load, from {_CALLED_BACK}: "
                "make it when the load has returned"
            )
        if self._thread is not None:
            raise UsageError(f"another thread is loading {self._folder} into this model: wait for the end of that load")
        if self._failure:
            raise UsageError(
                f"this model is half loaded: loading {self._folder} failed on its way ({self._failure}); load a "
                "checkpoint that is whole"
            )

    def _refuse(self, *_: Any) -> None:
        self.refuse()
