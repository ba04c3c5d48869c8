"""Says what is missing before anything is built: ``make`` runs it with the Python that the environment is made from.

It has to run on older Pythons than the package does, and names every missing piece at once.
"""

import os
import shutil
import sys
import sysconfig

PYTHON_MIN = (3, 10)


def missing():
    if sys.version_info < PYTHON_MIN:
        wanted, given = (".".join(map(str, version[:2])) for version in (PYTHON_MIN, sys.version_info))
        return [f"Python {wanted} or newer; {sys.executable} is {given}. Say which to use: make PYTHON=python3.12 ..."]
    problems = []
    version = "{}.{}".format(*sys.version_info[:2])
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        problems.append(f"Python's venv module (Debian, Ubuntu: apt install python{version}-venv)")
    header = os.path.join(sysconfig.get_paths()["include"], "Python.h")
    if not os.path.exists(header):
        problems.append(f"Python's headers, {header} (Debian, Ubuntu: apt install python{version}-dev)")
    for variable, default in (("CC", "cc"), ("CXX", "c++")):
        compiler = os.environ.get(variable, default).split()[0]
        if shutil.which(compiler) is None:
            problems.append(f"the compiler {compiler} (Debian, Ubuntu: apt install g++)")
    return problems


if __name__ == "__main__":
    found = missing()
    for problem in found:
        sys.stderr.write(f"deepoffload needs {problem}\n")
    sys.exit(1 if found else 0)
