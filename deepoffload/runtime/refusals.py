"""Errors for models that the budgets do not hold, which name budgets that do. Those are a host's, as the configuration
says them, also where what was planned for is less: the share of one rank, without what transfers take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from torch import nn

from deepoffload.config import Config
from deepoffload.config.resolve import Budgets
from deepoffload.errors import BudgetError, DevicePlacementError, PlacementError, UsageError
from deepoffload.native.aio import round_up
from deepoffload.params.pager import Pager
from deepoffload.runtime.device import with_ring
from deepoffload.runtime.plan import refusal_of
from deepoffload.runtime.registration import ShortageError
from deepoffload.runtime.whole_copies import ONE_RANK_HAS
from deepoffload.schedule.cost_model import Bandwidths
from deepoffload.schedule.nvme_room import set_up_nvme_bytes
from deepoffload.schedule.table import human_bytes

LARGE_PART = 4
"""A linear layer that takes more than one part in so many of the memory is what its refusal is about."""

SMALL_PART = 16
"""What has at most one part in so many of the memory is small enough to train in it."""


class Refusals:
    """Makes them for one engine.

    Args:
        capacity_bytes: of the arena, for blocks.
        nvme_bytes: None without NVMe.
    """

    def __init__(
        self,
        pager: Pager,
        config: Config,
        budgets: Budgets,
        *,
        capacity_bytes: int,
        nvme_bytes: int | None,
        bandwidths: Bandwidths,
    ) -> None:
        self._pager = pager
        self._config = config
        self._host_ranks = budgets.host_ranks
        self._device_ranks = budgets.device_ranks
        self._capacity_bytes = capacity_bytes
        self._nvme_bytes = nvme_bytes
        self._bandwidths = bandwidths

    def of_shortage(self, roots: Sequence[nn.Module], shortage: ShortageError, built_bytes: int) -> BudgetError:
        """The error for models, paged and on the meta device, of which one parameter did not fit: with a budget for all
        of them. ``built_bytes``: what was registered at once while they were built."""
        return self.for_host(self._of_shortage(roots, shortage, built_bytes), roots)

    def _of_shortage(self, roots: Sequence[nn.Module], shortage: ShortageError, built_bytes: int) -> PlacementError:
        why = partial(
            refusal_of,
            roots,
            capacity_bytes=self._capacity_bytes,
            nvme_bytes=self._nvme_bytes,
            bandwidths=self._bandwidths,
            device_bytes=self._pager.memory.device_bytes,
            alignment_bytes=self._pager.alignment_bytes,
            link=self._pager.link,
        )
        try:
            whole = why(self._config)
        except UsageError:  # keep_fp32 names what is not built yet
            whole = why(replace(self._config, keep_fp32=()))
        too_coarse = f"{whole}. " if isinstance(whole, DevicePlacementError) else ""
        covered = whole is not None and (whole.enough_bytes is None or whole.enough_bytes >= built_bytes)
        if shortage.on_disk and not too_coarse:
            return self._of_nvme(roots, shortage, built_bytes, whole)
        if not too_coarse and whole is not None and covered:
            text = f"{shortage}. {whole}"
            return PlacementError(text, whole.enough_bytes, enough_nvme_bytes=whole.enough_nvme_bytes)
        return PlacementError(
            f"{shortage}. {too_coarse}Parameters of {built_bytes:,} bytes are there at once while the model is built, "
            f"although not all of them stay. Raise host_budget to at least {built_bytes} bytes",
            built_bytes,
        )

    def _of_nvme(
        self, roots: Sequence[nn.Module], shortage: ShortageError, built_bytes: int, whole: PlacementError | None
    ) -> PlacementError:
        """NVMe was full while models were built; ``whole`` is why they cannot run, if they cannot."""
        rooms = [round_up(param.nbytes) for root in roots for param in root.parameters()]
        rooms += [block.room_bytes for block in self._pager.tiers.blocks()]
        enough = set_up_nvme_bytes(self._capacity_bytes, built_bytes, max(rooms))
        if whole is not None and (whole.enough_bytes is not None or (whole.enough_nvme_bytes or 0) >= enough):
            text = f"{shortage}. {whole}"
            return PlacementError(text, whole.enough_bytes, enough_nvme_bytes=whole.enough_nvme_bytes)
        return PlacementError(
            f"{shortage}. A model may take more there while it is built than later: raise nvme_budget to at least "
            f"{enough} bytes, or give {self._config.path_key} a file system with more free space",
            enough_nvme_bytes=enough,
        )

    def for_host(self, error: PlacementError, roots: Sequence[nn.Module] = ()) -> PlacementError:
        """The same error. Where it names memory for blocks or NVMe of one rank, it names budgets of the host that give
        each rank so much. Where it is one layer of ``roots`` that takes most of that memory, it says how to split it.
        """
        if not isinstance(error, DevicePlacementError) and error.enough_bytes is not None:
            said, newline, table = str(error).partition("\n")
            how = _how_to_split(roots, self._capacity_bytes)
            text = f"{said.rstrip('.')}{how}{newline}{table}" if how else str(error)
            error = PlacementError(text, error.enough_bytes, enough_nvme_bytes=error.enough_nvme_bytes)
        return of_host(error, self._host_ranks, self._device_ranks, self._capacity_bytes, self._of_blocks)

    def _of_blocks(self, capacity_bytes: int) -> tuple[int, str]:
        """The budget of one rank that leaves so much for blocks, and what else it is for."""
        memory, budget_of = self._pager.memory, self._pager.tiers.arena.budget_of
        if memory.on_host or self._pager.link is not None:  # with several ranks the plan counts all that is in memory
            whole_bytes = budget_of(capacity_bytes)
            return whole_bytes, ", in which activations have theirs" if whole_bytes > capacity_bytes else ""
        whole_bytes, named = in_ring(capacity_bytes, str(memory.device))
        return budget_of(whole_bytes), named


def in_ring(capacity_bytes: int, device: str) -> tuple[int, str]:
    """Memory that leaves so much for blocks next to gradients from a device, and what else it is for."""
    return with_ring(capacity_bytes), f", in which gradients on their way from {device} have theirs"


def of_host(
    error: PlacementError,
    host_ranks: int,
    device_ranks: int,
    capacity_bytes: int,
    of_blocks: Callable[[int], tuple[int, str]],
) -> PlacementError:
    """The same error. Where it names memory or NVMe of one rank, it names budgets of the host that give each rank so
    much; where it names a part of a device's budget, that one's.

    Args:
        host_ranks, device_ranks: that share a host, and a device.
        capacity_bytes: of memory for blocks, what each rank has.
        of_blocks: from such memory to the budget of one rank that leaves it, and what else that is for.
    """
    text, enough, enough_nvme = str(error), error.enough_bytes, error.enough_nvme_bytes
    if isinstance(error, DevicePlacementError):
        if enough is None or device_ranks == 1:
            return error
        share = f" ({enough} for each of the {device_ranks} ranks that compute there)"
        return DevicePlacementError(_renamed(text, enough, enough * device_ranks, share), enough * device_ranks)
    if host_ranks > 1:
        whole = human_bytes(capacity_bytes * host_ranks)
        text = text.replace(ONE_RANK_HAS, f"that each of the {host_ranks} ranks of a host has of its {whole}")
    share = f" ({{}} for each of the {host_ranks} ranks of a host)" if host_ranks > 1 else ""
    if enough is not None:
        each_bytes, why = of_blocks(enough)
        text = _renamed(text, enough, each_bytes * host_ranks, share.format(each_bytes) + why)
        enough = each_bytes * host_ranks
    if enough_nvme is not None:
        text = _renamed(text, enough_nvme, enough_nvme * host_ranks, share.format(enough_nvme))
        enough_nvme *= host_ranks
    return PlacementError(text, enough, enough_nvme_bytes=enough_nvme)


def _how_to_split(roots: Sequence[nn.Module], capacity_bytes: int) -> str:
    """What to do about the largest linear layer, if it takes much of the memory; else nothing."""
    named = [(name or type(root).__name__, module) for root in roots for name, module in root.named_modules()]
    owners = Counter(id(param) for _, module in named for param in module._parameters.values())
    linears = [
        (module.weight.nbytes, module.in_features * module.weight.element_size(), name)
        for name, module in named
        if type(module) is nn.Linear and owners[id(module.weight)] == 1
    ]
    nbytes, row_bytes, name = max(linears, default=(0, 0, ""))
    if nbytes * LARGE_PART <= capacity_bytes:
        return ""
    return (
        f". Or split its largest layer, {name} ({nbytes:,} bytes): call deepoffload.tile_linear(model, "
        f"max_bytes={max(capacity_bytes // SMALL_PART, row_bytes)}) before the context ends (docs/long_sequences.md)"
    )


def _renamed(text: str, nbytes: int, other_bytes: int, words: str) -> str:
    return text.replace(f"to at least {nbytes} bytes", f"to at least {other_bytes} bytes{words}")
