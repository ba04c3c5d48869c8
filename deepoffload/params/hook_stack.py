"""What runs now: the calls of windows that are open, and the saved-tensor hooks that were pushed for them, per thread.

torch keeps the stack of hooks per thread, and so is this. Micro-batches that take turns share a thread, and each has
its own :class:`Running`, which is in place while it runs. Both lists are undone in the reverse order in which they were
filled. Ctrl-C can end a call without its post hook: what then is left is found here and undone (see
[Note: the frame's end] in ``params.window_call``).
"""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import TYPE_CHECKING

import torch

from deepoffload.copies.shown import ShownMemory
from deepoffload.errors import UsageError
from deepoffload.memory.lock import BooksLock
from deepoffload.params.open_graphs import OpenGraphs
from deepoffload.params.own_hooks import OwnHooks
from deepoffload.params.ports import PagerPort, TurnPort
from deepoffload.params.saved import Hooks, SavedTensorHooks, of_checkpoint
from deepoffload.params.torch_private import (
    in_backward,
    pop_saved_tensors_hooks,
    push_saved_tensors_hooks,
    saved_tensors_hooks_enabled,
    top_saved_tensors_hooks,
)

if TYPE_CHECKING:
    from deepoffload.params.window_call import WindowCall


class Running:
    """What has been opened, innermost last."""

    def __init__(self) -> None:
        self.pushed: list[tuple[SavedTensorHooks, bool]] = []
        """Pairs, and whether it was inside a backward: torch sets the stack back itself then, after each node."""
        self.opened: list[WindowCall] = []


class _ThreadState(threading.local):
    """What this thread has opened."""

    def __init__(self) -> None:
        self.now = Running()


