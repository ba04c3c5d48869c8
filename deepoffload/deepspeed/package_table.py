"""The names of the package ``deepspeed``, and what becomes of each here.

Source: DeepSpeed 0.19.8: the public names of the package and of ``zero``, ``utils`` and ``checkpointing``, and what
scripts import from its other modules. A name's key is its path below the package.
"""

from __future__ import annotations

from collections.abc import Mapping

from deepoffload.deepspeed.names import HERE, PeerName, absent, all_of, otherwise

_INFERENCE = (
    "the engine of initialize() without an optimizer infers and generates, under the same budgets; "
    "there is no engine with kernels for inference"
)
_PIPELINE = (
    "there is no pipeline engine: a model that does not fit trains on one device, and ranks are data-parallel; "
    "use torch.nn.Sequential and initialize()"
)
_PARALLEL = "no layer is cut between ranks: what does not fit on the device is in host memory and on NVMe"
_SEQUENCE = "no sequence is cut between ranks; docs/long_sequences.md says how long ones fit"
_MOE = "use the experts of the model itself; only those that run are read"
_ONEBIT = "gradients are not compressed; use CPUAdamW (type AdamW)"
_LAMB = "use CPUAdamW (type AdamW), or torch's own optimizers, which work on paged parameters"
_MUON = "use deepoffload.Muon(model), or type Muon; it finds the hidden matrices, and a parameter's use_muon goes first"
_KERNEL = "layers are the model's; use torch.nn or transformers"
_INTERNAL = "only DeepSpeed's own code uses it"
_LEAF = "no module is marked: units follow from the budget, and a weight comes when it is used"


def _of(module: str, names: str, name: PeerName) -> dict[str, PeerName]:
    return {f"{module}.{each}": found for each, found in all_of(names, name).items()}


