"""``--inference``: what a forward pass reads, how long a token takes at least, and what the KV cache takes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from deepoffload.config import Config, Precision
from deepoffload.config.units import format_bytes
from deepoffload.errors import PlacementError
from deepoffload.estimate.blocks import Planner
from deepoffload.estimate.decoder import Decoder
from deepoffload.estimate.machine import MachineSpec
from deepoffload.estimate.questions import budgets
from deepoffload.estimate.report import table
from deepoffload.estimate.subject import Subject
from deepoffload.schedule.cost_model import BlockKind
from deepoffload.schedule.placement import Placement

CACHE_ITEM_BYTES = {Precision.BF16: 2, Precision.FP16: 2, Precision.FP32: 4, Precision.KEEP: 4}


@dataclass(frozen=True)
class InferenceEstimate:
    """Generating with one model on one machine.

    batch, context: sequences, and tokens in the cache of each. cache_bytes: of the KV cache, None where the model does
    not say its sizes. compute_s: of one token of each sequence, by the machine's rates. problem: why it does not fit.
    """

    subject: Subject
    machine: MachineSpec
    batch: int
    context: int
    capacity_bytes: int
    cache_bytes: int | None
    placement: Placement | None
    compute_s: float
    problem: str

    @property
    def fits(self) -> bool:
        return not self.problem

    @property
    def seconds_per_token(self) -> float:
        """Of every sequence of the batch: reading and computing overlap."""
        return max(self.compute_s, 0.0 if self.placement is None else self.placement.disk_seconds)

    @property
    def host_bytes(self) -> int:
        """Memory budget, cache and process. Activations of one token are small next to these."""
        return self.capacity_bytes + (self.cache_bytes or 0) + self.machine.process_bytes


def estimate_inference(
    subject: Subject, machine: MachineSpec, config: Config, batch: int, context: int
) -> InferenceEstimate:
    """Place ``subject`` for inference. Weights are planned as if they took room on NVMe, as far as a checkpoint does
    not have them as the model wants them; that is known only when it is loaded.

    Raises:
        ConfigError: the configuration asks for what the machine does not have.
    """
    config = replace(config, inference=True, optimizer=None)
    planner = Planner(subject.module, config)
    capacity, nvme = budgets(machine, config)
    placement, problem = None, ""
    try:
        plan = planner.plan(capacity_bytes=capacity, nvme_bytes=nvme, bandwidths=machine.bandwidths())
        placement = plan.placement
    except PlacementError as error:
        problem = str(error)
    cache = _cache_bytes(subject.module, batch, context, CACHE_ITEM_BYTES[config.precision])
    weights = 0
    if placement is not None:
        shares = (block.nbytes * block.read_share for block in placement.blocks if block.kind is BlockKind.WEIGHT)
        weights = round(sum(shares))
    item_bytes = CACHE_ITEM_BYTES[config.precision]
    flops = 2 * (weights / item_bytes) * batch
    moved = weights + (cache or 0)
    compute_s = max(flops / machine.flops_per_s, moved / machine.device_bytes_per_s)
    found = InferenceEstimate(
        subject, machine, batch, context, capacity, cache, placement, compute_s if placement else 0.0, problem
    )
    if not problem and found.host_bytes > machine.host_memory_bytes:
        most = machine.host_memory_bytes - found.host_bytes + capacity
        problem = (
            f"budget, KV cache and process take {found.host_bytes} bytes of host memory, and there are "
            f"{machine.host_memory_bytes}: give --host-budget at most {max(most, 0)}, or a smaller batch or context"
        )
    return replace(found, problem=problem)


def _cache_bytes(module: Any, batch: int, context: int, item_bytes: int) -> int | None:
    """Keys and values of all layers, for each of ``context`` tokens of each sequence."""
    sizes = _cache_sizes(module)
    if not all(isinstance(number, int) and number for number in sizes):
        return None
    layers, heads, width = sizes
    return int(2 * layers * heads * width * item_bytes * batch * context)


def _cache_sizes(module: Any) -> tuple[Any, Any, Any]:
    """Layers, heads of keys and values, and the width of a head, as far as the model says them."""
    if isinstance(module, Decoder):
        shape = module.shape
        return shape.layers, shape.kv_heads or shape.heads, shape.width
    config = getattr(module, "config", None)
    find = getattr(config, "get_text_config", None)
    config = config if find is None else find()
    heads, hidden = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", None)
    width = getattr(config, "head_dim", None)
    if not width and isinstance(hidden, int) and isinstance(heads, int):
        width = hidden // heads
    return getattr(config, "num_hidden_layers", None), getattr(config, "num_key_value_heads", None) or heads, width


def text(found: InferenceEstimate) -> str:
    """The whole answer as lines of text."""
    subject, placement = found.subject, found.placement
    lines = [
        (
            f"{subject.name}: {subject.num_parameters:,} parameters ({subject.source}); inference, batch "
            f"{found.batch}, context {found.context} tokens"
        ),
        "",
    ]
    if placement is not None:
        lines += [placement.table(), ""]
        cache = "unknown" if found.cache_bytes is None else format_bytes(found.cache_bytes)
        rows = [
            ("host memory", "", ""),
            ("budget (weights)", format_bytes(found.capacity_bytes), "host_budget"),
            ("KV cache", cache, f"{found.batch} x {found.context} tokens, next to the budget"),
            ("process", format_bytes(found.machine.process_bytes), ""),
            ("in all", format_bytes(found.host_bytes), ""),
        ]
        lines += [*table(rows), ""]
        bound = "the disk" if placement.disk_seconds >= found.compute_s else "computing"
        seconds = found.seconds_per_token
        rate = f", {found.batch / seconds:,.3g} tokens/s" if seconds else ""
        lines.append(
            f"a token of every sequence: {seconds:.3g} s{rate}; bound by {bound} (disk {placement.disk_seconds:.3g} s, "
            f"computing {found.compute_s:.3g} s)"
        )
    lines.append(f"It {'fits' if found.fits else 'does not fit: ' + found.problem}")
    return "\n".join(lines)


def as_json(found: InferenceEstimate) -> dict[str, Any]:
    """Everything as plain values; bytes, seconds."""
    placement = found.placement
    return {
        "model": {"name": found.subject.name, "parameters": found.subject.num_parameters},
        "notes": list(found.subject.notes),
        "machine": found.machine.to_json(),
        "batch": found.batch,
        "context": found.context,
        "fits": found.fits,
        "problem": found.problem,
        "budget_bytes": found.capacity_bytes,
        "kv_cache_bytes": found.cache_bytes,
        "host_bytes": found.host_bytes,
        "read_bytes_per_forward": None if placement is None else placement.traffic.read_bytes,
        "disk_s": None if placement is None else placement.disk_seconds,
        "compute_s": found.compute_s,
        "seconds_per_token": found.seconds_per_token,
        "placement": None if placement is None else placement.table(),
    }
