"""Host mappings and checksums of the native I/O module."""

from __future__ import annotations

import errno
import itertools
import os
import random
import resource
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepoffload.errors import BudgetError
from deepoffload.native.aio import HostMapping, ffi, lib, round_up
from tests.support.memory_watch import resident_bytes

HUGE_BYTES = 2 << 20


def smaps_flags(address: int) -> set[str]:
    inside = False
    with open("/proc/self/smaps") as smaps:
        for line in smaps:
            head = line.split()[0]
            if "-" in head:
                start, end = (int(part, 16) for part in head.split("-"))
                inside = start <= address < end
            elif inside and head == "VmFlags:":
                return set(line.split()[1:])
    raise AssertionError(f"{address:#x} is not mapped")


def test_mapping_is_aligned_lazy_and_stays_out_of_children():
    before = resident_bytes()
    with HostMapping(64 << 20) as mapping:
        assert mapping.address % HUGE_BYTES == 0
        assert mapping.nbytes == 64 << 20
        assert resident_bytes() - before < 8 << 20, "memory was touched before its user touched it"
        assert {"dc", "dd", "hg"} <= smaps_flags(mapping.address)  # MADV_DONTFORK, MADV_DONTDUMP, MADV_HUGEPAGE
        mapping.buffer[:4] = b"abcd"
        mapping.buffer[-4:] = b"wxyz"
        assert bytes(mapping.buffer[:4]) == b"abcd"


def test_mapping_gets_huge_pages_where_the_kernel_gives_them():
    with open("/sys/kernel/mm/transparent_hugepage/enabled") as enabled:
        if "[never]" in enabled.read():
            pytest.skip("transparent huge pages are off")
    with HostMapping(16 << 20) as mapping:
        assert mapping.huge_page_bytes() == 0
        ffi.memmove(ffi.cast("char *", mapping.address), b"\1" * mapping.nbytes, mapping.nbytes)
        assert mapping.huge_page_bytes() % HUGE_BYTES == 0


def test_mapping_rounds_to_pages_and_closes_twice():
    mapping = HostMapping(1)
    assert mapping.nbytes == 4096
    mapping.close()
    mapping.close()
    with pytest.raises(BudgetError, match="closed"):
        _ = mapping.buffer


@pytest.mark.parametrize("nbytes", [0, -1, 1 << 60])
def test_impossible_mapping_is_refused_with_the_size(nbytes):
    with pytest.raises(BudgetError, match=f"map {nbytes} bytes"):
        HostMapping(nbytes)


def test_locking_beyond_the_limit_is_reported_and_harmless():
    program = (
        "import resource, os\n"
        "from deepoffload.native.aio import HostMapping\n"
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))\n"
        "os.geteuid() or os.seteuid(65534)  # root may lock everything\n"
        "big, small = HostMapping(8 << 20, lock=True), HostMapping(4096, lock=True)\n"
        "big.buffer[:3] = b'abc'; print(big.lock_errno, small.lock_errno)"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=os.getcwd())
    big, small = map(int, out.stdout.split())
    assert big != 0 and small == 0
    assert resource.getrlimit(resource.RLIMIT_MEMLOCK)


def test_closing_in_a_forked_child_unmaps_nothing_of_it():
    mapping = HostMapping(4 << 20)
    mapping.buffer[:1] = b"p"
    child = os.fork()
    if child == 0:
        mapping.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert bytes(mapping.buffer[:1]) == b"p"
    mapping.close()


def crc_kinds() -> list[str]:
    names = (lib.doff_crc32c_kind(index) for index in itertools.count())
    return [ffi.string(name).decode() for name in itertools.takewhile(lambda name: name != ffi.NULL, names)]


def crc_of(data: bytes, block_bytes: int, kind: str | None = None) -> list[int]:
    buffer = ffi.from_buffer("char[]", data) if data else ffi.new("char[1]")
    address, count = int(ffi.cast("uintptr_t", buffer)), -(-len(data) // block_bytes)
    sums = ffi.new("uint32_t[]", count + 1)
    if kind is None:
        lib.doff_crc32c_blocks(address, len(data), block_bytes, sums)
    else:
        assert lib.doff_crc32c_blocks_by(kind.encode(), address, len(data), block_bytes, sums) == 0
    return list(sums)[:count]


def crc_reference(data: bytes) -> int:
    """Bit by bit, from the polynomial."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def test_crc_known_values():
    """RFC 3720, appendix B.4."""
    assert crc_of(b"123456789", 64) == [0xE3069283]
    assert crc_of(bytes(32), 32) == [0x8A9136AA]
    assert crc_of(b"\xff" * 32, 32) == [0x62A8AB43]
    assert crc_of(bytes(range(32)), 32) == [0x46DD794E]


@given(data=st.binary(max_size=3000), block_bytes=st.integers(1, 700))
def test_crc_of_blocks_by_every_kind_and_definition(data, block_bytes):
    expected = [crc_reference(data[start : start + block_bytes]) for start in range(0, len(data), block_bytes)]
    assert crc_of(data, block_bytes) == expected
    for kind in crc_kinds():
        assert crc_of(data, block_bytes, kind) == expected, kind


def test_crc_of_long_blocks_is_that_of_the_table():
    data = random.Random(0).randbytes((1 << 20) + 77)
    for block_bytes in (len(data), 1 << 18, 4096 + 256, 640):
        expected = crc_of(data, block_bytes, "table")
        for kind in crc_kinds():
            assert crc_of(data, block_bytes, kind) == expected, (kind, block_bytes)


def test_crc_kind_that_this_cpu_lacks():
    assert lib.doff_crc32c_blocks_by(b"abacus", 0, 0, 1, ffi.NULL) == -errno.ENOTSUP


def test_round_up():
    assert [round_up(n) for n in (0, 1, 4096, 4097)] == [0, 4096, 4096, 8192]
