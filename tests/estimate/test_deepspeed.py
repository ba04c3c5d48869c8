"""DeepSpeed's formulas: what its functions returned (DeepSpeed 0.19.8), recorded."""

from __future__ import annotations

import json
import subprocess

import pytest
import torch
from torch import nn

import deepoffload.estimate
from deepoffload.errors import ConfigError
from deepoffload.estimate import (
    estimate_model_states_mem_needs_all_cold,
    estimate_model_states_mem_needs_all_live,
    estimate_zero1_model_states_mem_needs,
    estimate_zero2_model_states_mem_needs,
    estimate_zero3_model_states_mem_needs,
)
from deepoffload.estimate.deepspeed import deepspeed_rows, model_to_params
from tests.support.deepspeed_installed import DEEPSPEED_PYTHON, needs_deepspeed

OFFLOADS = ((True, True), (True, False), (False, False))

RECORDED = (
    (
        (2_851_598_336, 32_899_072, 8, 1, 1.5),
        ((136_876_720_128, 5_703_196_672), (136_876_720_128, 12_119_292_928)),
        (
            (76_993_155_072, 131_596_288, 131_596_288),
            (136_876_720_128, 131_596_288, 131_596_288),
            (68_438_360_064, 844_495_872, 131_596_288),
            (136_876_720_128, 844_495_872, 131_596_288),
            (1_579_155_456, 6_547_692_544, 131_596_288),
            (136_876_720_128, 6_547_692_544, 131_596_288),
        ),
    ),
    (
        (125_000_000, 38_597_376, 1, 1, 1.5),
        ((3_000_000_000, 250_000_000), (750_000_000, 2_500_000_000)),
        (
            (3_375_000_000, 154_389_504, 154_389_504),
            (3_375_000_000, 154_389_504, 154_389_504),
            (3_000_000_000, 404_389_504, 154_389_504),
            (3_000_000_000, 404_389_504, 154_389_504),
            (231_584_256, 2_404_389_504, 154_389_504),
            (750_000_000, 2_404_389_504, 154_389_504),
        ),
    ),
    (
        (1_000_000_000_000, 2_500_000_000, 16, 2, 1.5),
        ((192_000_000_000_000, 2_000_000_000_000), (96_000_000_000_000, 2_562_500_000_000)),
        (
            (13_500_000_000_000, 10_000_000_000, 10_000_000_000),
            (96_000_000_000_000, 10_000_000_000, 10_000_000_000),
            (12_000_000_000_000, 72_500_000_000, 10_000_000_000),
            (96_000_000_000_000, 72_500_000_000, 10_000_000_000),
            (240_000_000_000, 572_500_000_000, 10_000_000_000),
            (96_000_000_000_000, 572_500_000_000, 10_000_000_000),
        ),
    ),
    (
        (7_000_000_001, 131_072_003, 3, 5, 1.1),
        ((462_000_000_066, 14_000_000_002), (92_400_000_013, 22_400_000_003)),
        (
            (27_720_000_003, 524_288_012, 524_288_012),
            (92_400_000_013, 524_288_012, 524_288_012),
            (24_640_000_003, 1_457_621_345, 524_288_012),
            (92_400_000_013, 1_457_621_345, 524_288_012),
            (1_730_150_439, 8_924_288_013, 524_288_012),
            (92_400_000_013, 8_924_288_013, 524_288_012),
        ),
    ),
    (
        (40_000_000, 3, 1, 4, 1.0),
        ((640_000_000, 80_000_000), (160_000_000, 260_000_000)),
        (
            (180_000_000, 12, 12),
            (180_000_000, 12, 12),
            (160_000_000, 20_000_012, 12),
            (160_000_000, 20_000_012, 12),
            (12, 180_000_012, 12),
            (160_000_000, 180_000_012, 12),
        ),
    ),
)
"""(parameters, largest layer, GPUs per node, nodes, buffer factor); of ZeRO-2 with and without offload (CPU, GPU); of
ZeRO-3 for each of OFFLOADS with and without zero_init (CPU, GPU, largest layer)."""


@pytest.mark.parametrize(("hardware", "zero2", "zero3"), RECORDED)
def test_the_functions_give_what_deepspeeds_gave(hardware, zero2, zero3):
    params, layer, gpus, nodes, factor = hardware
    for offload, expected in zip((True, False), zero2, strict=True):
        assert estimate_zero2_model_states_mem_needs(params, gpus, nodes, offload, factor) == expected
    cases = [(*offloads, zero_init) for offloads in OFFLOADS for zero_init in (True, False)]
    for case, expected in zip(cases, zero3, strict=True):
        assert estimate_zero3_model_states_mem_needs(params, layer, gpus, nodes, *case, factor) == expected


