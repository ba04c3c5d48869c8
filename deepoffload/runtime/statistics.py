"""Numbers of a run."""

from __future__ import annotations

from deepoffload.activations.store import ActivationStore
from deepoffload.config import Config
from deepoffload.config.resolve import Budgets
from deepoffload.io.swap_space import SwapSpace
from deepoffload.params.pager import Pager
from deepoffload.params.ports import RankPort
from deepoffload.schedule.cost_model import BlockKind
from deepoffload.timeline import Timeline

PROFILED_SPANS_MAX = 1 << 16
"""Spans that are kept where only one step is profiled."""


def timeline_of(config: Config) -> Timeline | None:
    """Where what happens is recorded; None where nobody looks."""
    if config.timeline:
        return Timeline()
    return Timeline(PROFILED_SPANS_MAX) if config.flops_profiler.enabled else None


def run_stats(
    pager: Pager, space: SwapSpace | None, budgets: Budgets, activations: ActivationStore | None
) -> dict[str, float]:
    """Those of the memory and the disk of one rank, so far."""
    of_activations = {} if activations is None else activations.stats()  # gives back what nobody needs: it is first
    tiers, counters = pager.tiers, pager.tiers.counters
    trace = pager.order.trace.stats()
    return {
        **pager.memory.stats(),
        "host_budget_bytes": tiers.arena.capacity_bytes,
        "host_bytes": tiers.arena.used_bytes,
        "host_peak_bytes": tiers.arena.peak_bytes,
        "host_weight_bytes": tiers.resident_bytes(BlockKind.WEIGHT),
        "host_gradient_bytes": tiers.resident_bytes(BlockKind.GRADIENT),
        "host_state_bytes": tiers.resident_bytes(BlockKind.STATE),
        "nvme_budget_bytes": budgets.nvme_bytes,
        "nvme_bytes": space.used_bytes if space is not None else 0,
        "nvme_capacity_bytes": space.capacity_bytes if space is not None else 0,
        "disk_bytes_read": space.bytes_read if space is not None else 0,
        "disk_bytes_written": space.bytes_written if space is not None else 0,
        "faults": counters.faults,
        "waits": counters.waits,
        "wait_s": counters.wait_s,
        "prefetches": counters.prefetches,
        "evictions": counters.evictions,
        "compactions": counters.compactions,
        "partial_reads": counters.partial_reads,
        "order_mismatches": trace.mismatches,
        "left_out": trace.left_out,
        "units": len(pager.units),
        "parameters": sum(h.numel for unit in pager.units for h in unit.handles),
        **of_activations,
    }


def stats_of_ranks(link: RankPort | None, mine: dict[str, float]) -> list[dict[str, float]]:
    """The numbers of every rank, in rank order. Every rank calls it, at the same place of the program.

    Raises:
        RankError: a rank has gone, or does not come.
    """
    if link is None:
        return [mine]
    with link.tasks.begin("stats(all_ranks=True)").together() as task:
        return task.gather(mine)
