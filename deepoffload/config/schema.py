"""What the user asked for, as immutable data.

A ``Config`` is made by :func:`deepoffload.config.parse_config`, which checks it. One made by hand is checked as soon as
it is handed to anything, because everything that takes a configuration calls ``parse_config`` first.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from deepoffload.config.tools import (
    AutotuningConfig,
    CometConfig,
    CurriculumConfig,
    FileMonitorConfig,
    FlopsProfilerConfig,
    LayerDropConfig,
    WandbConfig,
)
from deepoffload.device import Tier
from deepoffload.schedule.cost_model import AccumulationOrder, StepOverlap


class Precision(enum.Enum):
    """The dtype the weights compute in. The fp32 value stays the master."""

    KEEP = "keep"
    """As registered by the model."""
    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


class Buffers(enum.Enum):
    """The type of floating-point buffers."""

    KEEP = "keep"
    """Where ``precision`` converts the weights, a buffer of their type follows them; every other one stays as it is."""
    COMPUTE = "compute"
    """All of them take the type that the weights compute in."""
    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


class GradientDtype(enum.Enum):
    """What gradients accumulate in, in host memory."""

    KEEP = "keep"
    """The dtype of the weights, as plain PyTorch does."""
    FP32 = "fp32"


class ActivationMode(enum.Enum):
    """What the forwards of micro-batches that go through a model together keep for their backwards."""

    AUTO = "auto"
    """``KEEP`` where the memory that the first call has measured allows it."""
    KEEP = "keep"
    """All activations, as the program's own forward leaves them."""
    RECOMPUTE = "recompute"
    """The tensors between units; each unit runs again before its backward."""


class AioBackend(enum.Enum):
    """Which system interface moves bytes to and from disk."""

    AUTO = "auto"
    """The first of libaio, io_uring and pool that the machine permits."""
    LIBAIO = "libaio"
    IO_URING = "io_uring"
    POOL = "pool"
    """Threads calling pread and pwrite: works on every file system."""


