"""The table of keys: complete, without doubles, and each treatment does what it says."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from deepoffload.config import parse_config
from deepoffload.config.collect import KEYS, SECTIONS
from deepoffload.config.deepspeed_keys import DEEPSPEED_KEYS
from deepoffload.config.deepspeed_tool_keys import DEEPSPEED_TOOL_KEYS
from deepoffload.config.keys import Key, Mismatch, Treatment
from deepoffload.config.own_keys import OWN_KEYS
from deepoffload.errors import ConfigError

THEIRS = (*DEEPSPEED_KEYS, *DEEPSPEED_TOOL_KEYS)

# The pydantic models (fields and their aliases) and constants of DeepSpeed 0.19.8, group by group; some are older.
DEEPSPEED = {
    "": "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps managed_gradient_accumulation "
    "gradient_clipping prescale_gradients gradient_predivide_factor gradient_allreduce_op communication_data_type "
    "seq_parallel_communication_data_type sparse_gradients disable_allgather steps_per_print wall_clock_breakdown "
    "memory_breakdown dump_state log_level dataloader_drop_last zero_allow_untested_optimizer "
    "zero_force_ds_cpu_optimizer amp graph_harvesting checkpoint_serialization disable_python_gc vocabulary_size "
    "use_data_before_expert_parallelism",
    "optimizer": "type legacy_fusion",
    "optimizer.params": "lr betas eps weight_decay bias_correction torch_adam adam_w_mode amsgrad",
    "scheduler": "type params",
    "fp16": "enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis "
    "min_loss_scale fp16_master_weights_and_grads",
    "bf16": "enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads bf16_optimizer_states",
    "torch_autocast": "enabled dtype lower_precision_safe_modules",
    "data_types": "grad_accum_dtype param_dtype buffer_dtype keep_in_fp32_modules",
    "compile": "deepcompile autoep_non_moe free_activation free_activation_threshold offload_activation "
    "offload_activation_pin_memory offload_opt_states offload_parameters double_buffer symmetric_memory debug_log "
    "sync_before_reduce sync_after_reduce sync_before_allgather sync_after_allgather keep_int_input_tensors "
    "keep_all_input_tensors passes",
    "zero_optimization": "stage contiguous_gradients reduce_scatter allgather_partitions "
    "use_multi_rank_bucket_allreduce reduce_bucket_size allgather_bucket_size overlap_comm load_from_fp32_weights "
    "elastic_checkpoint sub_group_size stage3_prefetch_bucket_size stage3_param_persistence_threshold "
    "stage3_model_persistence_threshold stage3_max_live_parameters stage3_max_reuse_distance "
    "stage3_gather_16bit_weights_on_model_save stage3_module_granularity_threshold "
    "stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential ignore_unused_parameters legacy_stage1 "
    "round_robin_gradients zero_hpz_partition_size zero_quantized_weights zero_quantized_nontrainable_weights "
    "zero_quantized_gradients zeropp_loco_param mics_shard_size mics_hierarchical_params_gather "
    "memory_efficient_linear pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings "
    "compute_grad_norm parameter_alignment stage3_gather_fp16_weights_on_model_save "
    # their fields, which may be said in the place of the aliases
    "prefetch_bucket_size param_persistence_threshold model_persistence_threshold max_live_parameters "
    "max_reuse_distance gather_16bit_weights_on_model_save module_granularity_threshold "
    "use_all_reduce_for_fetch_params allgather_sequential "
    "enable_sanity_checks zenflow save_muon_momentum_buffer_in_memory cpu_offload cpu_offload_param "
    "cpu_offload_use_pin_memory",
    "zero_optimization.leaf_module": "classes names name_suffixes",
    "zero_optimization.offload_param": "device nvme_path buffer_count buffer_size max_in_cpu pin_memory",
    "zero_optimization.offload_optimizer": "device nvme_path buffer_count pin_memory pipeline_read pipeline_write "
    "fast_init ratio super_offload cpuadam_cores_perc",
    "aio": "block_size queue_depth intra_op_parallelism single_submit overlap_events use_gds thread_count num_threads",
    "activation_checkpointing": "partition_activations cpu_checkpointing contiguous_memory_optimization "
    "number_checkpoints synchronize_checkpoint_boundary profile",
    "checkpoint": "tag_validation load_universal use_node_local_storage checkpoint_serialization",
    "checkpoint.parallel_write": "pipeline_stage",
    "checkpoint.writer": "type decoupled io_buffer_size io_buffer_double show_statistics data_parallel io_multiplier",
    "tensorboard": "enabled output_path job_name",
    "wandb": "enabled group team project",
    "csv_monitor": "enabled output_path job_name",
    "comet": "enabled samples_log_interval project workspace api_key experiment_name experiment_key online mode",
    "flops_profiler": "enabled recompute_fwd_factor profile_step module_depth top_modules detailed output_file",
    "comms_logger": "enabled verbose prof_all debug prof_ops",
}


def nested(path: str, value: object) -> dict[str, object]:
    for name in reversed(path.split(".")):
        value = {name: value}
    assert isinstance(value, dict)
    return value


_TYPES = {
    **dict.fromkeys(("momentum", "dampening", "nesterov"), "SGD"),
    **dict.fromkeys(("lr_decay", "initial_accumulator_value"), "Adagrad"),
}
"""For parameters that Adam does not have: one that has them."""


def alone(path: str, value: object) -> dict[str, object]:
    """A source that says only this, and what without it would be a separate mistake."""
    source = nested(path, value)
    if path.startswith("optimizer.") and path != "optimizer.type":
        source["optimizer"] |= {"type": _TYPES.get(path.rpartition(".")[2], "Adam")}  # type: ignore[operator]
    return {"nvme_path": "/swap", **source}


def test_every_key_of_deepspeed_is_in_the_table():
    paths = {f"{group}.{name}".lstrip(".") for group, names in DEEPSPEED.items() for name in names.split()}
    assert not paths - KEYS.keys()


def test_no_path_twice_and_none_is_also_a_section():
    assert len(KEYS) == len(OWN_KEYS) + len(THEIRS)
    assert not KEYS.keys() & SECTIONS


def collected(rule: Callable[[Key], None], keys: Iterable[Key]) -> None:
    """Every key that breaks ``rule``, in one failure."""
    broken = []
    for key in keys:
        try:
            rule(key)
        except (AssertionError, ConfigError, Mismatch) as error:
            broken.append(f"{key.path}: {error}")
    assert not broken, f"{len(broken)} keys break the rule:\n" + "\n".join(broken)


def of(treatment: Treatment) -> list[Key]:
    return [key for key in THEIRS if key.treatment is treatment]


def test_defaults_are_values_of_their_kind_and_change_nothing():
    def rule(key: Key) -> None:
        if key.default is None or key.default in ("off", ()):
            return
        normal = key.kind.normalise(key.default)
        assert normal == key.default, f"the default {key.default!r} reads as {normal!r}"
        notes = parse_config(alone(key.path, key.default)).notes
        assert not notes, f"its default leaves notes: {notes}"

    collected(rule, KEYS.values())


FIRST_NAMES = {  # of those that are named otherwise than with and without "stage3_"
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": (
        "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    ),
    "zero_optimization.cpu_offload_params": "zero_optimization.cpu_offload_param",
    "seq_parallel_comm_data_type": "seq_parallel_communication_data_type",
}


def test_every_second_name_is_known_as_one():
    for path, key in KEYS.items():
        first = FIRST_NAMES.get(path, path.replace("bfloat16.", "bf16."))
        stage3 = first.replace("zero_optimization.", "zero_optimization.stage3_")
        assert key.first_path == (stage3 if stage3 in KEYS else first), path


def test_two_names_of_a_key_say_the_same_or_contradict_each_other():
    def rule(key: Key) -> None:
        values = [value for value in OTHER_VALUES if fits(key, value)]
        default = False if key.default == "off" else key.default  # in the place of a value that is refused
        values = [default, *(value for value in values if value not in key.harmless and value != default)]
        for one, other in ((key.path, key.first_path), (key.first_path, key.path)):
            said = parse_config(merged(nested(one, values[0]), nested(other, values[0])))
            assert replace(said, notes=()) == replace(parse_config(nested(one, values[0])), notes=())
            try:
                parse_config(merged(nested(one, values[0]), nested(other, values[1])))
            except ConfigError as error:
                assert f"{one} and {other} contradict each other" in str(error), str(error)
            else:
                raise AssertionError(f"{values[:2]} are accepted")

    second_names = [key for key in KEYS.values() if key.same_as is not None]
    assert len(second_names) > 15
    collected(rule, second_names)


def merged(one: dict[str, object], other: dict[str, object]) -> dict[str, object]:
    """Two sources as one."""
    result = dict(one)
    for name, value in other.items():
        below = result.get(name)
        both = isinstance(below, dict) and isinstance(value, dict)
        result[name] = merged(below, value) if both else value  # type: ignore[arg-type]
    return result


def fits(key: Key, value: object) -> bool:
    try:
        key.kind.normalise(value)
    except Mismatch:
        return False
    return True


def test_auto_and_null_say_nothing():
    def rule(key: Key) -> None:
        for value in ("auto", None):
            config = parse_config(nested(key.path, value))
            assert replace(config, warnings=()) == parse_config(), f"{value!r} says something: {config}"
            listed = value is not None and getattr(key.default, "value", key.default) != "auto"
            assert bool(config.warnings) is listed, f"{value!r}: {config.warnings}"

    collected(rule, KEYS.values())


OTHER_VALUES = (
    True,
    False,
    1,
    2,
    4096,
    0.5,
    "text",
    "fp32",
    "fp16",
    "cpu",
    "/some/dir",
    [0.5, 0.5],
    ["a"],
    {"enabled": True},
    {"layer_reduction": {"enabled": True}},
)


def other_value(key: Key) -> object:
    """A value of the key's kind that is neither its default nor harmless."""
    for value in OTHER_VALUES:
        try:
            normal = key.kind.normalise(value)
        except Mismatch:
            continue
        if normal != key.default and normal not in key.harmless:
            return value
    for word in key.kind.expected.split('"')[1::2]:
        if word not in ("enabled",) and key.kind.normalise(word) != key.default:
            return word
    raise AssertionError(f"no value found: {key.kind.expected}")


