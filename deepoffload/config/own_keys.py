"""deepoffload's own keys. Each is also a keyword of ``offload_context`` and ``initialize``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepoffload.config.keys import (
    AUTO,
    Key,
    Mismatch,
    Treatment,
    ValueKind,
    boolean,
    choice,
    choice_of,
    integer,
    names_or_classes,
    number,
    paths,
    size,
)
from deepoffload.config.schema import ActivationMode, AioBackend, Buffers, DurabilityConfig, GradientDtype, Precision
from deepoffload.device import Device, Tier
from deepoffload.errors import ConfigError
from deepoffload.native.aio import PAGE_BYTES, REQUEST_BYTES_MAX
from deepoffload.schedule.cost_model import AccumulationOrder, StepOverlap


def tier_limit() -> ValueKind:
    """DeepSpeed's spelling of a tier, and ours."""
    return choice(
        {"none": Tier.DEVICE, "cpu": Tier.HOST, "nvme": Tier.NVME, "device": Tier.DEVICE, "host": Tier.HOST},
    )


def device() -> ValueKind:
    """torch's name of a device."""

    def normalise(value: object) -> object:
        try:
            return str(Device.parse(str(value)))
        except ConfigError as error:
            raise Mismatch(str(error)) from None

    return ValueKind('a device, such as "cuda:0" or "cpu"', normalise)


EVERY_MAX = 1_000_000
"""Steps that may be lost. More is a mistake: nothing would ever be durable."""


def durability() -> ValueKind:
    """A switch, or its settings: :class:`DurabilityConfig`, or False."""
    kinds = {"every": integer(1, EVERY_MAX), "path": paths()}

    def normalise(value: object) -> object:
        if isinstance(value, DurabilityConfig):
            value = {"every": value.every, "path": value.path}
        if isinstance(value, bool):
            return DurabilityConfig() if value else False
        if not isinstance(value, Mapping):
            raise Mismatch
        found: dict[str, Any] = {}
        for name, each in value.items():
            if name not in kinds:
                raise Mismatch(f"unknown key {name!r}; expected {' and '.join(kinds)}")
            if each is None or each == AUTO:
                continue
            try:
                found[name] = kinds[name].normalise(each)
            except Mismatch as mismatch:
                raise Mismatch(f"{name}: {str(mismatch) or 'expected ' + kinds[name].expected}") from None
        return DurabilityConfig(**found)

    return ValueKind('true, false, or an object, such as {"every": 1, "path": "/mnt/nvme/run"}', normalise)


def _own(path: str, kind: ValueKind, text: str, default: object = None) -> Key:
    return Key(path, kind, Treatment.HONOURED, text, default, field=path)


