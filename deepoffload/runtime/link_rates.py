"""The rates between ranks: measured when they first train together, and kept as those of a disk are."""

from __future__ import annotations

import os
import time
from dataclasses import asdict, fields
from typing import Any

from deepoffload.io.kept_measurements import MEASURED_AT, has_names, kept, kept_file, write_kept
from deepoffload.optim.threads import num_threads
from deepoffload.ranks.exchange import Exchange
from deepoffload.ranks.group import RankGroup
from deepoffload.ranks.link_rate import measure_link
from deepoffload.schedule.cost_model import LinkRates

_NAMES = tuple(field.name for field in fields(LinkRates))


def link_rates(group: RankGroup, exchange: Exchange, *, fresh: bool = False) -> LinkRates:
    """What one rank gets from the others: the least of all ranks, so that all plan with the same numbers. Collective.

    Rank 0 keeps it for 30 days: for the same hosts, ranks on them, transport and threads.

    Args:
        fresh: measure now, also where a measurement is kept. What is measured is stored.

    Raises:
        RankError: another rank has gone.
    """
    rank, threads = group.ranks.rank, num_threads()
    names: list[str] = group.gather_objects(os.uname().nodename, "the names of hosts")
    file = kept_file("link", repr((names, group.ranks.hosts, exchange.transport, threads)))
    mine = None if fresh or rank else _known(kept(file, "the link between ranks", _check, _NAMES))
    known: LinkRates | None = group.gather_objects(mine, "known rates")[0]
    if known is not None:
        return known
    measured: list[LinkRates] = group.gather_objects(measure_link(exchange, threads), "measured rates")
    rates = LinkRates(*(min(getattr(one, name) for one in measured) for name in _NAMES))
    if rank == 0:
        write_kept(file, asdict(rates) | {MEASURED_AT: time.time()})
    return rates


def _check(found: dict[str, Any]) -> None:
    has_names(found, (*_NAMES, MEASURED_AT))


def _known(found: dict[str, Any]) -> LinkRates | None:
    return LinkRates(*(found[name] for name in _NAMES)) if found else None
