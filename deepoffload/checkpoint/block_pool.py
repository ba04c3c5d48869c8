"""Memory for transfers of checkpoints: blocks of 1 MiB."""

from __future__ import annotations

from deepoffload.native.aio import HostMapping

BLOCK_BYTES = 1 << 20
"""A file is written, read and checksummed in blocks of this size, so that transfers are aligned for O_DIRECT."""

_GROWTH_BLOCKS = 2
"""A huge page."""


class BlockPool:
    """Gives blocks of memory out and takes them back. It grows when all are in use; its user bounds how many are."""

    def __init__(self) -> None:
        self._mappings: list[HostMapping] = []
        self._free: list[int] = []

    @property
    def nbytes(self) -> int:
        """What it takes of the process's memory, at most."""
        return sum(mapping.nbytes for mapping in self._mappings)

    def take(self) -> int:
        """The address of a block."""
        if not self._free:
            mapping = HostMapping(_GROWTH_BLOCKS * BLOCK_BYTES)
            self._mappings.append(mapping)
            self._free = [mapping.address + index * BLOCK_BYTES for index in reversed(range(_GROWTH_BLOCKS))]
        return self._free.pop()

    def give_back(self, address: int) -> None:
        self._free.append(address)

    def close(self) -> None:
        """Unmap. No transfer may be under way."""
        self._free.clear()
        for mapping in self._mappings:
            mapping.close()
        self._mappings.clear()


def num_blocks_of(nbytes: int) -> int:
    """Blocks that a file of this length has."""
    return -(-nbytes // BLOCK_BYTES)
