#!/usr/bin/env bash
# test_versions.sh PYTHON:TORCH ...: the core tests with each of these versions, for example python3.10:2.11.0.
#
# Each pair has its own environment in .venv-versions, which stays, and tests a copy of this checkout there. Pythons
# are looked for on PATH and among pyenv's. PYTEST_ARGS: arguments of pytest instead of the core tests.
# TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu takes the CPU builds, which save gigabytes each.
set -euo pipefail
cd "$(dirname "$0")/.."
core="-n 2 --dist worksteal tests/house tests/unit tests/memory tests/native tests/params tests/optim tests/ranks"
failed=()

interpreter() {
    if "$1" -V >/dev/null 2>&1; then # a shim of pyenv may be on PATH and run nothing
        command -v "$1"
        return
    fi
    ls -d "${PYENV_ROOT:-$HOME/.pyenv}/versions/${1#python}".*/bin/python 2>/dev/null | sort -V | tail -n 1 | grep .
}

for pair in "$@"; do
    name=${pair%%:*} torch=${pair#*:}
    home=$PWD/.venv-versions/$name-torch-$torch
    if ! python=$(interpreter "$name"); then
        echo "test_versions: $name is neither on PATH nor among pyenv's; install it, or say VERSIONS=\"PYTHON:TORCH ...\"" >&2
        exit 1
    fi
    echo "== $name ($("$python" -V)) with torch $torch"
    mkdir -p "$home"
    test -x "$home/venv/bin/python" || "$python" -m venv "$home/venv"
    rm -rf "$home/deepoffload"
    bash tools/copy_tree.sh "$home/deepoffload"
    # Unlike `make install`: the constraints name one torch, and versions that newer Pythons or torches may not have.
    "$home/venv/bin/python" -m pip --disable-pip-version-check install --quiet \
        ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"} "torch==$torch" --editable "$home/deepoffload[dev]"
    (cd "$home/deepoffload" && "$home/venv/bin/python" -m pytest -q ${PYTEST_ARGS:-$core}) || failed+=("$pair")
done
[ ${#failed[@]} = 0 ] || { echo "test_versions: failed with ${failed[*]}" >&2; exit 1; }
