"""The NEON kernels, cross-compiled and run under qemu-user: the bytes of this machine's scalar kernels.

Needs the Debian packages g++-aarch64-linux-gnu and qemu-user; on an ARM machine the other tests cover NEON themselves.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "csrc" / "cpu_adam"
CROSS_COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"


def digests(compiler: str, target: Path, *options: str, emulator: tuple[str, ...] = ()) -> dict[str, str]:
    """Compile the cross-check for one architecture and run it: a digest for each instruction set."""
    sources = [*SOURCES.glob("kernels_*.cpp"), SOURCES / "dispatch.cpp", SOURCES / "hypers.cpp"]
    command = [
        compiler,
        "-std=c++17",
        *options,
        f"-I{SOURCES}",
        str(HERE / "cpu_adam_crosscheck.cpp"),
        *map(str, sources),
    ]
    subprocess.run([*command, "-o", str(target)], check=True, timeout=240)
    environment = {name: value for name, value in os.environ.items() if name != "DEEPOFFLOAD_CPU_CAPABILITY"}
    run = subprocess.run(
        [*emulator, str(target)], check=True, capture_output=True, text=True, timeout=240, env=environment
    )
    return {name: digest for name, _, digest in (line.partition(" ") for line in run.stdout.splitlines())}


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which(CROSS_COMPILER) is None or shutil.which(EMULATOR) is None,
    reason="needs g++-aarch64-linux-gnu and qemu-user",
)
def test_neon_equals_this_machine(tmp_path: Path) -> None:
    here = digests(os.environ.get("CXX", "g++"), tmp_path / "here", "-O0")
    there = digests(CROSS_COMPILER, tmp_path / "there", "-O1", "-static", emulator=(EMULATOR,))
    assert set(there) == {"scalar", "neon"}
    assert len({*here.values(), *there.values()}) == 1
