"""What DeepSpeed's ``aio_handle`` gets wrong: it reports success for half a transfer, or ends the process.

Here each is right or a clear error. A write that a file size limit cuts short is in test_engine_real_faults.py, memory
that cannot be locked in tests/io/test_native_memory.py.
"""

from __future__ import annotations

import errno
import os

import pytest

from deepoffload.errors import IoFailure

BYTES = 1 << 20
BEYOND = b"\x5a" * 8192


@pytest.fixture
def file(make_engine, backend, tmp_path):
    (tmp_path / "data").write_bytes(os.urandom(BYTES))
    return make_engine(backend=backend).open_file(tmp_path / "data")


@pytest.mark.parametrize("shift", [1, 4, 512, 2048])
@pytest.mark.parametrize("nbytes", [1, 511, 4095, 4097, BYTES // 2 + 100, BYTES - 4096])
def test_an_unaligned_view_gets_its_bytes_and_no_others(file, memory, shift, nbytes):
    content = bytearray(open(file.path, "rb").read())
    memory.buffer[: shift + nbytes + 8192] = b"\x5a" * (shift + nbytes + 8192)
    file.engine.read(file, memory.address + shift, nbytes, 4096).wait()
    assert memory.buffer[shift : shift + nbytes] == content[4096 : 4096 + nbytes]
    assert memory.buffer[:shift] == BEYOND[:shift] and memory.buffer[shift + nbytes : shift + nbytes + 8192] == BEYOND
    data = memory.buffer[shift : shift + nbytes] = os.urandom(nbytes)
    file.engine.write(file, memory.address + shift, nbytes, 4096).wait()
    content[4096 : 4096 + nbytes] = data
    assert open(file.path, "rb").read() == content


@pytest.mark.parametrize("offset", [BYTES - 4096, BYTES - 100, BYTES, BYTES + 4096, BYTES << 20])
def test_a_read_past_the_end_is_an_error(file, memory, offset):
    with pytest.raises(IoFailure, match="truncated") as caught:
        file.engine.read(file, memory.address, 8192, offset).wait(100)
    assert caught.value.errno == errno.ENODATA and caught.value.filename == file.path
    # Of the pieces an unaligned read is cut into, the one that failed first, and all beyond the end may.
    assert offset <= caught.value.offset < offset + 8192
    file.engine.read(file, memory.address, BYTES, 0).wait()


def test_waiting_when_nothing_is_pending_is_no_fault(file, memory):
    good = file.engine.read(file, memory.address, BYTES, 0)
    bad = file.engine.read(file, memory.address, BYTES, BYTES)
    file.engine.read(file, memory.address, 0, 0).wait()
    for _ in range(3):
        good.wait()
        with pytest.raises(IoFailure, match="ENODATA"):
            bad.wait()
    file.engine.close()
    file.engine.close()
    good.wait()
    with pytest.raises(IoFailure, match="ENODATA"):
        bad.wait()
    assert good.done() and bad.done() and not good.cancel()
