"""Builds the two compiled modules; everything else about the package is in pyproject.toml.

``DEEPOFFLOAD_SANITIZE=address`` (or ``thread``, ``undefined``, or several with commas) builds both with that sanitizer;
``csrc/aio/build_aio.py`` reads it for its own module. ``DEEPOFFLOAD_BUILD_JOBS`` limits the compilers at a time.
"""

from __future__ import annotations

import os
from glob import glob

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import setup

SANITIZERS = [name for name in os.environ.get("DEEPOFFLOAD_SANITIZE", "").split(",") if name]
SANITIZER_FLAGS = [f"-fsanitize={name}" for name in SANITIZERS]

ParallelCompile("DEEPOFFLOAD_BUILD_JOBS").install()

setup(
    cffi_modules=["csrc/aio/build_aio.py:ffibuilder"],
    ext_modules=[
        Pybind11Extension(
            "deepoffload.native._cpu_adam",
            sorted(glob("csrc/cpu_adam/*.cpp")),
            depends=sorted(glob("csrc/cpu_adam/*.h")),
            cxx_std=17,
            libraries=["dl"],
            extra_compile_args=[
                *("-O3", "-fvisibility=hidden", "-Wall", "-Wextra", "-pthread"),
                *(["-g", "-fno-omit-frame-pointer"] if SANITIZERS else []),
                *SANITIZER_FLAGS,
            ],
            extra_link_args=["-pthread", *SANITIZER_FLAGS],
        ),
    ],
)
