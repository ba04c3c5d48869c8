"""Importing deepoffload is cheap and drags nothing in (benchmarks/start_up measures the seconds)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
HEAVY = (
    "transformers",
    "safetensors",
    "peft",
    "psutil",
    "matplotlib",
    "rich",
    "tqdm",
    "accelerate",
    "greenlet",
    "triton",
    "pytest",
)
"""Packages that only some users need."""

LOADED = """
import sys
import torch
before = set(sys.modules)
import deepoffload
if {everything}:
    for name in deepoffload.__all__:
        getattr(deepoffload, name)
print(*sorted(set(sys.modules) - before))
"""


def loaded_by_import(*, everything: bool) -> set[str]:
    """Names of the modules that importing deepoffload loads on top of torch's; with `everything`, all it offers."""
    program = LOADED.format(everything=everything)
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(result.stdout.split())


def test_import_alone_loads_nothing_of_ours_but_the_list_of_names():
    assert loaded_by_import(everything=False) == {"deepoffload"}


def test_nothing_that_is_offered_loads_a_package_that_only_some_need():
    assert not {name.partition(".")[0] for name in loaded_by_import(everything=True)} & set(HEAVY)


def test_training_does_not_load_the_compiler():
    """torch's optimizers do: two seconds and 70 MB, also where nothing is compiled."""
    program = """
import sys, torch, deepoffload
with deepoffload.offload_context({"host_budget": "100 MB"}):
    model = torch.nn.Linear(8, 8)
optimizer = deepoffload.CPUAdamW([{"params": [model.weight]}], lr=1e-3)
optimizer.add_param_group({"params": [model.bias]})
for _ in range(2):
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
print("torch._dynamo" in sys.modules)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert result.stdout.split()[-1] == "False"


def test_errors_are_there_after_a_bare_import():
    program = "import deepoffload; assert 'errors' in dir(deepoffload); print(deepoffload.errors.ConfigError.__name__)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert result.stdout.strip() == "ConfigError"


def test_a_script_next_to_the_clone_finds_the_package_that_is_installed(tmp_path: Path):
    """`git clone` makes a folder of the package's name, which has no `__init__.py`."""
    (tmp_path / "deepoffload" / "docs").mkdir(parents=True)
    result = subprocess.run(
        [sys.executable, "-c", "import deepoffload; print(deepoffload.errors.ConfigError.__name__)"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )
    assert result.stdout.strip() == "ConfigError", result.stderr
