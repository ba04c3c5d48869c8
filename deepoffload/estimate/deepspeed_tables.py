"""DeepSpeed's printed tables of model states, under its own names: for people who arrive with them.

Arguments and lines are those of ``deepspeed.runtime.zero.stage_1_and_2`` and ``deepspeed.runtime.zero.stage3`` (0.19).
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from deepoffload.estimate.checks import at_least, positive_integer
from deepoffload.estimate.deepspeed import DeepSpeedRow, deepspeed_rows, model_to_params


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print what ZeRO 2 needs for ``model``, which may be on the meta device.

    Raises:
        ConfigError: no module, one without parameters, or a number that makes no sense.
    """
    total, _ = model_to_params(model)
    estimate_zero2_model_states_mem_needs_all_cold(total, num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """The same from the number of parameters. Raises ``ConfigError`` for a number that makes no sense."""
    total, gpus, nodes = _numbers(total_params, num_gpus_per_node, num_nodes, additional_buffer_factor)
    rows = deepspeed_rows(total, 1, gpus, nodes, additional_buffer_factor)
    _print(f"SW: Model with {int(total / 1e6)}M total params.", gpus, nodes, (row for row in rows if row.stage == 2))


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print what ZeRO 3 needs for ``model``, which may be on the meta device.

    Raises:
        ConfigError: no module, one without parameters, or a number that makes no sense.
    """
    total, largest = model_to_params(model)
    estimate_zero3_model_states_mem_needs_all_cold(
        total, largest, num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """The same from the number of parameters in all and in the largest layer. Raises ``ConfigError`` for a number that
    makes no sense."""
    total, gpus, nodes = _numbers(total_params, num_gpus_per_node, num_nodes, additional_buffer_factor)
    largest = positive_integer("largest_layer_params", largest_layer_params)
    rows = deepspeed_rows(total, largest, gpus, nodes, additional_buffer_factor)
    head = f"SW: Model with {int(total / 1e6)}M total params, {int(largest / 1e6)}M largest layer params."
    _print(head, gpus, nodes, (row for row in rows if row.stage == 3))


def _numbers(total: object, gpus: object, nodes: object, factor: object) -> tuple[int, int, int]:
    at_least("additional_buffer_factor", factor, 1.0)
    return (
        positive_integer("total_params", total),
        positive_integer("num_gpus_per_node", gpus),
        positive_integer("num_nodes", nodes),
    )


def _print(software: str, gpus: int, nodes: int, rows: Iterable[DeepSpeedRow]) -> None:
    print("Estimated memory needed for params, optim states and gradients for a:")
    print(hardware_line(gpus, nodes))
    print(software)
    print("  per CPU  |  per GPU |   Options")
    for row in rows:
        print(f" {row.cpu_bytes / 2**30:7.2f}GB | {row.gpu_bytes / 2**30:6.2f}GB | {row.options()}")


def hardware_line(gpus: int, nodes: int) -> str:
    """DeepSpeed's words for the machines."""
    return (
        f"HW: Setup with {nodes} {'nodes' if nodes > 1 else 'node'}, {gpus} {'GPUs' if gpus > 1 else 'GPU'} per node."
    )
