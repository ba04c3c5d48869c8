"""Memory of other processes: what is read is right, and what cannot be read is an error of its own class.

A process may read itself in this way, so most of it needs no other one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deepoffload.native.aio import HostMapping
from deepoffload.native.neighbour import (
    BOARD_SLOTS,
    YAMA_SCOPE_PATH,
    Board,
    NeighbourMemory,
    allow_readers,
    readers_need_leave,
)
from tests.support.failing_calls import run_before_libc

PAGE = 4096


@pytest.fixture
def memory() -> Iterator[HostMapping]:
    with HostMapping(4 * PAGE) as mapping:
        yield mapping


@pytest.fixture
def board() -> Board:
    return Board()


@pytest.fixture
def itself(board: Board) -> NeighbourMemory:
    return NeighbourMemory(board.address)


def error_of(call: Any, *arguments: Any) -> str:
    with pytest.raises(OSError) as caught:
        call(*arguments)
    return errno.errorcode[caught.value.errno or 0]


def test_bytes_are_read_from_any_address_to_any_address(itself, memory):
    memory.buffer[:PAGE] = os.urandom(PAGE)
    itself.read(memory.address + 13, memory.address + 2 * PAGE + 5, 1001)
    assert memory.buffer[2 * PAGE + 5 : 2 * PAGE + 5 + 1001] == memory.buffer[13 : 13 + 1001]
    assert memory.buffer[2 * PAGE + 5 + 1001] == b"\0"


def test_memory_that_ends_before_the_bytes_do_is_an_error(itself):
    with HostMapping(PAGE, spare=PAGE) as mapping, HostMapping(2 * PAGE) as target:
        assert mapping.spare_bytes == PAGE
        mapping.buffer[:] = b"x" * PAGE
        assert error_of(itself.read, mapping.address + PAGE - 10, target.address, 11) == "EFAULT"
        assert error_of(itself.read, mapping.address + PAGE, target.address, 1) == "EFAULT"
        assert error_of(itself.read, target.address, mapping.address + PAGE - 1, 2) == "EFAULT"
        itself.read(mapping.address + PAGE - 10, target.address, 10)


def test_short_and_interrupted_reads_are_continued_and_empty_ones_are_errors(tmp_path):
    source = Path(__file__).with_name("vm_read_faults.c")
    assert run_before_libc(source, tmp_path, "tests.io.vm_read_faults", timeout_s=100) == "all right\n"


def test_a_process_that_has_gone_is_named_as_that(board, memory):
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as child:
        gone = NeighbourMemory(board.address._replace(pid=child.pid))
        child.kill()
    with pytest.raises(ProcessLookupError):
        gone.read(memory.address, memory.address, 1)
    with pytest.raises(ProcessLookupError):
        gone.await_offer(1, 1000)


def test_another_process_with_the_same_number_is_not_read(board, memory):
    """A number that is given to another process: its token differs, or there is no memory where the token was."""
    other = NeighbourMemory(Board().address._replace(pid=os.getpid(), address=board.address.address))
    for call in (other.probe, lambda: other.read(memory.address, memory.address + PAGE, 1)):
        assert error_of(call) == "ESTALE"
    assert error_of(other.await_offer, 1, 1000) == "ESTALE"
    nowhere = NeighbourMemory(board.address._replace(address=PAGE))
    assert error_of(nowhere.probe) == "EFAULT"


def test_offers_have_their_own_numbers(board, itself):
    for number in (1, 2, BOARD_SLOTS, BOARD_SLOTS + 2):
        board.offer(number, 1000 + number, number)
    assert itself.await_offer(1, 0) == (1001, 1)
    assert itself.await_offer(BOARD_SLOTS, 0) == (1000 + BOARD_SLOTS, BOARD_SLOTS)
    assert itself.await_offer(BOARD_SLOTS + 2, 0) == (1002 + BOARD_SLOTS, BOARD_SLOTS + 2)
    assert error_of(itself.await_offer, 2, 0) == "EPROTO"  # its slot has a later one
    with pytest.raises(TimeoutError):
        itself.await_offer(3, 0)


def test_waiting_ends_when_the_offer_comes_or_the_limit_is_over(board, itself):
    begin = time.monotonic()
    with pytest.raises(TimeoutError):
        itself.await_taken(1, 50)
    assert time.monotonic() - begin >= 0.05
    threading.Timer(0.05, board.taken, (1,)).start()
    itself.await_taken(1, 60000)
    threading.Timer(0.05, board.offer, (7, 4096, 64)).start()
    assert itself.await_offer(7, 60000) == (4096, 64)


def test_a_closed_board_ends_waiting_and_withdraws_what_was_offered(board, itself, memory):
    board.offer(1, memory.address, 64)
    board.taken(1)
    assert itself.await_offer(1, 0) == (memory.address, 64)
    threading.Timer(0.05, board.close).start()
    assert error_of(itself.await_offer, 2, 60000) == "ESHUTDOWN"
    assert error_of(itself.await_taken, 2, 60000) == "ESHUTDOWN"
    assert error_of(itself.await_offer, 1, 0) == "ESHUTDOWN"
    assert error_of(itself.read, memory.address, memory.address + PAGE, 64) == "ESHUTDOWN"
    itself.await_taken(1, 0)


def test_bytes_that_change_while_they_are_read_are_never_taken_once_the_board_is_closed():
    """Its owner closes the board and uses the memory for something else. Reads that ended well have the old bytes."""
    nbytes = 1 << 20
    with HostMapping(nbytes) as source, HostMapping(nbytes) as target:
        for turn in range(30):
            board = Board()
            neighbour = NeighbourMemory(board.address)
            source.buffer[:] = b"a" * nbytes

            def close_and_reuse(board: Board = board, after_s: float = turn * 50e-6) -> None:
                time.sleep(after_s)
                board.close()
                source.buffer[:] = b"b" * nbytes

            owner = threading.Thread(target=close_and_reuse)
            owner.start()
            with contextlib.suppress(OSError):
                while True:
                    neighbour.read(source.address, target.address, nbytes)
                    assert bytes(target.buffer).count(b"a") == nbytes
            owner.join()


def test_a_stopped_process_can_be_read(board):
    """Its memory does not go away while it does nothing."""
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    try:
        os.kill(child, signal.SIGSTOP)
        os.waitpid(child, os.WUNTRACED)
        stopped = NeighbourMemory(board.address._replace(pid=child))
        stopped.probe()
        with pytest.raises(TimeoutError):
            stopped.await_offer(1, 20)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_leave_is_given_where_yama_asks_for_it():
    if os.path.exists(YAMA_SCOPE_PATH):
        allow_readers(True)
        allow_readers(False)
    else:
        assert not readers_need_leave()
        assert error_of(allow_readers, True) == "EINVAL"
