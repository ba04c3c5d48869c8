"""DeepSpeed's own memory estimates, in its formulas, for comparison with ours.

The formulas are those of ``estimate_zero2_model_states_mem_needs`` (``deepspeed/runtime/zero/stage_1_and_2.py``) and
``estimate_zero3_model_states_mem_needs`` (``stage3.py``) of DeepSpeed 0.19. They count mixed precision with Adam and
know nothing of NVMe, transfer buffers, activations, or page-locked memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from deepoffload.errors import ConfigError
from deepoffload.estimate.checks import at_least, positive_integer


@dataclass(frozen=True)
class DeepSpeedRow:
    """One combination of options and what DeepSpeed expects of it: bytes per node's CPU and per GPU.

    ``zero_init``: the model is built partitioned (stage 3); None where the stage does not have that choice.
    """

    stage: int
    offload_optimizer: bool
    offload_param: bool
    zero_init: bool | None
    cpu_bytes: int
    gpu_bytes: int

    def options(self) -> str:
        """In the words of DeepSpeed's printed tables."""
        words = [f"offload_optimizer={'cpu ' if self.offload_optimizer else 'none'}"]
        if self.stage == 3:
            words.insert(0, f"offload_param={'cpu ' if self.offload_param else 'none'}")
            words.append(f"zero_init={1 if self.zero_init else 0}")
        return ", ".join(words)


def model_to_params(model: nn.Module) -> tuple[int, int]:
    """Parameters of ``model`` with shared ones counted once, and the most that one module holds directly.

    DeepSpeed tells shared parameters by their data pointer; here it is the parameter itself, which also works on the
    meta device, where every pointer is 0.

    Raises:
        ConfigError: no module, or one without parameters.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model must be an nn.Module, not {type(model).__name__}")
    total = sum(param.numel() for param in model.parameters())
    if not total:
        raise ConfigError(f"{type(model).__name__} has no parameters, so there is nothing to estimate")
    layers = (sum(param.numel() for param in module.parameters(recurse=False)) for module in model.modules())
    return total, max(layers, default=0)


def estimate_zero1_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """(CPU bytes, GPU bytes) of ZeRO stage 1. DeepSpeed has no function for it: this is its stage 2 with the gradients
    whole on every GPU, 2 bytes per parameter (ZeRO, arXiv 1910.02054, section 5)."""
    cpu, gpu = estimate_zero2_model_states_mem_needs(
        total_params, num_gpus_per_node, num_nodes, cpu_offload, additional_buffer_factor
    )
    if cpu_offload:
        return cpu, gpu + 2 * total_params
    return cpu, 4 * total_params + int(16 * total_params / (num_nodes * num_gpus_per_node))


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """(CPU bytes, GPU bytes), as DeepSpeed's function of this name."""
    _check(total_params, num_gpus_per_node, num_nodes, additional_buffer_factor)
    total_gpus = num_nodes * num_gpus_per_node
    if cpu_offload:
        return int(total_params * max(4 * total_gpus, 16) * additional_buffer_factor), 2 * total_params
    cpu = total_params * 4 * num_gpus_per_node * additional_buffer_factor
    return int(cpu), 2 * total_params + int(18 * total_params / total_gpus)


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """(CPU bytes, GPU bytes, bytes of the largest layer), as DeepSpeed's function of this name."""
    _check(total_params, num_gpus_per_node, num_nodes, additional_buffer_factor)
    positive_integer("largest_layer_params", largest_layer_params)
    total_gpus = num_nodes * num_gpus_per_node
    layer = 4 * largest_layer_params
    whole = 4 * num_gpus_per_node  # the fp32 model of each process, where it is not built partitioned
    if cpu_offload:
        on_cpu, on_gpu = (18, 0) if cpu_offload_params else (16, 2)
        share = on_cpu * (1 / num_nodes)
        cpu = total_params * (share if zero_init else max(whole, share)) * additional_buffer_factor
        return int(cpu), layer + int(on_gpu * total_params / total_gpus), layer
    cpu = (largest_layer_params if zero_init else total_params) * whole * additional_buffer_factor
    return int(cpu), layer + int(18 * total_params / total_gpus), layer


def deepspeed_rows(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> Iterator[DeepSpeedRow]:
    """Stages 1, 2 and 3 with every combination of offloading that each has, in the order in which DeepSpeed prints."""
    hardware = (num_gpus_per_node, num_nodes)
    for stage, estimate in ((1, estimate_zero1_model_states_mem_needs), (2, estimate_zero2_model_states_mem_needs)):
        for offload in (True, False):
            cpu, gpu = estimate(total_params, *hardware, offload, additional_buffer_factor)
            yield DeepSpeedRow(stage, offload, False, None, cpu, gpu)
    for offload, offload_param in ((True, True), (True, False), (False, False)):
        for zero_init in (True, False):
            cpu, gpu, _ = estimate_zero3_model_states_mem_needs(
                total_params,
                largest_layer_params,
                *hardware,
                offload,
                offload_param,
                zero_init,
                additional_buffer_factor,
            )
            yield DeepSpeedRow(3, offload, offload_param, zero_init, cpu, gpu)


def _check(total_params: int, num_gpus_per_node: int, num_nodes: int, additional_buffer_factor: float) -> None:
    positive_integer("total_params", total_params)
    positive_integer("num_gpus_per_node", num_gpus_per_node)
    positive_integer("num_nodes", num_nodes)
    at_least("additional_buffer_factor", additional_buffer_factor, 1.0)
