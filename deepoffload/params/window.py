"""The unit window: while a module runs, its parameters are resident and look like plain ``nn.Parameter``s.

One pre and one post hook per module. Inside, no door is paid for, compiled code sees ordinary parameters, tensors
derived from weights are packed by our saved-tensor hooks, and the prefetcher learns where the program is.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from deepoffload.errors import UnsupportedError
from deepoffload.memory.block import Block
from deepoffload.params.pager import Pager
from deepoffload.params.parameter import OffloadedParameter
from deepoffload.params.torch_private import get_unwrapped, is_functorch_wrapped, version_of
from deepoffload.params.unit import ParamHandle, Unit


class _Entry:
    """One running call of a window's module."""

    __slots__ = ("window", "handles", "blocks", "pushed")

    def __init__(self, window: Window, handles: list[ParamHandle], blocks: list[Block]) -> None:
        self.window = window
        self.handles = handles
        self.blocks = blocks
        self.pushed: bool | None = False


class Window:
    """Hooks of one module. ``root`` marks the outermost module of a model, where wrappers around it are refused."""

    def __init__(self, pager: Pager, module: nn.Module, name: str) -> None:
        self.pager = pager
        self.name = name
        self._module = weakref.ref(module)
        self._members: list[tuple[dict[str, Any], int]] = []
        self._identities: list[tuple[dict[str, Any], str, Any]] = []
        self._handles: list[ParamHandle] = []
        self._units: list[Unit] = []
        self._scan(module)
        self._removable = (
            module.register_forward_pre_hook(_Hook(self, "enter"), prepend=True),
            module.register_forward_hook(_Hook(self, "leave"), always_call=True),
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Window:
        return self  # a copied model is plain: its copy of these hooks finds another module and does nothing

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return (_NoWindow, ())  # a pickled model is plain, too

    def remove(self) -> None:
        for handle in self._removable:
            handle.remove()

    # -- what the module holds -------------------------------------------------------------------------------------

    def _scan(self, module: nn.Module) -> None:
        """Find the paged parameters below the module, adopting newcomers; remember what to compare next time."""
        self._members, self._identities, self._handles = [], [], []
        units: dict[int, Unit] = {}
        for prefix, child in module.named_modules():
            self._members.append((child._parameters, len(child._parameters)))
            self._members.append((child._modules, len(child._modules)))
            self._identities.extend((child._modules, key, value) for key, value in child._modules.items())
            for key, param in child._parameters.items():
                self._identities.append((child._parameters, key, param))
                if param is None:
                    continue
                full_name = ".".join(part for part in (self.name, prefix, key) if part)
                handle = self._handle_of(param, full_name)
                if handle is not None and handle.unit is not None and handle not in self._handles:
                    self._handles.append(handle)
                    units[handle.unit.index] = handle.unit
        self._units = list(units.values())

    def _handle_of(self, param: Tensor, name: str) -> ParamHandle | None:
        slot = param.__dict__.get("_slot")
        if isinstance(slot, ParamHandle):
            return slot if slot.pager is self.pager else None
        if self.pager.adopt_late is None:
            return None
        return self.pager.adopt_late(param, name)

    def _stale(self) -> bool:
        for members, count in self._members:
            if len(members) != count:
                return True
        for members, key, value in self._identities:
            if members.get(key) is not value:
                return True
        return any(handle.unit not in self._units for handle in self._handles)

    # -- the two hooks ---------------------------------------------------------------------------------------------

    def enter(self, module: nn.Module, args: Any) -> None:
        pager = self.pager
        if module is not self._module() or pager.closed_because is not None:
            if module is self._module():
                pager.refuse_closed(self.name)
            return
        _refuse_wrappers()
        with pager.lock:
            if self._stale():
                self._scan(module)
            entry = _Entry(self, self._handles, [])
            pager.use_forward(self._units)
            try:
                for unit in self._units:
                    pager.tiers.acquire(unit.weights)
                    entry.blocks.append(unit.weights)
                    unit.owner.install()
                self._unwrap(module)
                entry.pushed = pager.push_hooks() if torch.is_grad_enabled() else False
                if entry.pushed is None:
                    for handle in self._handles:
                        pager.hold_until_step(handle)
            except BaseException:
                for block in entry.blocks:
                    pager.tiers.release(block)
                raise
            for handle in self._handles:
                handle.in_window += 1
                param = handle.tensor
                if param is not None:
                    param.__class__ = nn.Parameter
            pager.opened().append(entry)

    def _unwrap(self, module: nn.Module) -> None:
        """Under ``torch.func`` transforms a module holds wrappers of our parameters: keep what is inside resident."""
        for _, _, value in self._identities:
            if isinstance(value, Tensor) and is_functorch_wrapped(value):
                inner = get_unwrapped(value)
                while is_functorch_wrapped(inner):
                    inner = get_unwrapped(inner)
                if type(inner) is OffloadedParameter:
                    self.pager.hold_until_step(inner._slot)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        opened = self.pager.opened()
        if not opened or opened[-1].window is not self or module is not self._module():
            return  # enter() raised, or this is a copy of the module
        self.close(opened.pop())

    def close(self, entry: _Entry) -> None:
        """End one call: hooks off, classes back, leases released."""
        pager = self.pager
        with pager.lock:
            if entry.pushed:
                pager.pop_hooks()
            for handle in entry.handles:
                handle.in_window -= 1
                param = handle.tensor
                if param is None:
                    continue
                if handle.in_window == 0:
                    param.__class__ = OffloadedParameter
                if version_of(param) != handle.version and handle.changed():
                    pager.will_change(handle)
            for block in entry.blocks:
                pager.tiers.release(block)
            if pager.evict_always:
                pager.pump()


class _NoWindow:
    """What a pickled window becomes: hooks that do nothing."""

    def enter(self, module: nn.Module, args: Any) -> None:
        return None

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        return None


class _Hook:
    """A bound hook that Dynamo leaves alone when it compiles the module around it."""

    _torchdynamo_disable = True

    def __init__(self, window: Window, method: str) -> None:
        self._window = window
        self._method = method

    def __call__(self, *args: Any) -> None:
        getattr(self._window, self._method)(*args)


def _refuse_wrappers() -> None:
    if nn.parallel.DistributedDataParallel._get_active_ddp_module() is not None:
        raise UnsupportedError(
            "DistributedDataParallel around a paged model would not average gradients: use the model without it"
        )
