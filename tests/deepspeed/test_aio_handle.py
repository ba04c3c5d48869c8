"""``AsyncIOBuilder().load().aio_handle``: the bytes that plain Python reads and writes, by the calls of DeepSpeed's own
tests, and an error where DeepSpeed prints a line."""

from __future__ import annotations

import errno
import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepoffload
import deepoffload.deepspeed as deepspeed
from deepoffload.deepspeed.ops.op_builder import AsyncIOBuilder
from deepoffload.errors import ConfigError, IoFailure, UsageError
from tests.support.threads import native_threads, native_threads_left

BLOCK = 1024
NBYTES = 4 * BLOCK


@pytest.fixture
def handle() -> Any:
    assert deepspeed.ops.__compatible_ops__[AsyncIOBuilder.NAME] and AsyncIOBuilder().is_compatible()
    return AsyncIOBuilder().load().aio_handle(BLOCK, 2, True, False, 2)


def tensor(handle: Any, kind: str, nbytes: int = NBYTES) -> Tensor:
    if kind == "locked":
        return handle.new_cpu_locked_tensor(nbytes, torch.empty(0, dtype=torch.uint8))
    return torch.empty(nbytes, dtype=torch.uint8)


def test_what_a_handle_says_of_itself(handle):
    assert (handle.get_block_size(), handle.get_queue_depth(), handle.get_intra_op_parallelism()) == (BLOCK, 2, 2)
    assert handle.get_single_submit() is True and handle.get_overlap_events() is False
    assert deepspeed.ops.aio.AsyncIOBuilder is AsyncIOBuilder
    standard = AsyncIOBuilder().load().aio_handle()
    assert (standard.get_block_size(), standard.get_queue_depth()) == (1 << 20, 128)
    with pytest.raises(ConfigError, match="queue_depth: 0"):
        AsyncIOBuilder().load().aio_handle(queue_depth=0)


@pytest.mark.parametrize("kind", ["ordinary", "locked"])
def test_files_are_read_and_written(handle, kind, tmp_path):
    paths, buffers = [str(tmp_path / str(number)) for number in range(3)], []
    for path in paths:
        Path(path).write_bytes(os.urandom(NBYTES))
        buffers.append(tensor(handle, kind))
        assert handle.async_pread(buffers[-1], path, 0) == 0
    assert handle.wait() == 3 and handle.wait() == 0
    for path, buffer in zip(paths, buffers, strict=True):
        assert bytes(buffer.tolist()) == Path(path).read_bytes()
    assert handle.sync_pwrite(buffers[0], paths[1], 0) == 1
    assert handle.async_pwrite(buffers[2], paths[0]) == 0
    assert handle.pread(buffers[1], paths[1], True, False, 0) == 2  # waits for the one before, too
    assert Path(paths[1]).read_bytes() == bytes(buffers[0].tolist()) == bytes(buffers[1].tolist())
    assert Path(paths[0]).read_bytes() == Path(paths[2]).read_bytes()
    assert [handle.free_cpu_locked_tensor(buffer) for buffer in buffers] == [kind == "locked"] * 3
    assert not handle.free_cpu_locked_tensor(buffers[0])
    assert buffers[0].sum() >= 0  # still there