def test_stage_1_is_stage_2_with_whole_gradients():
    for offload in (True, False):
        cpu, gpu = estimate_zero1_model_states_mem_needs(1000, 4, 2, offload)
        cpu_2, gpu_2 = estimate_zero2_model_states_mem_needs(1000, 4, 2, offload)
        assert cpu == cpu_2
        assert gpu - gpu_2 == (2000 if offload else 2000 - 2000 // 8)


def test_every_combination_is_in_the_table_once():
    rows = list(deepspeed_rows(10**9, 10**7))
    assert len({(row.stage, row.options()) for row in rows}) == len(rows) == 10
    assert {row.stage for row in rows} == {1, 2, 3}


def tied() -> nn.Module:
    with torch.device("meta"):
        head = nn.Linear(16, 100, bias=False)
        model = nn.Sequential(nn.Embedding(100, 16), nn.Linear(16, 32), nn.Linear(32, 16), head)
    head.weight = model[0].weight
    return model


def test_shared_parameters_count_once():
    assert model_to_params(tied()) == (1600 + 16 * 32 + 32 + 32 * 16 + 16, 1600)


def test_live_prints_both_tables(capsys):
    theirs, ours = estimate_model_states_mem_needs_all_live(tied(), num_gpus_per_node=2)
    printed = capsys.readouterr().out
    assert "HW: Setup with 1 node, 2 GPUs per node." in printed
    assert "ZeRO-3: offload_param=cpu , offload_optimizer=cpu , zero_init=1" in printed and "on NVMe" in printed
    assert len(theirs) == 10
    assert {row.precision.value for row in ours} == {"bf16", "fp32", "fp16"}


def test_ours_keep_14_and_16_bytes_per_parameter(capsys):
    params = 4_000_000
    _, ours = estimate_model_states_mem_needs_all_cold(params, 1_000_000)
    whole = {
        (row.precision.value, row.state_dtype): row.host_bytes / params
        for row in ours
        if "host memory" in row.placement
    }
    scales = 2 * 4 / 256
    expected = {
        ("bf16", "fp32"): 14, ("bf16", "bf16"): 10, ("bf16", "8bit"): 8 + scales,
        ("fp32", "fp32"): 16, ("fp32", "bf16"): 12, ("fp32", "8bit"): 10 + scales,
        ("fp16", "fp32"): 16, ("fp16", "bf16"): 12, ("fp16", "8bit"): 10 + scales,
    }  # fmt: skip
    assert whole == pytest.approx(expected, rel=0.01)
    for row in ours:
        if "NVMe" in row.placement:
            moved = whole[row.precision.value, row.state_dtype]
            assert row.nvme_bytes / params > moved - 1 and row.host_bytes < 0.6 * params * 14
    assert "4M total params, 1M largest layer params" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"total_params": -1}, "total_params"),
        ({"total_params": 0}, "total_params"),
        ({"total_params": 2.5}, "total_params"),
        ({"total_params": "many"}, "total_params"),
        ({"largest_layer_params": 0}, "largest_layer_params"),
        ({"largest_layer_params": 10**10}, "largest_layer_params"),
        ({"num_gpus_per_node": 0}, "num_gpus_per_node"),
        ({"num_nodes": -2}, "num_nodes"),
        ({"additional_buffer_factor": 0.5}, "additional_buffer_factor"),
        ({"additional_buffer_factor": float("nan")}, "additional_buffer_factor"),
    ],
)
def test_nonsense_is_refused_by_name(arguments, named, capsys):
    with pytest.raises(ConfigError, match=named):
        estimate_model_states_mem_needs_all_cold(**{"total_params": 10**9, "largest_layer_params": 10**7, **arguments})
    assert capsys.readouterr().out == ""


