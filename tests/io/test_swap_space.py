"""Swap space on real directories: data, budgets, striping, checksums, and nothing left behind."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import subprocess
import sys
import warnings

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deepoffload.errors import BudgetError, ClosedError, ConfigError, IoFailure, IoTimeout, UsageError
from deepoffload.io.engine import IoEngine
from deepoffload.io.swap_files import check_paths, free_bytes, reclaim_stale
from deepoffload.io.swap_space import SPACE_MARGIN_BYTES, SwapSpace
from deepoffload.native.aio import HostMapping, round_up
from tests.support.disks import tmpfs

MIB = 1 << 20


@pytest.fixture
def engine(make_engine):
    return make_engine(block_bytes=64 << 10)


def fill(memory: HostMapping, nbytes: int) -> bytes:
    data = os.urandom(nbytes)
    memory.buffer[:nbytes] = data
    return data


def test_what_is_written_is_read(make_engine, memory, directories, backend):
    with SwapSpace(make_engine(backend=backend), directories[:1]) as swap:
        for nbytes in (1, 4095, 4096, 4097, MIB, 5 * MIB + 17):
            extent = swap.allocate(nbytes)
            assert extent.nbytes == nbytes and sum(piece.nbytes for piece in extent.pieces) == round_up(nbytes)
            data = fill(memory, nbytes)
            swap.write(extent, memory.address).wait()
            memory.buffer[:nbytes] = bytes(nbytes)
            swap.read(extent, memory.address, urgent=True).wait()
            assert memory.buffer[:nbytes] == data
            part = nbytes // 2
            memory.buffer[: round_up(nbytes)] = bytes(round_up(nbytes))
            swap.read(extent, memory.address, nbytes=part).wait()
            assert memory.buffer[:part] == data[:part]
            assert memory.buffer[round_up(part) : nbytes] == bytes(max(0, nbytes - round_up(part)))
        assert swap.bytes_written == sum((1, 4095, 4096, 4097, MIB, 5 * MIB + 17))


def test_full_extents_use_no_buffered_transfer(make_engine, memory, tmp_path):
    engine = make_engine()
    with SwapSpace(engine, [tmp_path]) as swap:
        if not swap.direct[0]:
            pytest.skip(f"no direct I/O on {tmp_path}")
        extent = swap.allocate(3 * MIB + 1)
        swap.write(extent, memory.address).wait()
        swap.read(extent, memory.address).wait()
        assert engine.stats()["chunks_buffered"] == 0


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    paths=st.integers(1, 3),
    verify=st.booleans(),
    steps=st.lists(st.tuples(st.sampled_from("aaawwrf"), st.integers(1, 200_000)), max_size=40),
)
def test_against_a_dictionary(engine, memory, directories, paths, verify, steps):
    """Allocate, write, read and free in any order: every extent keeps its bytes, and the accounts are right."""
    with SwapSpace(engine, directories[:paths], budget_bytes=MIB, verify=verify) as swap:
        held: dict[object, bytes] = {}
        for kind, number in steps:
            if kind == "a":
                room = MIB - sum(round_up(extent.nbytes) for extent in held)
                if round_up(number) > room:
                    with pytest.raises(BudgetError, match="nvme_budget"):
                        swap.allocate(number)
                    continue
                held[swap.allocate(number)] = b""
            elif held:
                extent = list(held)[number % len(held)]
                if kind == "w":
                    held[extent] = fill(memory, extent.nbytes)
                    swap.write(extent, memory.address).wait()
                elif kind == "r" and held[extent]:
                    swap.read(extent, memory.address).wait()
                    assert memory.buffer[: extent.nbytes] == held[extent]
                elif kind == "f":
                    swap.free(extent)
                    del held[extent]
            assert swap.used_bytes == sum(round_up(extent.nbytes) for extent in held)
            assert swap.used_bytes <= swap.capacity_bytes <= MIB
        for extent, data in held.items():
            if data:
                swap.read(extent, memory.address).wait()
                assert memory.buffer[: extent.nbytes] == data


def test_fragments_are_used_before_the_budget_is_called_full(engine, memory, tmp_path):
    with SwapSpace(engine, [tmp_path], budget_bytes=8 * MIB) as swap:
        extents = [swap.allocate(MIB) for _ in range(8)]
        for extent in extents[::2]:
            swap.free(extent)
        scattered = swap.allocate(4 * MIB)
        assert len(scattered.pieces) == 4
        data = fill(memory, 4 * MIB)
        swap.write(scattered, memory.address).wait()
        memory.buffer[: 4 * MIB] = bytes(4 * MIB)
        swap.read(scattered, memory.address).wait()
        assert memory.buffer[: 4 * MIB] == data
        with pytest.raises(BudgetError, match="nvme_budget"):
            swap.allocate(1)


def test_large_extents_follow_the_weights(engine, memory, directories):
    with SwapSpace(engine, directories, weights=[3.0, 1.0, 2.0]) as swap:
        extent = swap.allocate(12 * MIB)
        by_path = {piece.path_index: piece.nbytes for piece in extent.pieces}
        assert by_path == {0: 6 * MIB, 1: 2 * MIB, 2: 4 * MIB}
        data = fill(memory, 12 * MIB)
        swap.write(extent, memory.address).wait()
        memory.buffer[: 12 * MIB] = bytes(12 * MIB)
        swap.read(extent, memory.address).wait()
        assert memory.buffer[: 12 * MIB] == data
        small = [swap.allocate(4096) for _ in range(12)]
        assert all(len(extent.pieces) == 1 for extent in small)


def test_reserved_space_exists_and_is_not_reserved_again(engine, tmp_path):
    before = free_bytes(str(tmp_path))
    with SwapSpace(engine, [tmp_path], budget_bytes=64 * MIB) as swap:
        swap.reserve(48 * MIB)
        assert 48 * MIB <= swap.capacity_bytes <= 64 * MIB
        capacity = swap.capacity_bytes
        swap.reserve(40 * MIB)
        swap.allocate(48 * MIB)
        assert swap.capacity_bytes == capacity
        assert before - free_bytes(str(tmp_path)) > 0
        with pytest.raises(BudgetError, match="nvme_budget.*Raise nvme_budget"):
            swap.reserve(65 * MIB)
        assert swap.capacity_bytes == capacity


def test_more_than_the_disk_has_is_refused_before_anything_is_taken(engine, directories):
    with SwapSpace(engine, directories) as swap:
        asked = free_bytes(str(directories[0])) * 2
        with pytest.raises(BudgetError, match=f"{directories[0]}.*{SPACE_MARGIN_BYTES}.*host_budget"):
            swap.reserve(asked)
        assert swap.capacity_bytes == 0


@pytest.fixture
def small_disk(directories):
    with tmpfs(directories[1], 80) as where:
        yield where


def test_a_full_path_gets_less(engine, memory, directories, small_disk):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        swap = SwapSpace(engine, directories[:2])
    with swap:
        extent = swap.allocate(64 * MIB)
        by_path = dict.fromkeys((0, 1), 0)
        for piece in extent.pieces:
            by_path[piece.path_index] += piece.nbytes
        assert by_path[1] <= 80 * MIB - SPACE_MARGIN_BYTES
        assert sum(by_path.values()) == 64 * MIB


def test_a_disk_that_fills_between_check_and_allocation_is_a_budget_error(engine, small_disk):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        swap = SwapSpace(engine, [small_disk])
    with swap:
        # tmpfs shows blocks free that its limit on size then refuses: shrink the limit behind the check's back.
        swap.reserve(4 * MIB)
        file = swap.files[0]
        with pytest.raises(IoFailure, match="ENOSPC"):
            file.grow(100 * MIB)
        assert swap.capacity_bytes == 4 * MIB
        with pytest.raises(BudgetError, match=str(small_disk)):
            swap.allocate(70 * MIB)


def test_a_path_without_direct_io_warns_once_and_works(engine, memory, small_disk):
    with pytest.warns(RuntimeWarning, match=f"{small_disk}: O_DIRECT does not work") as caught:
        swap = SwapSpace(engine, [small_disk])
    assert len(caught) == 1
    with swap:
        extent = swap.allocate(100_000)
        data = fill(memory, 100_000)
        swap.write(extent, memory.address).wait()
        memory.buffer[:100_000] = bytes(100_000)
        swap.read(extent, memory.address).wait()
        assert memory.buffer[:100_000] == data
    with pytest.raises(ConfigError, match="direct I/O is required"):
        SwapSpace(engine, [small_disk], direct="required")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SwapSpace(engine, [small_disk], direct="off").close()


def test_wrong_paths_are_refused_before_anything_is_created(engine, tmp_path):
    good, file = tmp_path / "good", tmp_path / "file"
    good.mkdir()
    file.write_text("")
    for bad, match in [
        ([good, tmp_path / "none"], "none does not exist"),
        ([good, file], "file is not a directory"),
        ([good, file / "below"], r"below cannot be looked at: Not a directory \(ENOTDIR\)"),
        ([good, tmp_path / ("long" * 100)], r"long cannot be looked at: File name too long \(ENAMETOOLONG\)"),
        ([], "no directory"),
        ([good, good], "named twice"),
        ([good, tmp_path / "good" / ".." / "good"], "named twice"),
        ([good, ""], "an empty path"),
        ([good, "/proc"], "/proc .* keeps no files"),
        ([good, "a\0b"], "zero byte"),
    ]:
        with pytest.raises(ConfigError, match=f"nvme_path.*{match}"):
            SwapSpace(engine, bad)
    assert list(good.iterdir()) == []


def test_a_path_that_is_not_writable(tmp_path):
    """As another user, because root may write everywhere."""
    closed = tmp_path / "closed"
    closed.mkdir()
    closed.chmod(stat.S_IRUSR | stat.S_IXUSR)
    program = (
        "import os, sys\nfrom deepoffload.io.swap_space import SwapSpace\nfrom deepoffload.io.engine import IoEngine\n"
        "os.geteuid() or os.setuid(65534)\n"
        "try: SwapSpace(IoEngine(), [sys.argv[1]])\n"
        "except ValueError as error: print(error)"
    )
    for parent in (tmp_path, *list(tmp_path.parents)[:3]):  # pytest keeps its directories to their owner
        if parent != parent.parent and os.stat(parent).st_uid == os.geteuid() and str(parent) != "/tmp":
            parent.chmod(0o755)
    out = subprocess.run([sys.executable, "-c", program, str(closed)], capture_output=True, text=True, check=True)
    assert "not writable" in out.stdout


def test_a_path_on_a_read_only_file_system(small_disk):
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(ConfigError, match="mounted read-only"):
        check_paths([small_disk])


@pytest.mark.parametrize(
    ("options", "match"),
    [({"weights": [1.0, 2.0]}, "weights"), ({"weights": [0.0]}, "weights"), ({"label": "a/b"}, "label")],
)
def test_wrong_options(engine, tmp_path, options, match):
    with pytest.raises(ConfigError, match=match):
        SwapSpace(engine, [tmp_path], **options)
    with pytest.raises(ConfigError, match="direct"):
        SwapSpace(engine, [tmp_path], direct="sometimes")


def test_wrong_transfers(engine, memory, tmp_path):
    swap = SwapSpace(engine, [tmp_path])
    extent = swap.allocate(10_000)
    for address, nbytes, match in [
        (memory.address + 8, None, "multiple of 4096"),
        (0, None, "multiple of 4096"),
        (memory.address, 10_001, "extent of 10000"),
        (memory.address, -1, "extent of 10000"),
    ]:
        with pytest.raises(UsageError, match=match):
            swap.read(extent, address, nbytes=nbytes)
        with pytest.raises(UsageError, match=match):
            swap.write(extent, address, nbytes=nbytes)
    with pytest.raises(UsageError):
        swap.allocate(0)
    swap.free(extent)
    with pytest.raises(UsageError, match="freed twice"):
        swap.free(extent)
    swap.close()
    swap.close()
    for call in (lambda: swap.read(extent, memory.address), lambda: swap.allocate(1), lambda: swap.reserve(1 << 30)):
        with pytest.raises(ClosedError):
            call()


def test_nothing_is_left_when_construction_fails_half_way(make_engine, directories):
    engine = make_engine()
    descriptors = len(os.listdir("/proc/self/fd"))
    directories[2].rmdir()
    os.symlink("/proc", directories[2])  # a directory in which nothing can be created
    with pytest.raises(ConfigError):
        SwapSpace(engine, directories)
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert [list(path.iterdir()) for path in directories[:2]] == [[], []]


def test_files_of_dead_runs_are_reclaimed_and_those_of_live_ones_are_not(engine, tmp_path):
    stale, live, other = (tmp_path / name for name in ("deepoffload-a.swap", "deepoffload-b.swap", "mine.swap"))
    for path in (stale, live, other):
        path.write_bytes(b"x" * 4096)
    linked = tmp_path / "deepoffload-c.swap"
    linked.symlink_to(other)
    with open(live) as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        SwapSpace(engine, [tmp_path]).close()
        assert sorted(path.name for path in tmp_path.iterdir()) == [live.name, linked.name, other.name]
    assert reclaim_stale(str(tmp_path)) == [str(live)]


def test_failed_transfers_name_the_swap_file(make_engine, memory, directories):
    engine = make_engine(fault_script=f"op=write nth=2 errno={errno.EIO}")
    with SwapSpace(engine, directories[:1]) as swap:
        extent = swap.allocate(4 * MIB)
        with pytest.raises(IoFailure, match="EIO") as caught:
            swap.write(extent, memory.address).wait()
        assert os.path.dirname(caught.value.filename) == str(directories[0])
        swap.write(extent, memory.address).wait()


def test_two_spaces_on_one_path_do_not_meet(make_engine, memory, tmp_path):
    first, second = (SwapSpace(make_engine(), [tmp_path]) for _ in range(2))
    a, b = first.allocate(MIB), second.allocate(MIB)
    data = fill(memory, MIB)
    first.write(a, memory.address).wait()
    fill(memory, MIB)
    second.write(b, memory.address).wait()
    first.read(a, memory.address).wait()
    assert memory.buffer[:MIB] == data
    first.close()
    second.close()


def files_open_in(directory) -> list[str]:
    links = [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    return [link for link in links if link.startswith(f"{directory}/")]


def test_a_file_that_cannot_be_closed_keeps_no_other_open(make_engine, memory, directories, gate):
    engine = make_engine(fault_script=f"op=write nth=1 {gate.word}")
    swap = SwapSpace(engine, directories)
    first = swap.allocate(4096)
    slow = first.pieces[0].path_index
    ticket = swap.write(first, memory.address)
    with pytest.raises(IoTimeout, match=str(directories[slow])):
        swap.close(timeout_s=0.05)
    assert [bool(files_open_in(path)) for path in directories] == [index == slow for index in range(3)]
    with pytest.raises(ClosedError):
        swap.write(first, memory.address)
    gate.open()
    swap.close()
    ticket.wait()
    assert not any(files_open_in(path) for path in directories)


def test_a_space_nobody_closed_gives_its_descriptors_back(memory, tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    engine = IoEngine()
    swap = SwapSpace(engine, [tmp_path])
    swap.write(swap.allocate(MIB), memory.address)
    del swap, engine
    assert len(os.listdir("/proc/self/fd")) == before
