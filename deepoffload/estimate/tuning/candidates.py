"""What may be chosen, as data: every candidate trains with the same batch per optimizer step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from deepoffload.device import Tier
from deepoffload.errors import ConfigError
from deepoffload.schedule.cost_model import AccumulationOrder

SIZES_MAX = 6
"""Sizes of micro-batches that are looked at where nobody says how many."""

ACCUMULATION_MAX = 512
"""Micro-batches of a step at most: a prediction goes through all of them, so 4,096 take minutes."""


@dataclass(frozen=True)
class Candidate:
    """Settings of one training. ``micro_batch`` sequences at a time on each rank, ``accumulation`` times per step.

    checkpointing: the layers' activations are computed again in backward. tiled_loss: the logits of all tokens are
    never there. order: in which micro-batches go through the model. offload_activations: where inputs of checkpointed
    blocks go.
    """

    micro_batch: int
    accumulation: int
    checkpointing: bool = False
    tiled_loss: bool = False
    order: AccumulationOrder = AccumulationOrder.HORIZONTAL
    offload_activations: Tier | None = None

    @property
    def is_vertical(self) -> bool:
        return self.order is AccumulationOrder.VERTICAL

    @property
    def changes(self) -> int:
        """How many things a program has to do for it."""
        return sum((self.checkpointing, self.tiled_loss, self.is_vertical, self.offload_activations is not None))


@dataclass(frozen=True)
class Choices:
    """The values of each setting that are looked at. ``batch``: sequences per optimizer step and rank."""

    batch: int
    micro_batches: tuple[int, ...]
    checkpointing: tuple[bool, ...] = (False, True)
    tiled_loss: tuple[bool, ...] = (False, True)
    orders: tuple[AccumulationOrder, ...] = (AccumulationOrder.HORIZONTAL, AccumulationOrder.VERTICAL)
    offload_activations: tuple[Tier | None, ...] = (None,)

    def candidates(self) -> list[Candidate]:
        """All that make sense together: an order needs several micro-batches, and activations that leave are inputs of
        checkpointed blocks."""
        found = []
        parts = (self.micro_batches, self.checkpointing, self.tiled_loss, self.orders, self.offload_activations)
        for micro, checkpointing, tiled, order, offload in itertools.product(*parts):
            accumulation = self.batch // micro
            if accumulation == 1:
                order = AccumulationOrder.HORIZONTAL
            if offload is not None and not checkpointing:
                continue
            found.append(Candidate(micro, accumulation, checkpointing, tiled, order, offload))
        return list(dict.fromkeys(found))


def micro_batches(batch: int, least: int = 1, most: int | None = None, count: int | None = None) -> tuple[int, ...]:
    """Sizes that make at most ``ACCUMULATION_MAX`` micro-batches of ``batch``, from ``least`` to ``most``, in order. Of
    more than ``count`` those that are spread evenly over the list, the smallest and the largest among them.

    Raises:
        ConfigError: there is none.
    """
    counts = (number for number in range(min(batch, ACCUMULATION_MAX), 0, -1) if batch % number == 0)
    found = [size for size in (batch // number for number in counts) if least <= size <= (most or batch)]
    if not found:
        raise ConfigError(
            f"no micro-batch from {least} to {most or batch} divides the {batch} sequences of a rank's step in at most "
            f"{ACCUMULATION_MAX} micro-batches; change autotuning.min_train_micro_batch_size_per_gpu or "
            "max_train_micro_batch_size_per_gpu, or train_batch_size"
        )
    return spread(found, count or SIZES_MAX)


def spread(sizes: Sequence[int], count: int) -> tuple[int, ...]:
    """At most ``count`` of ``sizes``, the largest and, where there is room for two, the smallest among them."""
    if len(sizes) <= count:
        return tuple(sizes)
    if count == 1:
        return (sizes[-1],)
    last = len(sizes) - 1
    return tuple(dict.fromkeys(sizes[round(place * last / (count - 1))] for place in range(count)))
