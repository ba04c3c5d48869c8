"""Stored and shown: where the bytes of one tensor lie in its block, in the form that is kept and in the one the program
sees."""

from __future__ import annotations

from dataclasses import dataclass

AS_SHOWN = "as shown"
"""The encoding of bytes that are stored as they are shown."""

SHARD = "shard"
"""The encoding of a tensor of which a rank stores the run of elements that it owns, as they are shown, and other ranks
store the rest."""


@dataclass(frozen=True, slots=True)
class Form:
    """One tensor's bytes.

    Attributes:
        offset_stored, nbytes_stored: where they lie among the block's stored bytes (host memory, NVMe), and how many.
        offset_shown, nbytes_shown: the same among the bytes that the program is shown of the block.
        encoding: how the stored bytes say what is shown, by a name that the materialiser knows.
    """

    offset_stored: int
    nbytes_stored: int
    offset_shown: int
    nbytes_shown: int
    encoding: str

    @classmethod
    def as_shown(cls, offset: int, nbytes: int) -> Form:
        """Of bytes that are stored as they are shown."""
        return cls(offset, nbytes, offset, nbytes, AS_SHOWN)


def shown_bytes(forms: tuple[Form, ...]) -> int:
    """What the program is shown of a block whose tensors have these forms."""
    return max((form.offset_shown + form.nbytes_shown for form in forms), default=0)
