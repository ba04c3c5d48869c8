"""The unit window: while a module runs, its parameters are resident and look like plain ``nn.Parameter``s.

One pre and one post hook per module. Inside, no door is paid for, compiled code sees ordinary parameters, tensors
derived from weights are packed by our saved-tensor hooks, and the prefetcher learns where the program is.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from deepoffload.errors import UnsupportedError
from deepoffload.memory.block import Block
from deepoffload.params.careful import hooks_of, needs_doors
from deepoffload.params.membership import Membership
from deepoffload.params.pager import Pager
from deepoffload.params.parameter import OffloadedParameter
from deepoffload.params.torch_private import (
    get_unwrapped,
    in_functorch,
    is_functorch_wrapped,
    leave_to_python,
    refuse_tracing,
    version_of,
)
from deepoffload.params.unit import ParamHandle, Unit

_DEVICE = "cpu"


class _Entry:
    """One running call of a window's module. Empty until :meth:`Window.enter` is through, and when that has failed:
    torch calls the post hook then, too, which must not end the call around this one."""

    __slots__ = ("window", "handles", "blocks", "pushed", "frame_id", "frame_end", "thread", "over")

    def __init__(self, window: Window, frame: FrameType) -> None:
        self.window = window
        self.frame_id = id(frame)
        self.frame_end: weakref.ref[_FrameEnd] | None = None
        self.thread = threading.get_ident()
        self.over = False
        self.handles: list[ParamHandle] = []
        self.blocks: list[Block] = []
        self.pushed: bool | None = False


class _FrameEnd:
    """Lives in the frame of a module's call, and so shows its end, however it ends.

    torch runs no post hook when Ctrl-C ends the call. With this, parameters, leases and hooks are as before as soon as
    the program has handled the exception.
    """

    __slots__ = ("__weakref__",)


def _frame_ended(entry: _Entry, _: Any) -> None:
    """A call's frame is gone and its window still open. Runs anywhere; what cannot be done now, the next call does."""
    entry.over = True
    pager = entry.window.pager
    if entry.thread == threading.get_ident() and pager.lock.acquire_idle():
        try:
            pager.close_stale()
        finally:
            pager.lock.release()