@dataclass(frozen=True)
class AioConfig:
    """Disk requests."""

    backend: AioBackend = AioBackend.AUTO
    block_bytes: int = 1 << 20
    """Length of one request; longer transfers are cut."""
    queue_depth: int = 16
    """Requests in flight."""
    verify: bool = False
    """Keep a checksum of every extent written and compare it on every read."""


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints that are written while the program trains on."""

    share: float = 0.25
    """Of the disk, while the program itself has transfers."""


@dataclass(frozen=True)
class RanksConfig:
    """How the ranks that train one model deal with each other."""

    timeout_s: float = 600.0
    """How long a rank waits for another one while nothing happens."""
    transport: str = "auto"
    """``"auto"``, ``"group"`` (collectives) or ``"memory"`` (each reads its neighbours' memory)."""


@dataclass(frozen=True)
class DebugConfig:
    """Switches that make mistakes visible, at a price."""

    poison: bool = False
    """Fill every buffer with NaN when it is taken back."""
    evict_always: bool = False
    """Evict everything as soon as it may be evicted."""
    copies: bool = False
    """Show copies of the stored bytes on a CPU device, too, within ``device_budget``, as on a GPU."""


@dataclass(frozen=True)
class Fp16Config:
    """Loss scaling in ``initialize`` when ``precision`` is fp16; DeepSpeed's names and meanings."""

    auto_cast: bool = False
    """Cast floating-point arguments of the engine's forward to fp16."""
    loss_scale: float = 0.0
    """A static scale; 0 is dynamic scaling, which the rest is about."""
    initial_scale_power: int = 16
    """The first scale is 2 to this power."""
    loss_scale_window: int = 1000
    """Steps without an overflow after which the scale is doubled."""
    hysteresis: int = 2
    """The scale is halved from this overflow on."""
    consecutive_hysteresis: bool = False
    """Every step without an overflow renews the hysteresis."""
    min_loss_scale: int = 1
    """The scale is never below it; an overflow there is an error."""


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer ``initialize`` builds when it is given none.

    ``params`` are keyword arguments of its class, with DeepSpeed's defaults filled in; see ``config.optimizers``.
    """

    type: str
    """A name in ``config.optimizers``."""
    params: Mapping[str, object] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class SchedulerConfig:
    """The learning rate schedule ``initialize`` builds when it is given none; see ``config.lr_schedules``.

    ``params`` is complete: DeepSpeed's parameters of that type with its defaults filled in. Of a schedule of torch's it
    is what was said.
    """

    type: str
    """A name in ``config.lr_schedules``."""
    params: Mapping[str, object] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class DurabilityConfig:
    """State on disk that survives a death of the process."""

    every: int | None = None
    """Steps from one durable one to the next; ``None``: chosen by measured rates."""
    path: tuple[str, ...] = ()
    """Where it lies, in place of ``nvme_path``; empty: there."""


@dataclass(frozen=True)
class Config:
    """Everything the user said. ``None`` means "not said": ``config.resolve`` or the caller decides.

    Budgets are bytes. ``offload_param`` and ``offload_optimizer`` are the farthest tier those bytes may go to.
    """

    device: str | None = None
    """torch's name of what computes; ``None``: the accelerator that torch sees, else the CPU."""
    device_budget: int | None = None
    host_budget: int | None = None
    memory_may_grow: bool = False
    """``host_budget`` may be more than the memory that the machine has now, within the container's limit."""
    nvme_budget: int | None = None
    nvme_path: tuple[str, ...] = ()
    offload_param: Tier | None = None
    offload_optimizer: Tier | None = None
    step_overlap: StepOverlap | None = None
    """``None``: ``DEFERRED``, and ``SPECULATIVE`` as soon as that pays."""
    accumulation_order: AccumulationOrder = AccumulationOrder.AUTO
    activations: ActivationMode = ActivationMode.AUTO
    offload_activations: Tier | None = None
    """The farthest tier that activations may go to; ``None`` and ``DEVICE``: they stay where they are made."""
    activation_budget: int | None = None
    """Of the host budget, for activations; ``None``: a part of it (``config.resolve``)."""
    offload_activations_above: int | None = None
    """Bytes from which on all saved tensors leave; ``None``: inputs of checkpointed blocks alone."""
    prefetch: bool = True
    inference: bool = False
    """Nothing is trained: every parameter is frozen, and weights are read where their checkpoint has them."""
    durability: DurabilityConfig | None = None
    """``None``: nothing survives the process."""
    timeline: bool = False
    precision: Precision = Precision.KEEP
    buffers: Buffers = Buffers.KEEP
    keep_fp32: tuple[str | type, ...] = ()
    """What stays in fp32: parts of names of parameters and buffers, and classes of modules or their names."""
    gradient_dtype: GradientDtype = GradientDtype.KEEP
    gradient_clipping: float | None = None
    gradient_accumulation_steps: int = 1
    train_micro_batch_size_per_gpu: int | None = None
    train_batch_size: int | None = None
    dataloader_drop_last: bool = False
    steps_per_print: int | None = None
    wall_clock_breakdown: bool = False
    zero_stage: int | None = None
    load_universal: bool = False
    """Whether ``engine.load_checkpoint`` reads DeepSpeed's universal checkpoints."""
    decoupled_saves: bool = False
    """Whether ``engine.save_checkpoint`` returns before the checkpoint is complete."""
    tag_validation: str = "Warn"
    """What ``engine.save_checkpoint`` does where ranks give different tags."""
    optimizer: OptimizerConfig | None = None
    scheduler: SchedulerConfig | None = None
    fp16: Fp16Config = field(default_factory=Fp16Config)
    tensorboard: FileMonitorConfig = field(default_factory=FileMonitorConfig)
    csv_monitor: FileMonitorConfig = field(default_factory=FileMonitorConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)
    comet: CometConfig = field(default_factory=CometConfig)
    flops_profiler: FlopsProfilerConfig = field(default_factory=FlopsProfilerConfig)
    progressive_layer_drop: LayerDropConfig = field(default_factory=LayerDropConfig)
    curriculum_learning: CurriculumConfig = field(default_factory=CurriculumConfig)
    autotuning: AutotuningConfig = field(default_factory=AutotuningConfig)
    aio: AioConfig = field(default_factory=AioConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    ranks: RanksConfig = field(default_factory=RanksConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)
    notes: tuple[str, ...] = ()
    """One line per key that was mapped or does not apply, to be logged once."""
    warnings: tuple[str, ...] = ()
    """What is probably not meant so: unknown keys, and every ``"auto"`` with what it became."""

    @property
    def offloads_activations(self) -> bool:
        """Whether activations may leave where they are made."""
        return self.offload_activations in (Tier.HOST, Tier.NVME)

    @property
    def path_key(self) -> str:
        """The key that names the directories in ``nvme_path``: what errors about them ask people to change."""
        return "durability.path" if self.durability is not None and self.durability.path else "nvme_path"
