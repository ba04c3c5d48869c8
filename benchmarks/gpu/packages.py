"""Puts wheels from a folder where this Python finds them, without a network: those of packages that it does not have.

python -m benchmarks.gpu.packages WHEELS TARGET [--simulate]

It also says what the machine itself lacks (a torch that sees a device, compilers), all at once, and ends with status 1.
It imports nothing but the standard library and, to ask it, torch.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

TORCH_MIN = (2, 11)
"""The package needs no newer one, and works with no older one: pyproject.toml says so, too."""
NEEDED = (
    *("numpy", "cffi", "pycparser", "pybind11", "setuptools", "psutil", "greenlet"),
    *("pytest", "pytest_timeout", "hypothesis", "safetensors"),
)
"""Modules without which nothing builds, or tests/gpu does not run."""


def main() -> int:
    wheels, target, simulate = Path(sys.argv[1]), Path(sys.argv[2]), "--simulate" in sys.argv[3:]
    problems = list(missing_in_the_machine(simulate=simulate))
    target.mkdir(parents=True, exist_ok=True)
    sys.path.append(str(target))
    chosen = sorted(wheel for wheel in wheels.glob("*.whl") if not is_here(wheel) and fits(wheel))
    if chosen:
        install(chosen, target)
        importlib.invalidate_caches()
    for name in NEEDED:
        if importlib.util.find_spec(name) is None:
            problems.append(f"{name}, of which {wheels} has no wheel for this Python: benchmarks/gpu/fetch_wheels.sh")
    for problem in problems:
        print(f"run.sh needs {problem}", file=sys.stderr)
    return 1 if problems else 0


def missing_in_the_machine(*, simulate: bool) -> Iterator[str]:
    """What no wheel of ours can bring."""
    try:
        import torch
    except ImportError as error:
        yield f"a torch for {sys.executable} ({error}); set PYTHON to one that has it"
    else:
        version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
        if version < TORCH_MIN:
            wanted = ".".join(map(str, TORCH_MIN))
            yield f"torch {wanted} or newer; {sys.executable} has {torch.__version__}"
        if not simulate and not torch.cuda.is_available():
            yield "a torch that sees a CUDA device (or --simulate)"
    for compiler in ("gcc", "g++"):
        if shutil.which(compiler) is None:
            yield f"the compiler {compiler}"
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.exists():
        yield f"Python's headers, {header}"


def name_of(wheel: Path) -> str:
    return wheel.name.split("-")[0].replace("_", "-").lower()


def is_here(wheel: Path) -> bool:
    """Whether this Python has the package already, in any version."""
    try:
        importlib.metadata.version(name_of(wheel))
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def fits(wheel: Path) -> bool:
    """Whether a wheel is for this version of Python: the folder may have those of several."""
    python, abi, _ = wheel.stem.split("-")[-3:]
    mine = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    if abi == "abi3":
        least = min(int(tag.removeprefix("cp3") or 0) for tag in python.split(".") if tag.startswith("cp3"))
        return least <= sys.version_info[1]
    return mine in python.split(".") or any(tag.startswith("py") for tag in python.split("."))


def install(wheels: Iterable[Path], target: Path) -> None:
    """With pip where there is one; without it as the format says: a wheel is an archive of what goes into the folder
    (https://packaging.python.org/en/latest/specifications/binary-distribution-format/)."""
    if importlib.util.find_spec("pip") is not None:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--upgrade"]
        command += ["--disable-pip-version-check", "--target", str(target), *map(str, wheels)]
        subprocess.run(command, check=True)
        return
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(target)


if __name__ == "__main__":
    sys.exit(main())
