"""Builds the two compiled modules; everything else about the package is in pyproject.toml.

``DEEPOFFLOAD_SANITIZE=address`` (or ``thread``, ``undefined``, or several with commas) builds both with that sanitizer.
"""

from __future__ import annotations

import os
from glob import glob

from pybind11.setup_helpers import Pybind11Extension
from setuptools import setup
from setuptools.command.build_ext import build_ext

SANITIZERS = os.environ.get("DEEPOFFLOAD_SANITIZE", "")


class BuildExt(build_ext):
    """Adds the sanitizer to every module, whichever tool described it."""

    def build_extension(self, ext):
        if SANITIZERS:
            flags = [f"-fsanitize={SANITIZERS}", "-fno-omit-frame-pointer", "-g", "-O1"]
            ext.extra_compile_args = [*ext.extra_compile_args, *flags]
            ext.extra_link_args = [*ext.extra_link_args, f"-fsanitize={SANITIZERS}"]
        super().build_extension(ext)


setup(
    cffi_modules=["csrc/aio/build_aio.py:ffibuilder"],
    ext_modules=[
        Pybind11Extension(
            "deepoffload.native._cpu_adam",
            sorted(glob("csrc/cpu_adam/*.cpp")),
            depends=sorted(glob("csrc/cpu_adam/*.h")),
            cxx_std=17,
            extra_compile_args=["-O3", "-fvisibility=hidden", "-Wall", "-Wextra"],
        ),
    ],
    cmdclass={"build_ext": BuildExt},
)
