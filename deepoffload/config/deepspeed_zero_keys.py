"""Every key of DeepSpeed's sections for ZeRO, offloading and asynchronous I/O, and what becomes of it here.

Source: DeepSpeed 0.19.8 (``runtime/zero/config.py``, ``runtime/zero/offload_config.py``,
``runtime/swap_tensor/constants.py``).
"""

from __future__ import annotations

import sys

from deepoffload.config.keys import (
    Key,
    Treatment,
    boolean,
    honoured,
    inapplicable,
    integer,
    list_of,
    number,
    paths,
    present_group,
    refused,
    renamed,
    text,
)
from deepoffload.config.own_keys import tier_limit
from deepoffload.device import Tier
from deepoffload.native.aio import QUEUE_DEPTH_MAX

_BUDGETS = "the budgets and measured bandwidths decide which bytes stay near (device_budget, host_budget)"
_UNITS = "weights move in whole units (a layer each), so there is no bucket or sub-group to size"
_UNIT_TRANSFERS = "a unit (a layer, as a rule) is gathered or reduced in one transfer, so there is no bucket to size"
_OWNERS = "the parts of a gradient always go to their owners, which add them in rank order"
_GATHERED = "weights are gathered unit by unit, when they are used"
_OVERLAP = "gathers and reductions run during compute, as far as there is memory"
_EQUAL_CUTS = "each unit is cut in equal ranges over all ranks, and stays whole where there is room"


def _host_when_true(value: object) -> object:
    return Tier.HOST if value else None


def _off_when_zero(value: object) -> object:
    return False if value == 0 else None


_CPU_OFFLOAD_PARAM = Key(
    "zero_optimization.cpu_offload_param",
    boolean(),
    Treatment.MAPPED,
    "becomes offload_param = host",
    False,
    field="offload_param",
    convert=_host_when_true,
)
_GATHER_ON_SAVE = inapplicable(
    "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    boolean(),
    "save_pretrained always writes whole weights, streamed",
    False,
)

