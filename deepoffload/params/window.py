"""The unit window: while a module runs, its parameters are resident and look like plain ``nn.Parameter``s.

One pre and one post hook per module. Inside, no door is paid for, compiled code sees ordinary parameters, tensors
derived from weights are packed by our saved-tensor hooks, and the prefetcher learns where the program is.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from deepoffload.errors import UnsupportedError
from deepoffload.memory.block import Block
from deepoffload.params.code_scan import hooks_of, may_bypass_hooks, may_cast
from deepoffload.params.membership import Membership
from deepoffload.params.pager import Pager
from deepoffload.params.parameter import OffloadedParameter
from deepoffload.params.torch_private import (
    active_ddp_module,
    get_unwrapped,
    in_backward,
    in_functorch,
    is_functorch_wrapped,
    leave_to_python,
    refuse_tracing,
    version_of,
)
from deepoffload.params.unit import ParamHandle, Unit

_Shown = list[tuple[ParamHandle, Callable[[], Tensor | None]]]
"""Parameters of a window, each with a weak reference to its tensor object."""


class WindowCall:
    """One running call of a window's module. Empty until :meth:`Window.enter` is through, and when that has failed:
    torch calls the post hook then, too, which must not end the call around this one.

    Attributes:
        shown: the parameters of the call.
        plain: whether they are without their doors.
    """

    __slots__ = ("window", "shown", "plain", "blocks", "pushed", "frame_id", "frame_end", "thread", "over")

    def __init__(self, window: Window, frame: FrameType) -> None:
        self.window = window
        self.frame_id = id(frame)
        self.frame_end: weakref.ref[FrameEnd] | None = None
        self.thread = threading.get_ident()
        self.over = False
        self.shown: _Shown = []
        self.plain = False
        self.blocks: list[Block] = []
        self.pushed: bool | None = False


class FrameEnd:
    """Lives in the frame of a module's call, and so shows its end, however it ends.

    torch runs no post hook when Ctrl-C ends the call. With this, parameters, leases and hooks are as before as soon as
    the program has handled the exception.
    """

    __slots__ = ("__weakref__",)


def frame_ended(entry: WindowCall, _: Any) -> None:
    """A call's frame is gone and its window still open. Runs anywhere; what cannot be done now, the next call does."""
    entry.over = True
    pager = entry.window.pager
    if pager.minds_deaths and entry.thread == threading.get_ident() and pager.lock.acquire_idle():
        try:
            pager.close_stale()
        finally:
            pager.lock.release()


