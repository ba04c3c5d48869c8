#!/bin/sh
# The native I/O engine under the thread, address and undefined-behaviour sanitizers.
#   tests/native/run_sanitizers.sh [DIRECTORY]   (files go to DIRECTORY, by default a temporary one)
# First two C programs without the interpreter under each of them; then, with PYTHON set or python3 having pytest, the Python
# tests of memory, engine and swap space over a module built with the address sanitizer, in a copy of the package.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d "${1:-${TMPDIR:-/tmp}}/doff-sanitize.XXXXXX")
trap 'rm -rf "$work"' EXIT INT TERM
cc=${CC:-cc}
python=${PYTHON:-python3}

for sanitizer in thread address,undefined; do
    echo "== $sanitizer"
    # Kernels with much address-space randomization need it off for the thread sanitizer.
    run=
    if command -v setarch >/dev/null && setarch "$(uname -m)" -R true 2>/dev/null; then run="setarch $(uname -m) -R"; fi
    for program in neighbour_stress aio_stress; do
        "$cc" -g -O1 -std=gnu11 -Wall -Wextra -fno-omit-frame-pointer "-fsanitize=$sanitizer" \
            -fno-sanitize-recover=all -I "$root/csrc/aio" "$root"/csrc/aio/*.c "$root/tests/native/$program.c" \
            -o "$work/$program" -pthread -ldl
        TSAN_OPTIONS=halt_on_error=1:exitcode=66 ASAN_OPTIONS=detect_leaks=1 $run "$work/$program" "$work"
    done
done

if ! "$python" -c "import pytest, hypothesis, cffi" 2>/dev/null; then
    echo "== no pytest for $python: the Python tests were not run under the address sanitizer (set PYTHON)"
    exit 0
fi
echo "== Python tests, address,undefined"
mkdir "$work/tree"
cp -r "$root/deepoffload" "$root/csrc" "$root/tests" "$root/pyproject.toml" "$work/tree/"
cd "$work/tree"
DEEPOFFLOAD_SANITIZE=address,undefined "$python" csrc/aio/build_aio.py
asan=$("$cc" -print-file-name=libasan.so)
ubsan=$("$cc" -print-file-name=libubsan.so)
# The interpreter itself leaks by design; children of the tests inherit all this. What is left out: the sanitizer refuses
# impossible mappings itself, makes mlock do nothing, and touches other memory itself.
LD_PRELOAD="$asan $ubsan" ASAN_OPTIONS=detect_leaks=0:halt_on_error=1 UBSAN_OPTIONS=halt_on_error=1 PYTHONPATH="$work/tree" \
    "$python" -m pytest -q -p no:cacheprovider -p tests.support.session --confcutdir tests/io --durations=3 tests/io \
    --deselect tests/io/test_native_memory.py::test_impossible_mapping_is_refused_with_the_size \
    --deselect tests/io/test_native_memory.py::test_mapping_is_aligned_lazy_and_stays_out_of_children \
    --deselect tests/io/test_native_memory.py::test_locking_beyond_the_limit_is_reported_and_harmless