class Window:
    """The hooks of one module whose parameters form a unit, or which uses parameters of other units."""

    def __init__(self, pager: Pager, module: nn.Module, name: str) -> None:
        self.pager = pager
        self.name = name
        self._module = weakref.ref(module, pager.tensor_died)
        pager.tensor_born()  # parameters may all be replaced while their modules live on
        self._members: Membership
        self._waiting = False
        self._careful = False
        self._hooks: tuple[int, ...] = ()
        self._hooks_before = 0
        self._handles: list[ParamHandle] = []
        self._units: list[Unit] = []
        self._scan(module)
        self._removable = (
            module.register_forward_pre_hook(_Hook(self, "enter"), prepend=True),
            module.register_forward_hook(_Hook(self, "leave"), always_call=True),
        )
        self._read(module)

    def __deepcopy__(self, memo: dict[int, Any]) -> Window:
        return self  # a copied model is plain: its copy of these hooks finds another module and does nothing

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return (_NoWindow, ())  # a pickled model is plain, too

    def module(self) -> nn.Module | None:
        """The module, while it exists."""
        return self._module()

    def remove(self) -> None:
        for handle in self._removable:
            handle.remove()

    # -- what the module holds -------------------------------------------------------------------------------------

    def _scan(self, module: nn.Module) -> None:
        """Find the paged parameters below the module, adopting newcomers."""
        handles: dict[int, ParamHandle] = {}
        units: dict[int, Unit] = {}
        for name, param in module.named_parameters():
            if is_lazy(param):
                continue
            handle = self._handle_of(param, f"{self.name}.{name}" if self.name else name)
            if handle is not None and handle.unit is not None:
                if not isinstance(module, nn.Embedding):  # autocast leaves them as they are
                    handle.windows.add(id(self))
                    self.pager.casts_are_shared |= len(handle.windows) > 1
                handles[id(handle)] = handle
                units[handle.unit.index] = handle.unit
        self._members = Membership(module)
        self._waiting = any(is_lazy(param) for param in module.parameters())
        self._handles = list(handles.values())
        self._units = list(units.values())

    def _read(self, module: nn.Module) -> None:
        """Find out whether the doors must stay, unless no hook was put on anything since the last time."""
        self._hooks_before = RemovableHandle.next_id
        hooks = hooks_of(module)
        if hooks != self._hooks:
            self._hooks = hooks
            self._careful = needs_doors(module)

    def _handle_of(self, param: Tensor, name: str) -> ParamHandle | None:
        slot = param.__dict__.get("_slot")
        if isinstance(slot, ParamHandle):
            return slot if slot.pager is self.pager else None
        if self.pager.adopt_late is None:
            return None
        return self.pager.adopt_late(param, name)

    # -- the two hooks ---------------------------------------------------------------------------------------------

    def enter(self, module: nn.Module, args: Any) -> None:
        pager = self.pager
        if module is not self._module() or pager.closed_because is not None:
            if module is self._module():
                pager.refuse_closed(self.name)
            return
        refuse_tracing()
        _refuse_wrappers()
        with pager.lock:
            if pager.opened():
                pager.close_stale()
            frame = sys._getframe(2)  # the module's call
            entry = _Entry(self, frame)
            pager.opened().append(entry)
            if self._waiting or self._members.changed():
                self._scan(module)
                self._hooks_before, self._hooks = 0, ()
            if self._hooks_before != RemovableHandle.next_id:
                self._read(module)
            pager.use_forward(self._units)
            try:
                self._take(entry, module)
            except BaseException:
                for block in entry.blocks:
                    pager.tiers.release(block)
                entry.blocks = []
                raise
            doors = self._careful or pager.shared_by_threads()
            entry.handles = self._handles
            for handle in entry.handles:
                handle.in_window += 1
                param = handle.tensor
                if param is not None and not doors:
                    param.__class__ = nn.Parameter
            frame_end = _FrameEnd()
            entry.frame_end = weakref.ref(frame_end, partial(_frame_ended, entry))
            frame.f_locals["_deepoffload_window"] = frame_end

    def _take(self, entry: _Entry, module: nn.Module) -> None:
        """Bring and lease the bytes, and put our saved-tensor hooks on."""
        pager = self.pager
        for unit in self._units:
            pager.tiers.acquire(unit.weights)
            entry.blocks.append(unit.weights)
            unit.owner.install()
        if in_functorch():
            self._hold_wrapped(module)
        pushed = pager.push_hooks() if torch.is_grad_enabled() else False
        if pushed is None:
            for handle in self._handles:
                pager.hold_until_step(handle)
        entry.pushed = pushed

    def show_doors(self, entry: _Entry) -> None:
        """Give the parameters their doors back in the middle of a call (another thread uses them, too)."""
        for handle in entry.handles:
            param = handle.tensor
            if param is not None:
                param.__class__ = OffloadedParameter

    def _hold_wrapped(self, module: nn.Module) -> None:
        """Under ``torch.func`` transforms a module holds wrappers of our parameters: keep what is inside resident."""
        for param in module.parameters():
            inner: Tensor = param
            while is_functorch_wrapped(inner):
                inner = get_unwrapped(inner)
            if inner is not param and type(inner) is OffloadedParameter:
                self.pager.hold_until_step(inner._slot)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        with self.pager.lock:
            opened = self.pager.opened()
            if not opened or opened[-1].window is not self or module is not self._module():
                return  # enter() raised, or this is a copy of the module
            self.close(opened.pop())
            if torch.is_autocast_enabled(_DEVICE) and torch.is_autocast_cache_enabled():
                self._drop_casts()

    def _drop_casts(self) -> None:
        """Autocast keeps the casts of all weights until its end: a second copy of the model. Drop them with the window.

        Not where weights are used again in the same forward: torch adds the gradients of one cast in 16 bits, those of
        two in 32. Tied weights are known before; a module that is called twice shows when it is, and from then on
        autocast is left alone.
        """
        pager = self.pager
        if torch.is_grad_enabled():
            pager.casts_are_shared |= id(self) in pager.cast_by
            pager.cast_by.add(id(self))
        if not pager.casts_are_shared:
            torch.clear_autocast_cache()

    def close(self, entry: _Entry) -> None:
        """End one call: hooks off, classes back, leases released."""
        pager = self.pager
        with pager.lock:
            entry.frame_end = None
            if entry.pushed:
                pager.pop_hooks()
            for handle in entry.handles:
                handle.in_window -= 1
                param = handle.tensor
                if param is None:
                    continue
                # First what costs a door once the class is ours again.
                if handle.grad_hook is None and param.requires_grad and pager.gradients is not None:
                    pager.gradients.track(handle)  # unfrozen inside the window, where no door sees it
                if handle.in_window == 0:
                    param.__class__ = OffloadedParameter  # also where a careful window had left it as it was
                if (handle.displaced() or version_of(param) != handle.version) and handle.changed():
                    pager.will_change(handle)
            for block in entry.blocks:
                pager.tiers.release(block)
            if pager.evict_always:
                pager.pump()


class RootWatch:
    """Pre-forward hook of a whole model: calls ``refresh`` when modules or parameters came or went."""

    def __init__(self, root: nn.Module, refresh: Callable[[nn.Module], None]) -> None:
        self._refresh = refresh
        self._members = Membership(root)
        self._module = weakref.ref(root)
        self._removable = root.register_forward_pre_hook(_Hook(self, "enter"), prepend=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> RootWatch:
        return self

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return (_NoWindow, ())

    def enter(self, module: nn.Module, args: Any) -> None:
        if module is self._module() and self._members.changed():
            self._refresh(module)
            self._members = Membership(module)

    def remove(self) -> None:
        self._removable.remove()


class _NoWindow:
    """What a pickled window becomes: hooks that do nothing."""

    def enter(self, module: nn.Module, args: Any) -> None:
        return None

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        return None


class _Hook:
    """A bound hook that Dynamo leaves alone when it compiles the module around it."""

    def __init__(self, window: Window | RootWatch, method: str) -> None:
        self._window = window
        self._method = method

    def __call__(self, *args: Any) -> None:
        getattr(self._window, self._method)(*args)

    @property
    def __name__(self) -> str:
        if sys._getframe(1).f_globals.get("__name__", "").startswith("torch.jit"):
            raise UnsupportedError(
                "torch.jit.script cannot compile a paged model; script a plain copy (copy.deepcopy(model))"
            )
        return self._method

    __call__._torchdynamo_disable = True  # type: ignore[attr-defined]


leave_to_python(_Hook.__call__)


def _refuse_wrappers() -> None:
    if nn.parallel.DistributedDataParallel._get_active_ddp_module() is not None:
        raise UnsupportedError(
            "DistributedDataParallel around a paged model would not average gradients: use the model without it"
        )
