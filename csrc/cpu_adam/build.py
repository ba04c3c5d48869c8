"""Compile the kernels in place for development: ``python csrc/cpu_adam/build.py`` (setup.py has the same sources)."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pybind11

HERE = Path(__file__).resolve().parent
FLAGS = ["-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"]


def main() -> None:
    package = HERE.parents[1] / "deepoffload" / "native"
    target = package / f"_cpu_adam{sysconfig.get_config_var('EXT_SUFFIX')}"
    objects = Path(os.environ.get("CPU_ADAM_OBJECTS", HERE.parents[1] / "build" / "cpu_adam"))
    objects.mkdir(parents=True, exist_ok=True)
    compiler = os.environ.get("CXX", "g++")
    includes = [f"-I{pybind11.get_include()}", f"-I{sysconfig.get_path('include')}"]
    extra = os.environ.get("CXXFLAGS", "").split()
    newest_header = max(path.stat().st_mtime for path in HERE.glob("*.h"))

    def compile_one(source: Path) -> Path:
        result = objects / f"{source.stem}.o"
        fresh = result.exists() and result.stat().st_mtime > max(source.stat().st_mtime, newest_header)
        if extra or not fresh:
            subprocess.run([compiler, *FLAGS, *extra, *includes, "-c", str(source), "-o", str(result)], check=True)
        return result

    with ThreadPoolExecutor(2) as pool:
        compiled = list(pool.map(compile_one, sorted(HERE.glob("*.cpp"))))
    partial = target.with_suffix(".partial")
    subprocess.run([compiler, "-shared", *map(str, compiled), "-o", str(partial), "-ldl", "-pthread"], check=True)
    partial.replace(target)
    print(target)


if __name__ == "__main__":
    sys.exit(main())