class HookStack:
    """Args:
    memory: in which tensors show their bytes.
    graphs: are told when autograd is left to save weights itself.

    Attributes:
        turns: micro-batches that take turns; None where none do.
        own: our hooks on tensors and nodes.
        below: the pair of hooks that gets what is no weight where the program has none; None where autograd keeps it.
    """

    def __init__(self, pager: PagerPort, memory: ShownMemory, lock: BooksLock, graphs: OpenGraphs) -> None:
        self._pager = pager
        self._memory = memory
        self._lock = lock
        self._graphs = graphs
        self._local = _ThreadState()
        self._opened_by: dict[int, list[WindowCall]] = {}
        self._shared = False
        self.turns: TurnPort | None = None
        self.own = OwnHooks()
        self.below: Hooks | None = None
        self._hooks_alone = SavedTensorHooks(pager, None)

    def put_below(self, below: Hooks) -> None:
        """From now on what is no weight goes to this pair of hooks where the program has none."""
        self.below = below
        self._hooks_alone = SavedTensorHooks(self._pager, below)

    # -- saved-tensor hooks ----------------------------------------------------------------------------------------

    def push(self, *, always: bool = False) -> bool | None:
        """Push our saved-tensor hooks unless they are on top.

        Nor where nothing will ever be moved: what autograd keeps of a weight then stays right without us, and an update
        moves the weight's version, by which autograd sees that it no longer is. Not so under autocast, whose narrower
        copies of weights are a second copy of the model. Nor behind a checkpoint, which counts what reaches its own
        hooks: by the time it runs the forward again, something may have come that moves.

        Args:
            always: also there: more than weights may be saved.

        Returns True when pushed, False when that is not needed, None when the program has disabled such hooks.
        """
        memory = self._memory
        enabled = saved_tensors_hooks_enabled()
        top = top_saved_tensors_hooks(True) if enabled else None
        always = always or self.below is not None
        if not always and memory.all_stay() and not torch.is_autocast_enabled(memory.device.type):
            if not of_checkpoint(top):
                self._graphs.note_unhooked()
                return False
        if not enabled:
            return None
        if top is None:
            hooks = self._hooks_alone
        else:
            mine = getattr(top[0], "__self__", None)
            if type(mine) is SavedTensorHooks and mine.pager is self._pager:
                return False
            hooks = SavedTensorHooks(self._pager, top)
        # in this order: what an interrupt leaves is found and undone
        self._local.now.pushed.append((hooks, in_backward()))
        push_saved_tensors_hooks(hooks.pack, hooks.unpack)
        return True

    def pop(self) -> None:
        """Undo one :meth:`push` that returned True."""
        pop_saved_tensors_hooks()
        self._local.now.pushed.pop()

    # -- open calls ------------------------------------------------------------------------------------------------

    def opened(self) -> list[WindowCall]:
        """The calls of windows that this thread is in, innermost last."""
        return self._local.now.opened

    def shared_by_threads(self) -> bool:
        """True from the moment on that one thread uses the models while another is in a window of theirs.

        Then no parameter is without its door again: inside a window the other thread would pass it unseen.
        """
        me = threading.get_ident()
        opened_by = self._opened_by
        opened_by[me] = self._local.now.opened
        if not self._shared and len(opened_by) > 1:
            others = [entry for thread, opened in opened_by.items() if thread != me for entry in opened]
            if others:
                with self._lock:
                    self._shared = True
                    for entry in others:
                        entry.window.show_doors(entry)
        return self._shared

    def stand_back(self) -> Running:
        """What runs now lets something else run in this thread. What it has open keeps its bytes. Parameters get their
        doors back, which others need. Returns what :meth:`go_on` takes."""
        with self._lock:
            aside, self._local.now = self._local.now, Running()
            for entry in aside.opened:
                entry.window.show_doors(entry)
            self._opened_by.pop(threading.get_ident(), None)
        return aside

    def go_on(self, aside: Running) -> None:
        """What has stood back runs again."""
        self._local.now = aside

    def refuse_between_turns(self, call: str) -> None:
        """Raise where ``accumulate`` has not made all its backwards: ``call`` belongs after it."""
        if self.turns is not None:
            raise UsageError(f"{call} inside accumulate, which calls backward itself: call it when accumulate is over")

    # -- what a call left behind -----------------------------------------------------------------------------------

    def close_leaked(self) -> None:
        """Close what an interrupted forward (Ctrl-C) left open on this thread; torch runs no post hooks for it.

        To be called where no forward of these models is running on this thread.
        """
        with self._lock:
            while self._local.now.opened:
                self._close(self._local.now.opened.pop())
            while self._local.now.pushed:
                hooks, _ = self._local.now.pushed.pop()
                if self._is_on_top(hooks):
                    pop_saved_tensors_hooks()

    def close_stale(self) -> None:
        """The same where a forward may be running: close the calls whose frames are no longer on this thread's
        stack."""
        running = set()
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            running.add(id(frame))
            frame = frame.f_back
        with self._lock:
            opened = self._local.now.opened
            while opened and (opened[-1].over or opened[-1].frame_id not in running):
                self._close(opened.pop())

    def _close(self, entry: WindowCall) -> None:
        """End a call for which torch has run no post hook.

        Contexts that the interrupt has left (an activation checkpoint around the call) have popped the pair on top, in
        the belief that it was theirs: ours went first, and one of theirs is there for it. So one is popped for
        each of ours, unless torch has set the stack back already.
        """
        if entry.pushed:
            entry.pushed = False
            hooks, inside_backward = self._local.now.pushed.pop()
            if self._is_on_top(hooks) or (not inside_backward and self._is_any_on_top()):
                pop_saved_tensors_hooks()
        entry.window.close(entry)

    def _is_any_on_top(self) -> bool:
        return saved_tensors_hooks_enabled() and top_saved_tensors_hooks(True) is not None

    def _is_on_top(self, hooks: SavedTensorHooks) -> bool:
        top = top_saved_tensors_hooks(True) if saved_tensors_hooks_enabled() else None
        return top is not None and getattr(top[0], "__self__", None) is hooks
