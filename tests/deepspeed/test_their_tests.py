"""The page about DeepSpeed's own tests says what their last run gave, and the names that they import can be had."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "run_deepspeed_tests.py"


def tool() -> Any:
    spec = importlib.util.spec_from_file_location("run_deepspeed_tests", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_has_the_results_and_reasons():
    known = json.loads((Path(__file__).parent / "their_tests.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs" / "deepspeed_tests.md").read_text(encoding="utf-8")
    assert page.partition("<!-- results -->\n")[2].partition("<!-- end -->")[0] == tool().page(known)
    unexplained = [test for test, found in known.items() if (found["failed"] or found["skipped"]) and not found["why"]]
    assert not unexplained
    assert {test.partition("::")[0] for test in known} <= set(tool().FILES)


SUITE = """
import pytest, torch, deepspeed
import deepspeed.comm as dist
from deepspeed.checkpoint.constants import NO_SUCH_NAME
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.op_builder import CPUAdamBuilder
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

class TestOne:
    @pytest.mark.parametrize("lr", [0.1, 0.2])
    def test_here(self, lr):
        assert deepspeed.__version__ == "0.19.8" and deepspeed.ops.__compatible_ops__[CPUAdamBuilder.NAME]
        weight = torch.nn.Parameter(torch.ones(2))
        optimizer = DeepSpeedCPUAdam([weight], lr=lr)
        assert not isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3) and not dist.is_initialized()

    def test_not_here(self):
        CPUAdamBuilder().load()

def test_left_out():
    pytest.skip("no reason")
"""


def test_a_suite_is_run_and_read(tmp_path):
    folder = tmp_path / "unit" / "ops"
    folder.mkdir(parents=True)
    (folder / "test_small.py").write_text(SUITE)
    run = subprocess.run(
        [sys.executable, TOOL, tmp_path, "--file", "ops/test_small.py"], capture_output=True, text=True, timeout=240
    )
    assert run.returncode == 1, run.stdout + run.stderr
    assert "| `ops/test_small.py::TestOne::test_here` | 2 |  |  |  |" in run.stdout
    assert "| `ops/test_small.py::TestOne::test_not_here` |  | 1 |  |  |" in run.stdout
    assert "| `ops/test_small.py::test_left_out` |  |  | 1 |  |" in run.stdout
    assert "NotInDeepOffload: deepspeed.ops.op_builder.CPUAdamBuilder" in run.stdout
    assert "not as in their_tests.json: ops/test_small.py::TestOne::test_here, which is not there" in run.stdout


HANGS = """
import multiprocessing, threading
import pytest

def test_waits_for_ever_with_a_process_of_its_own():
    multiprocessing.get_context("fork").Process(target=threading.Event().wait).start()
    threading.Event().wait()

def test_behind_it():
    pass

def test_ends_the_run():
    pytest.exit("Test hanged, exiting", returncode=7)

@pytest.mark.parametrize("number", [1, 2])
def test_last(number):
    pass
"""


def test_a_case_that_hangs_or_ends_the_run_is_one_failure(tmp_path):
    folder = tmp_path / "unit" / "ops"
    folder.mkdir(parents=True)
    (folder / "test_hangs.py").write_text(HANGS)
    (folder / "test_broken.py").write_text("import no_such_module")
    files = ["ops/test_hangs.py", "ops/test_broken.py"]
    counts, errors = tool().run(tmp_path, files, [], limit_s=6.0)
    failed, passed = {"passed": 0, "failed": 1, "skipped": 0}, {"passed": 1, "failed": 0, "skipped": 0}
    assert counts == {
        "ops/test_broken.py": failed,
        "ops/test_hangs.py::test_behind_it": passed,
        "ops/test_hangs.py::test_ends_the_run": failed,
        "ops/test_hangs.py::test_last": {**passed, "passed": 2},
        "ops/test_hangs.py::test_waits_for_ever_with_a_process_of_its_own": failed,
    }
    assert errors["ops/test_hangs.py::test_waits_for_ever_with_a_process_of_its_own"] == "it did not end within 6 s"
    assert errors["ops/test_hangs.py::test_ends_the_run"] == "the run ended in it, with exit status 7"
    assert "no_such_module" in errors["ops/test_broken.py"]
