"""The tables of DeepSpeed's names are complete, and what they say is so."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepoffload.deepspeed as deepspeed
from deepoffload.deepspeed.accelerator import DeviceCalls
from deepoffload.deepspeed.engine import TrainingEngine
from deepoffload.deepspeed.engine_table import ENGINE_NAMES
from deepoffload.deepspeed.names import AbsentNameError, Presence
from deepoffload.deepspeed.package_table import PACKAGE_NAMES
from deepoffload.deepspeed.reference import markdown
from deepoffload.errors import UnsupportedError
from tests.support.deepspeed_installed import DEEPSPEED_PYTHON, needs_deepspeed

HERE = Path(__file__).parent
RECORDED = json.loads((HERE / "names_0.19.8.json").read_text(encoding="utf-8"))

ON_OBJECTS = ("module", "optimizer", "lr_scheduler", "tput_timer")
"""Attributes that an engine's object has and its class does not."""


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    model = nn.Linear(4, 4)
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3}}
    config = {"host_budget": "1MiB", "train_micro_batch_size_per_gpu": 2, "optimizer": optimizer}
    made = deepspeed.initialize(model=model, config=config, dist_init_required=False)[0]
    yield made
    made.close()


def lacking(names: dict[str, Any]) -> list[str]:
    """Names of DeepSpeed's that no table has."""
    missing = [f"engine.{name}" for name in names["engine"] if name not in ENGINE_NAMES]
    missing += [name for name in names["deepspeed"] if name not in PACKAGE_NAMES]
    for module in ("zero", "utils", "checkpointing"):
        missing += [f"{module}.{name}" for name in names[module] if f"{module}.{name}" not in PACKAGE_NAMES]
    for module, asked in (("comm", deepspeed.comm), ("accelerator", deepspeed.get_accelerator())):
        for name in names[module]:
            try:
                getattr(asked, name)
            except AbsentNameError:
                pass  # which says what to use
            except AttributeError:
                missing.append(f"{module}.{name}")
    return missing


def test_every_name_of_deepspeed_is_in_a_table():
    assert RECORDED["version"] == deepspeed.__version__
    assert not lacking(RECORDED)


