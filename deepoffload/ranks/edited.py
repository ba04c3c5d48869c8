"""What ranks say of an edit: which tensor it is of and, when it has been made, a checksum of what they have written.

One number of 64 bits, which goes with the want of a round. So ranks that write different values notice it where they
meet after the edit, without another exchange.
"""

from __future__ import annotations

from typing import NamedTuple

_CHECKSUM_BITS = 32
_MADE = 1 << _CHECKSUM_BITS


class Edited(NamedTuple):
    """An edit of one tensor.

    Attributes:
        tensor: its number among those of its unit.
        checksum: of all its bytes after the edit (32 bits); None before.
    """

    tensor: int
    checksum: int | None = None

    def packed(self) -> int:
        """As one number."""
        made = 0 if self.checksum is None else _MADE | self.checksum
        return self.tensor << (_CHECKSUM_BITS + 1) | made

    @classmethod
    def unpacked(cls, number: int) -> Edited:
        """What :meth:`packed` was called on."""
        checksum = number & (_MADE - 1) if number & _MADE else None
        return cls(number >> (_CHECKSUM_BITS + 1), checksum)
