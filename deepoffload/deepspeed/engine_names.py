"""Names of DeepSpeed's engine that ask what the configuration says, or ask for what is always so here."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from deepoffload.config import Config, GradientDtype, Precision
from deepoffload.deepspeed.optimizer_section import deepspeeds_name
from deepoffload.deepspeed.tools import EngineTools
from deepoffload.deepspeed.utils.timer import ThroughputTimer
from deepoffload.device import Tier
from deepoffload.errors import UnsupportedError, UsageError
from deepoffload.optim.base import HostOptimizer
from deepoffload.runtime.loop import TrainingLoop
from deepoffload.watching.monitor import Monitor

if TYPE_CHECKING:
    from deepoffload.runtime.engine import Engine

_DTYPES = {Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}
_STATES = ("optim_states", "hp_params", "lp_params", "lp_grads", "contiguous_grad_buffer")


class EngineNames:
    """Part of :class:`~deepoffload.deepspeed.engine.TrainingEngine`. It has many methods, because DeepSpeed's engine
    has; ``engine_table`` lists them all, and what differs."""

    module: nn.Module
    core: Engine
    loop: TrainingLoop
    tput_timer: ThroughputTimer
    tools: EngineTools
    optimizer: torch.optim.Optimizer | None
    lr_scheduler: Any
    _config: Config

    # -- precision -------------------------------------------------------------------------------------------------

    def fp16_enabled(self) -> bool:
        """Whether the configuration says fp16."""
        return self._config.precision is Precision.FP16

    def bfloat16_enabled(self) -> bool:
        """Whether the configuration says bf16."""
        return self._config.precision is Precision.BF16

    def fp16_auto_cast(self) -> bool:
        """Whether the forward casts its positional arguments."""
        return self.fp16_enabled() and self._config.fp16.auto_cast

    def fp16_master_weights_and_gradients(self) -> bool:
        """False: masters are in fp32."""
        return False

    bf16_master_weights_and_gradients = bf16_optimizer_states = torch_autocast_enabled = (
        fp16_master_weights_and_gradients
    )

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """What weights compute in, and what gradients accumulate in."""
        model = _DTYPES.get(self._config.precision, torch.float32)
        return model, torch.float32 if self._config.gradient_dtype is GradientDtype.FP32 else model

    def dynamic_loss_scale(self) -> bool:
        """Whether the configuration asks for a loss scale that changes (in fp16)."""
        return self._config.fp16.loss_scale == 0

    def initial_dynamic_scale(self) -> float:
        """The first dynamic loss scale."""
        return float(2**self._config.fp16.initial_scale_power)

    # -- ZeRO ------------------------------------------------------------------------------------------------------

    def zero_optimization_stage(self) -> int:
        """The stage that the configuration says; 0 where it says none. What is offloaded does not depend on it."""
        return self._config.zero_stage or 0

    def zero_optimization(self) -> bool:
        return self.zero_optimization_stage() > 0

    def zero_optimization_partition_gradients(self) -> bool:
        return self.zero_optimization_stage() >= 2

    def zero_optimization_partition_weights(self) -> bool:
        return self.zero_optimization_stage() >= 3

    def zero_offload_param(self) -> str | None:
        """The farthest place that the configuration says for weights: ``"cpu"``, ``"nvme"`` or None."""
        return _place(self._config.offload_param)

    def zero_offload_optimizer(self) -> str | None:
        """The same of optimizer state."""
        return _place(self._config.offload_optimizer)

    def zero_cpu_offload(self) -> bool:
        return self.zero_offload_optimizer() == "cpu"

    def zero_nvme_offload_optimizer(self) -> bool:
        return self.zero_offload_optimizer() == "nvme"

    def zero_use_cpu_optimizer(self) -> bool:
        """Whether the host updates the weights of this engine."""
        return isinstance(self.optimizer, HostOptimizer)

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """True: a ``state_dict()`` has every weight, at no cost."""
        return True

    zero_allow_untested_optimizer = zero_ignore_unused_parameters = zero_gather_16bit_weights_on_model_save

    # -- the run ---------------------------------------------------------------------------------------------------

    def dataloader_drop_last(self) -> bool:
        return self._config.dataloader_drop_last

    def steps_per_print(self) -> int | None:
        return self._config.steps_per_print

    def wall_clock_breakdown(self) -> bool:
        return self._config.wall_clock_breakdown

    def optimizer_name(self) -> str | None:
        """DeepSpeed's name of the configuration's optimizer; the class of one that was passed in."""
        said = self._config.optimizer
        if said is not None:
            return deepspeeds_name(said)
        return None if self.optimizer is None else type(self.optimizer).__name__

    def optimizer_params(self) -> dict[str, object] | None:
        """Parameters in the configuration's ``optimizer``, where that one trains."""
        return None if self._config.optimizer is None else dict(self._config.optimizer.params)

    def scheduler_name(self) -> str | None:
        """The schedule's type in the configuration."""
        return None if self._config.scheduler is None else self._config.scheduler.type

    def scheduler_params(self) -> dict[str, object] | None:
        return None if self._config.scheduler is None else dict(self._config.scheduler.params)

    def get_type(self) -> list[Any]:
        """The ``type`` of the optimizer's groups that have one."""
        return [] if self.optimizer is None else [group.get("type", 0.0) for group in self.optimizer.param_groups]

    @property
    def mp_world_size(self) -> int:
        """1: no layer is cut between ranks."""
        return 1

    def get_data_parallel_rank(self) -> int:
        return self.core.ranks.rank

    def get_data_parallel_world_size(self) -> int:
        return self.core.ranks.world_size

    def get_model_parallel_rank(self) -> int:
        return 0

    get_tensor_parallel_rank = get_model_parallel_rank

    def autotp_size(self) -> int:
        """0: no layer is cut between ranks."""
        return 0

    # -- batches ---------------------------------------------------------------------------------------------------

    def get_batch_info(self) -> tuple[int | None, int | None, int]:
        """Samples per update, samples per forward, and backwards per update."""
        config = self._config
        return config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Another number of samples per update, by another number of backwards per update.

        Raises:
            UsageError: the configuration has no ``train_micro_batch_size_per_gpu``, the number is no multiple of what
                the ranks take at once, or gradients of a step that is not complete are waiting.
        """
        micro = self._micro_batch("set_train_batch_size") * self.core.ranks.world_size
        if isinstance(train_batch_size, bool) or not isinstance(train_batch_size, int) or train_batch_size < micro:
            raise UsageError(f"set_train_batch_size({train_batch_size!r}): expected a whole number of at least {micro}")
        if train_batch_size % micro:
            raise UsageError(
                f"set_train_batch_size({train_batch_size}) is no multiple of {micro}, the samples of one backward"
            )
        steps = train_batch_size // micro
        self.loop.set_accumulation_steps(steps)
        changes = {"train_batch_size": train_batch_size, "gradient_accumulation_steps": steps}
        self._config = dataclasses.replace(self._config, **changes)  # type: ignore[arg-type]
        self.tput_timer.batch_size = train_batch_size

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Another number of samples per forward; the backwards per update stay. The loader that ``initialize`` has
        given keeps its size.

        Raises:
            UsageError: it is no whole number above zero.
        """
        if isinstance(micro_batch_size, bool) or not isinstance(micro_batch_size, int) or micro_batch_size < 1:
            raise UsageError(f"set_train_micro_batch_size({micro_batch_size!r}): expected a whole number above 0")
        whole = micro_batch_size * self._config.gradient_accumulation_steps * self.core.ranks.world_size
        changes = {"train_batch_size": whole, "train_micro_batch_size_per_gpu": micro_batch_size}
        self._config = dataclasses.replace(self._config, **changes)  # type: ignore[arg-type]
        self.tput_timer.batch_size = whole

    def _micro_batch(self, asking: str) -> int:
        micro = self._config.train_micro_batch_size_per_gpu
        if micro is None:
            raise UsageError(f"{asking}: the configuration says no train_micro_batch_size_per_gpu")
        return micro

    # -- watching, and schedules of layers and data ----------------------------------------------------------------

    @property
    def monitor(self) -> Monitor:
        """Writes the numbers of each update; its ``write_events`` takes events of your own."""
        return self.tools.monitor

    def get_pld_theta(self) -> float | None:
        """With which probability the last layer runs in the next forward; None without ``progressive_layer_drop``."""
        return self.tools.schedules.theta

    def curriculum_seqlen(self) -> int | None:
        """To how many tokens the next training forward is cut; None without ``curriculum_learning``."""
        return self.tools.schedules.length

    def curriculum_enabled_legacy(self) -> bool:
        return self._config.curriculum_learning.enabled

    def flops_profiler_enabled(self) -> bool:
        return self._config.flops_profiler.enabled

    def flops_profiler_profile_step(self) -> int:
        return self._config.flops_profiler.profile_step

    def flops_profiler_module_depth(self) -> int:
        return self._config.flops_profiler.module_depth

    def flops_profiler_top_modules(self) -> int:
        return self._config.flops_profiler.top_modules

    def flops_profiler_detailed(self) -> bool:
        return self._config.flops_profiler.detailed

    def flops_profiler_output_file(self) -> str | None:
        return self._config.flops_profiler.output_file

    def flops_profiler_recompute_fwd_factor(self) -> float:
        return self._config.flops_profiler.recompute_fwd_factor

    # -- the step --------------------------------------------------------------------------------------------------

    def scale(self, loss: Tensor) -> Tensor:
        """The loss for a ``backward()`` of the program's own: in fp16 times :attr:`loss_scale`. It is not divided by
        the accumulation steps.

        Raises:
            UsageError: no scalar tensor with a graph, or the engine has no optimizer.
        """
        return self.loop.scaled(loss)

    def coalesce_grad_reduction(self) -> contextlib.AbstractContextManager[None]:
        """Does nothing: gradients accumulate where they land, and are reduced once."""
        return contextlib.nullcontext()

    def allreduce_gradients(self, bucket_size: int = 0) -> None:
        """Nothing to do: :meth:`step` needs no call of it."""

    def managed_gradient_accumulation(self) -> bool:
        """True: the engine counts the micro-steps."""
        return True

    # -- weights ---------------------------------------------------------------------------------------------------

    def module_state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """The model's ``state_dict()``, which holds no memory."""
        state: dict[str, Any] = self.module.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        if exclude_frozen_parameters:
            for name, param in self.module.named_parameters(prefix.removesuffix("."), remove_duplicate=False):
                if not param.requires_grad:
                    state.pop(name, None)
        return state

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """The same, by the name that accelerate and transformers call."""
        return self.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict

    def load_module_state_dict(
        self,
        checkpoint: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., object] | None = None,
        fetch_z3_params: bool = False,
        z3_params_to_fetch: Any = None,
        allowed_missing_keys: Iterable[str] | None = None,
    ) -> None:
        """Put the weights of ``checkpoint["module"]``, or of a ``state_dict``, into the model.

        Args:
            fetch_z3_params, z3_params_to_fetch: accepted, unnecessary.
            allowed_missing_keys: what ``strict`` does not miss.

        Raises:
            UsageError: it is no mapping. RuntimeError: names that ``strict`` misses or does not know, as torch says it.
        """
        if not isinstance(checkpoint, Mapping):
            raise UsageError(f"load_module_state_dict takes a mapping, not a {type(checkpoint).__name__}")
        state = checkpoint["module"] if isinstance(checkpoint.get("module"), Mapping) else checkpoint
        if custom_load_fn is not None:
            custom_load_fn(src=state, dst=self.module)
        elif strict and allowed_missing_keys is not None:
            own = self.module.state_dict()
            present = {name: own[name] for name in set(allowed_missing_keys) & own.keys() - state.keys()}
            self.module.load_state_dict({**state, **present})
        else:
            self.module.load_state_dict(state, strict=strict)

    def compile(self, backend: Any = None, compile_kwargs: Mapping[str, Any] | None = None, **others: Any) -> None:
        """``module.compile``. It is cut at every layer; docs/compile.md says what is better.

        Raises:
            UnsupportedError: an argument of DeepCompile's.
        """
        if others:
            raise UnsupportedError(f"engine.compile({min(others)}=...): there are no passes of DeepCompile here")
        chosen = {} if backend is None else {"backend": backend}
        self.module.compile(**chosen, **(compile_kwargs or {}))

    @property
    def is_compiled(self) -> bool:
        """Whether the model's forward was compiled by ``module.compile``."""
        return getattr(self.module, "_compiled_call_impl", None) is not None

    # -- memory ----------------------------------------------------------------------------------------------------

    def empty_partition_cache(self) -> None:
        """Nothing to do: copies of weights never take more than ``device_budget``."""

    def offload_states(
        self, include: Any = None, device: Any = "cpu", pin_memory: bool = True, non_blocking: bool = False
    ) -> None:
        """Have nothing on the device. Where the CPU computes, nothing is there.

        Raises:
            UsageError: an argument that is wrong. UnsupportedError: a device computes, whose ``device_budget`` is taken
            for as long as the engine exists.
        """
        for state in include or ():
            if getattr(state, "value", state) not in _STATES:
                raise UsageError(
                    f"offload_states: {state!r} is no kind of state; expected some of {', '.join(_STATES)}"
                )
        place = getattr(device, "value", device)
        if place not in ("cpu", "none", torch.device("cpu")):
            raise UsageError(f"offload_states(device={place!r}): states go to 'cpu'; the engine decides about NVMe")
        if not self.core.pager.memory.on_host:
            raise UnsupportedError(
                "offload_states: the engine keeps its device_budget until it is closed; give it a smaller one, or save "
                "a checkpoint and close the engine"
            )

    def reload_states(self, non_blocking: bool = False) -> None:
        """Nothing to do after :meth:`offload_states`."""


def _place(tier: Tier | None) -> str | None:
    return {Tier.HOST: "cpu", Tier.NVME: "nvme"}.get(tier) if tier is not None else None
