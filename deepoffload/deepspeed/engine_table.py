"""The names of DeepSpeed's engine, and what becomes of each here.

Source: ``DeepSpeedEngine`` of DeepSpeed 0.19.8 (``runtime/engine.py``): its public methods, the private ones that other
libraries call, and the attributes of its objects that scripts read.
"""

from __future__ import annotations

from collections.abc import Mapping

from deepoffload.deepspeed.names import HERE, AbsentNameError, PeerName, Presence, absent, all_of, otherwise

_NO_CUT = "no layer is cut between ranks"
_ONE_UPDATE = "gradients are reduced where they land, and step() updates; there are no buckets to reduce by hand"
_SPARSE = "sparse gradients are refused by the optimizers; use dense embeddings"
_ZERO_KEY = "its key sets nothing here (docs/config.md says why); engine.placement_table() shows what went where"
_DATA = "the order and the sampling of data are your loader's"
_TUNING = "`python -m deepoffload.estimate --tune` chooses settings before a program starts (docs/estimators.md)"
_PROFILER = "use torch.profiler; engine.stats() and engine.summary() have the bytes moved and the times"
_COMPILER = "there is no DeepCompile; docs/compile.md says how layers are compiled"
_CHECKPOINT = "save_checkpoint and load_checkpoint do all of it, in one format (docs/checkpoints.md)"
_MOE = "DeepSpeed's MoE layers are not here; a model's own experts are parameters like others"
_APEX = "Apex is not supported; use bf16"
_SET_UP = "initialize() sets the engine up"

