"""Compiles the simulated GPU once per source and version of torch: ``build()`` gives the shared object."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch
from torch.utils import cpp_extension

SOURCES = Path(__file__).parent / "csrc"
BUILT = Path(__file__).parents[3] / "build" / "simulated_gpu"
MODULE = "_simulated_gpu"


def command(target: Path) -> list[str]:
    """The whole call of the compiler."""
    includes = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
    libraries = cpp_extension.library_paths()[0]
    return [
        os.environ.get("CXX", "g++"),
        *("-std=c++20", "-O1", "-g0", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wno-unused-function"),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-DSIMGPU_MODULE={MODULE}",
        *(f"-isystem{path}" for path in includes),
        str(SOURCES / "backend.cpp"),
        *("-o", str(target)),
        *(f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-lc10", "-ltorch_cpu", "-pthread"),
    ]


def key() -> str:
    """What the object depends on."""
    digest = hashlib.sha256(f"{torch.__version__} {sys.version} {shlex.join(command(Path()))}".encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def build() -> Path:
    """The object's path, compiled first where it is missing; processes that ask at once wait for one compiler.

    Raises:
        RuntimeError: the compiler failed; the message has its command and what it said.
    """
    target = BUILT / key() / f"{MODULE}{sysconfig.get_config_var('EXT_SUFFIX')}"
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.parent / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            partial = target.with_suffix(".partial")
            done = subprocess.run(command(partial), capture_output=True, text=True)
            if done.returncode != 0:
                raise RuntimeError(
                    f"the simulated GPU did not compile:\n{shlex.join(command(partial))}\n{done.stderr[-8000:]}"
                )
            partial.replace(target)
    return target
