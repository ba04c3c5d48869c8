"""The unit window: while a module runs, its parameters are resident and look like plain ``nn.Parameter``s.

One pre and one post hook per module. Inside, no door is paid for, compiled code sees ordinary parameters, tensors
derived from weights are packed by our saved-tensor hooks, and the prefetcher learns where the program is.
"""

from __future__ import annotations

import sys
import weakref
from collections import defaultdict
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from deepoffload.params.code_scan import hooks_of, may_bypass_hooks, may_cast
from deepoffload.params.graph_modes import refuse_capture, refuse_graph_mode_outside, refuse_graph_modes
from deepoffload.params.inference import unfrozen
from deepoffload.params.membership import Membership
from deepoffload.params.module_hooks import ModuleHook, NoWindow, refuse_wrappers
from deepoffload.params.pager import Pager
from deepoffload.params.parameter import OffloadedParameter
from deepoffload.params.root_watch import RootWatch
from deepoffload.params.routed import bring_experts, drop_experts, experts_of_call, num_experts
from deepoffload.params.rows import is_table, reads_rows
from deepoffload.params.sharding import refuse_wrapped
from deepoffload.params.torch_private import (
    forward_hooks_of_all,
    forward_pre_hooks_of_all,
    get_unwrapped,
    in_backward,
    in_functorch,
    is_functorch_wrapped,
    refuse_tracing,
    version_of,
)
from deepoffload.params.unit import ParamHandle, Unit
from deepoffload.params.window_call import FrameEnd, Shown, WindowCall, frame_ended


def _is_alone(module: nn.Module) -> bool:
    """Whether nobody but its window looks at a module when it is called."""
    hooks = (module._forward_hooks, module._forward_pre_hooks)
    return all(len(of_module) == 1 for of_module in hooks) and not (forward_hooks_of_all or forward_pre_hooks_of_all)


