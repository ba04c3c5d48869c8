"""Memory of model states alone: DeepSpeed's estimates in its words, and ours next to them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import nn

from deepoffload.config import Config, OptimizerConfig, Precision
from deepoffload.config.units import format_bytes
from deepoffload.errors import ConfigError
from deepoffload.estimate.blocks import UNBOUNDED_BYTES, Planner
from deepoffload.estimate.checks import positive_integer
from deepoffload.estimate.deepspeed import DeepSpeedRow, deepspeed_rows, model_to_params
from deepoffload.estimate.deepspeed_tables import hardware_line
from deepoffload.estimate.machine import MachineSpec

STATE_LAYOUTS = ("fp32", "bf16", "8bit")
"""What Adam's two moments are stored in."""


@dataclass(frozen=True)
class StatesRow:
    """Our model states: bytes on the host and on NVMe, and of the units in use on each GPU.

    ``state_dtype``: of the two moments. ``host_bytes`` and ``nvme_bytes`` are a node's, ``rank_host_bytes`` and
    ``rank_nvme_bytes`` one rank's. Host memory is one block, page-locked where the limits allow it; ``window_bytes`` of
    a rank's is what passes through: weights and gradients in use and ahead, and slots for state.
    """

    precision: Precision
    state_dtype: str
    placement: str
    host_bytes: int
    nvme_bytes: int
    gpu_bytes: int
    rank_host_bytes: int
    rank_nvme_bytes: int
    window_bytes: int


def estimate_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> tuple[list[DeepSpeedRow], list[StatesRow]]:
    """Print what model states need: ZeRO 1, 2 and 3 with every combination of offloading in DeepSpeed's formulas, and
    deepoffload's placements. ``model`` may be on the meta device. Returns the rows.

    Raises:
        ConfigError: a number makes no sense.
    """
    total, largest = model_to_params(model)
    return _print(model, total, largest, num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> tuple[list[DeepSpeedRow], list[StatesRow]]:
    """The same from numbers only: parameters in all and in the largest layer.

    Raises:
        ConfigError: a number makes no sense.
    """
    total = positive_integer("total_params", total_params)
    largest = positive_integer("largest_layer_params", largest_layer_params)
    if largest > total:
        raise ConfigError(f"largest_layer_params {largest} is more than total_params {total}")
    with torch.device("meta"):
        model = _Layers(total, largest)
    return _print(model, total, largest, num_gpus_per_node, num_nodes, additional_buffer_factor)


class _LayerOfSize(nn.Module):
    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(numel))


class _Layers(nn.Module):
    """As many layers of the largest size as there are, and one of the rest."""

    def __init__(self, total: int, largest: int) -> None:
        super().__init__()
        sizes = [largest] * (total // largest) + ([total % largest] if total % largest else [])
        self.layers = nn.ModuleList(_LayerOfSize(size) for size in sizes)


def our_rows(model: nn.Module, num_gpus_per_node: int, num_nodes: int) -> Iterator[StatesRow]:
    """For each precision and layout of the state: all on the host, and the least memory with the rest on NVMe."""
    ranks = num_gpus_per_node * num_nodes
    bandwidths = MachineSpec().bandwidths()
    for precision, state_dtype in product((Precision.BF16, Precision.FP32, Precision.FP16), STATE_LAYOUTS):
        config = Config(precision=precision, optimizer=OptimizerConfig("adamw", {"state_dtype": state_dtype}))
        planner = Planner(model, config)
        least = planner.smallest_capacity(nvme_bytes=UNBOUNDED_BYTES, bandwidths=bandwidths)
        for placement, capacity in (("all in host memory", UNBOUNDED_BYTES), ("least memory, rest on NVMe", least)):
            blocks = planner.plan(capacity_bytes=capacity, nvme_bytes=UNBOUNDED_BYTES, bandwidths=bandwidths)
            total = sum(block.nbytes for block in blocks.placement.blocks)
            nvme = sum(blocks.extent_bytes(b) for b in blocks.placement.blocks if b.id in blocks.placement.paged)
            held = min(capacity, total)
            host, disk, window = (-(-n // ranks) for n in (held, nvme, held - blocks.placement.resident_bytes))
            yield StatesRow(
                precision=precision,
                state_dtype=state_dtype,
                placement=placement,
                host_bytes=host * num_gpus_per_node,
                nvme_bytes=disk * num_gpus_per_node,
                gpu_bytes=blocks.in_use_bytes(),
                rank_host_bytes=host,
                rank_nvme_bytes=disk,
                window_bytes=window,
            )


def _print(
    model: nn.Module, total: int, largest: int, gpus: int, nodes: int, factor: float
) -> tuple[list[DeepSpeedRow], list[StatesRow]]:
    theirs = list(deepspeed_rows(total, largest, gpus, nodes, factor))
    ours = list(our_rows(model, gpus, nodes))
    print("Estimated memory needed for params, optim states and gradients for a:")
    print(hardware_line(gpus, nodes))
    print(f"SW: Model with {total // 10**6}M total params, {largest // 10**6}M largest layer params.")
    print("\nDeepSpeed, in its formulas (it counts no NVMe, transfer buffers or activations):")
    print("  per CPU  |  per GPU |   Options")
    for row in theirs:
        near, gpu = row.cpu_bytes / 2**30, row.gpu_bytes / 2**30
        print(f" {near:7.2f}GB | {gpu:6.2f}GB | ZeRO-{row.stage}: {row.options()}")
    print("\ndeepoffload (a computing device without its own memory needs only host memory):")
    print("  host/node |  NVMe/node |  host/rank |  NVMe/rank |    window |    per GPU |   Options")
    for mine in ours:
        sizes = (mine.host_bytes, mine.nvme_bytes, mine.rank_host_bytes, mine.rank_nvme_bytes)
        columns = [format_bytes(n).rjust(10) for n in (*sizes, mine.window_bytes, mine.gpu_bytes)]
        print(f" {' | '.join(columns)} | {mine.precision.value}, moments in {mine.state_dtype}, {mine.placement}")
    return theirs, ours
