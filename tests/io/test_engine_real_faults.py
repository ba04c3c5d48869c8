"""Faults that the kernel makes itself: limits, full and shrunken files, forks, signals.

Those that could end the process run in a separate one.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from deepoffload.errors import ClosedError, IoFailure
from deepoffload.io.engine import IoEngine
from deepoffload.native.aio import HostMapping
from tests.support.disks import tmpfs
from tests.support.waiting import wait_until

PRELUDE = """
import errno, os, resource, signal, sys, threading, time
from deepoffload.errors import *
from deepoffload.io.engine import IoEngine
from deepoffload.io.swap_space import SwapSpace
from deepoffload.native.aio import HostMapping
from tests.support.threads import native_threads_left
backend, directory = sys.argv[1:]
memory = HostMapping(16 << 20)
memory.buffer[:] = os.urandom(memory.nbytes)
engine = IoEngine(backend=backend)
"""


def start(body: str, backend: str, directory: Path) -> subprocess.Popen[str]:
    program = PRELUDE + textwrap.dedent(body)
    return subprocess.Popen(
        [sys.executable, "-c", program, backend, str(directory)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )


def run(body: str, backend: str, directory: Path) -> str:
    process = start(body, backend, directory)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    return out


@pytest.mark.parametrize("direct", ["preferred", "off"])
def test_a_file_size_limit_is_an_error_not_a_short_success(backend, direct, tmp_path):
    out = run(
        f"""
        file = engine.open_file(directory + "/data", create=True, direct={direct!r})
        resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20 | 100, 3 << 20 | 100))  # not aligned on purpose
        ticket = engine.write(file, memory.address, 8 << 20, 0)
        try:
            ticket.wait(100)
        except IoFailure as failure:
            print(errno.errorcode[failure.errno], failure.offset, failure.filename == file.path)
        engine.write(file, memory.address, 1 << 20, 0).wait()
        print("written")
        try:
            file.grow(8 << 20)
        except IoFailure as failure:
            print(errno.errorcode[failure.errno])
        engine.close()
        """,
        backend,
        tmp_path,
    )
    first, after, grow = out.splitlines()
    name, offset, same = first.split()
    assert (name, same) == ("EFBIG", "True")
    assert (3 << 20) <= int(offset) < (8 << 20)
    assert after == "written"
    assert grow == "EFBIG"


@pytest.mark.parametrize("direct", ["preferred", "off"])
def test_a_file_truncated_under_us_is_an_error(make_engine, memory, backend, direct, tmp_path):
    engine = make_engine(backend=backend)
    file = engine.open_file(tmp_path / "data", create=True, direct=direct)
    file.grow(8 << 20)
    engine.read(file, memory.address, 8 << 20, 0).wait()
    os.truncate(tmp_path / "data", (3 << 20) + 1000)
    with pytest.raises(IoFailure, match="truncated") as caught:
        engine.read(file, memory.address, 8 << 20, 0).wait(100)
    assert caught.value.errno == errno.ENODATA
    assert (3 << 20) <= caught.value.offset < (8 << 20)
    engine.read(file, memory.address, 3 << 20, 0).wait()
    engine.read(file, memory.address, (3 << 20) + 1000, 0).wait()


def test_a_file_removed_under_us_goes_on_working(make_engine, memory, backend, tmp_path):
    engine = make_engine(backend=backend)
    file = engine.open_file(tmp_path / "data", create=True)
    file.grow(1 << 20)
    os.unlink(tmp_path / "data")
    memory.buffer[:4] = b"kept"
    engine.write(file, memory.address, 1 << 20, 0).wait(100)
    memory.buffer[:4] = bytes(4)
    engine.read(file, memory.address, 1 << 20, 0).wait(100)
    assert bytes(memory.buffer[:4]) == b"kept"


@pytest.fixture
def small_disk(tmp_path):
    """A tmpfs of 4 MiB, where we may mount one."""
    with tmpfs(tmp_path / "small", 4) as where:
        yield where


def test_a_disk_that_fills_up(make_engine, memory, backend, small_disk):
    engine = make_engine(backend=backend)
    file = engine.open_file(small_disk / "data", create=True)
    assert not file.direct and file.direct_errno == errno.EOPNOTSUPP
    with pytest.raises(IoFailure, match="ENOSPC") as caught:
        engine.write(file, memory.address, 8 << 20, 0).wait(100)
    assert 0 <= caught.value.offset < 8 << 20  # pieces in flight together: any of them may be the first refused
    os.truncate(small_disk / "data", 0)  # which pieces have their blocks, and so the size, is a matter of chance
    with pytest.raises(IoFailure, match="ENOSPC"):
        file.grow(8 << 20)
    engine.write(file, memory.address, 1 << 20, 0).wait()
    file.close()


@pytest.mark.parametrize("devices", [1, 2])
def test_each_device_has_a_queue_depth_of_its_own(make_engine, memory, backend, tmp_path, small_disk, gate, devices):
    engine = make_engine(backend=backend, queue_depth=3, block_bytes=4096, fault_script=f"op=write {gate.word}")
    places = [tmp_path / "one", (tmp_path if devices == 1 else small_disk) / "two"]
    files = [engine.open_file(place, create=True) for place in places]
    for file in files:
        file.grow(64 << 10)
    tickets = [engine.write(file, memory.address, 32 << 10, 0) for file in files]
    wait_until(lambda: engine.stats()["chunks_in_flight"] == 3 * devices)
    gate.open()
    for ticket in tickets:
        ticket.wait(100)
    assert engine.stats()["chunks_in_flight_max"] == 3 * devices


def test_required_direct_io_is_refused_where_there_is_none(make_engine, small_disk):
    engine = make_engine()
    with pytest.raises(IoFailure, match="open failed"):
        engine.open_file(small_disk / "data", create=True, direct="required")
    assert list(small_disk.iterdir()) == []


def test_a_read_only_file_cannot_be_written(make_engine, memory, backend, tmp_path):
    (tmp_path / "data").write_bytes(b"x" * 5000)
    engine = make_engine(backend=backend)
    file = engine.open_file(tmp_path / "data", readonly=True)
    engine.read(file, memory.address, 5000, 0).wait()
    assert bytes(memory.buffer[:5000]) == b"x" * 5000
    with pytest.raises(IoFailure, match="EBADF"):
        engine.write(file, memory.address, 4096, 0).wait(100)


@pytest.mark.parametrize(("name", "match"), [("missing", "ENOENT"), (".", "EISDIR"), ("missing/data", "ENOENT")])
def test_what_cannot_be_opened(make_engine, tmp_path, name, match):
    with pytest.raises(IoFailure, match=match):
        make_engine().open_file(tmp_path / name)


def test_a_locked_file_is_refused_until_closed(make_engine, tmp_path):
    first, second = make_engine(), make_engine()
    file = first.open_file(tmp_path / "data", create=True, lock=True)
    with pytest.raises(IoFailure, match="EAGAIN|EWOULDBLOCK"):
        second.open_file(tmp_path / "data", lock=True)
    assert (tmp_path / "data").exists(), "a refused open must not remove what it did not create"
    file.close()
    second.open_file(tmp_path / "data", lock=True).close()


def test_descriptors_are_given_back(make_engine, tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    engine = make_engine()
    inside = len(os.listdir("/proc/self/fd"))
    for number in range(300):  # more than the table holds at once
        engine.open_file(tmp_path / str(number), create=True, unlink=True).close()
    assert len(os.listdir("/proc/self/fd")) == inside
    engine.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_forked_child_has_no_part_in_it(make_engine, memory, backend, tmp_path, gate):
    engine = make_engine(backend=backend, fault_script=f"op=write {gate.word}")
    file = engine.open_file(tmp_path / "data", create=True)
    file.grow(1 << 20)
    ticket = engine.write(file, memory.address, 1 << 20, 0)
    child = os.fork()
    if child == 0:
        try:
            assert not ticket.done() and not ticket.cancel()
            calls = (
                lambda: ticket.wait(1),
                lambda: engine.read(file, memory.address, 1, 0),
                lambda: file.grow(2 << 20),
            )
            for call in calls:
                try:
                    call()
                    os._exit(3)
                except ClosedError as error:
                    assert "parent" in str(error)
            file.close()
            engine.close()
            del ticket
            os._exit(0)
        except BaseException:
            os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    gate.open()
    ticket.wait(100)
    engine.read(file, memory.address, 4096, 0).wait()


SWAP = """
swap = SwapSpace(engine, [directory])
extents = [swap.allocate(8 << 20) for _ in range(4)]
def forever():
    for number in range(1 << 30):
        tickets = [swap.write(extent, memory.address) for extent in extents]
        if number == 1: print("ready", flush=True)
        for ticket in tickets: ticket.wait()