def test_keys_that_would_change_numbers_are_refused():
    def rule(key: Key) -> None:
        try:
            parse_config(alone(key.path, other_value(key)))
        except ConfigError as error:
            said = str(error)
        else:
            raise AssertionError("accepted")
        assert said.startswith(key.path) and "ignoring it would change numbers" in said and key.text in said, said

    collected(rule, of(Treatment.ERROR))


def test_inapplicable_keys_are_noted_once_and_change_nothing():
    def rule(key: Key) -> None:
        notes = parse_config(alone(key.path, other_value(key))).notes
        assert notes == (f"{key.path}: inapplicable: {key.text}",), notes

    collected(rule, of(Treatment.INAPPLICABLE))


def test_mapped_keys_set_their_field_and_are_noted():
    def rule(key: Key) -> None:
        value = 0 if key.path.endswith("prefetch_bucket_size") else other_value(key)
        source = nested(key.path, value) | ({"nvme_path": "/swap"} if key.path.endswith(".device") else {})
        config = parse_config(source)
        (note,) = config.notes
        assert note.startswith(f"{key.path} = ") and "mapped" in note, note
        assert key.field is not None
        owner, _, name = key.field.split(".offload")[0].rpartition(".")
        before, after = (getattr(getattr(each, owner) if owner else each, name) for each in (parse_config(), config))
        assert before != after, f"{key.field} is {after!r} as before"

    collected(rule, of(Treatment.MAPPED))


def test_switches_that_are_off_are_no_error():
    off = {
        "fp16": {"enabled": False, "loss_scale": 0},
        "amp": {"enabled": "auto", "opt_level": "auto"},
        "torch_autocast": {"enabled": False},
        "bf16": {"bf16_master_weights_and_grads": False},
        "curriculum_learning": {"enabled": False, "params": {}},
        "zero_optimization": {"zenflow": None, "zero_quantized_weights": False},
    }
    assert parse_config(off) == parse_config()


def test_notes_do_not_repeat_secrets():
    config = parse_config({"comet": {"enabled": True, "api_key": "s3cret"}, "trackio": {"enabled": True}})
    assert config.notes and "s3cret" not in repr(config)