@pytest.mark.parametrize("sizes", [(1000, 1024, 2048), (4096, 1, 8191)])
@pytest.mark.parametrize("by_number", [False, True])
def test_parts_of_files_at_any_offset(handle, sizes, by_number, tmp_path):
    data = torch.randint(0, 256, (sum(sizes),), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    path, start, back = str(tmp_path / "data"), 0, torch.empty_like(data)
    for nbytes in sizes:
        part = data[start : start + nbytes]
        if by_number:
            file = os.open(path, os.O_DIRECT | os.O_CREAT | os.O_WRONLY)
            assert handle.async_pwrite(buffer=part, fd=file, file_offset=start) == 0 and handle.wait() == 1
            os.close(file)
        else:
            assert handle.async_pwrite(buffer=part, filename=path, file_offset=start) == 0 and handle.wait() == 1
        start += nbytes
        assert Path(path).read_bytes() == bytes(data[:start].tolist())
        assert handle.sync_pread(back[start - nbytes : start], path, start - nbytes) == 1
    assert torch.equal(back, data)
    assert handle.sync_pwrite(torch.zeros(3, dtype=torch.uint8), path, 5) == 1  # what comes behind stays
    assert Path(path).read_bytes() == bytes([*data[:5].tolist(), 0, 0, 0, *data[8:].tolist()])


def test_types_and_graphs_that_have_kept_the_old_values(handle, tmp_path):
    path = str(tmp_path / "data")
    values = torch.randn(3, 5, dtype=torch.bfloat16)
    assert handle.write(values, path, True) == 0
    weight = nn.Parameter(torch.zeros(3, 5, dtype=torch.bfloat16))
    squares = weight.square().sum()
    assert handle.read(weight, path, True) == 0
    assert torch.equal(weight, values)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.backward()
    module = AsyncIOBuilder().load()
    other = torch.empty(5, 3, dtype=torch.bfloat16)
    assert module.aio_write(values, path, 1 << 20, 8, False, False, False) == 0
    assert module.aio_read(other, path, 1 << 20, 8, False, False, False) == 0
    assert torch.equal(other.view(3, 5), values)
    assert module.deepspeed_memcpy(other, torch.ones(15, dtype=torch.bfloat16)) == 0 and bool((other == 1).all())


def test_what_cannot_be_is_an_error_before_anything_happens(handle, nvme_path, tmp_path):
    path = tmp_path / "data"
    path.write_bytes(b"\x07" * 100)
    with pytest.raises(UsageError, match="has 100 bytes, and 64 at 50 are asked for; read 50 there"):
        handle.sync_pread(torch.empty(64, dtype=torch.uint8), str(path), 50)
    with pytest.raises(UsageError, match="file_offset = -1 is negative"):
        handle.sync_pread(torch.empty(4, dtype=torch.uint8), str(path), -1)
    with pytest.raises(UsageError, match="do not lie one after the other"):
        handle.sync_pwrite(torch.empty(4, 4).t(), str(path))
    with pytest.raises(UsageError, match="other values than its bytes"):
        handle.sync_pwrite(torch.tensor([1 + 2j, 3j]).conj(), str(path))
    with pytest.raises(IoFailure, match="ENOENT"):
        handle.async_pread(torch.empty(4), str(tmp_path / "none" / "data"))
    with pytest.raises(IoFailure, match="ENOENT"):
        handle.async_pwrite(torch.empty(4), str(tmp_path / "none" / "data"))
    with pytest.raises(UsageError, match="a file's name or the number"):
        handle.async_pwrite(torch.empty(4))
    with deepoffload.offload_context(host_budget="1MiB", nvme_path=str(nvme_path)):
        model = nn.Linear(8, 8)
    with pytest.raises(UsageError, match="a OffloadedParameter, whose bytes may move"):
        handle.sync_pread(model.weight, str(path))
    assert handle.wait() == 0 and path.read_bytes() == b"\x07" * 100


def test_a_failed_transfer_is_told_after_all_have_ended(handle, tmp_path):
    good, bad = str(tmp_path / "good"), str(tmp_path / "bad")
    values = torch.arange(1000)
    handle.async_pwrite(values, bad, (1 << 62) - 4096)
    handle.async_pwrite(values, good)
    with pytest.raises(IoFailure) as caught:
        handle.wait()
    assert caught.value.errno in (errno.EFBIG, errno.EINVAL) and caught.value.filename == bad
    assert handle.wait() == 0 and handle.sync_pread(values, good) == 1


def test_a_handle_that_goes_ends_its_transfers_and_threads(handle, tmp_path):
    before = len(native_threads())
    other = AsyncIOBuilder().load().aio_handle()
    other.async_pwrite(torch.ones(1 << 20, dtype=torch.uint8), str(tmp_path / "data"))
    del other
    gc.collect()
    assert (tmp_path / "data").read_bytes() == b"\1" * (1 << 20)
    assert native_threads_left(before) == []


def test_memory_that_cannot_be_locked_is_an_error(programs):
    program = (
        "import os, resource, torch\n"
        "from deepoffload.deepspeed.ops.op_builder import AsyncIOBuilder\n"
        "from deepoffload.errors import BudgetError\n"
        "handle = AsyncIOBuilder().load().aio_handle()\n"
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 16, 1 << 16))\n"
        "os.geteuid() or os.seteuid(65534)  # root may lock everything\n"
        "try: handle.new_cpu_locked_tensor(1 << 20, torch.empty(0))\n"
        "except BudgetError as error: print(error)\n"
    )
    said = programs.run(program).stdout
    assert f"does not lock {4 << 20} bytes of memory" in said and "ulimit -l" in said, said
