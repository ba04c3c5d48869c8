"""``aio.verify`` in training: a bit that flips in the swap file ends the step with an error that says where."""

from __future__ import annotations

import errno
import os

import pytest
import torch
from torch import nn

import deepoffload
from deepoffload.errors import IoFailure


def flip_everywhere(directory) -> None:
    """A bit in every 64 KiB of the swap file there."""
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    link = next(link for link in links if os.path.islink(link) and os.readlink(link).startswith(f"{directory}/"))
    file = os.open(link, os.O_RDWR)
    for offset in range(0, os.fstat(file).st_size, 64 << 10):
        (byte,) = os.pread(file, 1, offset)
        os.pwrite(file, bytes([byte ^ 16]), offset)
    os.fsync(file)
    os.close(file)


def test_a_flipped_bit_ends_the_step_with_its_place(tmp_path):
    torch.manual_seed(0)
    config = {"host_budget": 12 << 20, "nvme_path": str(tmp_path), "nvme_budget": "1GiB", "aio": {"verify": True}}
    context = deepoffload.offload_context(config, precision="fp32")
    with context:
        model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        model(torch.ones(2, 512)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step()
    assert context.engine.stats()["disk_bytes_read"] > 0
    flip_everywhere(tmp_path)
    with pytest.raises(IoFailure, match="EBADMSG.*Checksum 0x.* was read where 0x.* was written") as caught:
        for _ in range(2):
            step()
    assert caught.value.errno == errno.EBADMSG and os.path.dirname(caught.value.filename) == str(tmp_path)
    assert caught.value.offset % 4096 == 0 and 0 < caught.value.nbytes <= 256 << 10
    context.engine.close()
