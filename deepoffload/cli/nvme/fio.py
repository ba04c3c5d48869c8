"""The same pattern through fio (https://fio.readthedocs.io), for comparison."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence

from deepoffload.cli.nvme.files import BenchFile
from deepoffload.cli.nvme.job import Effort
from deepoffload.cli.nvme.types import Pattern, Sample, Setting
from deepoffload.errors import UnsupportedError

ENGINES = {"libaio": "libaio", "io_uring": "io_uring", "pool": "psync"}
MODES = {Pattern.READ: "read", Pattern.WRITE: "write", Pattern.MIXED: "rw"}
START_S = 30.0
# fio has no option for transparent huge pages; glibc has one (2.35), and it decides more than any other setting.
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


def find_fio() -> str:
    """The program.

    Raises:
        UnsupportedError: it is not installed.
    """
    found = shutil.which("fio")
    if found is None:
        raise UnsupportedError(
            "--compare fio: fio is not installed; install it (apt install fio) or leave --compare out"
        )
    return found


def fio_command(
    fio: str, setting: Setting, pattern: Pattern, files: Sequence[BenchFile], paths: int, effort: Effort
) -> list[str]:
    """The command line. What is on the files afterwards is fio's."""
    threads = setting.backend == "pool"
    depth = setting.queue_depth * paths
    return [
        fio,
        "--name=same",
        f"--filename={':'.join(file.proc_path for file in files)}",
        f"--ioengine={ENGINES[setting.backend]}",
        f"--rw={MODES[pattern]}",
        f"--bs={setting.block_bytes}",
        # fio's synchronous engine keeps one request in flight per job.
        *([f"--numjobs={depth}", "--thread"] if threads else [f"--iodepth={depth}"]),
        f"--direct={int(setting.direct)}",
        f"--filesize={min(file.filled_bytes for file in files)}",
        "--time_based",
        f"--ramp_time={effort.warmup_s * 1000:.0f}ms",
        f"--runtime={effort.measure_s * 1000:.0f}ms",
        "--group_reporting",
        "--allow_file_create=0",
        "--fallocate=none",
        "--invalidate=1",
        "--iomem_align=4096",
        "--iomem=malloc",
        *(["--end_fsync=1"] if not setting.direct else []),
        "--output-format=json",
    ]


def run_fio(
    fio: str, setting: Setting, pattern: Pattern, files: Sequence[BenchFile], paths: int, effort: Effort
) -> Sample:
    """One run of fio over ``files``, which lie on ``paths`` devices with the setting's depth each.

    Raises:
        UnsupportedError: it fails; says how.
    """
    command = fio_command(fio, setting, pattern, files, paths, effort)
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=START_S + 10 * (effort.warmup_s + effort.measure_s),
            env={**os.environ, **HUGE_PAGES},
        )
    except subprocess.TimeoutExpired as error:
        raise UnsupportedError(f"--compare fio: fio does not end: {' '.join(command)}") from error
    start = done.stdout.find("{")
    if done.returncode or start < 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise UnsupportedError(f"--compare fio: fio fails with {done.returncode}: {said[-1] if said else ''}")
    job = json.loads(done.stdout[start:])["jobs"][0]
    read, write = job["read"], job["write"]
    seconds = max(read["runtime"], write["runtime"]) / 1e3
    cpu_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * seconds
    return Sample(int(read["io_bytes"]), int(write["io_bytes"]), max(seconds, 1e-3), cpu_s)
