"""Every key of DeepSpeed's configuration that trains, and what becomes of it here.

Source: DeepSpeed 0.19.8 (``runtime/config.py``, ``runtime/constants.py``, ``runtime/precision_config.py``). Keys of
ZeRO and offloading are in ``deepspeed_zero_keys``, those of tools around the training in ``deepspeed_tool_keys``.
"""

from __future__ import annotations

from deepoffload.config.deepspeed_zero_keys import DEEPSPEED_ZERO_KEYS
from deepoffload.config.keys import (
    Key,
    Mismatch,
    Treatment,
    ValueKind,
    boolean,
    choice,
    choice_of,
    either,
    honoured,
    inapplicable,
    integer,
    interval,
    list_of,
    mapping,
    names_or_classes,
    number,
    refused,
    renamed,
    switched_group,
    text,
)
from deepoffload.config.lr_schedules import SCHEDULES, TORCH_SCHEDULES
from deepoffload.config.optimizers import OPTIMIZERS, TORCH_PARAMETERS
from deepoffload.config.schema import Buffers, Precision

_MEAN = "the ranks' gradients are added in fp32 and divided then, so there is nothing to scale before"
_NO_SEQUENCES = "there is no sequence parallelism"
_NO_AUTOCAST = "it only matters when torch_autocast is enabled"

_DTYPES = choice(
    {
        **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), Precision.FP32),
        **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), Precision.BF16),
        **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), Precision.FP16),
    }
)

_SEQUENCE_DTYPE = inapplicable(
    "seq_parallel_communication_data_type", choice_of("fp32", "bf16", "fp16"), _NO_SEQUENCES, "fp32"
)

_BATCH = (
    honoured("train_batch_size", integer(1), "Samples per step; the third of the three is worked out."),
    honoured("train_micro_batch_size_per_gpu", integer(1), "Samples per forward."),
    honoured("gradient_accumulation_steps", integer(1), "Backwards per step.", 1),
    refused(
        "managed_gradient_accumulation",
        boolean(),
        "initialize() always counts the micro-steps; to step when you like, use offload_context with CPUAdamW",
        True,
    ),
    honoured(
        "gradient_clipping",
        number(0),
        "Largest global norm of the gradients; 0 is off. Not said: 1.0 in initialize(), off in a plain loop.",
    ),
    honoured("dataloader_drop_last", boolean(), "Whether initialize()'s loader drops a last, smaller batch.", False),
    inapplicable("prescale_gradients", boolean(), _MEAN, False),
    inapplicable("gradient_predivide_factor", number(), _MEAN, 1.0),
    # The next two are errors where there are several ranks and the numbers would be others, see parse.
    inapplicable(
        "gradient_allreduce_op",
        choice_of("mean", "sum"),
        "gradients are the mean over the ranks; `sum` is an error with several",
        "mean",
        field="gradient_allreduce_op",
    ),
    inapplicable(
        "communication_data_type",
        _DTYPES,
        "gradients travel in the dtype in which autograd makes them, and are added in fp32; a narrower one is an error "
        "with several ranks",
        field="communication_data_type",
    ),
    _SEQUENCE_DTYPE,
    renamed(_SEQUENCE_DTYPE, "seq_parallel_comm_data_type"),
    inapplicable("sparse_gradients", boolean(), "what lands is dense, so nothing sparse travels", False),
    inapplicable("disable_allgather", boolean(), "weights are gathered when they are used", False),
)

_LOGGING = (
    honoured(
        "steps_per_print",
        interval(),
        "Steps between two lines of progress, on stderr or to the logger `deepoffload.progress`; 0 or not said: none.",
    ),
    honoured(
        "wall_clock_breakdown",
        boolean(),
        "A line with the seconds of forward, backward and step after each step, as above.",
        False,
    ),
    inapplicable("memory_breakdown", boolean(), "engine.stats() gives the bytes of every tier and their peaks", False),
    inapplicable("dump_state", boolean(), "a Config can be printed as it is", False),
    inapplicable("disable_python_gc", boolean(), "the program decides when garbage is collected", False),
    inapplicable("log_level", text(), "the logger is named deepoffload; set its level with Python's logging"),
    inapplicable("vocabulary_size", integer(1), "only DeepSpeed's padding advice used it"),
)

