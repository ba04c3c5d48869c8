"""Who runs what: every contender-case of the benchmark, and the settings of each."""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.common.gpt import SHAPES, num_parameters

RING_BYTES_MAX = 400_000_000
"""Memory for everything that passes through: weights in use, optimizer state on its way."""
OVERLAPS = ("none", "deferred", "speculative", "in_backward", "default")
"""Values of ``step_overlap``; with "default" it is not said."""
ORDERS = ("horizontal", "vertical")
"""Of the micro-batches of a step."""
BYTES = {"weights": 2, "gradients": 2, "state": 10}
"""Per parameter, with bf16 weights that are the upper half of the fp32 masters."""
SLACK = 1.01
"""Alignment of blocks."""


class Side(enum.Enum):
    OURS = "ours"
    PLAIN = "plain"
    DEEPSPEED = "deepspeed"


@dataclass(frozen=True)
class Work:
    """What every contender does: the same model, data and optimizer settings.

    A run goes on until ``steps`` steps after the warm-up met no more foreign load than ``foreign_share_max`` (of all
    cores), or ``steps_max`` have been made.
    """

    size: str
    batch: int = 1
    seq: int = 128
    accumulate: int = 1
    clip: float | None = 1.0
    lr: float = 1e-4
    warmup: int = 2
    steps: int = 5
    steps_max: int = 15
    foreign_share_max: float = 0.1
    threads: int = 1

    @property
    def num_parameters(self) -> int:
        return num_parameters(SHAPES[self.size], self.seq)

    @property
    def ring_bytes(self) -> int:
        """An eighth of the optimizer state in small models, in which 400 MB would hold most of it."""
        return min(RING_BYTES_MAX, self.num_parameters * BYTES["state"] // 8)


@dataclass(frozen=True)
class Case:
    """One contender with one placement. ``settings`` is the side's own."""

    name: str
    side: Side
    text: str
    settings: dict[str, Any]

    def spec(self, work: Work, path: str) -> dict[str, Any]:
        """All that the subprocess needs."""
        return {"side": self.side.value, "settings": self.settings, "work": asdict(work), "path": path}


PLAIN = (
    Case("plain", Side.PLAIN, "plain PyTorch, bf16 weights, fp32 masters, fused AdamW", {}),
    Case("plain-backward", Side.PLAIN, "plain PyTorch, forward and backward only", {"update": False}),
)


def ours(work: Work, overlap: str, *, verify: bool = False) -> tuple[Case, ...]:
    """Our placements by budget. ``overlap`` is the value of ``step_overlap``. ``verify``: one more, with checksums."""
    n = work.num_parameters
    kept = n * (BYTES["weights"] + BYTES["gradients"])
    half = n * BYTES["state"] // 2
    budgets: dict[str, tuple[str, int, dict[str, Any]]] = {
        "host": ("everything in host memory", int(n * sum(BYTES.values()) * SLACK) + (64 << 20), {}),
        "half": ("half of the optimizer state resident", int((kept + half) * SLACK) + work.ring_bytes, {}),
        "optimizer": (
            "optimizer on NVMe, weights resident",
            int(kept * SLACK) + work.ring_bytes,
            {"offload_param": "cpu"},
        ),
        "all": ("everything on NVMe", int(n * BYTES["gradients"] * SLACK) + work.ring_bytes, {}),
    }
    if verify:
        text, budget, _ = budgets["all"]
        budgets["verify"] = (f"{text}, checksums", budget, {"aio": {"verify": True}})
    return tuple(
        Case(
            f"{name}-{overlap}",
            Side.OURS,
            f"ours, {text}, {overlap}",
            {
                "host_budget": budget,
                "step_overlap": None if overlap == "default" else overlap,
                **more,
                "disk": name != "host",
            },
        )
        for name, (text, budget, more) in budgets.items()
    )


CLIPS_EVERY = 6
"""Often enough to be measured, and so seldom that guessing goes on."""


def clipping(work: Work) -> tuple[Case, ...]:
    """What wrong guesses cost: each sixth step clips, or every one, which only the last gradients tell."""
    guessing = [case for case in ours(work, "speculative") if case.name.startswith(("optimizer", "all"))]
    return tuple(
        replace(
            case,
            name=f"{case.name}-{name}",
            text=f"{case.text}; {text}",
            settings={**case.settings, "clips_every": every},
        )
        for case in guessing
        for name, every, text in (("sixth", CLIPS_EVERY, "each sixth step clips"), ("clips", 1, "every step clips"))
    )


def vertical(case: Case) -> Case:
    """The same with all micro-batches of a step together."""
    settings = {**case.settings, "accumulation_order": "vertical"}
    return replace(case, name=f"{case.name}-vertical", text=f"{case.text}, vertical order", settings=settings)


def beside(host: Case, disk: Case) -> Case:
    """``host``, while a process of its own moves the bytes that ``disk`` moves."""
    settings = {**host.settings, "beside": disk.name}
    text = f"{host.text}, the bytes of {disk.name} moved beside it"
    return replace(host, name=f"beside-{disk.name}", text=text, settings=settings)


def moving(case: Case, nbytes: float) -> Case:
    """A case of :func:`beside`, when the bytes of a step are known."""
    settings = {key: value for key, value in case.settings.items() if key != "beside"}
    return replace(case, settings={**settings, "beside_bytes": nbytes})


def recorded(case: Case, folder: Path) -> Case:
    """The same with a timeline, if it is ours."""
    if case.side is not Side.OURS:
        return case
    return replace(case, settings={**case.settings, "trace": str(folder / f"{case.name}.json")})


def budget_case(work: Work, overlap: str, host_budget: int) -> Case:
    """Any budget in bytes."""
    settings = {"host_budget": host_budget, "step_overlap": overlap, "disk": True}
    return Case(f"budget-{host_budget}-{overlap}", Side.OURS, f"ours, {host_budget / 1e6:.0f} MB, {overlap}", settings)


def deepspeed(work: Work) -> tuple[Case, ...]:
    """ZeRO-3 with its offload, as it comes and with the settings that made it fastest."""
    large = work.num_parameters > 8e8
    tuned_zero = {
        "sub_group_size": int(5e7 if large else 3.5e7),
        "reduce_bucket_size": int(4e7 if large else 2e7),
        "stage3_prefetch_bucket_size": int(4e7 if large else 2e7),
    }
    aio = {"block_size": 1 << 20, "queue_depth": 32, "single_submit": False, "overlap_events": True}
    nvme = {"device": "nvme", "pin_memory": True, "pipeline_read": True, "pipeline_write": True, "buffer_count": 12}
    # Without the two limits the second step dies with "Not enough buffers 0 for swapping 1".
    paged = {"stage3_max_reuse_distance": 0, "stage3_max_live_parameters": int(4e7)}
    cpu = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
    as_it_comes = {"offload_optimizer": {"device": "nvme"}}
    tuned = {"offload_optimizer": nvme, **tuned_zero}
    everything = {**tuned, **paged, "offload_param": {"device": "nvme", "pin_memory": True, "max_in_cpu": 0}}
    return (
        Case("deepspeed-cpu", Side.DEEPSPEED, "DeepSpeed, optimizer on the CPU", {"zero": cpu}),
        Case("deepspeed-nvme", Side.DEEPSPEED, "DeepSpeed, optimizer on NVMe, as it comes", {"zero": as_it_comes}),
        Case(
            "deepspeed-nvme-tuned",
            Side.DEEPSPEED,
            "DeepSpeed, optimizer on NVMe, tuned",
            {"zero": tuned, "aio": aio},
        ),
        Case(
            "deepspeed-all-tuned",
            Side.DEEPSPEED,
            "DeepSpeed, everything on NVMe, tuned",
            {"zero": everything, "aio": aio},
        ),
    )
