"""Every instruction set and thread backend gives the same bits; the environment variable chooses, or says why not."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from deepoffload.native import cpu_adam
from deepoffload.native.cpu_adam import DType, StateLayout
from tests.native.cpu_adam_scenario import HYPER, AdamBuffers, run_all

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def run(code: list[str], capability: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    environment.pop("DEEPOFFLOAD_CPU_CAPABILITY", None)
    if capability is not None:
        environment["DEEPOFFLOAD_CPU_CAPABILITY"] = capability
    return subprocess.run([sys.executable, *code], env=environment, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def digest_here() -> str:
    return run_all(2)


@pytest.mark.parametrize(
    ("capability", "num_threads"),
    [*((name, 3) for name in cpu_adam.available_capabilities()), (cpu_adam.available_capabilities()[-1], 1)],
)
def test_every_capability_on_the_own_pool_equals_this_process(
    capability: str, num_threads: int, digest_here: str
) -> None:
    result = run([str(HERE / "cpu_adam_scenario.py"), str(num_threads)], capability)
    assert result.returncode == 0, result.stderr
    name, torch_loaded, *backend, digest = result.stdout.split()
    assert (name, torch_loaded, " ".join(backend)) == (capability, "False", "own pool")
    assert digest == digest_here


def test_scalar_is_always_available_and_the_last_is_the_default() -> None:
    names = cpu_adam.available_capabilities()
    assert names[0] == "scalar"
    result = run(["-c", "from deepoffload.native import cpu_adam; print(cpu_adam.capability())"])
    assert result.stdout.strip() == names[-1]


def test_an_unknown_capability_is_an_error_that_names_the_known() -> None:
    result = run(["-c", "from deepoffload.native import cpu_adam; cpu_adam.capability()"], "sse9")
    assert result.returncode != 0
    assert "ValueError: DEEPOFFLOAD_CPU_CAPABILITY is 'sse9'" in result.stderr
    assert ", ".join(cpu_adam.available_capabilities()) in result.stderr


def test_torchs_own_openmp_team_is_used() -> None:
    backend = cpu_adam.threading_backend()
    assert backend.startswith("openmp: ")
    loaded = Path("/proc/self/maps").read_text()
    assert backend.removeprefix("openmp: ") in loaded


def test_no_threads_beyond_torchs() -> None:
    """After torch has its team, our passes start no further thread."""
    if torch.get_num_threads() < 2:
        pytest.skip("one CPU: no team")
    torch.ones(4_000_000).add_(1)
    before = len(os.listdir("/proc/self/task"))
    buffers = AdamBuffers(300_000, StateLayout.FP32, DType.FP32, DType.FP32)
    buffers.step(num_threads=torch.get_num_threads())
    assert len(os.listdir("/proc/self/task")) <= before


def test_the_gil_is_released() -> None:
    """A Python thread makes progress while a long step runs."""
    buffers = AdamBuffers(4_000_000, StateLayout.FP32, DType.FP32, DType.FP32)
    running, done = threading.Event(), threading.Event()

    def steps() -> None:
        running.set()
        for _ in range(5):
            buffers.step()
        done.set()

    thread = threading.Thread(target=steps)
    thread.start()
    running.wait()
    count = 0
    while not done.is_set():
        count += 1
    thread.join()
    assert count > 100


def test_steps_from_several_python_threads_at_once() -> None:
    together = [AdamBuffers(100_000, StateLayout.FP32, DType.BF16, DType.FP32, seed=i) for i in range(4)]
    alone = [AdamBuffers(100_000, StateLayout.FP32, DType.BF16, DType.FP32, seed=i) for i in range(4)]
    threads = [threading.Thread(target=buffers.step, args=(HYPER,), kwargs={"num_threads": 2}) for buffers in together]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for a, b in zip(together, alone, strict=True):
        b.step()
        assert a.master.tobytes() == b.master.tobytes()


def test_the_own_pool_survives_a_fork() -> None:
    code = """
import os, numpy as np
from deepoffload.native import cpu_adam
a, b = np.arange(3_000_000, dtype=np.uint8), np.zeros(3_000_000, np.uint8)
def work():
    cpu_adam.copy(b.ctypes.data, a.ctypes.data, a.nbytes, 2)
    return (a == b).all()
assert cpu_adam.threading_backend() == "own pool" and work()
b[:] = 0
pid = os.fork()
if pid == 0:
    os._exit(0 if work() else 1)
assert os.waitpid(pid, 0)[1] == 0
assert work()
"""
    result = run(["-c", code])
    assert result.returncode == 0, result.stderr
