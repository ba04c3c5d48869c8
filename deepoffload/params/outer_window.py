"""The window over a module that was split: its weights belong to units that have windows of their own, or none.

Such a module uses weights by their doors, and takes views of them (``x * self.gamma.reshape(1, -1)``,
``x @ self.embedding.weight.t()``). A view is an ordinary tensor: what is computed with it passes no door, and autograd
would keep the view itself, with the memory of its weight, until backward. So what autograd saves is packed by us as
long as the module runs.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from deepoffload.params.window import Window


class OuterWindow(Window):
    """Holds nothing and swaps no class; only the saved-tensor hooks are on."""

    def _scan(self, module: nn.Module) -> None:
        """Nothing to find."""

    def _read(self, module: nn.Module) -> None:
        """Nothing to find out: the doors stay."""

    def enter(self, module: nn.Module, args: Any) -> None:
        pager = self.pager
        if module is not self.module() or pager.closed_because is not None:
            return
        with pager.lock:
            if pager.opened():
                pager.close_stale()
            frame = sys._getframe(2)  # the module's call
            entry = self._begin(frame)
            if torch.is_grad_enabled():
                entry.pushed = pager.push_hooks()
            pager.shared_by_threads()
            self._watch_frame(entry, frame)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        with self.pager.lock:
            opened = self.pager.opened()
            if opened and opened[-1].window is self and module is self.module():
                self.close(opened.pop())
