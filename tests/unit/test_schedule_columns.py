"""The placement, which works by the column, against the same worked out block by block."""

from __future__ import annotations

from dataclasses import asdict
from types import ModuleType
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from deepoffload.errors import PlacementError
from deepoffload.schedule.cost_model import Bandwidths, BlockKind, StepOverlap, Workload
from deepoffload.schedule.placement import BlockSpec
from tests.support import placement_reference, placing


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[tuple[BlockKind, int, int]], dict[str, Any]]:
    blocks: list[tuple[BlockKind, int, int]] = []
    sizes = st.integers(1, 60)
    for unit in range(draw(st.integers(1, 6))):
        size = draw(sizes)
        blocks.append((BlockKind.WEIGHT, size, unit))
        if draw(st.booleans()):
            blocks.append((BlockKind.GRADIENT, draw(st.sampled_from((size, 2 * size))), unit))
            blocks += [(BlockKind.STATE, draw(sizes), unit) for _ in range(draw(st.integers(0, 4)))]
    total = sum(size for _, size, _ in blocks)
    keep = draw(st.frozensets(st.integers(1, len(blocks) + 2), max_size=3))
    rates = [float(draw(st.integers(1, 9))) for _ in range(3)]
    said = {
        "capacity_bytes": draw(st.integers(0, total + 10)),
        "nvme_capacity_bytes": draw(st.sampled_from((None, total // 2, 1 << 62))),
        "event_weight_bytes": draw(st.integers(0, 80)),
        "bandwidths": Bandwidths(*rates, 1e9),
        "workload": Workload(draw(st.integers(1, 3)), draw(st.sampled_from(StepOverlap)), draw(st.booleans())),
        "ring_pieces": draw(st.integers(1, 5)),
        "keep": keep,
        "set_up_bytes": draw(st.sampled_from((0, total // 3))),
    }
    return blocks, said


def answer(module: ModuleType, blocks: list[tuple[BlockKind, int, int]], said: dict[str, Any]) -> object:
    specs = [
        BlockSpec(number, f"{number}", kind, nbytes, unit, number % 3 == 0, (1.0, 0.5, 0.0)[number % 5 % 3])
        if kind is BlockKind.WEIGHT and not said["workload"].training
        else BlockSpec(number, f"{number}", kind, nbytes, unit)
        for number, (kind, nbytes, unit) in enumerate(blocks, start=1)
    ]
    try:
        found = module.plan_placement(specs, **said)
    except PlacementError as error:
        return str(error), error.enough_bytes
    return asdict(found), found.table()


@settings(max_examples=400)
@given(problems())
def test_by_the_column_is_block_by_block(problem: tuple[list[tuple[BlockKind, int, int]], dict[str, Any]]) -> None:
    blocks, said = problem
    assert answer(placing, blocks, said) == answer(placement_reference, blocks, said)
