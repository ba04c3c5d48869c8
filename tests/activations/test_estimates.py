"""What the estimators say of activations that leave."""

from __future__ import annotations

import pytest

from deepoffload.config import Config, Precision
from deepoffload.device import Tier
from deepoffload.errors import ConfigError
from deepoffload.estimate import Batch, MachineSpec, estimate, from_counts
from deepoffload.estimate.arguments import parse
from deepoffload.estimate.memory import LEFT, MemoryRow
from deepoffload.estimate.step_time import StepEstimate

TOKENS, HIDDEN, LAYERS = 4096, 256, 4
INPUTS = TOKENS * HIDDEN * LAYERS * 2
PART = 1 << 20
GIB = 1 << 30


def rows(
    tier: Tier | None, part: int | None = None, *, device: int = 0, checkpointing: bool = True
) -> dict[str, MemoryRow]:
    subject = from_counts(20_000_000, LAYERS, HIDDEN, Batch(1, TOKENS), vocabulary=1000, checkpointing=checkpointing)
    machine = MachineSpec(host_memory_bytes=8 * GIB, nvme_bytes=64 * GIB, device_memory_bytes=device)
    said = {"host_budget": GIB, "offload_activations": tier, "activation_budget": part}
    config = Config(precision=Precision.BF16, **said)
    found = estimate(subject, machine, config, time_ops=None)
    assert found.memory is not None, found.problem
    of = {row.name: row for row in found.memory.rows}
    return of | {"problem": MemoryRow(found.problem)}


def test_where_activations_are() -> None:
    usual = rows(None)
    assert INPUTS <= usual["activations"].pageable < 2 * INPUTS and LEFT not in usual
    nvme = rows(Tier.NVME, PART)
    assert nvme["activations"].pageable == 0 and nvme[LEFT].pageable == PART
    assert nvme[LEFT].nvme == usual["activations"].pageable - PART
    assert nvme["held by malloc"].pageable <= usual["held by malloc"].pageable
    assert "written and read" in nvme[LEFT].note
    host = rows(Tier.HOST, 4 * INPUTS, device=8 * GIB)
    assert host["activations"].device == 0 and INPUTS <= host[LEFT].pinned < 2 * INPUTS
    small = rows(Tier.HOST, PART, device=8 * GIB)
    assert "raise activation_budget to at least" in small["problem"].name and "nvme" in small["problem"].name
    # on a CPU device they are in host memory already, and without checkpoints nothing leaves
    assert rows(Tier.HOST) == usual
    whole = rows(Tier.NVME, PART, checkpointing=False)
    assert LEFT not in whole and whole["activations"].pageable > usual["activations"].pageable


def test_a_step_waits_for_what_the_disk_has_no_time_for() -> None:
    """What goes to NVMe in each micro-batch comes back; an idle disk has time for it, a slow one has not."""
    subject = from_counts(20_000_000, LAYERS, HIDDEN, Batch(1, TOKENS), vocabulary=1000, checkpointing=True)

    def step(tier: Tier | None, rate: float) -> StepEstimate:
        rates = {f"nvme_{name}_bytes_per_s": rate for name in ("read", "write", "mixed")}
        machine = MachineSpec(host_memory_bytes=8 * GIB, nvme_bytes=64 * GIB, **rates)
        more = {} if tier is None else {"offload_activations": tier, "activation_budget": PART}
        config = Config(precision=Precision.BF16, host_budget=GIB, gradient_accumulation_steps=2, **more)
        found = estimate(subject, machine, config)
        assert found.step is not None, found.problem
        return found.step

    usual, fast, slow = step(None, 1e12), step(Tier.NVME, 1e12), step(Tier.NVME, 1e6)
    assert usual.activation_bytes == 0 and usual.times.busy_s == 0, "everything stays in memory"
    assert 2 * (INPUTS - PART) <= fast.activation_bytes == slow.activation_bytes < 4 * INPUTS
    assert fast.activation_wait_s == 0 and fast.seconds == usual.seconds
    assert slow.seconds == pytest.approx(2 * slow.activation_bytes / 1e6), "the disk is never idle"


def test_arguments() -> None:
    said = ["--parameters", "20M", "--layers", "4", "--hidden", "256"]
    found = parse(
        [*said, "--checkpointing", "--offload-activations", "nvme", "--activation-budget", "1MiB"], "estimate"
    )
    assert (found.offload_activations, found.activation_budget) == ("nvme", PART)
    with pytest.raises(ConfigError, match="say --checkpointing, too"):
        parse([*said, "--offload-activations", "nvme"], "estimate")
    with pytest.raises(ConfigError, match="say host or nvme"):
        parse([*said, "--activation-budget", "1MiB"], "estimate")
