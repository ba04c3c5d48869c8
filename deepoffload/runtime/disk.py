"""The disks of one engine: the I/O engine, the swap space, and what is durable in it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack

from deepoffload.config import Config
from deepoffload.errors import UsageError
from deepoffload.io.durable_store import DurableStore
from deepoffload.io.engine import IoEngine
from deepoffload.io.probe import Bandwidth, measure_bandwidth, stripe_weights
from deepoffload.io.swap_files import warn_of_shared
from deepoffload.io.swap_space import SwapSpace
from deepoffload.runtime.agreement import Agreement
from deepoffload.runtime.host_share import least_rates, measure_together
from deepoffload.runtime.plan import NO_DISK
from deepoffload.schedule.cost_model import Bandwidths


class EngineDisk:
    """What an engine holds of its disks. All is None where it has none.

    Attributes:
        store: the durable steps in ``space``, with the key ``durability``.
        bandwidths: measured.
    """

    def __init__(self) -> None:
        self.io: IoEngine | None = None
        self.space: SwapSpace | None = None
        self.store: DurableStore | None = None
        self.bandwidths = NO_DISK

    def open(self, config: Config, paths: list[str], nvme_bytes: int, agreement: Agreement) -> None:
        """Measure the disks, and make the swap files. With several ranks all of them call it.

        Raises:
            ConfigError: a path cannot be used. UsageError: the durable state there is another run's, or damaged, or
            there is no disk space for one.
        """
        if not paths or not nvme_bytes:
            if config.durability is not None:
                raise UsageError("durability needs disk space, and nvme_budget is 0; leave nvme_budget out or raise it")
            return
        aio, group = config.aio, agreement.group
        warn_of_shared(paths, config.path_key)
        io = self.io = IoEngine(backend=aio.backend.value, queue_depth=aio.queue_depth, block_bytes=aio.block_bytes)
        key = config.path_key
        rates, ranks = measure_together(
            agreement, paths, lambda: [measure_bandwidth(path, io, key=key) for path in paths]
        )
        self.bandwidths = least_rates(agreement, _together(rates, ranks))
        self.space = SwapSpace(
            self.io,
            paths,
            budget_bytes=nvme_bytes,
            label="swap",
            weights=stripe_weights(rates),
            verify=aio.verify,
            named=config.durability is not None,
            rank=None if group is None or "RANK" in os.environ else group.ranks.rank,
            key=key,
        )
        if config.durability is not None:
            self.store = DurableStore(self.space, shared=group is not None)

    def close(self) -> None:
        """Give files and threads back; durable files without a durable step are removed. Idempotent."""
        with ExitStack() as last:  # each runs, even if the one before raised
            if self.io is not None:
                last.callback(self.io.close)
            if self.space is not None:
                last.callback(self.space.close)
            if self.store is not None:
                self.store.remove_if_empty()


def _together(rates: Sequence[Bandwidth], ranks: int) -> Bandwidths:
    """What the paths give one of ``ranks`` that use them when extents are striped over all of them."""
    return Bandwidths(
        sum(rate.read_bytes_per_s for rate in rates) / ranks,
        sum(rate.write_bytes_per_s for rate in rates) / ranks,
        sum(rate.mixed_bytes_per_s for rate in rates) / ranks,
        NO_DISK.memory_bytes_per_s,
    )
