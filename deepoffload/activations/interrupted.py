"""Graphs that an error has left behind, with all that they keep."""

from __future__ import annotations

import gc

import torch

from deepoffload.params.torch_private import in_backward, outside_user_modes


def forget_interrupted_graphs() -> None:
    """Free graphs that nobody can use any more. torch keeps the nodes that were still to run when a backward was ended
    by an error until the next backward of the thread; other graphs may be in reference cycles."""
    if not in_backward():
        with outside_user_modes(), torch.enable_grad():
            torch.zeros((), requires_grad=True).clone().backward()
    gc.collect()