class Window:
    """The hooks of one module whose parameters form a unit, or which uses parameters of other units.

    It has more methods than other classes, because a call has many steps that every call pays for: each is one.
    """

    def __init__(self, pager: Pager, module: nn.Module, name: str) -> None:
        self.pager = pager
        self.name = name
        self._module = weakref.ref(module, pager.life.parameter_dropped)
        pager.life.parameter_registered()  # parameters may all be replaced while their modules live on
        self._members: Membership
        self._watch: RootWatch | None = None
        self._checks = self._changes = 0
        self._call = 0
        self._waiting = False
        self._careful = self._casts = False
        self._table: ParamHandle | None = None
        self._stacked = False
        self._hooks: tuple[int, ...] = ()
        self._hooks_before = 0
        self._shown: Shown = []
        self._untracked: list[ParamHandle] = []
        self._units: list[Unit] = []
        self._checkpointing: list[weakref.ref[nn.Module]] = []
        self._by_shape: dict[torch.Size, list[ParamHandle]] = {}
        self._scan(module)
        self._removable = (
            module.register_forward_pre_hook(ModuleHook(self.enter), prepend=True, with_kwargs=True),
            module.register_forward_hook(ModuleHook(self.leave), always_call=True),
        )
        self._read(module)

    def __deepcopy__(self, memo: dict[int, Any]) -> Window:
        return self  # a copied model is plain: its copy of these hooks finds another module and does nothing

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return (NoWindow, ())  # a pickled model is plain, too

    def expected_units(self) -> list[Unit]:
        """Those whose weights a call takes as a whole."""
        in_parts = self._table is not None or self._stacked
        return [unit for unit in self._units if not in_parts or unit.weights.id in self.pager.tiers.static]

    def module(self) -> nn.Module | None:
        """The module, while it exists."""
        return self._module()

    def remove(self) -> None:
        for handle in self._removable:
            handle.remove()

    # -- what the module holds -------------------------------------------------------------------------------------

    def _scan(self, module: nn.Module) -> None:
        """Find the paged parameters below the module, adopting newcomers."""
        refuse_graph_modes(module, self.pager.memory)
        handles: dict[int, ParamHandle] = {}
        units: dict[int, Unit] = {}
        for name, param in module.named_parameters():
            if is_lazy(param):
                continue
            handle = self._handle_of(param, f"{self.name}.{name}" if self.name else name)
            if handle is not None and handle.unit is not None:
                if not isinstance(module, nn.Embedding):  # autocast leaves them as they are
                    handle.windows.add(id(self))
                    if len(handle.windows) > 1:
                        self.pager.casts.share()
                handles[id(handle)] = handle
                units[handle.unit.index] = handle.unit
        frozen = self.pager.inference and self.pager.memory.on_host
        self._table = next(iter(handles.values())) if frozen and len(handles) == 1 and is_table(module) else None
        self._stacked = frozen and bool(num_experts(module))
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

    def handles(self) -> list[ParamHandle]:
        """The paged parameters below the module."""
        return [handle for handle, _ in self._shown]

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
        """Find out whether the doors must stay, unless no hook was put on anything since the last time.

        Raises:
            UnsupportedError: torch averages the gradients of the module, or shards it.
        """
        hooks_before, hooks = self.pager.hooks.own.others(), hooks_of(module)
        if hooks != self._hooks:
            refuse_wrapped(module, self.name)  # torch's replicate() is nothing but hooks and another class
            self._hooks = hooks
            self._careful, self._casts = may_bypass_hooks(module), may_cast(module)
        self._hooks_before = hooks_before

    def _handle_of(self, param: Tensor, name: str) -> ParamHandle | None:
        slot = param.__dict__.get("_slot")
        if isinstance(slot, ParamHandle):
            return slot if slot.pager is self.pager else None
        return self.pager.adopt_late(param, name)

    # -- the two hooks ---------------------------------------------------------------------------------------------

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        pager = self.pager
        if module is not self._module() or pager.life.closed_because is not None:
            if module is self._module():
                pager.life.refuse_closed(self.name)
            return None
        refuse_tracing()
        refuse_wrappers()
        if not pager.memory.on_host:
            refuse_capture(pager.memory)
            if not pager.hooks.opened():
                refuse_graph_mode_outside(pager.memory)
        turns = pager.hooks.turns
        changed = None if turns is None else turns.enter(self, args, kwargs)
        if changed is not None:
            args, kwargs = changed
        with pager.lock:
            opened = pager.hooks.opened()
            if opened:
                pager.hooks.close_stale()
            frame = sys._getframe(2)  # the module's call
            entry = WindowCall(self, frame)
            opened.append(entry)
            if self._waiting or self._has_changed():
                self._scan(module)
                self._hooks_before, self._hooks = -1, ()
            if self._hooks_before != pager.hooks.own.others():
                self._read(module)
            pager.casts.enter(id(self), args, kwargs, pager.memory.device.type)
            if self._table is None or not reads_rows(self._table, args[0] if args else None):
                self._open(entry, module, args, kwargs)
            frame_end = FrameEnd()  # see [Note: the frame's end] in params.window_call
            entry.frame_end = weakref.ref(frame_end, partial(frame_ended, entry))
            frame.f_locals["_deepoffload_window"] = frame_end
        return changed

    def _open(self, entry: WindowCall, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Bring the bytes, and end the time of doors."""
        pager = self.pager
        shared = pager.hooks.shared_by_threads()
        experts = None
        if self._stacked and not shared and _is_alone(module):
            experts = experts_of_call(module, self._units, args)
        if experts is None:
            pager.use_forward(self._units)
        try:
            self._take(entry, module, experts)
            if torch.is_grad_enabled():
                self._push_hooks(entry, module, args, kwargs)
        except BaseException:
            for block in entry.blocks:
                pager.memory.release(block)
            for unit in entry.partial:
                drop_experts(unit, ())
            entry.blocks, entry.partial = [], []
            raise
        entry.shown = self._shown
        if not (shared or self._careful or (self._checkpointing and self._checkpoints())):
            entry.plain = True
            for _, reference in entry.shown:
                param = reference()
                if param is not None:
                    param.__class__ = nn.Parameter

    def _take(self, entry: WindowCall, module: nn.Module, experts: list[int] | None) -> None:
        """Bring and lease the bytes, or those of ``experts`` alone."""
        pager = self.pager
        for unit in self._units:
            if experts is None:
                pager.refuse_partial(unit.weights)
                pager.memory.acquire(unit.weights)
                entry.blocks.append(unit.weights)
            else:
                bring_experts(unit, experts)
                entry.partial.append(unit)
            if not unit.owner.installed:
                unit.owner.install()
        if in_functorch():
            self._hold_wrapped(module)

    def _push_hooks(self, entry: WindowCall, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Put our saved-tensor hooks on, above those of an activation region. The disk is not waited for in between,
        where a Ctrl-C would find the one and not the other."""
        hooks = self.pager.hooks
        if hooks.turns is not None:
            entry.region = hooks.turns.region(self, module, args, kwargs)
        entry.pushed = hooks.push(always=self._casts)
        if entry.pushed is None:
            for handle, _ in self._shown:
                self.pager.hold_until_step(handle)

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
            opened = self.pager.hooks.opened()
            if not opened or opened[-1].window is not self or module is not self._module():
                return  # enter() raised, or this is a copy of the module
            self.close(opened.pop())
            turns = self.pager.hooks.turns
            number = None if turns is None else turns.number()
            if number is None:
                self._note_call()
            if torch.is_autocast_enabled(self.pager.memory.device.type) and torch.is_autocast_cache_enabled():
                self.pager.casts.leave(id(self), number)
        if turns is not None:
            turns.leave(self, output)

    def _note_call(self) -> None:
        """Whether the module is called twice in one call of the whole model. Known before autocast asks for it."""
        watch = self._watch
        if watch is not None and watch.running:
            call = watch.checks + watch.changes
            if call == self._call and not self.pager.casts.shared and torch.is_grad_enabled() and not in_backward():
                self.pager.casts.share()
            self._call = call

    def close(self, entry: WindowCall) -> None:
        """End one call, which is none of its thread's open ones any more: hooks off, doors back, leases released. To be
        called under the lock."""
        pager = self.pager
        entry.frame_end = None
        if entry.pushed:
            pager.hooks.pop()
        if self._untracked:
            self._track_unfrozen()
        edited: list[ParamHandle] = []
        try:
            for handle in self._give_doors_back(entry) if entry.plain else self._look_through_doors(entry):
                if handle.changed():
                    edited.append(handle)
                    pager.will_change(handle)
        finally:
            for block in entry.blocks:
                pager.memory.release(block)
            for unit in entry.partial:
                drop_experts(unit, [handle for handle in edited if handle.unit is unit])
            if entry.region is not None:
                entry.region.close()
        if pager.evict_always:
            pager.pump()

    def _track_unfrozen(self) -> None:
        """Parameters that were unfrozen inside the window, where no door sees it."""
        for handle in self._untracked:
            param = handle.tensor
            if param is not None and param.requires_grad:
                unfrozen(handle)

    def _give_doors_back(self, entry: WindowCall) -> list[ParamHandle]:
        """End the time without doors. Returns the parameters that were written to, or given other memory, meanwhile:
        each is asked while its class is plain, which costs nearly nothing."""
        edited = []
        plain_still = {handle for other in self.pager.hooks.opened() if other.plain for handle, _ in other.shown}
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
