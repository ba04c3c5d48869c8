"""Keys of DeepSpeed's tools around the training: checkpoints, monitors, profilers, compilation, data, compression."""

from __future__ import annotations

from deepoffload.config.deepspeed_tuning_keys import TUNING_KEYS
from deepoffload.config.deepspeed_watching_keys import MONITOR_KEYS, PROFILER_KEYS, SCHEDULE_KEYS
from deepoffload.config.keys import (
    Key,
    Treatment,
    ValueKind,
    boolean,
    choice_of,
    cut_group,
    group_of_parts,
    honoured,
    inapplicable,
    integer,
    list_of,
    number,
    present_group,
    switched_group,
    text,
)
from deepoffload.device import Tier

_CHECKPOINTING = "it sets up deepspeed.checkpointing; use torch.utils.checkpoint or the model's own switch"
_CHECKPOINT = "engine.save_checkpoint streams what it writes"
_FORMAT = "the format is safetensors and JSON (docs/checkpoints.md); nothing is pickled"
_WRITER = "blocks of 1 MiB go directly to the disk, through the engine that swaps"
_MONITOR = "tensorboard, csv_monitor, wandb and comet are honoured; deepoffload.Monitor feeds any other logger"
_PROFILER = "use torch.profiler; stats() has the bytes moved"
_DATA_PARALLEL = "all ranks are data-parallel; with several ranks it is an error to ask for another kind"
_COMPILE = "torch.compile works on the layers as usual"


def _group(prefix: str, why: str, **keys: tuple[ValueKind, object]) -> tuple[Key, ...]:
    return tuple(
        Key(f"{prefix}.{name}", kind, Treatment.INAPPLICABLE, why, default) for name, (kind, default) in keys.items()
    )


_TEXT_OR_NOTHING = (text(), None)
_OFF = (boolean(), False)
_ON = (boolean(), True)


def _changes_numbers(path: str, why: str, kind: ValueKind | None = None) -> Key:
    return Key(path, kind or switched_group(), Treatment.ERROR, why, "off", ("off",))


def _other_group(path: str, why: str, kind: ValueKind | None = None) -> Key:
    return Key(path, kind or switched_group(), Treatment.INAPPLICABLE, why, "off")


_COMPRESSION_PARTS = (
    "layer_reduction",
    "weight_quantization",
    "activation_quantization",
    "sparse_pruning",
    "row_pruning",
    "head_pruning",
    "channel_pruning",
)

