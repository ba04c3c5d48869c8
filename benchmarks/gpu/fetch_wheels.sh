#!/usr/bin/env bash
# Fetches what benchmarks/gpu/run.sh needs on a machine that has a GPU and no network, into benchmarks/gpu/wheels (git
# ignores it). Run it where there is a network:
#
#     benchmarks/gpu/fetch_wheels.sh [VERSION OF PYTHON THERE, such as 3.12]...
#
# Wheels are for Linux on x86-64. DeepSpeed has none on the index, so one without compiled operators is built here: it
# compiles its Adam on the machine itself. Everything but the first line of packages is for the rows of the peers.
set -euo pipefail
cd "$(dirname "$0")/../.."
WHEELS=benchmarks/gpu/wheels
PYTHON=${PYTHON:-python3}
NEEDED="cffi pycparser pybind11 setuptools psutil greenlet numpy pytest pytest-timeout iniconfig pluggy packaging pygments hypothesis
    sortedcontainers safetensors"
PEERS="torchao==0.18.0 hjson pydantic pydantic-core annotated-types typing-extensions typing-inspection einops msgpack
    ninja py-cpuinfo tqdm"
DEEPSPEED=deepspeed==0.19.8
mkdir -p "$WHEELS"
[ $# -gt 0 ] || set -- 3.12

for version in "$@"; do
    # Of each package what it depends on is in the lists, so that nothing brings another torch along.
    for package in $NEEDED $PEERS; do
        "$PYTHON" -m pip download --quiet --no-deps --only-binary=:all: --python-version "$version" \
            --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
            --platform manylinux1_x86_64 --dest "$WHEELS" "$package" ||
            echo "fetch_wheels.sh: there is no wheel of $package for Python $version" >&2
    done
done
# pydantic says which version of its core it works with.
for core in $(unzip -p "$WHEELS"/pydantic-2*.whl '*/METADATA' | sed -n 's/^Requires-Dist: pydantic-core *(\?\(==[0-9.]*\).*/\1/p'); do
    rm -f "$WHEELS"/pydantic_core-*.whl
    for version in "$@"; do
        "$PYTHON" -m pip download --quiet --no-deps --only-binary=:all: --python-version "$version" \
            --platform manylinux_2_17_x86_64 --dest "$WHEELS" "pydantic-core$core"
    done
done
DS_BUILD_OPS=0 "$PYTHON" -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$WHEELS" "$DEEPSPEED" ||
    DS_BUILD_OPS=0 "$PYTHON" -m pip wheel --quiet --no-deps --wheel-dir "$WHEELS" "$DEEPSPEED" ||
    echo "fetch_wheels.sh: no wheel of DeepSpeed could be built; its rows will be left out" >&2
du -sh "$WHEELS"
