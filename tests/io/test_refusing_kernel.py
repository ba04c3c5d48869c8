"""System calls that fail from some moment on, always: a seccomp filter in a separate process (seccomp(2))."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

NUMBERS = {
    "x86_64": {"seccomp": 317, "fallocate": 285, "io_getevents": 208, "io_uring_enter": 426, "sync_file_range": 277,
               "madvise": 28, "process_vm_readv": 310, "process_vm_writev": 311},
    "aarch64": {"seccomp": 277, "fallocate": 47, "io_getevents": 4, "io_uring_enter": 426, "sync_file_range": 84,
                "madvise": 233, "process_vm_readv": 270, "process_vm_writev": 271},
}  # fmt: skip

PRELUDE = """
import ctypes, errno, os, struct, sys, time
from deepoffload.errors import *
from deepoffload.io.engine import IoEngine
from deepoffload.native.aio import HostMapping
numbers, directory, backend = eval(sys.argv[1]), sys.argv[2], sys.argv[3]
memory = HostMapping(16 << 20)
memory.buffer[:] = os.urandom(memory.nbytes)

def forbid(name, code, argument=None, value=None):
    # All threads, from now on; argument: only calls in which this one has that value.
    def word(op, k, yes=0, no=0):
        return struct.pack("=HBBI", op, yes, no, k)
    load, equal, answer = 0x20, 0x15, 0x06
    program = word(load, 0) + word(equal, numbers[name], 0, 1 if argument is None else 3)
    if argument is not None:
        program += word(load, 16 + 8 * argument) + word(equal, value, 0, 1)
    program += word(answer, 0x50000 | code) + word(answer, 0x7FFF0000)
    buffer = ctypes.create_string_buffer(program)
    filter = struct.pack("=HxxxxxxQ", len(program) // 8, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    assert libc.syscall(numbers["seccomp"], 1, 1, filter) == 0, os.strerror(ctypes.get_errno())  # TSYNC

def told(call):
    begin = time.monotonic()
    try:
        call()
    except (IoFailure, IoTimeout) as error:
        print(type(error).__name__, int(time.monotonic() - begin < 60), error)

engine = IoEngine(backend=backend)
file = engine.open_file(directory + "/data", create=True)
file.grow(8 << 20)
engine.write(file, memory.address, 8 << 20, 0).wait(100)
"""


def run(body: str, directory: Path, backend: str = "pool") -> list[str]:
    command = [sys.executable, "-c", PRELUDE + textwrap.dedent(body), repr(NUMBERS[platform.machine()])]
    done = subprocess.run([*command, str(directory), backend], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_an_allocation_that_is_always_interrupted_ends(tmp_path):
    (line,) = run('forbid("fallocate", errno.EINTR); told(lambda: file.grow(64 << 20))', tmp_path)
    assert line.startswith("IoFailure 1 ") and "allocate failed with EINTR" in line
    assert os.path.getsize(tmp_path / "data") == 8 << 20


def test_a_write_back_that_is_always_interrupted_ends(tmp_path):
    body = 'forbid("sync_file_range", errno.EINTR); told(engine.write(file, memory.address, 100, 0).wait)'
    (line,) = run(body, tmp_path)
    assert line.startswith("IoFailure 1 ") and "EINTR" in line and "again and again" in line


@pytest.mark.parametrize("backend", ["libaio"], indirect=True)
@pytest.mark.parametrize("code, answer", [("EPERM", "errno.EPERM"), ("EINTR", "errno.EINTR"), ("EAGAIN", "0")])
def test_a_queue_that_no_longer_says_what_is_done(tmp_path, backend, code, answer):
    """Waits end with the reason, what is queued fails, and nobody takes memory for free that may be written to.
    "Nothing is done" is no answer to a call that waits for something."""
    body = f"""
    forbid("io_getevents", {answer})
    ticket = engine.read(file, memory.address, 8 << 20, 0)
    told(ticket.wait)
    told(ticket.wait)
    told(lambda: engine.write(file, memory.address, 4096, 0))
    told(file.close)
    told(engine.close)
    print(ticket.done())
    """
    waited, again, refused, closed, ended, done = run(body, tmp_path, backend)
    for line in (waited, again, closed, ended):
        assert line.startswith("IoTimeout 1 ") and f"no longer says what is done ({code}" in line, line
    assert f"{tmp_path}/data" in waited and "memory in use" in waited
    assert refused.startswith("IoFailure 1 ") and f"({code}" in refused and "aio.backend" in refused
    assert done == "False"


@pytest.mark.parametrize("backend", ["io_uring"], indirect=True)
def test_a_ring_that_cannot_be_waited_for_is_looked_at(tmp_path, backend):
    """Completions lie in shared memory, so they are found all the same."""
    body = """
    forbid("io_uring_enter", errno.EPERM, 3, 1)  # IORING_ENTER_GETEVENTS
    engine.read(file, memory.address + (8 << 20), 8 << 20, 0).wait(100)
    print(memory.buffer[: 8 << 20] == memory.buffer[8 << 20 : 16 << 20])
    forbid("io_uring_enter", errno.EPERM)
    told(engine.read(file, memory.address, 8 << 20, 0).wait)
    engine.close()
    """
    same, refused = run(body, tmp_path, backend)
    assert same == "True" and refused.startswith("IoFailure 1 ") and "read failed with EPERM" in refused


@pytest.mark.parametrize("forbidden", [["madvise"], ["madvise", "process_vm_readv", "process_vm_writev"]])
def test_memory_that_is_not_there_is_noticed_by_old_kernels_and_in_sandboxes(tmp_path, forbidden):
    """Linux before 5.14 does not know MADV_POPULATE_READ; some containers forbid process_vm_readv."""
    body = f"""
    address = 4096  # nothing is ever mapped there: vm.mmap_min_addr
    for name in {forbidden}:
        forbid(name, errno.EINVAL if name == "madvise" else errno.EPERM)
    engine.write(file, memory.address + 1, 3 << 20, 0).wait(100)
    engine.read(file, memory.address + (8 << 20) + 3, 3 << 20, 0).wait(100)
    print(memory.buffer[1 : 1 + (3 << 20)] == memory.buffer[(8 << 20) + 3 : (11 << 20) + 3])
    told(engine.write(file, address + 1, 3 << 20, 0).wait)
    told(engine.read(file, address + 1, 3 << 20, 0).wait)
    """
    same, write, read = run(body, tmp_path)
    assert same == "True"
    assert "write failed with EFAULT" in write and "read failed with EFAULT" in read