class Window:
    """The hooks of one module whose parameters form a unit, or which uses parameters of other units."""

    def __init__(self, pager: Pager, module: nn.Module, name: str) -> None:
        self.pager = pager
        self.name = name
        self._module = weakref.ref(module, pager.parameter_dropped)
        pager.parameter_registered()  # parameters may all be replaced while their modules live on
        self._members: Membership
        self._watch: RootWatch | None = None
        self._checks = self._changes = 0
        self._call = 0
        self._waiting = False
        self._careful = self._casts = False
        self._hooks: tuple[int, ...] = ()
        self._hooks_before = 0
        self._shown: _Shown = []
        self._untracked: list[ParamHandle] = []
        self._units: list[Unit] = []
        self._checkpointing: list[weakref.ref[nn.Module]] = []
        self._by_shape: dict[torch.Size, list[ParamHandle]] = {}
        self._scan(module)
        self._removable = (
            module.register_forward_pre_hook(_Hook(self.enter), prepend=True),
            module.register_forward_hook(_Hook(self.leave), always_call=True),
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
        self._shown = [(handle, handle.reference) for handle in handles.values()]
        gradients = self.pager.gradients
        self._untracked = [h for h in handles.values() if gradients is not None and not gradients.is_tracked(h)]
        self._units = list(units.values())
        layers = (child for child in module.modules() if hasattr(child, "gradient_checkpointing"))
        self._checkpointing = [weakref.ref(layer) for layer in layers]
        self._by_shape = defaultdict(list)
        for handle in handles.values():
            self._by_shape[handle.shape].append(handle)

    def _checkpoints(self) -> bool:
        """Whether transformers puts an activation checkpoint into a forward in this window. It runs again in backward
        without the window, by the doors, and must save the same tensors then."""
        layers = (reference() for reference in self._checkpointing)
        return any(layer is not None and layer.__dict__.get("gradient_checkpointing") for layer in layers)

    def of_shape(self, shape: torch.Size) -> list[ParamHandle]:
        """The parameters of that shape."""
        return self._by_shape.get(shape, [])

    def watched_by(self, watch: RootWatch) -> None:
        """Let the module be compared together with the whole model that it is part of."""
        self._watch = watch
        self._checks, self._changes = watch.checks, watch.changes

    def _has_changed(self) -> bool:
        """Whether something came to the module or went. Not asked again where the model's own call has just asked."""
        watch = self._watch
        if watch is not None:
            asked = watch.checks != self._checks and watch.changes == self._changes
            self._checks, self._changes = watch.checks, watch.changes
            if asked:
                return False
        return self._members.changed()

    def _read(self, module: nn.Module) -> None:
        """Find out whether the doors must stay, unless no hook was put on anything since the last time."""
        self._hooks_before = RemovableHandle.next_id
        hooks = hooks_of(module)
        if hooks != self._hooks:
            self._hooks = hooks
            self._careful, self._casts = may_bypass_hooks(module), may_cast(module)

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
            opened = pager.opened()
            if opened:
                pager.close_stale()
            frame = sys._getframe(2)  # the module's call
            entry = WindowCall(self, frame)
            opened.append(entry)
            if self._waiting or self._has_changed():
                self._scan(module)
                self._hooks_before, self._hooks = 0, ()
            if self._hooks_before != RemovableHandle.next_id:
                self._read(module)
            if pager.casts_of is not None and pager.casts_of != id(self):
                pager.casts_of = None
                torch.clear_autocast_cache()
            pager.use_forward(self._units)
            try:
                self._take(entry, module)
            except BaseException:
                for block in entry.blocks:
                    pager.memory.release(block)
                entry.blocks = []
                raise
            entry.shown = self._shown
            if not (pager.shared_by_threads() or self._careful or (self._checkpointing and self._checkpoints())):
                entry.plain = True
                for _, reference in entry.shown:
                    param = reference()
                    if param is not None:
                        param.__class__ = nn.Parameter
            frame_end = FrameEnd()
            entry.frame_end = weakref.ref(frame_end, partial(frame_ended, entry))
            frame.f_locals["_deepoffload_window"] = frame_end

    def _take(self, entry: WindowCall, module: nn.Module) -> None:
        """Bring and lease the bytes, and put our saved-tensor hooks on."""
        pager = self.pager
        for unit in self._units:
            pager.memory.acquire(unit.weights)
            entry.blocks.append(unit.weights)
            if not unit.owner.installed:
                unit.owner.install()
        if in_functorch():
            self._hold_wrapped(module)
        pushed = pager.push_hooks(always=self._casts) if torch.is_grad_enabled() else False
        if pushed is None:
            for handle, _ in self._shown:
                pager.hold_until_step(handle)
        entry.pushed = pushed

    def show_doors(self, entry: WindowCall) -> None:
        """Give the parameters their doors back in the middle of a call (another thread uses them, too)."""
        if entry.plain:
            entry.plain = False
            for _, reference in entry.shown:
                param = reference()
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
            self._note_call()
            if torch.is_autocast_enabled(self.pager.memory.device.type) and torch.is_autocast_cache_enabled():
                self._note_casts()

    def _note_call(self) -> None:
        """Whether the module is called twice in one call of the whole model. Known before autocast asks for it."""
        watch = self._watch
        if watch is not None and watch.running:
            call = watch.checks + watch.changes
            if call == self._call and not self.pager.casts_are_shared and torch.is_grad_enabled() and not in_backward():
                self.pager.casts_are_shared = True
            self._call = call

    def _note_casts(self) -> None:
        """Autocast keeps the casts of all weights until its end: a second copy of the model. Drop them when another
        window comes: one that is called again at once uses them again.

        Not where weights are used again in the same forward: torch adds the gradients of one cast in 16 bits, those of
        two in 32. Tied weights are known before; a module that is called twice shows when it is, and from then on
        autocast is left alone.
        """
        pager = self.pager
        if torch.is_grad_enabled():
            pager.casts_are_shared |= id(self) in pager.cast_by
            pager.cast_by.add(id(self))
        pager.casts_of = None if pager.casts_are_shared else id(self)

    def close(self, entry: WindowCall) -> None:
        """End one call, which is none of its thread's open ones any more: hooks off, doors back, leases released. To be
        called under the lock."""
        pager = self.pager
        entry.frame_end = None
        if entry.pushed:
            pager.pop_hooks()
        if self._untracked:
            self._track_unfrozen()
        try:
            for handle in self._give_doors_back(entry) if entry.plain else self._look_through_doors(entry):
                if handle.changed():
                    pager.will_change(handle)
        finally:
            for block in entry.blocks:
                pager.memory.release(block)
        if pager.evict_always:
            pager.pump()

    def _track_unfrozen(self) -> None:
        """Parameters that were unfrozen inside the window, where no door sees it."""
        gradients = self.pager.gradients
        for handle in self._untracked:
            param = handle.tensor
            if param is not None and param.requires_grad and gradients is not None:
                gradients.track(handle)

    def _give_doors_back(self, entry: WindowCall) -> list[ParamHandle]:
        """End the time without doors. Returns the parameters that were written to, or given other memory, meanwhile:
        each is asked while its class is plain, which costs nearly nothing."""
        edited = []
        plain_still = {handle for other in self.pager.opened() if other.plain for handle, _ in other.shown}
        for handle, reference in entry.shown:
            param = reference()
            if param is None:
                continue
            try:
                if param._version != handle.version or param.data_ptr() != handle.data_ptr:
                    edited.append(handle)
            except RuntimeError:  # memory without an address
                edited.append(handle)
            if not plain_still or handle not in plain_still:
                param.__class__ = OffloadedParameter
        return edited

    def _look_through_doors(self, entry: WindowCall) -> list[ParamHandle]:
        """The same of a call in which the doors were there all the time."""
        present = [(handle, reference()) for handle, reference in entry.shown]
        return [h for h, p in present if p is not None and (version_of(p) != h.version or h.displaced())]


class RootWatch:
    """Pre-forward hook of a whole model: calls ``refresh`` when modules or parameters came or went.

    Args:
        windows: those of them that lie below ``root`` need not ask again in a call of it.

    Attributes:
        checks: how often it has asked and found nothing new.
        changes: how often it has found something.
        running: a call of ``root`` is.
    """

    def __init__(self, root: nn.Module, refresh: Callable[[nn.Module], None], windows: Iterable[Window]) -> None:
        self.checks = self.changes = 0
        self.running = False
        self._refresh = refresh
        self._members = Membership(root)
        below = set(root.modules())
        for window in windows:
            if window.module() in below:
                window.watched_by(self)
        self._module = weakref.ref(root)
        self._removable = (
            root.register_forward_pre_hook(_Hook(self.enter), prepend=True),
            root.register_forward_hook(_Hook(self.leave), always_call=True),
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> RootWatch:
        return self

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return (_NoWindow, ())

    def enter(self, module: nn.Module, args: Any) -> None:
        if module is not self._module():
            return
        self.running = True
        if not self._members.changed():
            self.checks += 1
            return
        self.changes += 1
        self._refresh(module)
        self._members = Membership(module)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.running = False

    def remove(self) -> None:
        for handle in self._removable:
            handle.remove()


class _NoWindow:
    """What a pickled window becomes: hooks that do nothing."""

    def enter(self, module: nn.Module, args: Any) -> None:
        return None

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        return None


class _Hook:
    """A bound hook that Dynamo leaves alone when it compiles the module around it."""

    def __init__(self, method: Callable[..., None]) -> None:
        self._method = method

    def __call__(self, *args: Any) -> None:
        self._method(*args)

    @property
    def __name__(self) -> str:
        if sys._getframe(1).f_globals.get("__name__", "").startswith("torch.jit"):
            raise UnsupportedError(
                "torch.jit.script cannot compile a paged model; script a plain copy (copy.deepcopy(model))"
            )
        return self._method.__name__


leave_to_python(_Hook.__call__)


def _refuse_wrappers() -> None:
    if active_ddp_module() is not None:
        raise UnsupportedError(
            "DistributedDataParallel around a paged model would not average gradients: use the model without it"
        )
