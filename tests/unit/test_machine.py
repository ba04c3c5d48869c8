"""Measuring the machine: the real one, and file trees laid out as the kernel lays them out."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from deepoffload.machine import MemoryLimit, measure, memory_limits, physical_bytes, usable_cores

MIB = 1 << 20


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_this_machine(tmp_path):
    machine = measure([str(tmp_path)])
    assert 0 < machine.memory_available_bytes <= machine.memory_total_bytes
    assert 1 <= machine.cores <= len(os.sched_getaffinity(0))
    assert machine.disks[0].path == str(tmp_path) and machine.disks[0].free_bytes > 0


def test_cgroup_v2_counts_every_ancestor_and_frees_the_cache(tmp_path):
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/a/b/memory.max": "max\n",
            "sys/fs/cgroup/a/b/memory.current": "1\n",
            "sys/fs/cgroup/a/memory.max": f"{100 * MIB}\n",
            "sys/fs/cgroup/a/memory.current": f"{80 * MIB}\n",
            "sys/fs/cgroup/a/memory.stat": f"anon 5\ninactive_file {30 * MIB}\nslab_reclaimable {10 * MIB}\n",
            "sys/fs/cgroup/a/b/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/a/cpu.max": "max 100000\n",
        },
    )
    assert memory_limits(root) == [MemoryLimit(100 * MIB, 60 * MIB)]
    assert usable_cores(root) == min(2, len(os.sched_getaffinity(0)))
    machine = measure(root=str(root))
    assert (machine.memory_total_bytes, machine.memory_available_bytes) == (100 * MIB, 60 * MIB)


def test_cgroup_v2_in_a_container_whose_path_is_the_hosts(tmp_path):
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/docker/0123\n",
            "sys/fs/cgroup/memory.max": f"{64 * MIB}",
            "sys/fs/cgroup/memory.current": f"{70 * MIB}",
            "sys/fs/cgroup/cpu.max": "5000 100000",
        },
    )
    assert memory_limits(root) == [MemoryLimit(64 * MIB, 0)]
    assert usable_cores(root) == 1


def test_cgroup_v1(tmp_path):
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/job\n3:cpu,cpuacct:/job\n1:name=systemd:/\n",
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{50 * MIB}\n",
            "sys/fs/cgroup/memory/job/memory.usage_in_bytes": f"{20 * MIB}\n",
            "sys/fs/cgroup/memory/job/memory.stat": f"cache 1\ntotal_inactive_file {5 * MIB}\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "1\n",
            "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "100000\n",
            "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
    )
    assert memory_limits(root) == [MemoryLimit(50 * MIB, 35 * MIB)]
    assert usable_cores(root) == 1


def test_memory_that_the_machine_may_come_to_have(tmp_path):
    """Blocks of 128 MiB of which one is not in use yet, and pages that a balloon has taken."""
    assert physical_bytes(tmp_path, 5) == 5
    blocks = {f"sys/devices/system/memory/memory{number}/state": "online\n" for number in range(8)}
    blocks["sys/devices/system/memory/memory8/state"] = "offline\n"
    root = tree(tmp_path, blocks | {"sys/devices/system/memory/block_size_bytes": "8000000\n"})
    assert physical_bytes(root, 1000 * MIB) == 9 * 128 * MIB
    zones = "Node 0, zone DMA\n  pages free 3\n        present  4096\nNode 0, zone Normal\n        present  1044480\n"
    assert physical_bytes(tree(root, {"proc/zoneinfo": zones}), 1000 * MIB) == (4096 + 1044480) * os.sysconf(
        "SC_PAGE_SIZE"
    )


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"proc/self/cgroup": ""},
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "what\n", "sys/fs/cgroup/cpu.max": "1 2 3"},
        {"proc/self/cgroup": "0::/../../elsewhere\n", "sys/fs/cgroup/cpu.max": "max 0"},
    ],
)
def test_no_limit_or_an_unreadable_one(tmp_path, files):
    root = tree(tmp_path, files)
    assert memory_limits(root) == []
    assert usable_cores(root) == len(os.sched_getaffinity(0))
