"""The window over a module that was split: its weights belong to units with their own windows, or to none.

Such a module uses weights by their doors, and takes views of them (``x * self.gamma.reshape(1, -1)``,
``x @ self.embedding.weight.t()``). A view is an ordinary tensor: what is computed with it passes no door, and autograd
would keep the view itself, with the memory of its weight, until backward. So what autograd saves is packed by us as
long as the module runs.
"""

from __future__ import annotations

import sys
import weakref
from functools import partial
from typing import Any

import torch
from torch import nn

from deepoffload.params.graph_modes import refuse_capture, refuse_graph_mode_outside
from deepoffload.params.window import Window
from deepoffload.params.window_call import FrameEnd, WindowCall, frame_ended


class OuterWindow(Window):
    """Holds nothing and swaps no class; only the saved-tensor hooks are on."""

    def _scan(self, module: nn.Module) -> None:
        """Nothing to find."""

    def _read(self, module: nn.Module) -> None:
        """Nothing to find out: the doors stay."""

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        pager = self.pager
        if not torch.is_grad_enabled() or (pager.memory.all_stay() and pager.hooks.below is None):
            return  # autograd keeps nothing, or what it keeps by reference is no harm
        if module is not self.module() or pager.life.closed_because is not None:
            return
        if not pager.memory.on_host:
            refuse_capture(pager.memory)
            if not pager.hooks.opened():
                refuse_graph_mode_outside(pager.memory)
        with pager.lock:
            if pager.hooks.opened():
                pager.hooks.close_stale()
            frame = sys._getframe(2)  # the module's call
            entry = WindowCall(self, frame)
            entry.caller_id = id(frame.f_back)
            pager.hooks.opened().append(entry)
            entry.pushed = pager.hooks.push()
            pager.hooks.shared_by_threads()
            frame_end = FrameEnd()  # see [Note: the frame's end] in params.window_call
            entry.frame_end = weakref.ref(frame_end, partial(frame_ended, entry))
            frame.f_locals["_deepoffload_window"] = frame_end

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        opened = self.pager.hooks.opened()
        if not opened or opened[-1].window is not self:
            return  # enter() had nothing to do
        if id(sys._getframe(2)) in (opened[-1].frame_id, opened[-1].caller_id):
            with self.pager.lock:
                self.close(opened.pop())