"""


def test_kill_9_leaves_no_file(backend, tmp_path):
    process = start(SWAP + "forever()", backend, tmp_path)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    assert list(tmp_path.iterdir()) == [], "the file has no name while it is used"
    process.kill()
    process.communicate(timeout=200)
    assert process.returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_ends_a_wait_and_everything_behind_it(backend, tmp_path):
    body = """
    try:
        forever()
    except KeyboardInterrupt:
        swap.close(); engine.close()
        print(native_threads_left())
    """
    process = start(SWAP + textwrap.dedent(body), backend, tmp_path)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert out == "[]\n"
    assert list(tmp_path.iterdir()) == []


def test_no_python_runs_when_a_ticket_ends(make_engine, memory, backend, tmp_path):
    """Ctrl-C that comes there would be written to stderr and lost."""
    engine = make_engine(backend=backend)
    file = engine.open_file(tmp_path / "data", create=True)
    tickets = [engine.write(file, memory.address, 4096, 0)]
    tickets[0].wait()
    frames = []
    sys.setprofile(lambda frame, event, argument: frames.append(frame.f_code.co_name) if event == "call" else None)
    tickets.clear()
    sys.setprofile(None)
    assert frames == []


def test_ctrl_c_reaches_a_wait_for_a_slow_disk(tmp_path):
    body = """
    looked_at, opened_by = os.pipe()
    engine = IoEngine(backend="pool", fault_script=f"op=write gate={looked_at}")
    file = engine.open_file(directory + "/data", create=True)
    ticket = engine.write(file, memory.address, 4096, 0)
    try:
        print("ready", flush=True)
        ticket.wait()
    except KeyboardInterrupt:
        print("interrupted", ticket.done())
    os.write(opened_by, b"x")
    """
    process = start(body, "pool", tmp_path)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert out == "interrupted False\n"


def test_an_engine_nobody_closed_does_not_hang_the_exit(backend, tmp_path):
    body = """
    file = engine.open_file(directory + "/data", create=True)
    ticket = engine.write(file, memory.address, 16 << 20, 0)
    keep = [engine, ticket]
    """
    run(body, backend, tmp_path)


def test_many_threads_submit_wait_and_cancel(backend, tmp_path):
    import threading

    with IoEngine(backend=backend, queue_depth=4, block_bytes=16 << 10) as engine, HostMapping(8 << 20) as memory:
        file = engine.open_file(tmp_path / "data", create=True)
        file.grow(8 << 20)
        problems: list[BaseException] = []

        def work(number: int) -> None:
            try:
                base = number << 20
                for turn in range(30):
                    memory.buffer[base : base + 100_000] = bytes([turn * 8 + number]) * 100_000
                    engine.write(file, memory.address + base, 100_000, base).wait(30)
                    engine.read(file, memory.address + base + (512 << 10), 100_000, base).cancel()
                    engine.read(file, memory.address + base + (256 << 10), 100_000, base).wait(30)
                    assert memory.buffer[base + (256 << 10)] == bytes([turn * 8 + number])
            except BaseException as problem:
                problems.append(problem)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        file.close(30)
        assert problems == []


def test_memory_that_is_not_there_is_an_error_of_its_request(backend, tmp_path):
    """Unaligned, so that it is copied: EFAULT, as of a direct transfer, where a copy alone would end the process."""
    out = run(
        """
        import ctypes, mmap
        libc = ctypes.CDLL(None, use_errno=True)
        file = engine.open_file(directory + "/data", create=True)
        file.grow(8 << 20)
        engine.write(file, memory.address, 8 << 20, 0).wait(100)
        address = 4096  # nothing is ever mapped there: vm.mmap_min_addr
        holes = HostMapping(4 << 20)
        assert libc.munmap(ctypes.c_void_p(holes.address + (1 << 20)), 1 << 20) == 0
        closed = HostMapping(4 << 20)
        assert libc.mprotect(ctypes.c_void_p(closed.address + (1 << 20)), 1 << 20, mmap.PROT_READ) == 0
        for at, start in (
            (address + 1, engine.write), (address + 1, engine.read),
            (holes.address + 1, engine.write), (holes.address + 1, engine.read),
            (closed.address + 1, engine.read), (1, engine.write), (4095, engine.read),
        ):
            try:
                start(file, at, 3 << 20, 0).wait(100)
            except IoFailure as failure:
                print(errno.errorcode[failure.errno], 0 <= failure.offset < 3 << 20, "not mapped" in str(failure))
        engine.write(file, closed.address + 1, 3 << 20, 4 << 20).wait()
        print("written")
        engine.read(file, memory.address + 1, 8 << 20, 0).wait()
        print("read")
        engine.close()
        """,
        backend,
        tmp_path,
    )
    assert out.splitlines() == ["EFAULT True True"] * 7 + ["written", "read"]
