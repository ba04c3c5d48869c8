"""Notices modules and parameters that come to a model or leave it after it was placed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from torch import nn

from deepoffload.params.membership import Membership
from deepoffload.params.module_hooks import ModuleHook, NoWindow

if TYPE_CHECKING:
    from deepoffload.params.forward_passes import ForwardPasses
    from deepoffload.params.window import Window


class RootWatch:
    """Pre-forward hook of a whole model: calls ``refresh`` when modules or parameters came or went.

    Args:
        windows: those of them that lie below ``root`` need not ask again in a call of it.
        passes: told when a call begins and ends; it makes of what the call returns what the program gets.

    Attributes:
        checks: how often it has asked and found nothing new.
        changes: how often it has found something.
        running: a call of ``root`` is.
    """

    def __init__(
        self,
        root: nn.Module,
        refresh: Callable[[nn.Module], None],
        windows: Iterable[Window],
        passes: ForwardPasses | None = None,
    ) -> None:
        self.checks = self.changes = 0
        self.running = False
        self._refresh = refresh
        self._passes = passes
        self._members = Membership(root)
        below = set(root.modules())
        for window in windows:
            if window.module() in below:
                window.watched_by(self)
        self._module = weakref.ref(root)
        self._removable = (
            root.register_forward_pre_hook(ModuleHook(self.enter), prepend=True),
            root.register_forward_hook(ModuleHook(self.leave), always_call=True),
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> RootWatch:
        return self

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return (NoWindow, ())

    def enter(self, module: nn.Module, args: Any) -> None:
        if module is not self._module():
            return
        self.running = True
        if self._passes is not None:
            self._passes.began()
        if not self._look_at(module):
            self.checks += 1

    def look(self) -> None:
        """Refresh before the next call, if that has to be."""
        module = self._module()
        if module is not None:
            self._look_at(module)

    def _look_at(self, module: nn.Module) -> bool:
        if not self._members.changed():
            return False
        self.changes += 1
        self._refresh(module)
        self._members = Membership(module)
        return True

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        self.running = False
        return None if self._passes is None or module is not self._module() else self._passes.ended(output)

    def stats(self) -> dict[str, float]:
        """Of the calls of all models that this one was built with, where they are counted."""
        return {} if self._passes is None else self._passes.stats()

    def remove(self) -> None:
        for handle in self._removable:
            handle.remove()
