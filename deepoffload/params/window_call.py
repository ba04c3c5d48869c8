"""One running call of a module that has a window, and how its end is noticed.

[Note: the frame's end] A window is closed by its module's post hook. torch calls post hooks when a forward returns and,
with ``always_call``, when it raises an ``Exception``; but not for KeyboardInterrupt and SystemExit. After a Ctrl-C in a
notebook cell the program goes on, with leases that are held for nothing, our saved-tensor hooks pushed, and parameters
without their doors. So the window puts an object into the frame of the call, among its local variables:

    frame of nn.Module._call_impl    {"self": layer, "args": ..., "_deepoffload_window": FrameEnd}

Nobody else refers to it, so it dies with the frame, however that ends, and a weak reference to it calls
:func:`frame_ended`. For example, Ctrl-C in layer 3 unwinds the frames of layer 3 and of the model. The traceback keeps
them alive until the program has handled the exception; then both objects die, and the two windows close.

A weak reference's callback may run anywhere, in the middle of our own code too. Therefore it closes the window only
where the lock is idle and the thread is the call's own, and else only marks the call (``over``): the next window that
is entered looks for such calls, and for calls whose frames are not on the stack any more (``HookStack.close_stale``).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

from torch import Tensor

from deepoffload.memory.block import Block
from deepoffload.params.ports import ActivationRegion
from deepoffload.params.unit import ParamHandle, Unit

if TYPE_CHECKING:
    from deepoffload.params.window import Window

Shown = list[tuple[ParamHandle, Callable[[], Tensor | None]]]
"""Parameters of a window, each with a weak reference to its tensor object."""


class WindowCall:
    """One running call of a window's module. Empty until :meth:`Window.enter` is through, and when that has failed:
    torch calls the post hook then, too, which must not end the call around this one.

    Attributes:
        shown: the parameters of the call.
        plain: whether they are without their doors.
        partial: units of which only some bytes are there.
        caller_id: of the frame around that of the call, in which torch calls the post hook when the forward has raised.
            Only outer windows ask.
        region: what is done with the activations of the call; its hooks are below those of the window.
    """

    __slots__ = (
        *("window", "shown", "plain", "blocks", "partial", "pushed", "region"),
        *("frame_id", "caller_id", "frame_end", "thread", "over"),
    )

    def __init__(self, window: Window, frame: FrameType) -> None:
        self.window = window
        self.frame_id = id(frame)
        self.caller_id: int | None = None
        self.frame_end: weakref.ref[FrameEnd] | None = None
        self.thread = threading.get_ident()
        self.over = False
        self.shown: Shown = []
        self.plain = False
        self.blocks: list[Block] = []
        self.partial: list[Unit] = []
        self.pushed: bool | None = False
        self.region: ActivationRegion | None = None


class FrameEnd:
    """Lives in the frame of a module's call, and so shows its end, however it ends.

    See [Note: the frame's end] at the top of this file.
    """

    __slots__ = ("__weakref__",)


def frame_ended(entry: WindowCall, _: Any) -> None:
    """A call's frame is gone and its window still open. Runs anywhere; what cannot be done now, the next call does."""
    entry.over = True
    pager = entry.window.pager
    if pager.life.minds_deaths and entry.thread == threading.get_ident() and pager.lock.acquire_idle():
        try:
            pager.hooks.close_stale()
        finally:
            pager.lock.release()