DEEPSPEED_TOOL_KEYS = (
    *_group(
        "activation_checkpointing",
        _CHECKPOINTING,
        partition_activations=_OFF,
        contiguous_memory_optimization=_OFF,
        number_checkpoints=(integer(), None),
        synchronize_checkpoint_boundary=_OFF,
        profile=_OFF,
    ),
    Key(
        "activation_checkpointing.cpu_checkpointing",
        boolean(),
        Treatment.HONOURED,
        'true is `offload_activations = "host"`: inputs of checkpointed blocks wait for backward in host memory, in a '
        "part of `host_budget`. Where the CPU computes they are there already.",
        False,
        field="offload_activations",
        convert=lambda value: Tier.HOST if value else None,
    ),
    honoured(
        "checkpoint.load_universal",
        boolean(),
        "engine.load_checkpoint loads a universal checkpoint: the tag that the file latest_universal names.",
        False,
        field="load_universal",
    ),
    honoured(
        "checkpoint.writer.decoupled",
        boolean(),
        "engine.save_checkpoint returns at once, and the checkpoint is complete at a later step, as with "
        "`TrainingState.save(wait=False)`.",
        False,
        field="decoupled_saves",
    ),
    honoured(
        "checkpoint.tag_validation",
        choice_of("Ignore", "Warn", "Fail"),
        "What becomes of a save for which ranks give different tags. There is one checkpoint, with rank 0's.",
        "Warn",
        field="tag_validation",
    ),
    *_group("checkpoint", "the directory that engine.save_checkpoint is given is written", use_node_local_storage=_OFF),
    *_group("checkpoint", _FORMAT, checkpoint_serialization=_ON),
    *_group("checkpoint.parallel_write", "there is no pipeline engine", pipeline_stage=_OFF),
    *_group(
        "checkpoint.writer",
        _WRITER,
        type=(choice_of("FAST", "PYTHON", "MOCK"), "FAST"),
        io_buffer_size=(integer(), 64 << 20),
        io_buffer_double=_ON,
        io_multiplier=(number(0), 1.0),
    ),
    *_group("checkpoint.writer", "the log has the rate of every save", show_statistics=_OFF),
    *_group(
        "checkpoint.writer",
        "one process writes everything",
        data_parallel=(choice_of("replica", "socket", "machine"), None),
    ),
    Key("checkpoint_serialization", boolean(), Treatment.INAPPLICABLE, _FORMAT, True),
    *MONITOR_KEYS,
    *_group("trackio", _MONITOR, enabled=_OFF, project=(text(), "deepspeed")),
    *PROFILER_KEYS,
    *_group(
        "comms_logger",
        "engine.stats() counts the bytes and the waits between ranks",
        enabled=_OFF,
        verbose=_OFF,
        prof_all=_ON,
        debug=_OFF,
        prof_ops=(list_of(text()), ()),
    ),
    Key("graph_harvesting", boolean(), Treatment.INAPPLICABLE, "CUDA graphs cannot hold weights that move", False),
    *_group(
        "compile",
        _COMPILE,
        deepcompile=_OFF,
        autoep_non_moe=_OFF,
        free_activation=_OFF,
        free_activation_threshold=(integer(), 10 << 20),
        offload_activation=_OFF,
        offload_activation_pin_memory=_ON,
        offload_opt_states=_OFF,
        offload_parameters=_OFF,
        double_buffer=_ON,
        symmetric_memory=_OFF,
        debug_log=_OFF,
        sync_before_reduce=_OFF,
        sync_after_reduce=_OFF,
        sync_before_allgather=_OFF,
        sync_after_allgather=_OFF,
        keep_int_input_tensors=_ON,
        keep_all_input_tensors=_OFF,
        passes=(list_of(text()), None),
    ),
    *SCHEDULE_KEYS,
    # Whole groups: what is inside them is not looked at.
    _changes_numbers("data_efficiency", "the data schedule and token dropping are your loader's and model's"),
    _changes_numbers(
        "sparse_attention",
        "attention is the model's: write it with torch's FlexAttention (docs/long_sequences.md)",
        present_group(),
    ),
    _changes_numbers("quantize_training", "weights are never quantised", present_group()),
    _changes_numbers("compression_training", "the model is never compressed", group_of_parts(*_COMPRESSION_PARTS)),
    _changes_numbers("weight_quantization", "weights are never quantised", present_group()),
    _changes_numbers("elasticity", "it works out other batch sizes; say train_batch_size"),
    _other_group("eigenvalue", "it only serves quantize_training"),
    *TUNING_KEYS,
    _other_group("nebula", _CHECKPOINT),
    _other_group("datastates_ckpt", _CHECKPOINT, present_group()),
    _other_group("hybrid_engine", "the model generates as it is"),
    _other_group("timers", _PROFILER, present_group()),
    *(
        inapplicable(name, kind, _DATA_PARALLEL, "off", field=name)
        for name, kind in (
            ("tensor_parallel", cut_group("autotp_size", "tp_size")),
            ("expert_parallel", present_group()),
        )
    ),
    _other_group("pipeline", "pipelines are torch.distributed.pipelining's, as docs/ranks.md says", present_group()),
    inapplicable("sequence_parallel_size", integer(1), _DATA_PARALLEL, 1, field="sequence_parallel_size"),
    inapplicable("data_parallel_size", integer(1), "the process group says how many ranks there are", 1),
    inapplicable("use_data_before_expert_parallelism", boolean(), "there is no expert parallelism", False),
)
