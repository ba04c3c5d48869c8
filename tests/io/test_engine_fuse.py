"""Errors and silences of a real file system below the kernel: a used-up quota, a server that timed out, and one that
does not answer at all."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deepoffload.errors import BudgetError, IoFailure, IoTimeout
from deepoffload.io.swap_space import SwapSpace

MIB = 1 << 20
LIMIT_BYTES = 2 * MIB
Mount = Callable[[int], "subprocess.Popen[str]"]


@pytest.fixture
def where(tmp_path: Path) -> Path:
    (tmp_path / "fuse").mkdir()
    return tmp_path / "fuse"


@pytest.fixture
def mount(where: Path) -> Iterator[Mount]:
    """Mounts a file system there whose transfers beyond 2 MiB get the errno given."""
    servers: list[subprocess.Popen[str]] = []

    def start(code: int) -> subprocess.Popen[str]:
        program = Path(__file__).with_name("fuse_disk.py")
        server = subprocess.Popen(
            [sys.executable, program, where, str(code), str(LIMIT_BYTES)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        servers.append(server)
        assert server.stdout is not None and server.stderr is not None
        if server.stdout.readline().strip() != "mounted":
            pytest.skip(f"no FUSE file system for us: {server.stderr.read().strip().splitlines()[-1]}")
        return server

    yield start
    for server in servers:
        server.kill()  # what still waits for it gets ENOTCONN
        server.wait()
        for stream in (server.stdout, server.stderr):
            if stream is not None:
                stream.close()
        subprocess.run(["umount", "-l", where], capture_output=True)


@pytest.mark.parametrize("direct", ["preferred", "off"])
@pytest.mark.parametrize(
    ("code", "words"), [(errno.EDQUOT, "quota is used up"), (errno.ETIMEDOUT, "did not answer in time")]
)
def test_an_error_of_the_file_system_is_named_and_spares_the_rest(
    make_engine, memory, backend, where, mount, direct, code, words
):
    mount(code)
    engine = make_engine(backend=backend)
    file = engine.open_file(where / "data", create=True, direct=direct)
    memory.buffer[: 2 * MIB] = os.urandom(2 * MIB)
    good = engine.write(file, memory.address, 2 * MIB, 0)
    bad = engine.write(file, memory.address, MIB, LIMIT_BYTES)
    good.wait(100)
    with pytest.raises(IoFailure, match=words) as caught:
        bad.wait(100)
    assert (caught.value.errno, caught.value.filename) == (code, str(where / "data"))
    assert LIMIT_BYTES <= caught.value.offset < LIMIT_BYTES + MIB
    assert f"{errno.errorcode[code]}" in str(caught.value)
    engine.read(file, memory.address + 2 * MIB, 2 * MIB, 0).wait()
    assert memory.buffer[: 2 * MIB] == memory.buffer[2 * MIB : 4 * MIB]


def test_a_read_that_timed_out_below_is_an_error(make_engine, memory, backend, where, mount):
    mount(errno.ETIMEDOUT)
    engine = make_engine(backend=backend)
    file = engine.open_file(where / "data", create=True)
    os.truncate(where / "data", 2 * LIMIT_BYTES)
    with pytest.raises(IoFailure, match="ETIMEDOUT") as caught:
        engine.read(file, memory.address, 2 * LIMIT_BYTES, 0).wait(100)
    assert caught.value.errno == errno.ETIMEDOUT and caught.value.offset >= LIMIT_BYTES - MIB
    engine.read(file, memory.address, MIB, 0).wait()


def test_a_quota_stops_swap_space_before_anything_is_written(make_engine, memory, where, mount):
    mount(errno.EDQUOT)
    with SwapSpace(make_engine(), [where]) as swap:
        with pytest.raises(BudgetError, match=f"{where}.*quota"):
            swap.reserve(8 * MIB)
        extent = swap.allocate(MIB)
        swap.write(extent, memory.address).wait(100)


def test_a_file_system_that_does_not_answer_hangs_nobody(make_engine, memory, backend, where, tmp_path, mount):
    server = mount(errno.EIO)
    engine = make_engine(backend=backend)
    files = {place: engine.open_file(place / "data", create=True) for place in (where, tmp_path)}
    for file in files.values():
        file.grow(MIB)
    server.send_signal(signal.SIGSTOP)
    memory.buffer[:4] = b"late"
    stuck = engine.write(files[where], memory.address, MIB, 0)
    with pytest.raises(IoTimeout, match="still in flight"):
        stuck.wait(0.2)
    engine.write(files[tmp_path], memory.address, MIB, 0).wait(100)  # another device goes on
    with pytest.raises(IoTimeout, match="does not answer"):
        engine.close(0.2)
    server.send_signal(signal.SIGCONT)
    stuck.wait(100)
    engine.close(100)
    assert (where / "data").read_bytes()[:4] == b"late"
