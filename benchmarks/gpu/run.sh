#!/usr/bin/env bash
# One command on a machine with a CUDA device, without a network: builds, asks the device what deepoffload takes for
# granted, runs tests/gpu, and measures as many rows as the seconds allow, the most important ones first.
#
#     benchmarks/gpu/run.sh [--simulate] [DIRECTORY ON AN NVME DISK [SECONDS]]
#
# It needs python3 (or $PYTHON) with a torch that sees the device, and gcc and g++. What else is missing comes from the
# wheels in benchmarks/gpu/wheels, which benchmarks/gpu/fetch_wheels.sh fills where there is a network; they are put into
# build/gpu_packages, and nothing is installed anywhere else. Each result is written when it is there, to
# benchmarks/results/gpu_*.json. HOST_BYTES=120GiB says how much memory rows may take where the machine's grows as it is
# used. --simulate does the same on the tests' simulated GPU, with tiny rows, and writes to build.
set -euo pipefail
cd "$(dirname "$0")/../.."
SIMULATE=
if [ "${1:-}" = --simulate ]; then
    SIMULATE=--simulate
    shift
fi
DISK=${1:-${TMPDIR:-/tmp}}
SECONDS_IN_ALL=${2:-540}
PYTHON=${PYTHON:-python3}
RESULTS=benchmarks/results
[ -z "$SIMULATE" ] || RESULTS=build/gpu_results
mkdir -p "$RESULTS" build
started=$SECONDS
left() { echo $((SECONDS_IN_ALL - (SECONDS - started))); }

# Without our packages on the path: what the machine itself lacks.
"$PYTHON" -m benchmarks.gpu.packages benchmarks/gpu/wheels build/gpu_packages $SIMULATE
export PYTHONPATH="$PWD:$PWD/build/gpu_packages${PYTHONPATH:+:$PYTHONPATH}"

# DeepSpeed compiles its Adam: here, and meanwhile. A compilation that was killed leaves a file for which others wait.
export TORCH_EXTENSIONS_DIR="$PWD/build/torch_extensions"
rm -rf "$TORCH_EXTENSIONS_DIR"/*/lock "$TORCH_EXTENSIONS_DIR"/lock
timeout --kill-after=5 240 "$PYTHON" -c "from deepspeed.ops.op_builder import CPUAdamBuilder; CPUAdamBuilder().load()" \
    >"$RESULTS/gpu_deepspeed_build.txt" 2>&1 &
compiles=$!

"$PYTHON" csrc/aio/build_aio.py
"$PYTHON" csrc/cpu_adam/build.py
echo "run.sh: built; $(left) s are left"

status=0
"$PYTHON" -m benchmarks.gpu.probe $SIMULATE --folder "$RESULTS" || status=$?
echo "run.sh: probed; $(left) s are left"

# At most half of the time, so that there are rows in any case. The order is that of the files' names.
limit=$((SECONDS_IN_ALL / 2))
if [ -n "$SIMULATE" ]; then
    chosen=(-k simgpu ${TESTS:-tests/gpu})
else
    chosen=(-m gpu ${TESTS:-tests/gpu})
fi
tests=0
timeout --signal=INT --kill-after=20 "$limit" "$PYTHON" -m pytest -q -p no:cacheprovider --timeout 120 \
    --continue-on-collection-errors "${chosen[@]}" >"$RESULTS/gpu_tests.txt" 2>&1 || tests=$?
tail -n 40 "$RESULTS/gpu_tests.txt"
case $tests in
    0) ;;
    124 | 130) echo "run.sh: the tests were ended after $limit s; $RESULTS/gpu_tests.txt has what they had said" ;;
    *) status=$tests ;;
esac
wait "$compiles" || echo "run.sh: DeepSpeed's Adam was not compiled; $RESULTS/gpu_deepspeed_build.txt says why"
echo "run.sh: tested; $(left) s are left"

"$PYTHON" -m benchmarks.gpu $SIMULATE --path "$DISK" --seconds "$(left)" --folder "$RESULTS" \
    ${HOST_BYTES:+--host-bytes "$HOST_BYTES"} || status=$?
exit "$status"
