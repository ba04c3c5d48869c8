"""What to keep near, what to move, and when: pure functions and plain data, without torch, I/O, threads or clocks."""

from __future__ import annotations

from deepoffload.schedule.cost_model import Bandwidths, BlockKind, StepOverlap, Traffic, Workload
from deepoffload.schedule.placement import BlockSpec, Placement, plan_placement
from deepoffload.schedule.planner import Move, MoveKind, plan_prefetch, plan_write_back
from deepoffload.schedule.trace import Event, Trace, TraceStats
from deepoffload.schedule.victims import choose_victim

__all__ = [
    "Bandwidths",
    "BlockSpec",
    "Event",
    "BlockKind",
    "Move",
    "MoveKind",
    "Placement",
    "StepOverlap",
    "Trace",
    "TraceStats",
    "Traffic",
    "Workload",
    "choose_victim",
    "plan_placement",
    "plan_prefetch",
    "plan_write_back",
]