OWN_KEYS = (
    _own("device", device(), "What computes, such as `cuda:1` or `cpu`; not said: the GPU, where there is one."),
    _own(
        "device_budget",
        size(1),
        "Bytes of device memory for weights, and for optimizer state in what they leave of it; activations come on "
        "top. On a CPU device one pool with `host_budget`.",
    ),
    _own(
        "host_budget",
        size(1),
        "Bytes of host memory for weights, gradients, optimizer state and transfer buffers, of all ranks of a host "
        "together.",
    ),
    _own(
        "memory_may_grow",
        boolean(),
        "The machine gets more memory as it is used, as some virtual machines do: `host_budget` may be more than the "
        "system has now. The limit of the container holds.",
        False,
    ),
    _own("nvme_budget", size(), "Bytes of disk, of all ranks of a host together. 0 keeps everything off the disk."),
    _own("nvme_path", paths(), "Directory for the swap file, or a list of them on different disks.", ()),
    _own("offload_param", tier_limit(), "The farthest tier weights may go to; not said: as far as the budgets ask."),
    _own(
        "offload_optimizer",
        tier_limit(),
        "The farthest tier optimizer state may go to; not said: as for weights, and on a GPU as far as a "
        "`device_budget` that is said has room. `device`: it lives there as far as there is room, and in host memory "
        "else.",
    ),
    _own(
        "step_overlap",
        choice({member.value: member for member in StepOverlap}),
        "When the update runs. `deferred`: a unit is updated right before its next use; `none`: inside `step()`. "
        "`in_backward`: as soon as a unit's last gradient landed, without clipping. `speculative`: as `deferred`, but "
        "some units are updated inside backward, and `step()` confirms that or undoes it exactly. Not said: "
        "`deferred`, and `speculative` once steps wait long for the disk.",
    ),
    _own(
        "accumulation_order",
        choice({member.value: member for member in AccumulationOrder}),
        "In which order `deepoffload.accumulate` and `engine.train_batch` run micro-batches. `vertical`: all of them "
        "go through a unit before any goes on to the next, so weights are read once per step. `horizontal`: one after "
        "the other. `auto`: vertical where that saves time. The numbers are the same. See "
        "[accumulation](accumulation.md).",
        AccumulationOrder.AUTO,
    ),
    _own(
        "activations",
        choice({member.value: member for member in ActivationMode}),
        "What `deepoffload.accumulate` and `engine.train_batch` keep of the forwards. `keep`: all activations. "
        "`recompute`: the tensors between units; a unit runs again before its backward. `auto`: `keep` where memory "
        "has room for those of all micro-batches, as measured in the first call. The numbers are the same. See "
        "[accumulation](accumulation.md).",
        ActivationMode.AUTO,
    ),
    _own(
        "offload_activations",
        tier_limit(),
        "The farthest tier that activations may go to, which wait for backward: inputs of blocks behind an activation "
        "checkpoint, of either kind. `host`: a part of the host budget; `nvme`: beyond that part the disk. On a CPU "
        "device `host` moves nothing, unless `activation_budget` bounds what may be kept. The numbers are the same: "
        "[long sequences](long_sequences.md).",
    ),
    _own(
        "activation_budget",
        size(1),
        "Of `host_budget`, the bytes for activations that leave by `offload_activations`, of all ranks of a host. "
        "Not said: a quarter for `host`, an eighth for `nvme`.",
    ),
    _own(
        "offload_activations_above",
        size(1),
        'Other saved tensors leave, too, if they take at least so many bytes, such as `"1MiB"`. Not said: only inputs '
        "of checkpointed blocks leave.",
    ),
    _own("prefetch", boolean(), "Fetch units before they are used. `false` is the serial reference.", True),
    _own(
        "inference",
        boolean(),
        "Nothing is trained: every parameter is frozen, memory holds weights only, and weights that a safetensors file "
        "has as the model wants them are read there. See [inference](inference.md).",
        False,
    ),
    _own(
        "durability",
        durability(),
        "State on disk that survives a death of the process and a power failure: `state.commit()`, `state.resume()`, "
        "see [checkpoints](checkpoints.md). `every`: how many steps may be lost; not said: chosen so that it costs at "
        "most 5 %. `path`: where the swap files are then, in place of `nvme_path`. Takes disk space for weights and "
        "optimizer state twice.",
        False,
    ),
    _own("timeline", boolean(), "Record what happened when: `engine.export_trace(path)`, `engine.summary()`.", False),
    _own(
        "precision",
        choice({member.value: member for member in Precision}),
        "The dtype the weights compute in, over fp32 master weights. `keep`: as registered.",
        Precision.KEEP,
    ),
    _own(
        "buffers",
        choice({member.value: member for member in Buffers}),
        "The dtype of floating-point buffers. `keep`: one that has the dtype of its module's weights follows them "
        "(batch norm), every other one stays as it is (rotary frequencies, which stay fp32). `compute`: all take the "
        "dtype the weights compute in, as with `model.to(dtype)`. A dtype: all take it. See [precision](precision.md).",
        Buffers.KEEP,
    ),
    _own(
        "keep_fp32",
        names_or_classes(),
        "What computes in fp32 in a bf16 or fp16 model: names of parameters, buffers or modules (whole parts of them, "
        'such as `"router.classifier"`), and classes of modules or their names, which mean subclasses, too. What a '
        "model of transformers names in `_keep_in_fp32_modules` and `_keep_in_fp32_modules_strict` stays fp32 by "
        "itself.",
        (),
    ),
    _own(
        "gradient_dtype",
        choice({member.value: member for member in GradientDtype}),
        "What gradients accumulate in. `keep`: the dtype of the weights; `fp32` takes 4 bytes per parameter and rounds "
        "nothing when micro-batches are added.",
        GradientDtype.KEEP,
    ),
    _own(
        "aio.backend",
        choice({member.value: member for member in AioBackend}),
        "The system interface for disk requests. `auto` takes the first one that the machine permits.",
        AioBackend.AUTO,
    ),
    _own(
        "aio.block_bytes",
        ValueKind(
            f"bytes from {PAGE_BYTES} to {REQUEST_BYTES_MAX}, a multiple of {PAGE_BYTES}",
            lambda value: integer(PAGE_BYTES, REQUEST_BYTES_MAX, PAGE_BYTES).normalise(size().normalise(value)),
        ),
        "Length of one disk request.",
        1 << 20,
    ),
    _own(
        "aio.verify",
        boolean(),
        "Keep checksums of what is written to disk and compare them with what is read; else damaged bytes train on.",
        False,
    ),
    _own(
        "checkpoint.share",
        number(0.01, 1.0),
        "The share of the disk that a save with `wait=False` takes while the program itself has transfers; all of the "
        "rest, too, while it has none.",
        0.25,
    ),
    _own(
        "ranks.timeout_s",
        number(1),
        "Seconds for which a rank waits while nothing happens. Then all ranks raise an error that says where each was.",
        600.0,
    ),
    _own(
        "ranks.transport",
        choice_of("auto", "group", "memory"),
        "How bytes get from rank to rank. `group`: by collectives; `memory`: each rank reads the memory of the others, "
        "which takes one host; `auto`: `memory` where a test at the start shows that it works.",
        "auto",
    ),
    _own("debug.poison", boolean(), "Fill every buffer with NaN when it is taken back.", False),
    _own("debug.evict_always", boolean(), "Evict everything as soon as it may be evicted.", False),
    _own(
        "debug.copies",
        boolean(),
        "Compute on a CPU as on a GPU: with copies of the stored bytes, which take at most `device_budget`.",
        False,
    ),
)
