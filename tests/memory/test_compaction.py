"""Of all runs of neighbours whose sliding makes a hole, the one that moves the fewest bytes."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from deepoffload.memory.block import Block, Census
from deepoffload.memory.compaction import cheapest_run
from deepoffload.schedule.block_state import BlockState
from deepoffload.schedule.placement import BlockKind

Layout = list[tuple[int, int, bool]]


@st.composite
def arenas(draw: st.DrawFn) -> tuple[Layout, dict[int | None, Block], set[int]]:
    """Ranges, holes and which of the blocks may be moved."""
    sizes = draw(st.lists(st.tuples(st.integers(1, 6), st.sampled_from(["hole", "movable", "fixed"])), max_size=12))
    layout: Layout = []
    blocks: dict[int | None, Block] = {}
    movable: set[int] = set()
    census: Census = {state: {} for state in BlockState}
    offset = 0
    for number, (size, what) in enumerate(sizes):
        layout.append((offset, size, what != "hole"))
        if what != "hole":
            blocks[offset] = Block(number, "", BlockKind.STATE, size, census)
        if what == "movable":
            movable.add(number)
        offset += size
    return layout, blocks, movable


def moved_by_the_best(
    layout: Layout, blocks: dict[int | None, Block], movable: set[int], nbytes: int, limit: float
) -> float:
    """Least bytes of all runs, by trying every one; infinite when there is none."""
    best = math.inf
    for first in range(len(layout)):
        for last in range(first, len(layout)):
            run = layout[first : last + 1]
            inside = [blocks[offset] for offset, _, used in run if used]
            if run[0][2] or run[-1][2] or any(block.id not in movable for block in inside):
                continue
            if sum(size for _, size, used in run if not used) >= nbytes:
                best = min(best, sum(block.nbytes for block in inside))
    return best if best <= limit else math.inf


@given(arenas(), st.integers(1, 20), st.one_of(st.just(math.inf), st.integers(0, 20).map(float)))
def test_the_fewest_bytes_of_all_runs(
    arena: tuple[Layout, dict[int | None, Block], set[int]], nbytes: int, limit: float
) -> None:
    layout, blocks, movable = arena
    asked: list[int] = []

    def may_move(block: Block) -> bool:
        asked.append(block.id)
        return block.id in movable

    run = cheapest_run(layout, blocks, nbytes, may_move, limit)
    best = moved_by_the_best(layout, blocks, movable, nbytes, limit)
    assert len(asked) == len(set(asked))
    assert (run is None) == (best == math.inf)
    if run is not None:
        assert sum(block.nbytes for block in run) == best
        assert all(block.id in movable for block in run)
        offsets = [offset for offset, _, used in layout if used and blocks[offset] in run]
        between = [used for offset, _, used in layout if run and offsets[0] <= offset <= offsets[-1]]
        assert sum(between) == len(run), "neighbours: nothing else in use lies between them"
