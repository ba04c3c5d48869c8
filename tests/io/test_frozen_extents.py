"""Extents with several holders: frozen until all but one have let go, and copied out by ranges."""

from __future__ import annotations

import errno
import threading

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepoffload.errors import IoFailure, UsageError
from deepoffload.io.extents import Extent, ExtentPart, cut_ranges
from deepoffload.io.swap_space import SwapSpace
from deepoffload.native.aio import HostMapping, round_up
from tests.io.test_checksums import flip_on_disk
from tests.io.test_swap_space import fill

KIB, MIB = 1 << 10, 1 << 20
PAGE = 4096


def copied_out(swap: SwapSpace, extent: Extent, memory: HostMapping, limit_bytes: int) -> bytes:
    data = bytearray(extent.nbytes)
    for part in swap.ranges(extent, limit_bytes):
        assert part.nbytes <= limit_bytes
        swap.read_range(extent, part, memory.address).wait()
        data[part.start : part.start + part.nbytes] = memory.buffer[: part.nbytes]
    return bytes(data)


@given(
    pieces=st.lists(st.integers(1, 400), min_size=1, max_size=5),
    missing=st.integers(0, PAGE - 1),
    limit_pages=st.integers(64, 600),
    chunk_pages=st.sampled_from([1, 16, 64, 75, 256, 1000]),
)
def test_ranges_cover_an_extent_once_and_keep_its_checksums(pieces, missing, limit_pages, chunk_pages):
    nbytes = sum(pieces) * PAGE - missing
    extent = Extent(nbytes, tuple(ExtentPart(0, 0, pages * PAGE) for pages in pieces))
    chunk, sums, at = chunk_pages * PAGE, 256 * KIB, 0
    begins = [sum(pieces[:number]) * PAGE for number in range(len(pieces))]
    for part in cut_ranges(extent, limit_pages * PAGE, chunk, sums):
        assert part.start == at == begins[part.piece] + part.offset and 0 < part.nbytes <= limit_pages * PAGE
        at += part.nbytes
        inside = part.offset % chunk
        assert inside % sums == 0 and (not inside or inside + part.nbytes <= chunk)
    assert at == nbytes


def test_ranges_that_hold_no_checksum_are_refused():
    with pytest.raises(UsageError, match="neither a chunk"):
        list(cut_ranges(Extent(PAGE, (ExtentPart(0, 0, PAGE),)), 100 * KIB, MIB, 256 * KIB))


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    paths=st.integers(1, 3),
    verify=st.booleans(),
    block_kib=st.sampled_from([16, 300, 1024]),
    steps=st.lists(
        st.tuples(st.sampled_from(["allocate", "write", "hold", "free", "free", "copy"]), st.integers(1, 900_000)),
        max_size=40,
    ),
)
def test_against_counts(make_engine, memory, directories, paths, verify, block_kib, steps):
    """An extent that is held keeps its bytes and its place. Nothing writes to it. The last holder makes it free."""
    engine = make_engine(block_bytes=block_kib * KIB)
    with SwapSpace(engine, directories[:paths], budget_bytes=8 * MIB, verify=verify) as swap:
        holders: dict[Extent, int] = {}
        written: dict[Extent, bytes] = {}
        for kind, number in steps:
            if kind == "allocate":
                if sum(round_up(extent.nbytes) for extent in holders) + round_up(number) <= 8 * MIB:
                    extent = swap.allocate(number)
                    assert extent not in holders
                    holders[extent] = 1
                continue
            if not holders:
                continue
            extent = list(holders)[number % len(holders)]
            assert swap.is_frozen(extent) == (holders[extent] > 1)
            if kind == "write" and holders[extent] > 1:
                with pytest.raises(UsageError, match="frozen"):
                    swap.write(extent, memory.address)
            elif kind == "write":
                written[extent] = fill(memory, extent.nbytes)
                swap.write(extent, memory.address).wait()
            elif kind == "hold":
                swap.hold(extent)
                holders[extent] += 1
            elif kind == "free":
                swap.free(extent)
                holders[extent] -= 1
                if not holders[extent]:
                    del holders[extent]
                    written.pop(extent, None)
            elif extent in written:
                assert copied_out(swap, extent, memory, 256 * KIB + number) == written[extent]
            assert swap.used_bytes == sum(round_up(extent.nbytes) for extent in holders)
        for extent, data in written.items():
            assert copied_out(swap, extent, memory, MIB) == data
    engine.close()


def test_what_is_not_allocated_cannot_be_held_or_freed(make_engine, tmp_path):
    with SwapSpace(make_engine(), [tmp_path]) as swap:
        extent = swap.allocate(3 * PAGE)
        swap.hold(extent)
        swap.free(extent)
        swap.free(extent)
        for call in (swap.hold, swap.free):
            with pytest.raises(UsageError, match="not allocated"):
                call(extent)
        assert not swap.is_frozen(extent) and swap.used_bytes == 0
        with pytest.raises(UsageError, match="not allocated"):
            swap.hold(Extent(PAGE, (ExtentPart(0, swap.capacity_bytes, PAGE),)))


@pytest.mark.parametrize("block_kib", [64, 300, 1024, 4096])
def test_a_flipped_bit_is_found_when_it_is_copied_out(make_engine, memory, directories, block_kib):
    nbytes = 9 * MIB + 12345
    with SwapSpace(make_engine(block_bytes=block_kib * KIB), directories[:2], verify=True) as swap:
        swap.allocate(PAGE)
        extent = swap.allocate(nbytes)
        data = fill(memory, nbytes)
        swap.write(extent, memory.address).wait()
        piece = extent.pieces[1]
        for offset in (0, MIB + 5, piece.nbytes // 2, nbytes - extent.pieces[0].nbytes - 1):
            flip_on_disk(directories[piece.path_index], piece.offset + offset)
            with pytest.raises(IoFailure, match="Checksum") as caught:
                copied_out(swap, extent, memory, MIB + 17)
            assert caught.value.errno == errno.EBADMSG
            assert caught.value.offset <= piece.offset + offset < caught.value.offset + caught.value.nbytes
            flip_on_disk(directories[piece.path_index], piece.offset + offset)
        assert copied_out(swap, extent, memory, MIB + 17) == data


def test_holders_in_many_threads(make_engine, tmp_path):
    with SwapSpace(make_engine(), [tmp_path]) as swap:
        extent = swap.allocate(5 * PAGE)

        def come_and_go() -> None:
            for _ in range(300):
                swap.hold(extent)
                assert swap.is_frozen(extent)
                swap.free(extent)

        threads = [threading.Thread(target=come_and_go) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not swap.is_frozen(extent) and swap.used_bytes == 5 * PAGE
        swap.free(extent)
        assert swap.used_bytes == 0