@needs_deepspeed
def test_the_installed_deepspeed_has_the_recorded_names(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [DEEPSPEED_PYTHON, str(HERE / "names_of_deepspeed.py"), str(tmp_path / "names.json")]
    subprocess.run(command, check=True, capture_output=True, env=environment, cwd=tmp_path)
    found = json.loads((tmp_path / "names.json").read_text(encoding="utf-8"))
    if found["version"] == RECORDED["version"]:
        # What its accelerator has depends on the machine's device.
        assert {**found, "accelerator": None} == {**RECORDED, "accelerator": None}
    assert not lacking(found)


@pytest.mark.parametrize("name", [name for name, known in ENGINE_NAMES.items() if known.presence is Presence.ABSENT])
def test_an_absent_name_of_the_engine_says_what_to_use(engine, name):
    assert not hasattr(TrainingEngine, name) and not hasattr(engine, name)
    with pytest.raises(UnsupportedError, match=f"engine.{name} is not in deepoffload: .+") as raised:
        getattr(engine, name)
    assert isinstance(raised.value, AttributeError)  # so hasattr says False


def test_the_other_names_of_the_engine_are_there(engine):
    for name, known in ENGINE_NAMES.items():
        if known.presence is not Presence.ABSENT and name != "config":
            assert name in ON_OBJECTS or hasattr(TrainingEngine, name), name
            getattr(engine, name)


def test_the_engine_has_its_models_attributes_before_the_refusal():
    model = nn.Linear(2, 2)
    model.timers = "mine"  # type: ignore[assignment]
    model.config = {"hidden": 2}  # type: ignore[assignment]
    config = {"host_budget": "1MiB"}
    made = deepspeed.initialize(model=model, config=config, dist_init_required=False)[0]
    assert made.timers == "mine" and made.config == {"hidden": 2}
    made.close()


def of_package(path: str) -> Any:
    """What ``deepspeed.<path>`` gives when everything is asked for as an attribute."""
    found: Any = deepspeed
    for part in path.split("."):
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("path", [path for path, known in PACKAGE_NAMES.items() if known.presence is Presence.ABSENT])
def test_an_absent_name_of_the_package_raises_when_it_is_used(path):
    stand_in = of_package(path)
    with pytest.raises(UnsupportedError, match=f"deepspeed.{path} is not in deepoffload: .+"):
        stand_in(1, name=2)
    if isinstance(stand_in, type):
        assert not isinstance(torch.nn.Linear(1, 1), stand_in)


@pytest.mark.parametrize(
    "path", [path for path, known in PACKAGE_NAMES.items() if known.presence is not Presence.ABSENT]
)
def test_the_other_names_of_the_package_are_there(path):
    found = of_package(path)
    home = getattr(found, "__module__", None) or getattr(found, "__name__", "")
    assert str(home).startswith("deepoffload") or path.endswith("logger"), home


IMPORTS = """
from deepoffload.deepspeed.accelerator import get_accelerator
from deepoffload.deepspeed import comm as dist, zero, get_accelerator, init_distributed, PipelineModule
from deepoffload.deepspeed.comm import all_reduce, ReduceOp, barrier
from deepoffload.deepspeed.moe.layer import MoE
from deepoffload.deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer, is_moe_param
from deepoffload.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepoffload.deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepoffload.deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepoffload.deepspeed.ops.lamb import FusedLamb
from deepoffload.deepspeed.ops.adam.cpu_adam import DeepSpeedCPUAdam
from deepoffload.deepspeed.ops.adam.fused_adam import FusedAdam
from deepoffload.deepspeed.inference.engine import InferenceEngine
from deepoffload.deepspeed.linear import LoRAConfig, OptimizedLinear
from deepoffload.deepspeed.moe.experts import Experts
from deepoffload.deepspeed.moe.sharded_moe import TopKGate
from deepoffload.deepspeed.monitor.monitor import MonitorMaster
from deepoffload.deepspeed.profiling.flops_profiler import FlopsProfiler, get_model_profile
from deepoffload.deepspeed.profiling.flops_profiler.profiler import FlopsProfiler
from deepoffload.deepspeed.pipe import PipelineModule, LayerSpec
from deepoffload.deepspeed.runtime.activation_checkpointing import checkpointing
from deepoffload.deepspeed.runtime.activation_checkpointing.checkpointing import checkpoint
from deepoffload.deepspeed.runtime.config import DeepSpeedConfig
from deepoffload.deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepoffload.deepspeed.runtime.dataloader import RepeatingLoader, DeepSpeedDataLoader
from deepoffload.deepspeed.runtime.engine import DeepSpeedEngine, DeepSpeedOptimizerCallable
from deepoffload.deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepoffload.deepspeed.runtime.fp16.loss_scaler import LossScaler, DynamicLossScaler
from deepoffload.deepspeed.runtime.fp16.onebit.lamb import OnebitLamb
from deepoffload.deepspeed.runtime.fp16.onebit.zoadam import ZeroOneAdam
from deepoffload.deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepoffload.deepspeed.runtime.hybrid_engine import DeepSpeedHybridEngine
from deepoffload.deepspeed.runtime.pipe.engine import PipelineEngine
from deepoffload.deepspeed.runtime.pipe.module import PipelineModule, LayerSpec, TiedLayerSpec
from deepoffload.deepspeed.runtime.pipe.topology import ProcessTopology
from deepoffload.deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from deepoffload.deepspeed.runtime.zero import GatheredParameters, Init
from deepoffload.deepspeed.runtime.zero.config import ZeroStageEnum, DeepSpeedZeroConfig
from deepoffload.deepspeed.runtime.zero.tiling import TiledLinear
from deepoffload.deepspeed.runtime.zero.utils import is_zero_param
from deepoffload.deepspeed.sequence.layer import DistributedAttention
from deepoffload.deepspeed.utils.init_on_device import OnDevice
from deepoffload.deepspeed.utils.tensor_fragment import fragment_address, safe_get_full_grad
from deepoffload.deepspeed.utils.timer import ThroughputTimer, SynchronizedWallClockTimer
from deepoffload.deepspeed.runtime.fp16.onebit import OnebitAdam
from deepoffload.deepspeed.runtime.fp16.onebit.adam import OnebitAdam
from deepoffload.deepspeed.runtime.lr_schedules import WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest
from deepoffload.deepspeed.runtime.utils import see_memory_usage
from deepoffload.deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from deepoffload.deepspeed.runtime.zero.partition_parameters import ZeroParamStatus, GatheredParameters
from deepoffload.deepspeed.runtime.zero.stage3 import (
    DeepSpeedZeroOptimizer_Stage3, GatheredParameters, estimate_zero3_model_states_mem_needs_all_live)
from deepoffload.deepspeed.runtime.zero.stage_1_and_2 import (
    DeepSpeedZeroOptimizer, estimate_zero2_model_states_mem_needs_all_cold)
from deepoffload.deepspeed.utils import RepeatingLoader, logger, log_dist, safe_get_full_fp32_param
from deepoffload.deepspeed.utils import set_z3_leaf_modules, get_z3_leaf_modules
from deepoffload.deepspeed.utils.logging import logger, log_dist
from deepoffload.deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from deepoffload.deepspeed.zero import Init, GatheredParameters, register_external_parameter, TiledLinear
"""


def test_lines_of_imports_that_scripts_have():
    exec(IMPORTS, {})


def test_a_name_that_deepspeed_does_not_have_either():
    with pytest.raises(AttributeError, match="docs/from_deepspeed.md"):
        _ = deepspeed.initialise
    with pytest.raises(ImportError):
        exec("from deepoffload.deepspeed.zero import Gathered", {})
    with pytest.raises(AttributeError, match="torch.distributed"):
        _ = deepspeed.comm.reduce_everything
    with pytest.raises(AttributeError, match="torch.accelerator"):
        _ = deepspeed.get_accelerator().warm_up


def test_importing_the_package_loads_no_other_module_of_ours(programs):
    program = "import sys, torch\nbefore = set(sys.modules)\nimport deepoffload.deepspeed as deepspeed\n"
    program += "print(*sorted(name for name in set(sys.modules) - before if name.startswith('deepoffload')))"
    done = programs.run(program)
    assert done.stdout.split() == ["deepoffload", "deepoffload.deepspeed"]


def test_dir_lists_what_is_there():
    assert {"initialize", "zero", "comm", "get_accelerator", "DeepSpeedEngine"} <= set(dir(deepspeed))
    assert isinstance(deepspeed.get_accelerator(), DeviceCalls)
    assert importlib.import_module("deepoffload.deepspeed.comm") is deepspeed.dist


def test_the_page_is_written_from_the_tables():
    page = (HERE.parents[1] / "docs" / "from_deepspeed.md").read_text(encoding="utf-8")
    assert page == markdown(), "run: python -m deepoffload.deepspeed.reference > docs/from_deepspeed.md"
    for name in (*ENGINE_NAMES, *PACKAGE_NAMES):
        assert f"`{name}`" in page
