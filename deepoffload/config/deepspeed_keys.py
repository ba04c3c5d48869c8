"""Every key of DeepSpeed's configuration that trains, and what becomes of it here.

Source: DeepSpeed 0.19.8 (``runtime/config.py``, ``runtime/constants.py``, ``runtime/precision_config.py``,
``runtime/zero/config.py``, ``runtime/zero/offload_config.py``, ``runtime/swap_tensor/constants.py``). Keys of tools
around the training are in ``deepspeed_tool_keys``. One process runs, which is why nothing is reduced or gathered.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from deepoffload.config.keys import (
    Key,
    Treatment,
    ValueKind,
    boolean,
    choice,
    choice_of,
    either,
    integer,
    list_of,
    mapping,
    names_or_classes,
    number,
    paths,
    present_group,
    switched_group,
    text,
)
from deepoffload.config.own_keys import tier_limit
from deepoffload.config.schema import Buffers, Precision
from deepoffload.device import Tier
from deepoffload.native.aio import QUEUE_DEPTH_MAX

_ONE_RANK = "one process trains, so nothing is reduced, scattered or gathered"
_BUDGETS = "the budgets and measured bandwidths decide which bytes stay near (device_budget, host_budget)"
_UNITS = "weights move in whole units (a layer each), so there is no bucket or sub-group to size"
_NO_AUTOCAST = "it only matters when torch_autocast is enabled"


def _honoured(path: str, kind: ValueKind, what: str, default: object = None, field: str | None = None) -> Key:
    return Key(path, kind, Treatment.HONOURED, what, default, field=field or path)


def _inapplicable(path: str, kind: ValueKind, why: str, default: object = None) -> Key:
    return Key(path, kind, Treatment.INAPPLICABLE, why, default)


def _error(path: str, kind: ValueKind, why: str, default: object = None, *harmless: object) -> Key:
    return Key(path, kind, Treatment.ERROR, why, default, (default, *harmless))


_DTYPES = choice(
    {
        **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), Precision.FP32),
        **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), Precision.BF16),
        **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), Precision.FP16),
    }
)

_BATCH = (
    _honoured("train_batch_size", integer(1), "Samples per step; the third of the three is worked out."),
    _honoured("train_micro_batch_size_per_gpu", integer(1), "Samples per forward."),
    _honoured("gradient_accumulation_steps", integer(1), "Backwards per step.", 1),
    _error(
        "managed_gradient_accumulation",
        boolean(),
        "initialize() always counts the micro-steps; to step when you like, use offload_context with CPUAdamW",
        True,
    ),
    _honoured(
        "gradient_clipping",
        number(0),
        "Largest global norm of the gradients; 0 is off. Not said: 1.0 in initialize(), off in a plain loop.",
    ),
    _honoured("dataloader_drop_last", boolean(), "Whether initialize()'s loader drops a last, smaller batch.", False),
    _inapplicable("prescale_gradients", boolean(), _ONE_RANK, False),
    _inapplicable("gradient_predivide_factor", number(), _ONE_RANK, 1.0),
    _inapplicable("gradient_allreduce_op", choice_of("mean", "sum"), _ONE_RANK, "mean"),
    _inapplicable("communication_data_type", choice_of("fp32", "bf16", "fp16"), _ONE_RANK),
    _inapplicable("seq_parallel_communication_data_type", choice_of("fp32", "bf16", "fp16"), _ONE_RANK, "fp32"),
    _inapplicable("seq_parallel_comm_data_type", choice_of("fp32", "bf16", "fp16"), _ONE_RANK, "fp32"),
    _inapplicable("sparse_gradients", boolean(), _ONE_RANK, False),
    _inapplicable("disable_allgather", boolean(), _ONE_RANK, False),
)

_LOGGING = (
    _honoured("steps_per_print", integer(0), "Steps between two lines of progress; 0 or not said: none."),
    _honoured("wall_clock_breakdown", boolean(), "Log the seconds of forward, backward and step.", False),
    _inapplicable("memory_breakdown", boolean(), "engine.stats() gives the bytes of every tier and their peaks", False),
    _inapplicable("dump_state", boolean(), "a Config can be printed as it is", False),
    _inapplicable("disable_python_gc", boolean(), "the program decides when garbage is collected", False),
    _inapplicable("log_level", text(), "the logger is named deepoffload; set its level with Python's logging"),
    _inapplicable("vocabulary_size", integer(1), "only DeepSpeed's padding advice used it"),
)

_OPTIMIZER = (
    _honoured(
        "optimizer.type",
        choice_of("adam", "adamw", "lion", "adagrad", "sgd"),
        "The optimizer, in any case of letters; each takes the parameters below that its class has.",
    ),
    _honoured("optimizer.params.lr", number(0), "Learning rate; 1e-2 for Adagrad.", 1e-3),
    _honoured("optimizer.params.betas", list_of(number(0, below=1), 2), "Decay of the two moments.", (0.9, 0.999)),
    _honoured("optimizer.params.eps", number(0), "Term added to the denominator; 1e-10 for Adagrad.", 1e-8),
    _honoured("optimizer.params.weight_decay", number(0), "Weight decay.", 0.0),
    _honoured("optimizer.params.bias_correction", boolean(), "Correct the moments' bias.", True),
    _honoured(
        "optimizer.params.adam_w_mode",
        boolean(),
        "Decoupled weight decay for type `Adam`; `AdamW` always has it.",
        True,
        field="optimizer.params.adamw_mode",
    ),
    _honoured("optimizer.params.adamw_mode", boolean(), "The same, as the constructor spells it.", True),
    _inapplicable("optimizer.params.torch_adam", boolean(), "there is one Adam, and it agrees with torch's", False),
    _inapplicable("optimizer.params.fused", boolean(), "the update is always one fused pass", None),
    _inapplicable("optimizer.params.foreach", boolean(), "the update is always one fused pass", None),
    _honoured("optimizer.params.amsgrad", boolean(), "Adam with the largest second moment so far.", False),
    _honoured("optimizer.params.maximize", boolean(), "Ascend instead of descend.", False),
    _honoured("optimizer.params.fp32_optimizer_states", boolean(), '`false` is `state_dtype` "bf16".', True),
    _honoured(
        "optimizer.params.state_dtype",
        choice_of("fp32", "bf16", "8bit"),
        "What Adam's moments (Lion's: not 8bit) are stored in; see optimizers.md.",
        "fp32",
    ),
    _honoured("optimizer.params.momentum", number(0), "Of SGD.", 0.0),
    _honoured("optimizer.params.dampening", number(), "Of SGD's momentum.", 0.0),
    _honoured("optimizer.params.nesterov", boolean(), "Nesterov's momentum in SGD.", False),
    _honoured("optimizer.params.lr_decay", number(0), "Of Adagrad.", 0.0),
    _honoured("optimizer.params.initial_accumulator_value", number(0), "Of Adagrad.", 0.0),
    _error("optimizer.params.max_grad_norm", number(0), "say gradient_clipping instead, at the top level", 0.0),
    _inapplicable("optimizer.legacy_fusion", boolean(), "the update is always one fused pass", False),
    _inapplicable("zero_allow_untested_optimizer", boolean(), "any torch optimizer may be passed in", False),
    _inapplicable("zero_force_ds_cpu_optimizer", boolean(), "the optimizer that is passed in is the one used", True),
    _honoured(
        "scheduler.type",
        choice_of("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"),
        "Learning rate schedule; its parameters are listed below.",
    ),
    _honoured("scheduler.params", mapping(), "Parameters of the schedule."),
)


def _bf16_when_on(enabled: object) -> object:
    return Precision.BF16 if enabled else None


def _fp16_when_on(enabled: object) -> object:
    return Precision.FP16 if enabled else None


_PRECISION = (
    Key(
        "fp16.enabled",
        boolean(),
        Treatment.MAPPED,
        "becomes precision = fp16, over fp32 master weights, with a scaled loss in initialize()",
        False,
        field="precision",
        convert=_fp16_when_on,
    ),
    _honoured("fp16.auto_cast", boolean(), "Cast floating-point positional arguments of the forward to fp16.", False),
    _honoured("fp16.loss_scale", number(0), "A static loss scale; 0: a dynamic one, which the next five rule.", 0.0),
    _honoured("fp16.initial_scale_power", integer(0, 127), "The first scale is 2 to this power.", 16),
    _honoured("fp16.loss_scale_window", integer(1), "Steps without an overflow until the scale is doubled.", 1000),
    _honoured("fp16.hysteresis", integer(1), "The scale is halved from this overflow on.", 2),
    _honoured(
        "fp16.consecutive_hysteresis",
        boolean(),
        "Each step without an overflow renews the hysteresis, not only one that doubles the scale.",
        False,
    ),
    _honoured("fp16.min_loss_scale", integer(1), "The least scale; an overflow there raises `LossScaleError`.", 1),
    _inapplicable("fp16.fused_mode", boolean(), "the update is always one fused pass", True),
    _error("fp16.fp16_master_weights_and_grads", boolean(), "master weights are kept in fp32", False),
    *(
        key
        for section in ("bf16", "bfloat16")
        for key in (
            Key(
                f"{section}.enabled",
                boolean(),
                Treatment.MAPPED,
                "becomes precision = bf16, over fp32 master weights",
                False,
                field="precision",
                convert=_bf16_when_on,
            ),
            _inapplicable(
                f"{section}.immediate_grad_update",
                boolean(),
                "gradients always land on the host during backward",
                False,
            ),
            _inapplicable(
                f"{section}.check_grad_overflow",
                boolean(),
                "non-finite gradients are always looked for, in the pass that lands them",
                True,
            ),
            _error(f"{section}.bf16_master_weights_and_grads", boolean(), "master weights are kept in fp32", False),
            _error(f"{section}.bf16_optimizer_states", boolean(), "moments are kept in fp32", False),
        )
    ),
    _error(
        "torch_autocast.enabled",
        boolean(),
        "the engine does not enter autocast; write `with torch.autocast(...)` around the forward, or use bf16",
        False,
    ),
    _inapplicable("torch_autocast.dtype", _DTYPES, _NO_AUTOCAST, Precision.BF16),
    _inapplicable("torch_autocast.lower_precision_safe_modules", list_of(text()), _NO_AUTOCAST),
    _error("amp", switched_group(), "Apex is not supported; use bf16", "off"),
    # The next two are compared with the precision by parse, where both are known.
    _honoured(
        "data_types.grad_accum_dtype",
        _DTYPES,
        "fp32, or the dtype of the weights, which is what gradients accumulate in when this is not said.",
    ),
    _honoured("data_types.param_dtype", _DTYPES, "Has to be the dtype of the weights."),
    Key(
        "data_types.buffer_dtype",
        _DTYPES,
        Treatment.MAPPED,
        "it becomes buffers; where it is not said, DeepSpeed leaves all buffers as they are",
        field="buffers",
        convert=lambda dtype: Buffers(dtype.value) if isinstance(dtype, Precision) else None,
    ),
    Key(
        "data_types.keep_in_fp32_modules",
        either(choice_of("auto"), names_or_classes(1)),
        Treatment.MAPPED,
        "it becomes keep_fp32, which keeps weights, too; DeepSpeed keeps buffers of these names and casts the weights",
        "auto",
        field="keep_fp32",
        convert=lambda names: None if names == "auto" else names,
    ),
)


def _host_when_true(value: object) -> object:
    return Tier.HOST if value else None


def _off_when_zero(value: object) -> object:
    return False if value == 0 else None


_ZERO = (
    Key(
        "zero_optimization.stage",
        integer(0, 3),
        Treatment.MAPPED,
        "one process holds everything at every stage; the budgets decide what is offloaded",
        0,
        field="zero_stage",
    ),
    _inapplicable("zero_optimization.contiguous_gradients", boolean(), _UNITS, True),
    _inapplicable("zero_optimization.reduce_scatter", boolean(), _ONE_RANK, True),
    _inapplicable("zero_optimization.allgather_partitions", boolean(), _ONE_RANK, True),
    _inapplicable("zero_optimization.use_multi_rank_bucket_allreduce", boolean(), _ONE_RANK, True),
    _inapplicable("zero_optimization.reduce_bucket_size", integer(), _ONE_RANK, 500_000_000),
    _inapplicable("zero_optimization.allgather_bucket_size", integer(), _ONE_RANK, 500_000_000),
    _inapplicable("zero_optimization.overlap_comm", boolean(), _ONE_RANK),
    _inapplicable(
        "zero_optimization.compute_grad_norm", boolean(), "the norm is a by-product of landing the gradients", True
    ),
    _inapplicable("zero_optimization.load_from_fp32_weights", boolean(), "DeepSpeed's checkpoints are not read", True),
    _inapplicable("zero_optimization.elastic_checkpoint", boolean(), "DeepSpeed's checkpoints are not read", False),
    _inapplicable("zero_optimization.sub_group_size", integer(), _UNITS, 1_000_000_000),
    Key(
        "zero_optimization.stage3_prefetch_bucket_size",
        integer(),
        Treatment.MAPPED,
        "0 becomes prefetch = false; otherwise how far to fetch ahead follows from measured bandwidths",
        50_000_000,
        field="prefetch",
        convert=_off_when_zero,
    ),
    _inapplicable("zero_optimization.stage3_param_persistence_threshold", integer(), _BUDGETS, 100_000),
    _inapplicable("zero_optimization.stage3_model_persistence_threshold", integer(), _BUDGETS, sys.maxsize),
    _inapplicable("zero_optimization.stage3_max_live_parameters", integer(), _BUDGETS, 1_000_000_000),
    _inapplicable("zero_optimization.stage3_max_reuse_distance", integer(), _BUDGETS, 1_000_000_000),
    _inapplicable(
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        boolean(),
        "save_pretrained always writes whole weights, streamed",
        False,
    ),
    _inapplicable(
        "zero_optimization.stage3_gather_fp16_weights_on_model_save",
        boolean(),
        "save_pretrained always writes whole weights, streamed",
        False,
    ),
    _inapplicable("zero_optimization.stage3_module_granularity_threshold", integer(), _UNITS, 0),
    _inapplicable("zero_optimization.stage3_use_all_reduce_for_fetch_params", boolean(), _ONE_RANK, False),
    _inapplicable("zero_optimization.stage3_allgather_sequential", boolean(), _ONE_RANK, False),
    _inapplicable("zero_optimization.stage3_partition_stream_chunk_size", integer(), _ONE_RANK, 0),
    _inapplicable(
        "zero_optimization.ignore_unused_parameters",
        boolean(),
        "an unused parameter has no gradient and is not updated, as in plain PyTorch",
        True,
    ),
    _inapplicable("zero_optimization.legacy_stage1", boolean(), _ONE_RANK, False),
    _inapplicable("zero_optimization.round_robin_gradients", boolean(), _ONE_RANK, False),
    _inapplicable("zero_optimization.parameter_alignment", boolean(), "every parameter is aligned, always", False),
    _inapplicable("zero_optimization.zero_hpz_partition_size", integer(), _ONE_RANK, 1),
    *(
        _error(
            f"zero_optimization.zero_quantized_{what}", boolean(), "weights and gradients are never quantised", False
        )
        for what in ("weights", "nontrainable_weights", "gradients")
    ),
    _error("zero_optimization.zeropp_loco_param", present_group(), "gradients are never quantised", "off"),
    _inapplicable("zero_optimization.mics_shard_size", integer(-1), _ONE_RANK, -1),
    _inapplicable("zero_optimization.mics_hierarchical_params_gather", boolean(), _ONE_RANK, False),
    _inapplicable(
        "zero_optimization.memory_efficient_linear",
        boolean(),
        "no layer keeps a second reference to a weight, so none is replaced",
        True,
    ),
    _inapplicable("zero_optimization.pipeline_loading_checkpoint", boolean(), "there is no pipeline engine", False),
    _inapplicable(
        "zero_optimization.override_module_apply", boolean(), "weights are fetched where apply() needs them", True
    ),
    _inapplicable("zero_optimization.log_trace_cache_warnings", boolean(), "faults are counted in stats", False),
    _inapplicable("zero_optimization.enable_sanity_checks", boolean(), "the checks are always on", False),
    *(
        _inapplicable(
            f"zero_optimization.leaf_module.{name}",
            list_of(text()),
            "experts are fetched when they are used, so none has to be declared",
        )
        for name in ("classes", "names", "name_suffixes")
    ),
    _error(
        "zero_optimization.zenflow", present_group(), "ZenFlow delays updates; step_overlap hides them exactly", "off"
    ),
    _inapplicable("zero_optimization.save_muon_momentum_buffer_in_memory", boolean(), "there is no Muon", False),
    Key(
        "zero_optimization.cpu_offload",
        boolean(),
        Treatment.MAPPED,
        "becomes offload_optimizer = host",
        False,
        field="offload_optimizer",
        convert=_host_when_true,
    ),
    *(
        Key(
            f"zero_optimization.{name}",
            boolean(),
            Treatment.MAPPED,
            "becomes offload_param = host",
            False,
            field="offload_param",
            convert=_host_when_true,
        )
        for name in ("cpu_offload_param", "cpu_offload_params")
    ),
    _inapplicable(
        "zero_optimization.cpu_offload_use_pin_memory",
        boolean(),
        "host memory is page-locked as far as the machine permits, which is reported",
        False,
    ),
)


_WITHOUT_FIELD_NAME = ("gather_fp16_weights_on_model_save", "partition_stream_chunk_size")
_STAGE3 = "zero_optimization.stage3_"
_ZERO_FIELD_NAMES = tuple(
    replace(key, path="zero_optimization." + key.path.removeprefix(_STAGE3))
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
        _inapplicable(f"{prefix}.buffer_count", integer(), _BUDGETS, 5 if section == "offload_param" else 4),
        _inapplicable(f"{prefix}.buffer_size", integer(), _BUDGETS, 100_000_000),
        _inapplicable(
            f"{prefix}.pin_memory",
            boolean(),
            "host memory is page-locked as far as the machine permits, which is reported",
            True,
        ),
    )


_OFFLOAD = (
    *_offload("offload_param"),
    _inapplicable("zero_optimization.offload_param.max_in_cpu", integer(), _BUDGETS, 1_000_000_000),
    *_offload("offload_optimizer"),
    *(
        _inapplicable(
            f"zero_optimization.offload_optimizer.{name}",
            boolean(),
            "reads, updates and writes always overlap; step_overlap says how far",
            False,
        )
        for name in ("pipeline_read", "pipeline_write", "super_offload")
    ),
    _inapplicable("zero_optimization.offload_optimizer.fast_init", boolean(), "state is created where it stays", False),
    _inapplicable("zero_optimization.offload_optimizer.ratio", number(0, 1), _BUDGETS, 1.0),
    _inapplicable(
        "zero_optimization.offload_optimizer.convert_grad_on_cpu", boolean(), "gradients land in one pass", True
    ),
    _inapplicable(
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
    _honoured("aio.queue_depth", integer(1, QUEUE_DEPTH_MAX), "Disk requests in flight (16 here when not said).", 8),
    *(
        _inapplicable(f"aio.{name}", integer(1), _OWN_THREADS, 1)
        for name in ("intra_op_parallelism", "thread_count", "num_threads")
    ),
    _inapplicable(
        "aio.single_submit", boolean(), "requests are submitted together as far as the queue has room", False
    ),
    _inapplicable("aio.overlap_events", boolean(), "requests are reaped while others are submitted, always", True),
    _inapplicable("aio.use_gds", boolean(), "bytes go through host memory; there is no GPUDirect path", False),
)

DEEPSPEED_KEYS = (*_BATCH, *_LOGGING, *_OPTIMIZER, *_PRECISION, *_ZERO, *_ZERO_FIELD_NAMES, *_OFFLOAD, *_AIO)

BOOLEAN_SECTIONS = {"zero_optimization": "zero_optimization.stage"}
"""Sections that may be ``true`` or ``false``: an older form, and the key that it sets to 1 or 0."""

TRAINER_KEYS = frozenset(
    (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "fp16.enabled",
        "bf16.enabled",
        "optimizer.params.lr",
        "optimizer.params.betas",
        "optimizer.params.eps",
        "optimizer.params.weight_decay",
        "scheduler.params",
    )
)
"""Where ``"auto"`` stands for an argument of the trainer, which puts its value there (transformers'
``HfTrainerDeepSpeedConfig``)."""
