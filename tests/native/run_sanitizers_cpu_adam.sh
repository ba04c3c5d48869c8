#!/bin/sh
# The host kernels under the address, undefined-behaviour and thread sanitizers.
#   tests/native/run_sanitizers_cpu_adam.sh [DIRECTORY]   (files go to DIRECTORY, by default a temporary one)
# First every kernel of every instruction set of this CPU, then several callers at once on the own pool, in C++ programs
# without the interpreter; then, with PYTHON set or python3 having pytest, the Python tests of the kernels over a module
# built so, in a copy of the package.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d "${1:-${TMPDIR:-/tmp}}/doff-sanitize.XXXXXX")
trap 'rm -rf "$work"' EXIT INT TERM
cxx=${CXX:-g++}
python=${PYTHON:-python3}
flags="-g -O1 -std=c++17 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all"

echo "== kernels, address,undefined"
# shellcheck disable=SC2086
"$cxx" $flags -I "$root/csrc/cpu_adam" "$root"/tests/native/cpu_adam_crosscheck.cpp "$root"/csrc/cpu_adam/kernels_*.cpp \
    "$root/csrc/cpu_adam/dispatch.cpp" "$root/csrc/cpu_adam/hypers.cpp" -o "$work/crosscheck"
"$work/crosscheck" | tee "$work/digests"
if [ "$(cut -d' ' -f2- "$work/digests" | sort -u | wc -l)" != 1 ]; then
    echo "the instruction sets do not agree"
    exit 1
fi

echo "== own pool, thread"
"$cxx" -g -O1 -std=c++17 -fsanitize=thread -I "$root/csrc/cpu_adam" "$root/tests/native/cpu_adam_threads.cpp" \
    "$root"/csrc/cpu_adam/landing.cpp "$root"/csrc/cpu_adam/threads.cpp "$root"/csrc/cpu_adam/pool.cpp \
    "$root"/csrc/cpu_adam/dispatch.cpp "$root"/csrc/cpu_adam/kernels_*.cpp -ldl -pthread -o "$work/threads"
TSAN_OPTIONS=halt_on_error=1 "$work/threads"

if ! "$python" -c "import pytest, hypothesis, numpy, pybind11" 2>/dev/null; then
    echo "== no pytest for $python: the Python tests were not run under the sanitizers (set PYTHON)"
    exit 0
fi
echo "== Python tests, address,undefined"
mkdir "$work/tree"
cp -r "$root/deepoffload" "$root/csrc" "$root/tests" "$root/pyproject.toml" "$work/tree/"
cd "$work/tree"
CXX="$cxx" CPU_ADAM_OBJECTS="$work/objects" CXXFLAGS="$flags" "$python" csrc/cpu_adam/build.py
# The interpreter itself leaks by design; children of the tests inherit all this. What a sanitizer says goes past pytest.
LD_PRELOAD="$("$cxx" -print-file-name=libasan.so) $("$cxx" -print-file-name=libubsan.so)" \
    ASAN_OPTIONS=detect_leaks=0:halt_on_error=1 UBSAN_OPTIONS=halt_on_error=1 PYTHONPATH="$work/tree" \
    "$python" -m pytest -q --capture=sys -p no:cacheprovider \
    tests/native/test_cpu_adam.py tests/native/test_cpu_adam_states.py tests/native/test_cpu_adam_sisters.py \
    tests/native/test_cpu_adam_arguments.py tests/native/test_landing.py tests/native/test_sums_of_squares.py \
    tests/native/test_land_parts.py tests/native/test_rounding.py