_THEIR_OPTIMIZERS = (
    *("Lamb", "OneBitAdam", "ZeroOneAdam", "OneBitLamb", "MuAdam", "MuAdamW", "MuSGD"),
    *("SparseAdam", "LBFGS"),
)
"""Types that DeepSpeed builds, or built once, and we do not."""


def _optimizer_type() -> ValueKind:
    ours = choice_of(*OPTIMIZERS)
    theirs = {name.lower(): name for name in _THEIR_OPTIMIZERS}

    def normalise(value: object) -> object:
        if isinstance(value, str) and value.lower() in theirs:
            raise Mismatch(
                f"expected {ours.expected}; other optimizers work on paged parameters: pass one to "
                "initialize(optimizer=...), in the place of this section"
            )
        return ours.normalise(value)

    return ValueKind(ours.expected, normalise)


_OPTIMIZER = (
    honoured(
        "optimizer.type",
        _optimizer_type(),
        "The optimizer, in any case of letters; each takes the parameters below that its class has. Those after `muon` "
        "are torch's own, by `deepoffload.paged`. DeepSpeed's Lamb, 1-bit and Mu ones are errors: gradients are not "
        "compressed, and an optimizer of yours goes to `initialize`.",
    ),
    honoured("optimizer.params.lr", number(0), "Learning rate; 1e-2 for Adagrad.", 1e-3),
    honoured("optimizer.params.betas", list_of(number(0, below=1), 2), "Decay of the two moments.", (0.9, 0.999)),
    honoured("optimizer.params.eps", number(0), "Term added to the denominator; 1e-10 for Adagrad.", 1e-8),
    honoured(
        "optimizer.params.weight_decay",
        number(0),
        "Weight decay; `deepoffload.CPUAdamW` by itself has 0.01, as torch's.",
        0.0,
    ),
    honoured("optimizer.params.bias_correction", boolean(), "Correct the moments' bias.", True),
    honoured(
        "optimizer.params.adam_w_mode",
        boolean(),
        "Decoupled weight decay for type `Adam`; `AdamW` always has it.",
        True,
        field="optimizer.params.adamw_mode",
    ),
    honoured("optimizer.params.adamw_mode", boolean(), "The same, as the constructor spells it.", True),
    honoured(
        "optimizer.params.torch_adam",
        boolean(),
        "There is one Adam, and it agrees with torch's. With `true` AdamW's weight decay is 0.01 where it is not said: "
        "torch's default, which DeepSpeed then trains with.",
        False,
    ),
    inapplicable("optimizer.params.fused", boolean(), "the update is always one fused pass", None),
    inapplicable("optimizer.params.foreach", boolean(), "the update is always one fused pass", None),
    honoured("optimizer.params.amsgrad", boolean(), "Adam with the largest second moment so far.", False),
    honoured("optimizer.params.maximize", boolean(), "Ascend instead of descend.", False),
    honoured("optimizer.params.fp32_optimizer_states", boolean(), '`false` is `state_dtype` "bf16".', True),
    honoured(
        "optimizer.params.state_dtype",
        choice_of("fp32", "bf16", "8bit"),
        "What Adam's moments (Lion's: not 8bit) are stored in; see optimizers.md.",
        "fp32",
    ),
    honoured("optimizer.params.momentum", number(0, 1), "Of SGD, RMSprop and Muon (0.95).", 0.0),
    honoured("optimizer.params.dampening", number(), "Of SGD's momentum.", 0.0),
    honoured("optimizer.params.nesterov", boolean(), "Nesterov's momentum in SGD.", False),
    honoured("optimizer.params.lr_decay", number(0), "Of Adagrad.", 0.0),
    honoured("optimizer.params.initial_accumulator_value", number(0), "Of Adagrad.", 0.0),
    *(honoured(f"optimizer.params.{name}", kind, f"Of {whose}.") for name, kind, whose in TORCH_PARAMETERS),
    refused("optimizer.params.max_grad_norm", number(0), "say gradient_clipping instead, at the top level", 0.0),
    inapplicable("optimizer.legacy_fusion", boolean(), "the update is always one fused pass", False),
    inapplicable("zero_allow_untested_optimizer", boolean(), "any torch optimizer may be passed in", False),
    inapplicable("zero_force_ds_cpu_optimizer", boolean(), "the optimizer that is passed in is the one used", True),
    honoured(
        "scheduler.type",
        choice_of(*SCHEDULES, *TORCH_SCHEDULES),
        "Learning rate schedule; the parameters of the first five are listed below, those of the others are torch's.",
    ),
    honoured("scheduler.params", mapping(), "Parameters of the schedule."),
)


