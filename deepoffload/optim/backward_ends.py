"""The ends of backwards, inner and outer ones, as who collects their gradients is told of them."""

from __future__ import annotations

from collections.abc import Callable

from deepoffload.params.torch_private import call_at_end_of_backward, graph_task


class BackwardEnds:
    """Not thread-safe: the backwards of one model.

    Args:
        ended: called at the end of each backward that is watched, in its thread, with whether others still are.
    """

    def __init__(self, ended: Callable[[bool], None]) -> None:
        self._ended = ended
        self._watched: set[int] = set()

    def watch(self) -> None:
        """Be told of the end of the backward that this thread is in, if it is in one."""
        task = graph_task()
        if task >= 0 and task not in self._watched:
            self._watched.add(task)
            call_at_end_of_backward(lambda: self._end(task))

    def _end(self, task: int) -> None:
        self._watched.discard(task)
        self._ended(bool(self._watched))

    def is_inner(self) -> bool:
        """Whether the backward that this thread is in has another one around it that is watched."""
        return bool(self._watched - {graph_task()})

    def forget(self) -> None:
        """Watch none any more. torch does not tell the end of a backward that has raised an error."""
        self._watched.clear()
