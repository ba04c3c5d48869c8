#!/usr/bin/env bash
# Builds, runs tests/gpu, and measures, in one command, on a machine with a CUDA device:
#
#     benchmarks/gpu/run.sh [DIRECTORY ON AN NVME DISK]
#
# It uses the Python that has torch ($PYTHON, else python3) and installs nothing over it: what is missing beside torch goes
# into an environment of its own that sees it. Results: benchmarks/results/gpu_<device>.json, and a table on the screen.
set -euo pipefail
cd "$(dirname "$0")/../.."
DISK=${1:-${TMPDIR:-/tmp}}
PYTHON=${PYTHON:-python3}
MINUTES=${MINUTES:-9}

if ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "run.sh: $PYTHON has no torch, or its torch sees no CUDA device; set PYTHON, or try python -m benchmarks.gpu --simulate" >&2
    exit 1
fi
VENV=.venv-gpu
if [ ! -x "$VENV/bin/python" ]; then
    "$PYTHON" -m venv --system-site-packages "$VENV"
fi
PY="$PWD/$VENV/bin/python"
for package in cffi pybind11 psutil pytest numpy; do
    "$PY" -c "import $package" 2>/dev/null || "$PY" -m pip install --quiet "$package" ||
        echo "run.sh: $package is not there and could not be installed" >&2
done
"$PY" csrc/aio/build_aio.py
"$PY" csrc/cpu_adam/build.py

started=$SECONDS
status=0
PYTHONPATH="$PWD" "$PY" -m pytest -q -m gpu tests/gpu || status=$?
[ "$status" -eq 5 ] && status=0 # no test was collected: pytest's own tests need packages that are not there
left=$((MINUTES * 60 - (SECONDS - started)))
PYTHONPATH="$PWD" "$PY" -m benchmarks.gpu --path "$DISK" --seconds "$left" || status=$?
exit "$status"
