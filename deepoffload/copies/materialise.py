"""Between what is stored and what the program is shown: how a copy comes about, and how it goes back.

A copy on another device, a weight in another type, a dequantised one: each is *like the stored bytes, or dirty*, and
differs from the others in these two verbs only.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from deepoffload.copies.host_link import HostLink, host_offset
from deepoffload.memory.block import Block


class TakesBack(Protocol):
    """Makes what is stored of a block from what is shown, on the current stream and outside of the program's modes.
    ``shown`` is uint8, ``(block.shown_nbytes,)``, on the device that computes; the stored bytes are in the arena, and
    leased. How each tensor lies in both, ``block.forms`` says."""

    def take_back(self, block: Block, shown: Tensor) -> None:
        """Start overwriting the stored bytes with what the program has made of ``shown``."""

    def check_take_back(self, block: Block) -> None:
        """Called before the program writes, and before :meth:`take_back`.

        Raises:
            UnsupportedError: what is shown of this block cannot be taken back. Says why, and what to do.
        """


class Materialiser(TakesBack, Protocol):
    """Also makes what is shown from what is stored, likewise."""

    def bring(self, block: Block, shown: Tensor) -> None:
        """Start filling ``shown``.

        Raises:
            UnsupportedError: these stored bytes cannot be shown.
        """


class SameBytes:
    """Shows the stored bytes themselves."""

    def __init__(self, link: HostLink) -> None:
        self._link = link

    def bring(self, block: Block, shown: Tensor) -> None:
        self._link.bring(shown, host_offset(block))

    def take_back(self, block: Block, shown: Tensor) -> None:
        self._link.take(shown, host_offset(block))

    def check_take_back(self, block: Block) -> None:
        """Always possible."""
