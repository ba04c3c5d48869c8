"""Builds ``deepoffload.native._aio`` (cffi, API mode) from the C sources next to this file.

``setup.py`` uses it through ``cffi_modules=["csrc/aio/build_aio.py:ffibuilder"]``; run as a program it builds in place.
``DEEPOFFLOAD_SANITIZE=address|thread|undefined`` adds that sanitizer to the library.
"""

from __future__ import annotations

import os
import pathlib
import tempfile

from cffi import FFI

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SOURCES = (
    "backend_fault.c",
    "backend_libaio.c",
    "backend_pool.c",
    "backend_uring.c",
    "bounce.c",
    "crc32c.c",
    "engine.c",
    "file.c",
    "memory.c",
    "neighbour.c",
    "pump.c",
    "reaper.c",
    "request.c",
    "sums.c",
)
SANITIZERS = ("address", "thread", "undefined")


def sanitizer_flags() -> list[str]:
    """Compiler flags for the sanitizers named in ``DEEPOFFLOAD_SANITIZE`` (comma-separated)."""
    names = [name for name in os.environ.get("DEEPOFFLOAD_SANITIZE", "").split(",") if name]
    for name in names:
        if name not in SANITIZERS:
            raise SystemExit(f"DEEPOFFLOAD_SANITIZE: unknown sanitizer {name!r}, known are {', '.join(SANITIZERS)}")
    return [f"-fsanitize={name}" for name in names] + (["-g", "-fno-omit-frame-pointer"] if names else [])


def declarations() -> str:
    """The part of the public header that cffi reads."""
    header = (HERE / "doff_aio.h").read_text()
    return header.split("cdef-begin", 1)[1].split("*/", 1)[1].split("/* cdef-end */", 1)[0]


def source_path(name: str) -> str:
    """Relative to the project for setuptools, which runs there; absolute for our own build, which runs elsewhere."""
    return str(HERE / name) if __name__ == "__main__" else os.path.relpath(HERE / name, os.getcwd())


ffibuilder = FFI()
ffibuilder.cdef(declarations())
ffibuilder.set_source(
    "deepoffload.native._aio",
    '#include "doff_aio.h"',
    sources=[source_path(name) for name in SOURCES],
    depends=[source_path(name) for name in ("doff_aio.h", "backend.h", "crc32c_fold.h", "internal.h")],
    include_dirs=[str(HERE)],
    libraries=["dl", "pthread"],
    extra_compile_args=["-O2", "-std=gnu11", "-Wall", "-Wextra", *sanitizer_flags()],
    extra_link_args=["-pthread", *sanitizer_flags()],
)


if __name__ == "__main__":
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory() as build_dir:
        built = pathlib.Path(ffibuilder.compile(tmpdir=build_dir, verbose=False))
        target = ROOT / "deepoffload" / "native" / built.name
        target.with_suffix(".tmp").write_bytes(built.read_bytes())
        target.with_suffix(".tmp").replace(target)  # a process that has the old one mapped keeps it
    print(target)