_ZERO = (
    Key(
        "zero_optimization.stage",
        integer(0, 3),
        Treatment.MAPPED,
        "stages 1 to 3 are one: weights, gradients and optimizer state are partitioned over the ranks, and whole "
        "weights are kept as long as there is room. With several ranks 0 is taken as 1; with one the stage changes "
        "nothing",
        0,
        field="zero_stage",
    ),
    inapplicable("zero_optimization.contiguous_gradients", boolean(), _UNITS, True),
    inapplicable("zero_optimization.reduce_scatter", boolean(), _OWNERS, True),
    inapplicable("zero_optimization.allgather_partitions", boolean(), _GATHERED, True),
    inapplicable("zero_optimization.use_multi_rank_bucket_allreduce", boolean(), _OWNERS, True),
    inapplicable("zero_optimization.reduce_bucket_size", integer(), _UNIT_TRANSFERS, 500_000_000),
    inapplicable("zero_optimization.allgather_bucket_size", integer(), _UNIT_TRANSFERS, 500_000_000),
    inapplicable("zero_optimization.overlap_comm", boolean(), _OVERLAP),
    inapplicable(
        "zero_optimization.compute_grad_norm", boolean(), "the norm is a by-product of landing the gradients", True
    ),
    inapplicable(
        "zero_optimization.load_from_fp32_weights",
        boolean(),
        "weights are always loaded with their exact masters",
        True,
    ),
    inapplicable(
        "zero_optimization.elastic_checkpoint",
        boolean(),
        "every checkpoint loads under any budget and precision",
        False,
    ),
    inapplicable("zero_optimization.sub_group_size", integer(), _UNITS, 1_000_000_000),
    Key(
        "zero_optimization.stage3_prefetch_bucket_size",
        integer(),
        Treatment.MAPPED,
        "0 becomes prefetch = false; otherwise how far to fetch ahead follows from measured bandwidths",
        50_000_000,
        field="prefetch",
        convert=_off_when_zero,
    ),
    inapplicable("zero_optimization.stage3_param_persistence_threshold", integer(), _BUDGETS, 100_000),
    inapplicable("zero_optimization.stage3_model_persistence_threshold", integer(), _BUDGETS, sys.maxsize),
    inapplicable("zero_optimization.stage3_max_live_parameters", integer(), _BUDGETS, 1_000_000_000),
    inapplicable("zero_optimization.stage3_max_reuse_distance", integer(), _BUDGETS, 1_000_000_000),
    _GATHER_ON_SAVE,
    renamed(_GATHER_ON_SAVE, "zero_optimization.stage3_gather_fp16_weights_on_model_save"),
    inapplicable("zero_optimization.stage3_module_granularity_threshold", integer(), _UNITS, 0),
    inapplicable("zero_optimization.stage3_use_all_reduce_for_fetch_params", boolean(), _GATHERED, False),
    inapplicable("zero_optimization.stage3_allgather_sequential", boolean(), _GATHERED, False),
    inapplicable("zero_optimization.stage3_partition_stream_chunk_size", integer(), _UNIT_TRANSFERS, 0),
    inapplicable(
        "zero_optimization.ignore_unused_parameters",
        boolean(),
        "an unused parameter has no gradient and is not updated, as in plain PyTorch",
        True,
    ),
    inapplicable("zero_optimization.legacy_stage1", boolean(), _OWNERS, False),
    inapplicable("zero_optimization.round_robin_gradients", boolean(), _EQUAL_CUTS, False),
    inapplicable("zero_optimization.parameter_alignment", boolean(), "every parameter is aligned, always", False),
    inapplicable("zero_optimization.zero_hpz_partition_size", integer(), _EQUAL_CUTS, 1),
    *(
        refused(
            f"zero_optimization.zero_quantized_{what}", boolean(), "weights and gradients are never quantised", False
        )
        for what in ("weights", "nontrainable_weights", "gradients")
    ),
    refused("zero_optimization.zeropp_loco_param", present_group(), "gradients are never quantised", "off"),
    inapplicable("zero_optimization.mics_shard_size", integer(-1), _EQUAL_CUTS, -1),
    inapplicable("zero_optimization.mics_hierarchical_params_gather", boolean(), _EQUAL_CUTS, False),
    inapplicable(
        "zero_optimization.memory_efficient_linear",
        boolean(),
        "no layer keeps a second reference to a weight, so none is replaced",
        True,
    ),
    inapplicable("zero_optimization.pipeline_loading_checkpoint", boolean(), "there is no pipeline engine", False),
    inapplicable(
        "zero_optimization.override_module_apply", boolean(), "weights are fetched where apply() needs them", True
    ),
    inapplicable("zero_optimization.log_trace_cache_warnings", boolean(), "faults are counted in stats", False),
    inapplicable("zero_optimization.enable_sanity_checks", boolean(), "the checks are always on", False),
    *(
        inapplicable(
            f"zero_optimization.leaf_module.{name}",
            list_of(text()),
            "experts are fetched when they are used, so none has to be declared",
        )
        for name in ("classes", "names", "name_suffixes")
    ),
    refused(
        "zero_optimization.zenflow", present_group(), "ZenFlow delays updates; step_overlap hides them exactly", "off"
    ),
    inapplicable(
        "zero_optimization.save_muon_momentum_buffer_in_memory",
        boolean(),
        "Muon's momentum is optimizer state, which budgets place",
        False,
    ),
    Key(
        "zero_optimization.cpu_offload",
        boolean(),
        Treatment.MAPPED,
        "becomes offload_optimizer = host",
        False,
        field="offload_optimizer",
        convert=_host_when_true,
    ),
    _CPU_OFFLOAD_PARAM,
    renamed(_CPU_OFFLOAD_PARAM, "zero_optimization.cpu_offload_params"),
    inapplicable(
        "zero_optimization.cpu_offload_use_pin_memory",
        boolean(),
        "host memory is page-locked as far as the machine permits, which is reported",
        False,
    ),
)