TABLES = (
    ("zero2", (2_851_598_336,), {"num_gpus_per_node": 8}),
    ("zero2", (125_000_000,), {"num_nodes": 3, "additional_buffer_factor": 1.1}),
    ("zero3", (2_851_598_336, 32_899_072), {"num_gpus_per_node": 8, "num_nodes": 2}),
    ("zero3", (40_000_000, 3), {}),
)
PRINTED = {
    0: """Estimated memory needed for params, optim states and gradients for a:
HW: Setup with 1 node, 8 GPUs per node.
SW: Model with 2851M total params.
  per CPU  |  per GPU |   Options
  127.48GB |   5.31GB | offload_optimizer=cpu{}
  127.48GB |  11.29GB | offload_optimizer=none
""".format(" "),
    2: """Estimated memory needed for params, optim states and gradients for a:
HW: Setup with 2 nodes, 8 GPUs per node.
SW: Model with 2851M total params, 32M largest layer params.
  per CPU  |  per GPU |   Options
   35.85GB |   0.12GB | offload_param=cpu , offload_optimizer=cpu , zero_init=1
  127.48GB |   0.12GB | offload_param=cpu , offload_optimizer=cpu , zero_init=0
   31.87GB |   0.45GB | offload_param=none, offload_optimizer=cpu , zero_init=1
  127.48GB |   0.45GB | offload_param=none, offload_optimizer=cpu , zero_init=0
    1.47GB |   3.11GB | offload_param=none, offload_optimizer=none, zero_init=1
  127.48GB |   3.11GB | offload_param=none, offload_optimizer=none, zero_init=0
""",
}
"""What DeepSpeed 0.19.8 printed for some of TABLES. From Python 3.11 on it has ``OffloadDeviceEnum.cpu``
for ``cpu ``."""


@pytest.mark.parametrize("number", PRINTED)
def test_its_tables_have_its_names_and_print_what_it_prints(number, capsys):
    stage, positional, named = TABLES[number]
    getattr(deepoffload.estimate, f"estimate_{stage}_model_states_mem_needs_all_cold")(*positional, **named)
    assert capsys.readouterr().out == PRINTED[number]


def test_its_tables_of_a_live_model(capsys):
    model = tied()
    for stage, numbers in (("zero2", (2672,)), ("zero3", (2672, 1600))):
        name = f"estimate_{stage}_model_states_mem_needs_all"
        getattr(deepoffload.estimate, f"{name}_live")(model=model, num_gpus_per_node=2)
        live = capsys.readouterr().out
        getattr(deepoffload.estimate, f"{name}_cold")(*numbers, num_gpus_per_node=2)
        assert capsys.readouterr().out == live and live.count("\n") > 5


THEIRS = """
import json, sys
from deepspeed.runtime.zero import stage3, stage_1_and_2
modules = {"zero2": stage_1_and_2, "zero3": stage3}
for stage, positional, named in json.loads(sys.argv[1]):
    print("=====")
    getattr(modules[stage], f"estimate_{stage}_model_states_mem_needs_all_cold")(*positional, **named)
"""


@needs_deepspeed
def test_the_installed_deepspeed_prints_the_same(capsys):
    command = [DEEPSPEED_PYTHON, "-c", THEIRS, json.dumps(TABLES)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    theirs = done.stdout.replace("OffloadDeviceEnum.cpu", "cpu ").split("=====\n")[1:]
    for (stage, positional, named), expected in zip(TABLES, theirs, strict=True):
        getattr(deepoffload.estimate, f"estimate_{stage}_model_states_mem_needs_all_cold")(*positional, **named)
        assert capsys.readouterr().out == expected


LIVE = [
    deepoffload.estimate.estimate_model_states_mem_needs_all_live,
    deepoffload.estimate.estimate_zero2_model_states_mem_needs_all_live,
    deepoffload.estimate.estimate_zero3_model_states_mem_needs_all_live,
]


@pytest.mark.parametrize("function", LIVE)
@pytest.mark.parametrize(
    ("model", "named"), [(None, "NoneType"), ({}, "dict"), ("gpt2", "str"), (nn.Identity(), "no parameters")]
)
def test_what_is_no_model_is_refused(function, model, named, capsys):
    with pytest.raises(ConfigError, match=named):
        function(model)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "function",
    [
        estimate_zero1_model_states_mem_needs,
        estimate_zero2_model_states_mem_needs,
        deepoffload.estimate.estimate_zero2_model_states_mem_needs_all_cold,
    ],
)
@pytest.mark.parametrize("value", [0, -1, 2.5, float("nan"), float("inf"), "8", None, True, [8]])
def test_numbers_that_make_no_sense(function, value):
    for name in ("total_params", "num_gpus_per_node", "num_nodes"):
        with pytest.raises(ConfigError, match=name):
            function(**{"total_params": 10**9, "num_gpus_per_node": 1, "num_nodes": 1, name: value})