ENGINE_NAMES: Mapping[str, PeerName] = {
    # -- the step --
    **all_of("backward forward step train eval no_sync set_gradient_accumulation_boundary", HERE),
    **all_of("is_gradient_accumulation_boundary gradient_accumulation_steps was_step_applied", HERE),
    "zero_grad": otherwise("step() clears the gradients at a boundary, so it is rarely needed"),
    "scale": HERE,
    "coalesce_grad_reduction": otherwise("does nothing: gradients accumulate where they land, and are reduced once"),
    "managed_gradient_accumulation": otherwise("True: the engine counts the micro-steps"),
    "allreduce_gradients": otherwise("does nothing: gradients of several ranks are reduced without a call"),
    **all_of(
        "allreduce_bucket allreduce_and_copy allreduce_no_retain buffered_allreduce_fallback all_gather_scalar",
        absent(_ONE_UPDATE),
    ),
    **all_of("sparse_all_gather sparse_allreduce sparse_allreduce_bucket sparse_allreduce_no_retain", absent(_SPARSE)),
    "clip_fp32_gradients": absent("step() clips, inside the update; the key gradient_clipping says to what"),
    # -- questions --
    **all_of("get_global_grad_norm get_lr global_steps skipped_steps micro_steps", HERE),
    "loss_scale": otherwise(
        "a number, the present scale; DeepSpeed has a method, which gives that of the section fp16"
    ),
    "get_mom": otherwise("Adam's betas or SGD's momentum of each group; None for a group that has neither"),
    "get_type": HERE,
    **all_of("fp16_enabled bfloat16_enabled fp16_auto_cast dynamic_loss_scale initial_dynamic_scale", HERE),
    **all_of(
        "fp16_master_weights_and_gradients bf16_master_weights_and_gradients bf16_optimizer_states",
        otherwise("False: masters are in fp32; optimizer.params.state_dtype says what moments are stored in"),
    ),
    "torch_autocast_enabled": otherwise("False: write `with torch.autocast(...)` around the forward"),
    **all_of(
        "torch_autocast_dtype torch_autocast_lower_precision_safe_modules",
        absent("the engine does not enter autocast; write `with torch.autocast(...)` around the forward"),
    ),
    "get_data_types": HERE,
    "dynamic_loss_scale_args": absent("engine.loss_scale is the present scale; the section fp16 has the rest"),
    "gradient_clipping": HERE,
    **all_of("train_batch_size train_micro_batch_size_per_gpu", HERE),
    "get_batch_info": otherwise("the three numbers; DeepSpeed gives the methods that give them"),
    "set_train_batch_size": otherwise("refused in the middle of an update"),
    "set_train_micro_batch_size": HERE,
    **all_of("dataloader_drop_last wall_clock_breakdown steps_per_print", HERE),
    **all_of("optimizer_name scheduler_name scheduler_params", HERE),
    "optimizer_params": otherwise("those of the optimizer that trains; None where it was passed in"),
    "optimizer_legacy_fusion": absent("the update is always one fused pass"),
    "get_optimizer_configuration": absent(_SET_UP),
    "get_wall_clock_timers": absent("engine.summary() has the times of the last steps"),
    **all_of("memory_breakdown dump_state log_level", absent("engine.stats() has bytes; logging sets levels")),
    "communication_data_type": absent("gradients travel in the type of the weights"),
    **all_of("gradient_predivide_factor postscale_gradients", absent("gradients are the mean over the ranks")),
    **all_of("get_data_parallel_rank get_model_parallel_rank get_tensor_parallel_rank", HERE),
    **all_of("dp_world_size world_size mp_world_size", HERE),
    **all_of("global_rank local_rank device module optimizer lr_scheduler", HERE),
    "autotp_size": otherwise(f"0: {_NO_CUT}"),
    **all_of(
        "get_sequence_parallel_group tensor_parallel_config is_first_weights_partition_group get_autosp_backend "
        "get_autotp_backend compile_autosp compile_autotp uses_parallelization_pass_only",
        absent(f"{_NO_CUT}, and no sequence"),
    ),
    # -- ZeRO --
    **all_of("zero_optimization zero_optimization_stage", HERE),
    **all_of("zero_optimization_partition_gradients zero_optimization_partition_weights", HERE),
    **all_of(
        "zero_offload_param zero_offload_optimizer",
        otherwise('"cpu", "nvme" or None: what the configuration says; DeepSpeed gives the whole section'),
    ),
    **all_of("zero_cpu_offload zero_nvme_offload_optimizer", HERE),
    "zero_use_cpu_optimizer": otherwise(
        "whether the host updates the weights, also where the configuration offloads nothing"
    ),
    "zero_gather_16bit_weights_on_model_save": otherwise("True: a state_dict() has every weight, at no cost"),
    **all_of("zero_allow_untested_optimizer zero_ignore_unused_parameters", otherwise("True")),
    **all_of(
        "zero_allgather_bucket_size zero_allgather_partitions zero_allgather_sequential zero_contiguous_gradients "
        "zero_elastic_checkpoint zero_force_ds_cpu_optimizer zero_hpz_partition_size zero_legacy_stage1 "
        "zero_load_from_fp32_weights zero_log_trace_cache_warnings zero_max_live_parameters zero_max_reuse_distance "
        "zero_model_persistence_threshold zero_module_granularity_threshold zero_multi_rank_bucket_allreduce "
        "zero_overlap_comm zero_param_persistence_threshold zero_parameter_alignment zero_partial_offload "
        "zero_prefetch_bucket_size zero_reduce_bucket_size zero_reduce_scatter zero_round_robin_gradients "
        "zero_save_muon_momentum_buffer_in_memory zero_sub_group_size zero_compute_grad_norm "
        "swap_tensor_config aio_config super_offload zenflow_config cpuadam_cores_perc compile_zero_optimization_stage "
        "is_sanity_checks_enabled",
        absent(_ZERO_KEY),
    ),
    **all_of(
        "zero_quantized_gradients zero_quantized_nontrainable_weights zero_quantized_weights",
        absent("weights and gradients are never quantised"),
    ),
    # -- memory --
    "empty_partition_cache": otherwise("does nothing: copies of weights never take more than device_budget"),
    "offload_states": otherwise("where the CPU computes, nothing is to move; refused on a device, whose budget stays"),
    "reload_states": otherwise("does nothing, after offload_states"),
    "destroy": otherwise(
        "also ends the parameters, as close() does: using one is an error. Models of one zero.Init end with the last "
        "of their engines"
    ),
    "collect_python_gc": absent("the program decides when garbage is collected"),
    # -- saving --
    **all_of("save_checkpoint load_checkpoint save_16bit_model", HERE),
    "save_fp16_model": absent("its name is save_16bit_model"),
    "module_state_dict": otherwise("holds no memory: values are read when they are used"),
    **all_of(
        "_zero3_consolidated_16bit_state_dict _consolidated_16bit_state_dict",
        otherwise("as module_state_dict; on every rank"),
    ),
    "load_module_state_dict": HERE,
    **all_of("load_moe_state_dict", absent(_MOE)),
    **all_of(
        "checkpoint_serialization_enabled checkpoint_tag_validation_enabled checkpoint_tag_validation_fail "
        "checkpoint_writer_enabled load_universal_checkpoint use_node_local_storage",
        absent(_CHECKPOINT),
    ),
    # -- compilation --
    "compile": otherwise("module.compile(); DeepCompile's arguments are refused"),
    "is_compiled": HERE,
    **all_of(
        "is_deepcompile_active is_deepcompile_enabled get_compile_time get_deepcompile_backend register_compile_pass "
        "get_deepspeed_compile_backend",
        absent(_COMPILER),
    ),
    # -- data --
    "deepspeed_io": otherwise("a torch DataLoader, of this rank's share of the data; no worker processes unless said"),
    **all_of("is_iterable_style_dataset is_map_style_dataset", absent("isinstance(data, IterableDataset) tells")),
    **all_of(
        "curriculum_learning_config curriculum_learning_enabled data_efficiency_config data_efficiency_enabled "
        "data_sampling_config data_sampling_enabled random_ltd_config random_ltd_enabled random_ltd_initialize "
        "set_custom_curriculum_learning_schedule set_data_post_process_func",
        absent(_DATA),
    ),
    # -- tools --
    **all_of(
        "autotuning_enabled autotuning_end_profile_step autotuning_metric autotuning_metric_path "
        "autotuning_model_info_path autotuning_profile_model_info autotuning_start_profile_step",
        absent(_TUNING),
    ),
    **all_of(
        "flops_profiler_detailed flops_profiler_enabled flops_profiler_module_depth flops_profiler_output_file "
        "flops_profiler_profile_step flops_profiler_recompute_fwd_factor flops_profiler_top_modules",
        HERE,
    ),
    "print_forward_breakdown": absent(_PROFILER),
    # -- attributes of its objects --
    "config": otherwise("the model's own config, where it has one; DeepSpeed's is the configuration"),
    "monitor": otherwise("has enabled and write_events, and events of its own (docs/watching.md)"),
    "tput_timer": otherwise("counts epochs, updates and samples per second; steps_per_print reports none of it"),
    "timers": absent("engine.summary() has the times of the last steps"),
    "training_dataloader": HERE,
    **all_of("training_data collate_fn", absent("initialize() gives the loader, which has dataset and collate_fn")),
    **all_of("client_optimizer basic_optimizer", absent("engine.optimizer is the one that trains")),
    "client_lr_scheduler": absent("engine.lr_scheduler is the one in use"),
    "global_samples": otherwise(
        "global_steps * train_batch_size(), also where the size has changed; None without a batch size"
    ),
    "losses": absent("keep what engine(...) gives"),
    "mpu": absent(_NO_CUT),
    "checkpoint_engine": absent(_CHECKPOINT),
    **all_of("has_moe_layers moe_layers num_experts", absent(_MOE)),
    "pipeline_parallelism": absent("there is no pipeline engine"),
    "data_parallel_group": absent("the engine has its own groups; torch.distributed.group.WORLD is the program's"),
    "train_batch": otherwise("DeepSpeed has it for pipelines only; here it is a whole step of any model"),
    "eval_batch": absent("it belongs to DeepSpeed's pipeline engine; write engine(...) under torch.no_grad()"),
    "amp_enabled": absent(_APEX),
}


def refuse_absent(name: str) -> None:
    """Raise for a name of DeepSpeed's engine that is not here.

    Raises:
        AbsentNameError: with what to use in its place.
    """
    known = ENGINE_NAMES.get(name)
    if known is not None and known.presence is Presence.ABSENT:
        raise AbsentNameError(f"engine.{name} is not in deepoffload: {known.text}")
