"""Memory of model states alone: DeepSpeed's estimates in its words, and ours beside them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from deepoffload.config import Config, Precision
from deepoffload.config.units import format_bytes
from deepoffload.errors import ConfigError
from deepoffload.estimate.blocks import UNBOUNDED_BYTES, plan_blocks, smallest_capacity
from deepoffload.estimate.checks import positive_integer
from deepoffload.estimate.deepspeed import DeepSpeedRow, deepspeed_rows, model_to_params
from deepoffload.estimate.machine import MachineSpec


@dataclass(frozen=True)
class StatesRow:
    """Our model states: bytes on the host and on NVMe of a node, and of the units in use on each GPU.

    ``host_bytes`` is page-locked where the limits allow it; there are no other buffers.
    """

    precision: Precision
    placement: str
    host_bytes: int
    nvme_bytes: int
    gpu_bytes: int


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


class _Layer(nn.Module):
    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(numel))


class _Layers(nn.Module):
    """As many layers of the largest size as there are, and one of the rest."""

    def __init__(self, total: int, largest: int) -> None:
        super().__init__()
        sizes = [largest] * (total // largest) + ([total % largest] if total % largest else [])
        self.layers = nn.ModuleList(_Layer(size) for size in sizes)


def our_rows(model: nn.Module, num_gpus_per_node: int, num_nodes: int) -> Iterator[StatesRow]:
    """For each precision: everything on the host, and the least memory with the rest on NVMe."""
    ranks = num_gpus_per_node * num_nodes
    bandwidths = MachineSpec().bandwidths()
    for precision in (Precision.BF16, Precision.FP32, Precision.FP16):
        config = Config(precision=precision)
        least = smallest_capacity(model, config, nvme_bytes=UNBOUNDED_BYTES, bandwidths=bandwidths)
        for placement, capacity in (("all in host memory", UNBOUNDED_BYTES), ("least memory, rest on NVMe", least)):
            blocks = plan_blocks(
                model, config, capacity_bytes=capacity, nvme_bytes=UNBOUNDED_BYTES, bandwidths=bandwidths
            )
            total = sum(block.nbytes for block in blocks.placement.blocks)
            nvme = sum(blocks.extent_bytes(b) for b in blocks.placement.blocks if b.id in blocks.placement.paged)
            host, disk = (-(-n // ranks) for n in (min(capacity, total), nvme))
            gpu = blocks.in_use_bytes()
            yield StatesRow(precision, placement, host * num_gpus_per_node, disk * num_gpus_per_node, gpu)


def _print(
    model: nn.Module, total: int, largest: int, gpus: int, nodes: int, factor: float
) -> tuple[list[DeepSpeedRow], list[StatesRow]]:
    theirs = list(deepspeed_rows(total, largest, gpus, nodes, factor))
    ours = list(our_rows(model, gpus, nodes))
    print("Estimated memory needed for params, optim states and gradients for a:")
    print(
        f"HW: Setup with {nodes} {'nodes' if nodes > 1 else 'node'}, {gpus} {'GPUs' if gpus > 1 else 'GPU'} per node."
    )
    print(f"SW: Model with {total // 10**6}M total params, {largest // 10**6}M largest layer params.")
    print("\nDeepSpeed, in its formulas (it counts no NVMe, transfer buffers or activations):")
    print("  per CPU  |  per GPU |   Options")
    for row in theirs:
        near, gpu = row.cpu_bytes / 2**30, row.gpu_bytes / 2**30
        print(f" {near:7.2f}GB | {gpu:6.2f}GB | ZeRO-{row.stage}: {row.options()}")
    print("\ndeepoffload (per node; one computing device without memory of its own needs nothing beside host memory):")
    print("       host |       NVMe |    per GPU |   Placement")
    for mine in ours:
        columns = (format_bytes(n).rjust(10) for n in (mine.host_bytes, mine.nvme_bytes, mine.gpu_bytes))
        print(f" {' | '.join(columns)} | {mine.precision.value}, {mine.placement}")
    return theirs, ours
