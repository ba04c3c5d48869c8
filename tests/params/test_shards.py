"""How units are cut for ranks: every element on one rank, equal ranges of whole blocks, and the way back."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepoffload.memory.form import SHARD
from deepoffload.native.cpu_adam import STATE_BLOCK, SUM_BLOCK
from deepoffload.params.cut import TensorCut
from deepoffload.params.layout import TensorRun, byte_offsets, cut_pieces, whole_tensors
from deepoffload.params.shards import (
    FilePlace,
    FlatTensor,
    OwnedRun,
    ShardLayout,
    file_ranges,
    moves,
    shard_layout,
    shared_runs,
)

KINDS = [("bfloat16", 2, True), ("float32", 4, True), ("float32", 4, False), ("int8", 1, False), ("float64", 8, False)]
NUMELS = st.one_of(st.sampled_from([0, 1, 2, 255, 256, 257, 4095, 4096, 4097]), st.integers(0, 30_000))
RANKS = st.integers(1, 64)


@st.composite
def units(draw: st.DrawFn) -> list[FlatTensor]:
    """Tensors of any sizes and types; ``section`` is the type and whether they are trained."""
    kinds = draw(st.lists(st.tuples(NUMELS, st.sampled_from(KINDS)), max_size=12))
    return [FlatTensor(numel, itemsize, (name, trained)) for numel, (name, itemsize, trained) in kinds]


def whole_bytes(layout: ShardLayout, seed: int = 0) -> np.ndarray:
    """A whole copy with random elements and zeros for padding."""
    rng = np.random.default_rng(seed)
    whole = np.zeros(layout.whole_nbytes, np.uint8)
    for (numel, itemsize, _), offset in zip(layout.tensors, layout.offsets, strict=True):
        whole[offset : offset + numel * itemsize] = rng.integers(1, 256, numel * itemsize, dtype=np.uint8)
    return whole


def shards_of(layout: ShardLayout, whole: np.ndarray) -> list[np.ndarray]:
    """What ranks keep of a whole copy, as a gather reads it."""
    return [
        np.concatenate([np.zeros(0, np.uint8), *(whole[begin : begin + nbytes] for begin, nbytes in ranges)])
        for ranges in (
            [(s.whole_offset + rank * s.range_nbytes, s.range_nbytes) for s in layout.sections]
            for rank in range(layout.world_size)
        )
    ]


def converted(source: ShardLayout, target: ShardLayout, shards: list[np.ndarray]) -> list[np.ndarray]:
    result = [np.zeros(target.shard_nbytes, np.uint8) for _ in range(target.world_size)]
    for giver, source_offset, taker, target_offset, nbytes in moves(source, target):
        part = shards[giver][source_offset : source_offset + nbytes]
        assert not result[taker][target_offset : target_offset + nbytes].any(), "moved twice"
        result[taker][target_offset : target_offset + nbytes] = part
    return result


@given(units(), RANKS)
def test_every_element_is_owned_once(tensors: list[FlatTensor], world_size: int) -> None:
    layout = shard_layout(tensors, world_size)
    owned: dict[int, list[TensorRun]] = defaultdict(list)
    for rank in range(world_size):
        for run in layout.runs(rank):
            assert run.numel > 0
            owned[run.tensor].append(TensorRun(*run[:3]))
            for start in {run.start, run.start + run.numel - 1}:
                assert layout.owner(run.tensor, start) == rank
    for index, tensor in enumerate(tensors):
        position = 0
        for run in owned[index]:  # ranks are in the order of elements
            assert run.start == position
            position += run.numel
        assert position == tensor.numel


@given(units(), RANKS)
def test_ranges_are_equal_and_whole_blocks(tensors: list[FlatTensor], world_size: int) -> None:
    layout = shard_layout(tensors, world_size)
    assert layout.whole_nbytes == sum(section.range_nbytes for section in layout.sections) * world_size
    if world_size == 1:
        return
    for rank in range(world_size):
        for run in layout.runs(rank):
            assert run.start % SUM_BLOCK == 0 and run.start % STATE_BLOCK == 0
            assert run.shard_offset % 64 == 0
    for index, tensor in enumerate(tensors):
        section = layout.sections[layout.section_of[index]]
        assert section.range_nbytes % (SUM_BLOCK * tensor.itemsize) == 0
        assert (layout.offsets[index] - section.whole_offset) % (STATE_BLOCK * tensor.itemsize) == 0
    padding = layout.whole_nbytes - sum(tensor.numel * tensor.itemsize for tensor in tensors)
    most = sum(2 * (SUM_BLOCK - 1) * tensor.itemsize for tensor in tensors)
    assert padding <= most + sum(SUM_BLOCK * 8 * world_size for _ in layout.sections)


@given(units(), RANKS)
def test_a_shard_holds_what_the_whole_copy_shows(tensors: list[FlatTensor], world_size: int) -> None:
    layout = shard_layout(tensors, world_size)
    whole = whole_bytes(layout)
    shards = shards_of(layout, whole)
    for rank, shard in enumerate(shards):
        assert len(shard) == layout.shard_nbytes
        covered = np.zeros(layout.shard_nbytes, bool)
        for run in layout.runs(rank):
            itemsize = tensors[run.tensor].itemsize
            nbytes = run.numel * itemsize
            assert run.whole_offset == layout.offsets[run.tensor] + run.start * itemsize
            here = slice(run.shard_offset, run.shard_offset + nbytes)
            assert np.array_equal(shard[here], whole[run.whole_offset : run.whole_offset + nbytes])
            assert not covered[here].any()
            covered[here] = True
            for element in {0, run.numel // 2, run.numel - 1}:
                offset = layout.shard_offset(rank, run.tensor, run.start + element)
                assert offset == run.shard_offset + element * itemsize
        assert not shard[~covered].any(), "elements that no run names"


@given(units())
def test_one_rank_has_the_layout_without_ranks(tensors: list[FlatTensor]) -> None:
    layout = shard_layout(tensors, 1)
    offsets, nbytes = byte_offsets([tensor.numel * tensor.itemsize for tensor in tensors])
    assert (list(layout.offsets), layout.shard_nbytes, layout.whole_nbytes) == (offsets, nbytes, nbytes)
    runs = list(layout.runs(0))
    whole = whole_tensors([tensor.numel for tensor in tensors])
    assert [TensorRun(*run[:3]) for run in runs] == [run for run in whole if run.numel]
    assert [(run.shard_offset, run.whole_offset) for run in runs] == [(offsets[run.tensor],) * 2 for run in runs]
    assert all(layout.shard_offset(0, run.tensor, 0) == offsets[run.tensor] for run in runs)


@given(units(), RANKS, RANKS)
def test_shards_are_converted_there_and_back(tensors: list[FlatTensor], first: int, second: int) -> None:
    one, other = shard_layout(tensors, first), shard_layout(tensors, second)
    shards = shards_of(one, whole_bytes(one))
    there = converted(one, other, shards)
    assert all(map(np.array_equal, there, shards_of(other, whole_bytes(other))))
    assert all(map(np.array_equal, converted(other, one, there), shards))


def test_what_lies_side_by_side_moves_in_one_range() -> None:
    block = SUM_BLOCK
    tensors = [FlatTensor(2 * block, 2), FlatTensor(block, 2), FlatTensor(4 * block, 2)]
    two, four = shard_layout(tensors, 2), shard_layout(tensors, 4)
    assert [(m.source, m.target, m.nbytes) for m in moves(two, four)] == [
        (0, 0, 4 * block),
        (0, 1, 4 * block),
        (1, 2, 4 * block),
        (1, 3, 2 * block),
    ]
    assert [m.nbytes for m in moves(four, four)] == [4 * block, 4 * block, 4 * block, 2 * block]


def test_small_tensors_share_a_block_and_are_never_cut() -> None:
    sizes = [256, 1000, 600, 10, SUM_BLOCK + 1, 1, SUM_BLOCK]
    layout = shard_layout([FlatTensor(numel, 1) for numel in sizes], 64)
    assert layout.offsets == (0, 256, 1280, 2048, 4096, 8448, 12288)
    assert [run.tensor for rank in range(64) for run in layout.runs(rank)] == [0, 1, 2, 3, 4, 4, 5, 6]


@given(units(), RANKS)
def test_gradients_are_cut_like_the_weights(tensors: list[FlatTensor], world_size: int) -> None:
    """A gradient in fp32, of the trained tensors alone, is owned by the rank that owns the weight."""
    trained = [index for index, tensor in enumerate(tensors) if tensor.section[1]]  # type: ignore[index]
    weights = shard_layout([tensors[i] for i in trained], world_size)
    gradients = shard_layout([tensors[i]._replace(itemsize=4) for i in trained], world_size)
    for rank in range(world_size):
        assert [run[:3] for run in weights.runs(rank)] == [run[:3] for run in gradients.runs(rank)]
    if world_size > 1 and len({tensor.section for tensor in tensors}) == 1:
        assert len(shard_layout(tensors, world_size).sections) == 1


@given(units(), RANKS, st.sampled_from([64, 256]), st.integers(1, 40))
def test_pieces_hold_the_runs_of_a_rank(
    tensors: list[FlatTensor], world_size: int, alignment_numel: int, most_blocks: int
) -> None:
    layout = shard_layout(tensors, world_size)
    piece_numel = most_blocks * alignment_numel
    for rank in {0, world_size // 2, world_size - 1}:
        runs = [TensorRun(*run[:3]) for run in layout.runs(rank)]
        pieces = cut_pieces(runs, piece_numel, alignment_numel)
        assert all(piece.numel == piece_numel for piece in pieces[:-1])
        joined: list[TensorRun] = []
        for piece in pieces:
            end = 0
            for segment in piece.segments:
                assert segment.piece_start == -(-end // alignment_numel) * alignment_numel
                assert segment.start % alignment_numel == 0 and segment.numel > 0
                end = segment.piece_start + segment.numel
                last = joined[-1] if joined else None
                if last is not None and last.tensor == segment.tensor and last.start + last.numel == segment.start:
                    joined[-1] = last._replace(numel=last.numel + segment.numel)
                else:
                    joined.append(TensorRun(segment.tensor, segment.start, segment.numel))
            assert end <= piece.numel <= piece_numel
        assert joined == runs


def test_pieces_of_whole_tensors() -> None:
    pieces = cut_pieces(whole_tensors([1, 300, 0, 200]), 256)
    assert [[(s.tensor, s.start, s.numel, s.piece_start) for s in piece.segments] for piece in pieces] == [
        [(0, 0, 1, 0), (1, 0, 192, 64)],
        [(1, 192, 108, 0), (3, 0, 128, 128)],
        [(3, 128, 72, 0)],
    ]
    assert [piece.numel for piece in pieces] == [256, 256, 128]


@given(units(), RANKS, RANKS)
def test_pieces_of_other_ranks_share_runs(tensors: list[FlatTensor], first: int, second: int) -> None:
    """Optimizer state is converted by runs: what the pieces of some ranks hold, and those of others want."""
    held, wanted = (
        [
            [TensorRun(segment.tensor, segment.start, segment.numel) for segment in piece.segments]
            for rank in range(world_size)
            for piece in cut_pieces([TensorRun(*run[:3]) for run in layout.runs(rank)], piece_numel, STATE_BLOCK)
        ]
        for layout, world_size, piece_numel in (
            (shard_layout(tensors, first), first, 1024),
            (shard_layout(tensors, second), second, 2560),
        )
    )
    seen = {index: np.zeros(tensor.numel, int) for index, tensor in enumerate(tensors)}
    for tensor, start, numel, source, target in shared_runs(held, wanted):
        for owner in (held[source], wanted[target]):
            assert any(run.tensor == tensor and run.start <= start < run.start + run.numel for run in owner)
        seen[tensor][start : start + numel] += 1
    assert all((counts == 1).all() for counts in seen.values())


@given(units(), RANKS, st.sampled_from([1, 2, 4, 8]))
def test_ranks_read_their_own_ranges_of_a_file(tensors: list[FlatTensor], world_size: int, itemsize: int) -> None:
    """The elements are counted through; in the file they have another type than in memory."""
    layout, at, places, stored = shard_layout(tensors, world_size), 77, [], [b"\0" * 77]
    for index, tensor in enumerate(tensors):
        places.append(FilePlace(at, itemsize))
        numbers = (np.arange(tensor.numel) + 31 * index).astype(f"u{itemsize}")
        stored.append(numbers.tobytes())
        at += len(stored[-1])
    content, read = b"".join(stored), 0
    for rank in range(world_size):
        for run, offset, nbytes in file_ranges(layout.runs(rank), places):
            values = np.frombuffer(content[offset : offset + nbytes], f"u{itemsize}")
            expected = (np.arange(run.start, run.start + run.numel) + 31 * run.tensor).astype(f"u{itemsize}")
            assert np.array_equal(values, expected)
            read += nbytes
    assert read == sum(tensor.numel for tensor in tensors) * itemsize


def test_a_real_safetensors_file(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    arrays = {f"w{i}": np.arange(n, dtype=np.float32).reshape(-1, 1) + i for i, n in enumerate([3, 700, 1, 5000])}
    path = tmp_path / "model.safetensors"
    safetensors.save_file(arrays, path)
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    places = [FilePlace(8 + length + header[name]["data_offsets"][0], 4) for name in arrays]
    layout = shard_layout([FlatTensor(array.size, 2) for array in arrays.values()], 3)
    for rank in range(3):
        for run, offset, nbytes in file_ranges(layout.runs(rank), places):
            values = np.frombuffer(content[offset : offset + nbytes], np.float32)
            assert np.array_equal(values, arrays[f"w{run.tensor}"].ravel()[run.start : run.start + run.numel])


def test_mistakes_are_told() -> None:
    layout = shard_layout([FlatTensor(5000, 2), FlatTensor(0, 2), FlatTensor(1, 2)], 2)
    with pytest.raises(ValueError, match="world_size must be at least 1"):
        shard_layout([], 0)
    with pytest.raises(ValueError, match="items of 2 and of 4 bytes"):
        shard_layout([FlatTensor(1, 2), FlatTensor(1, 4)], 2)
    with pytest.raises(ValueError, match="element 4999 of tensor 0 is rank 1's, not rank 0's"):
        layout.shard_offset(0, 0, 4999)
    with pytest.raises(ValueError, match="tensor 1 has 0 elements, no element 0"):
        layout.owner(1, 0)
    with pytest.raises(ValueError, match="no rank 2 among 2"):
        list(layout.runs(2))
    with pytest.raises(ValueError, match="same tensors"):
        moves(layout, shard_layout([FlatTensor(5000, 4)], 2))
    with pytest.raises(ValueError, match="starts at 32"):
        cut_pieces([TensorRun(0, 32, 64)], 256)
    with pytest.raises(ValueError, match="positive multiple of 64"):
        cut_pieces([], 100)


@given(units(), RANKS, st.integers(1, 5))
def test_ranges_of_a_shard_have_its_runs_between_them(tensors: list[FlatTensor], world_size: int, blocks: int) -> None:
    """In steps of whole blocks of the first section, as parts of a contribution come."""
    layout = shard_layout([tensor._replace(itemsize=4) for tensor in tensors], world_size)
    for rank in {0, world_size - 1}:
        found: list[OwnedRun] = []
        for begin in range(0, layout.shard_nbytes, blocks * SUM_BLOCK * 4):
            for run in layout.runs_between(rank, begin, begin + blocks * SUM_BLOCK * 4):
                assert begin <= run.shard_offset and run.shard_offset + run.numel * 4 <= begin + blocks * SUM_BLOCK * 4
                assert layout.shard_offset(rank, run.tensor, run.start) == run.shard_offset
                assert world_size == 1 or run.start % SUM_BLOCK == 0
                last = found[-1] if found else None
                if last is not None and last.tensor == run.tensor:
                    assert last.whole_offset + last.numel * 4 == run.whole_offset
                    assert last.start + last.numel == run.start
                    found[-1] = last._replace(numel=last.numel + run.numel)
                else:
                    found.append(run)
        assert found == list(layout.runs(rank))


@given(units(), RANKS)
def test_a_tensors_forms_say_where_its_bytes_are_kept(tensors: list[FlatTensor], world_size: int) -> None:
    layout = shard_layout(tensors, world_size)
    whole = whole_bytes(layout)
    shards = shards_of(layout, whole)
    for index, (numel, itemsize, _) in enumerate(tensors):
        kept = []
        for rank in range(world_size):
            cut = TensorCut(layout, index, rank)
            form, run = cut.form(), cut.run()
            assert (form.offset_shown, form.nbytes_shown) == (layout.offsets[index], numel * itemsize)
            assert form.encoding == SHARD
            assert form.nbytes_stored == (0 if run is None else run.numel * itemsize)
            if run is not None:
                assert cut.shard_offset(run.start) == form.offset_stored
                assert cut.shard_offset(run.start + run.numel - 1) == form.offset_stored + (run.numel - 1) * itemsize
                with pytest.raises(ValueError, match="element"):
                    cut.shard_offset(run.start + run.numel)
            kept.append(shards[rank][form.offset_stored : form.offset_stored + form.nbytes_stored])
        begin = layout.offsets[index]
        assert np.array_equal(np.concatenate(kept), whole[begin : begin + numel * itemsize])