PACKAGE_NAMES: Mapping[str, PeerName] = {
    # -- deepspeed --
    "initialize": otherwise("the four things; placement follows from budgets (docs/config.md)"),
    **all_of("add_config_arguments get_accelerator log_dist logger dist OnDevice", HERE),
    "init_distributed": otherwise("a process that no launcher has started gets a group of one rank"),
    "DeepSpeedConfig": otherwise("checks and reads; its attribute config has every setting"),
    "DeepSpeedConfigError": otherwise("our ConfigError"),
    "DeepSpeedEngine": otherwise("the class of the engine, for isinstance; it is no torch.nn.Module, its .module is"),
    **all_of(
        "accelerator checkpoint checkpointing comm inference linear monitor ops pipe profiling moe runtime utils zero",
        otherwise("a module with the names below"),
    ),
    **all_of("init_inference InferenceEngine DeepSpeedInferenceConfig default_inference_config", absent(_INFERENCE)),
    **all_of("model_implementations module_inject replace_transformer_layer", absent(_INFERENCE)),
    "DeepSpeedHybridEngine": absent("the model generates as it is; call engine.generate(...)"),
    **all_of("PipelineModule PipelineEngine DualPipeVEngine DualPipeVModule", absent(_PIPELINE)),
    **all_of(
        "tp_model_init merge_tp_model_init_into_config record_tp_model_init_args set_autotp_mode", absent(_PARALLEL)
    ),
    **all_of("DeepSpeedTransformerLayer DeepSpeedTransformerConfig", absent(_KERNEL)),
    **all_of("DeepSpeedOptimizer DeepSpeedOptimizerCallable", absent("optimizers are torch.optim.Optimizer")),
    "DeepSpeedSchedulerCallable": absent("schedules are those of torch.optim.lr_scheduler, or functions giving one"),
    "DeepSpeedDataLoader": absent("initialize() gives a torch DataLoader"),
    **all_of("MUON_OPTIMIZER set_optimizer_flags resolve_per_head_muon_after_sharding", absent(_MUON)),
    **all_of("autotuning", absent("python -m deepoffload.estimate --tune chooses settings (docs/estimators.md)")),
    **_of(
        "linear",
        "LoRAConfig OptimizedLinear QuantizationConfig",
        absent("use peft for LoRA; frozen weights have no optimizer state and are written once"),
    ),
    "monitor.monitor.MonitorMaster": absent("engine.monitor writes events; deepoffload.Monitor is for a plain loop"),
    **_of(
        "profiling.flops_profiler",
        "FlopsProfiler get_model_profile",
        absent("the key flops_profiler prints the profile of a step (docs/watching.md)"),
    ),
    "inference.engine.InferenceEngine": absent(_INFERENCE),
    "inference.config.DeepSpeedInferenceConfig": absent(_INFERENCE),
    "sequence": otherwise("a module with the names below"),
    "sequence.layer.DistributedAttention": absent(_SEQUENCE),
    **all_of("compile", absent("there is no DeepCompile; docs/compile.md says how layers are compiled")),
    **all_of("datastates io", absent("engine.save_checkpoint streams what it writes (docs/checkpoints.md)")),
    "checkpoint.utils.clone_tensors_for_torch_save": HERE,
    "checkpoint.DeepSpeedCheckpoint": absent(
        "python -m deepoffload.checkpoint converts checkpoints (docs/checkpoints.md)"
    ),
    **all_of("load_ds_config", absent("DeepSpeedConfig(path), or deepoffload.config.parse_config")),
    **all_of(
        "constants KV MLA_KV MLA_Q NOT_HEAD_BLOCKED QUERY TORCH_DISTRIBUTED_DEFAULT_PORT git_branch git_hash "
        "git_version_info git_version_info_installed version",
        absent(_INTERNAL),
    ),
    # -- deepspeed.zero --
    "zero.Init": otherwise("offload_context with DeepSpeed's arguments: give it the configuration of initialize()"),
    "zero.GatheredParameters": otherwise("marks parameters; their bytes come when used, and edits are always kept"),
    **_of(
        "zero",
        "register_external_parameter unregister_external_parameter",
        otherwise("accepted, unnecessary: a weight comes where it is used"),
    ),
    "zero.ZeroParamStatus": otherwise("AVAILABLE within GatheredParameters, NOT_AVAILABLE or INFLIGHT elsewhere"),
    "zero.unwrap_model_for_generation": otherwise("gives the model, which generates as it is"),
    **_of(
        "zero",
        "TiledLinear TiledLinearReturnBias",
        otherwise("the same; for layers of a finished model there is deepoffload.tile_linear (docs/long_sequences.md)"),
    ),
    **_of("zero", "DeepSpeedTensorOverride DeepSpeedZeRoOffload ZeroParamType", absent(_INTERNAL)),
    # -- deepspeed.utils --
    **_of("utils", "logger log_dist log_dist_once set_log_level_from_string RepeatingLoader OnDevice", HERE),
    **_of(
        "utils",
        "safe_get_full_fp32_param safe_set_full_fp32_param safe_set_full_grad safe_set_full_optimizer_state "
        "safe_set_local_fp32_param safe_set_local_grad safe_set_local_optimizer_state "
        "safe_update_full_grad_vectorized",
        HERE,
    ),
    **_of(
        "utils",
        "safe_get_full_grad safe_get_full_optimizer_state safe_get_local_fp32_param safe_get_local_grad "
        "safe_get_local_optimizer_state",
        otherwise("a copy; before the first step, optimizer state is what it starts with"),
    ),
    **_of(
        "utils",
        "set_z3_leaf_modules unset_z3_leaf_modules set_z3_leaf_module set_z3_leaf_modules_by_name "
        "set_z3_leaf_modules_by_suffix",
        otherwise(f"finds and returns the modules; {_LEAF}"),
    ),
    **_of("utils", "get_z3_leaf_modules z3_leaf_module z3_leaf_parameter", absent(_LEAF)),
    "utils.instrument_w_nvtx": otherwise("gives the function as it is"),
    "utils.groups": otherwise("all ranks are data-parallel"),
    **_of(
        "utils",
        "get_full_hp_grad get_full_hp_param get_hp_fragment_mapping link_hp_params lazy_init_hp_params_optimizer_state "
        "map_to_flat_opt_states set_full_hp_grad set_full_hp_param fragment_address tensor_fragment.fragment_address "
        "get_caller_func get_numactl_cmd recursive_getattr recursive_setattr",
        absent(_INTERNAL),
    ),
    **_of(
        "utils",
        "get_data_parallel_group get_data_parallel_rank get_data_parallel_world_size get_model_parallel_rank "
        "get_model_parallel_world_size",
        otherwise("all ranks are data-parallel"),
    ),
    **_of(
        "utils",
        "bwc_pipeline_parallel_world_size bwc_tensor_model_parallel_world_size get_model_parallel_group "
        "get_tensor_model_parallel_group get_tensor_model_parallel_rank get_tensor_model_parallel_src_rank "
        "get_tensor_model_parallel_world_size set_tensor_model_parallel_rank set_tensor_model_parallel_world_size "
        "initialize",
        absent(_PARALLEL),
    ),
    "utils.DeprecatedException": absent(_INTERNAL),
    **all_of(
        "utils.zero_to_fp32 utils.zero_to_torch", otherwise("reads our checkpoints and DeepSpeed's, tensor by tensor")
    ),
    "utils.timer": otherwise("ThroughputTimer, which engine.tput_timer is"),
    "utils.timer.SynchronizedWallClockTimer": absent("engine.summary() has the times of the last steps"),
    "utils.tensor_fragment": otherwise("a module with the safe_* functions"),
    "utils.init_on_device": HERE,
    # -- deepspeed.checkpointing --
    **_of(
        "checkpointing",
        "checkpoint non_reentrant_checkpoint",
        otherwise("torch's non-reentrant checkpoint, with the tracker's random states"),
    ),
    "checkpointing.configure": otherwise("checkpoint_in_cpu is used; the rest is accepted, because nothing is cut"),
    **_of(
        "checkpointing",
        "is_configured get_cuda_rng_tracker model_parallel_cuda_manual_seed",
        HERE,
    ),
    **_of("checkpointing", "set_num_layers partition_activations_in_checkpoint reset", otherwise("does nothing")),
    **_of("checkpointing", "CheckpointFunction", absent("call checkpoint(function, *args)")),
    **_of("checkpointing", "CudaRNGStatesTracker", absent("get_cuda_rng_tracker() gives the tracker")),
    **_of("checkpointing", "model_parallel_reconfigure_tp_seed", absent(_PARALLEL)),
    **_of(
        "checkpointing",
        "detach_variable extract_tensors gather_partitioned_activations get_cpu_activations_for_backward "
        "get_offloaded_activations_for_backward get_partition_size get_partition_start "
        "get_partitioned_activations_for_backward is_activation_to_checkpoint merge_tensors partition_activations "
        "restore_offloaded_activations",
        absent(_INTERNAL),
    ),
    # -- deepspeed.ops --
    **_of(
        "ops",
        "adam.DeepSpeedCPUAdam lion.DeepSpeedCPULion adagrad.DeepSpeedCPUAdagrad",
        otherwise("our CPUAdam, CPULion, CPUAdagrad"),
    ),
    **_of("ops", "adam.FusedAdam lion.FusedLion", otherwise("updates where the state lies")),
    "ops.adam.ZenFlowCPUAdam": absent("it delays updates, which changes numbers; use DeepSpeedCPUAdam"),
    "ops.lamb.FusedLamb": absent(_LAMB),
    **_of(
        "ops",
        "aio.AsyncIOBuilder op_builder.AsyncIOBuilder",
        otherwise("`load()` gives `aio_handle`, `aio_read` and `aio_write` over our engine; a failure is an error"),
    ),
    **_of("ops", "aio op_builder", otherwise("a module with `AsyncIOBuilder`")),
    **_of(
        "ops.op_builder",
        "CPUAdagradBuilder CPUAdamBuilder CPULionBuilder FusedAdamBuilder FusedLionBuilder",
        absent("nothing is built: the optimizers' kernels come with the package"),
    ),
    "ops.op_builder.FusedLambBuilder": absent(_LAMB),
    "ops.op_builder.GDSBuilder": absent("bytes of a device go through host memory: use AsyncIOBuilder"),
    **_of(
        "ops.op_builder",
        "EvoformerAttnBuilder FPQuantizerBuilder InferenceBuilder InferenceCoreBuilder InferenceCutlassBuilder "
        "PinMemoryBuilder QuantizerBuilder RaggedOpsBuilder RaggedUtilsBuilder RandomLTDBuilder SparseAttnBuilder "
        "SpatialInferenceBuilder StochasticTransformerBuilder TransformerBuilder UtilsBuilder",
        absent(_KERNEL),
    ),
    **_of("ops", "sparse_attention transformer", absent(_KERNEL)),
    **_of("ops", "quantizer fp_quantizer random_ltd", absent("weights are never quantised by the engine")),
    # -- what scripts import from elsewhere --
    "moe.layer.MoE": absent(_MOE),
    **_of(
        "moe.utils",
        "split_params_grads_into_shared_and_expert_params configure_moe_param_groups",
        absent(_MOE),
    ),
    **_of(
        "moe.utils",
        "is_moe_param has_moe_layers split_params_into_different_moe_groups_for_optimizer",
        otherwise("there are no layers of DeepSpeed's MoE"),
    ),
    **_of("moe", "experts.Experts sharded_moe.TopKGate sharded_moe.MOELayer", absent(_MOE)),
    **_of("pipe", "PipelineModule LayerSpec TiedLayerSpec ProcessTopology", absent(_PIPELINE)),
    **_of("runtime.fp16.onebit", "OnebitAdam OnebitLamb ZeroOneAdam", absent(_ONEBIT)),
    **_of("runtime.fp16", "FP16_Optimizer FP16_UnfusedOptimizer", absent("the engine scales and keeps fp32 masters")),
    "runtime.lr_schedules": otherwise("DeepSpeed's five schedules as torch schedulers"),
    "runtime.config": otherwise("DeepSpeedConfig"),
    "runtime.engine": otherwise("DeepSpeedEngine"),
    "runtime.dataloader": otherwise("RepeatingLoader"),
    "runtime.utils.see_memory_usage": HERE,
    **_of(
        "runtime.utils", "clip_grad_norm_", absent("use torch.nn.utils.clip_grad_norm_, or the key gradient_clipping")
    ),
    "runtime.pipe": otherwise("a module with the names below"),
    **_of(
        "runtime.pipe",
        "engine.PipelineEngine module.PipelineModule module.LayerSpec module.TiedLayerSpec topology.ProcessTopology "
        "topology.PipeDataParallelTopology topology.PipeModelDataParallelTopology topology.PipelineParallelGrid",
        absent(_PIPELINE),
    ),
    "runtime.sequence_parallel.ulysses_sp.UlyssesSPAttentionHF": absent(_SEQUENCE),
    "runtime.hybrid_engine.DeepSpeedHybridEngine": absent("the model generates as it is; call engine.generate(...)"),
    **_of(
        "runtime.fp16.loss_scaler",
        "LossScaler DynamicLossScaler",
        absent("the engine scales the loss; engine.loss_scale is the present scale"),
    ),
    "runtime.bf16_optimizer.BF16_Optimizer": absent("the engine keeps exact fp32 masters"),
    "runtime.dataloader.DeepSpeedDataLoader": absent("initialize() gives a torch DataLoader"),
    **_of(
        "runtime.engine",
        "DeepSpeedOptimizerCallable DeepSpeedSchedulerCallable",
        absent("optimizers and schedules are torch's, or functions giving one"),
    ),
    **_of("runtime", "data_pipeline", absent("the order and the sampling of data are your loader's")),
    **_of(
        "runtime.zero",
        "stage3 stage_1_and_2",
        otherwise("DeepSpeed's estimates; `python -m deepoffload.estimate` has ours"),
    ),
    **_of("runtime.zero", "partition_parameters offload_config tiling utils", HERE),
    "runtime.zero.config": otherwise("ZeroStageEnum"),
    "runtime.zero.config.DeepSpeedZeroConfig": absent("DeepSpeedConfig(...).config has every setting"),
    **_of(
        "runtime.zero",
        "stage3.DeepSpeedZeroOptimizer_Stage3 stage_1_and_2.DeepSpeedZeroOptimizer",
        absent("engine.optimizer is the one optimizer, a torch.optim.Optimizer"),
    ),
}