_WITHOUT_FIELD_NAME = ("gather_fp16_weights_on_model_save", "partition_stream_chunk_size")
_STAGE3 = "zero_optimization.stage3_"
_ZERO_FIELD_NAMES = tuple(
    renamed(key, "zero_optimization." + key.path.removeprefix(_STAGE3))
    for key in _ZERO
    if key.path.startswith(_STAGE3) and not key.path.endswith(_WITHOUT_FIELD_NAME)
)
"""The same under the names of the fields, which DeepSpeed takes as well as their aliases (``populate_by_name``)."""


def _offload(section: str) -> tuple[Key, ...]:
    prefix = f"zero_optimization.{section}"
    return (
        Key(
            f"{prefix}.device",
            tier_limit(),
            Treatment.MAPPED,
            f"becomes {section}: the farthest tier these bytes may go to",
            Tier.DEVICE,
            field=section,
        ),
        Key(f"{prefix}.nvme_path", paths(), Treatment.MAPPED, "becomes nvme_path", (), field=f"nvme_path.{section}"),
        inapplicable(f"{prefix}.buffer_count", integer(), _BUDGETS, 5 if section == "offload_param" else 4),
        inapplicable(f"{prefix}.buffer_size", integer(), _BUDGETS, 100_000_000),
        inapplicable(
            f"{prefix}.pin_memory",
            boolean(),
            "host memory is page-locked as far as the machine permits, which is reported",
            True,
        ),
    )


_OFFLOAD = (
    *_offload("offload_param"),
    inapplicable("zero_optimization.offload_param.max_in_cpu", integer(), _BUDGETS, 1_000_000_000),
    *_offload("offload_optimizer"),
    *(
        inapplicable(
            f"zero_optimization.offload_optimizer.{name}",
            boolean(),
            "reads, updates and writes always overlap; step_overlap says how far",
            False,
        )
        for name in ("pipeline_read", "pipeline_write", "super_offload")
    ),
    inapplicable("zero_optimization.offload_optimizer.fast_init", boolean(), "state is created where it stays", False),
    inapplicable("zero_optimization.offload_optimizer.ratio", number(0, 1), _BUDGETS, 1.0),
    inapplicable(
        "zero_optimization.offload_optimizer.convert_grad_on_cpu", boolean(), "gradients land in one pass", True
    ),
    inapplicable(
        "zero_optimization.offload_optimizer.cpuadam_cores_perc",
        number(0, 1),
        "the update runs on torch's own threads (torch.set_num_threads)",
        0.8,
    ),
)


_OWN_THREADS = "the disk engine sizes its own threads; aio.queue_depth is what counts"
_AIO = (
    Key(
        "aio.block_size",
        integer(4096, 1 << 30, 4096),
        Treatment.MAPPED,
        "becomes aio.block_bytes",
        1 << 20,
        field="aio.block_bytes",
    ),
    honoured("aio.queue_depth", integer(1, QUEUE_DEPTH_MAX), "Disk requests in flight (16 here when not said).", 8),
    *(
        inapplicable(f"aio.{name}", integer(1), _OWN_THREADS, 1)
        for name in ("intra_op_parallelism", "thread_count", "num_threads")
    ),
    inapplicable("aio.single_submit", boolean(), "requests are submitted together as far as the queue has room", False),
    inapplicable("aio.overlap_events", boolean(), "requests are reaped while others are submitted, always", True),
    inapplicable("aio.use_gds", boolean(), "bytes go through host memory; there is no GPUDirect path", False),
)

DEEPSPEED_ZERO_KEYS = (*_ZERO, *_ZERO_FIELD_NAMES, *_OFFLOAD, *_AIO)
