"""Rank 0's values for all ranks: what DeepSpeed and DistributedDataParallel do where each rank builds a model itself.

Ranks that are seeded alike build the same values. So they compare checksums first, and send bytes only where these
differ. A program that looks at a parameter before that sees the values of its own rank.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from deepoffload.copies.rank_link import RankLink
from deepoffload.io.checksums import crc32c
from deepoffload.params.torch_private import outside_user_modes

_GONE = b""
"""What a rank says of a parameter that its program has dropped."""


class Rank0Values:
    """Gives values of rank 0 to the others. All calls are collective: ranks make them in the same order."""

    def __init__(self, link: RankLink) -> None:
        self._link = link

    def give(self, values: Tensor | None) -> bool:
        """Let ``values`` have the bytes that it has on rank 0.

        Nothing is sent where its length differs, or where a rank has dropped it: ranks then have built different
        models, and are told when these are compared.

        Args:
            values: uint8 with one dimension, in host memory; None where it was dropped.

        Returns:
            Whether this rank has other bytes now.
        """
        mine = _GONE if values is None else struct.pack("<QI", values.numel(), _checksum(values))
        said = self._link.exchange_messages(mine)
        if values is None or _GONE in said or len({one[:8] for one in said}) > 1 or len(set(said)) == 1:
            return False
        self._link.take_from_rank_0(values)
        return said[0] != mine

    def give_buffers(self, roots: Sequence[nn.Module]) -> None:
        """Let the ordinary buffers of models have the values that they have on rank 0. Models whose buffers differ in
        more than values keep them."""
        with outside_user_modes():
            found = [(name, buffer) for root in roots for name, buffer in root.named_buffers() if _is_ordinary(buffer)]
            bytes_of = [buffer.detach().cpu().contiguous().view(-1).view(torch.uint8) for _, buffer in found]
            look = repr([(name, tuple(buffer.shape), str(buffer.dtype)) for name, buffer in found])
            sums = _packed(map(_checksum, bytes_of))
            said = self._link.exchange_messages(hashlib.sha256(look.encode()).digest() + sums)
            if len({one[:32] for one in said}) > 1 or len(set(said)) == 1:
                return
            for (_, buffer), values in zip(found, bytes_of, strict=True):
                self._link.take_from_rank_0(values)
                if values.data_ptr() != buffer.data_ptr():
                    buffer.detach().copy_(values.view(buffer.dtype).view(buffer.shape))


def _is_ordinary(buffer: Tensor) -> bool:
    return type(buffer) is Tensor and not buffer.is_meta and buffer.layout is torch.strided and buffer.numel() > 0


def _checksum(values: Tensor) -> int:
    return crc32c(values.data_ptr(), values.numel())


def _packed(numbers: Iterable[int]) -> bytes:
    return b"".join(struct.pack("<I", number) for number in numbers)