def _switch(precision: Precision, also: str = "") -> Key:
    """The key that switches a precision on."""
    return Key(
        f"{precision.value}.enabled",
        boolean(),
        Treatment.MAPPED,
        f"becomes precision = {precision.value}, over fp32 master weights{also}",
        False,
        field="precision",
        convert=lambda enabled: precision if enabled else None,
    )


_BF16 = (
    _switch(Precision.BF16),
    inapplicable("bf16.immediate_grad_update", boolean(), "gradients always land on the host during backward", False),
    inapplicable(
        "bf16.check_grad_overflow",
        boolean(),
        "non-finite gradients are always looked for, in the pass that lands them",
        True,
    ),
    refused("bf16.bf16_master_weights_and_grads", boolean(), "master weights are kept in fp32", False),
    refused("bf16.bf16_optimizer_states", boolean(), "moments are kept in fp32", False),
)

_PRECISION = (
    _switch(Precision.FP16, ", with a scaled loss in initialize()"),
    honoured("fp16.auto_cast", boolean(), "Cast floating-point positional arguments of the forward to fp16.", False),
    honoured("fp16.loss_scale", number(0), "A static loss scale; 0: a dynamic one, which the next five rule.", 0.0),
    honoured("fp16.initial_scale_power", integer(0, 127), "The first scale is 2 to this power.", 16),
    honoured(
        "fp16.loss_scale_window", integer(), "Steps without an overflow until the scale is doubled; above 0.", 1000
    ),
    honoured("fp16.hysteresis", integer(1), "The scale is halved from this overflow on.", 2),
    honoured(
        "fp16.consecutive_hysteresis",
        boolean(),
        "Each step without an overflow renews the hysteresis, not only one that doubles the scale.",
        False,
    ),
    honoured(
        "fp16.min_loss_scale", integer(), "The least scale, above 0; an overflow there raises `LossScaleError`.", 1
    ),
    inapplicable("fp16.fused_mode", boolean(), "the update is always one fused pass", True),
    refused("fp16.fp16_master_weights_and_grads", boolean(), "master weights are kept in fp32", False),
    *_BF16,
    *(renamed(key, key.path.replace("bf16.", "bfloat16.", 1)) for key in _BF16),
    refused(
        "torch_autocast.enabled",
        boolean(),
        "the engine does not enter autocast; write `with torch.autocast(...)` around the forward, or use bf16",
        False,
    ),
    inapplicable("torch_autocast.dtype", _DTYPES, _NO_AUTOCAST, Precision.BF16),
    inapplicable("torch_autocast.lower_precision_safe_modules", list_of(text()), _NO_AUTOCAST),
    refused("amp", switched_group(), "Apex is not supported; use bf16", "off"),
    # The next two are compared with the precision by parse, where both are known.
    honoured(
        "data_types.grad_accum_dtype",
        _DTYPES,
        "fp32, or the dtype of the weights, which is what gradients accumulate in when this is not said.",
    ),
    honoured("data_types.param_dtype", _DTYPES, "Has to be the dtype of the weights."),
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

DEEPSPEED_KEYS = (*_BATCH, *_LOGGING, *_OPTIMIZER, *_PRECISION, *DEEPSPEED_ZERO_KEYS)

BOOLEAN_SECTIONS = {"zero_optimization": "zero_optimization.stage"}
"""Sections that may be ``true`` or ``false``: an older form, and the key that it sets to 1 or 0."""

TOLERANT_SECTIONS = frozenset(
    (
        *("activation_checkpointing", "aio", "checkpoint", "checkpoint.parallel_write", "checkpoint.writer"),
        *("autotuning", "flops_profiler"),
    )
)
"""Sections whose unknown keys DeepSpeed ignores, as it ignores those at the top level. It does so in four more, where a
misspelt key would train with other numbers: ``optimizer``, ``scheduler``, ``data_types`` and ``torch_autocast``."""

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
