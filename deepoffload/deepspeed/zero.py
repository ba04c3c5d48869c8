"""``deepspeed.zero``: building a model in its place, and contexts around the use of parameters."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from deepoffload.config import Config, Precision, parse_config
from deepoffload.deepspeed import comm
from deepoffload.deepspeed.initialization import paging_engine, take_over
from deepoffload.deepspeed.names import look_up
from deepoffload.deepspeed.utils.groups import refuse_cut_models
from deepoffload.errors import ConfigError, UnsupportedError, UsageError
from deepoffload.memory.lock import SHIELD
from deepoffload.optim.handles import handle_of
from deepoffload.params.peer_names import ZeroParamStatus as ZeroParamStatus
from deepoffload.params.unit import ParamHandle
from deepoffload.runtime.context import offload_context
from deepoffload.runtime.ranks import RankChoice
from deepoffload.runtime.registration import context_is_open

_PRECISIONS = {torch.float32: Precision.FP32, torch.bfloat16: Precision.BF16, torch.float16: Precision.FP16}
_REMOTE = {None: None, "none": None, "cpu": "cpu", "nvme": "nvme"}
_GROUPS = ("zero_param_parallel_group", "sequence_data_parallel_group")


class _Context(offload_context):
    """Ranks may build different values: as with DeepSpeed, all get those of rank 0."""

    _values_of_rank_0 = True


class Init:
    """Build a model within it, and its parameters are paged: :class:`deepoffload.offload_context` with DeepSpeed's
    arguments. Within another one it adds nothing. It starts the process group that scripts then use, as DeepSpeed's.

    Args:
        module: a model that is built already: it is paged at once. One that is paged stays as it is.
        data_parallel_group: the ranks that train the model; not said: all.
        config_dict_or_path, config: the configuration; the one that ``initialize`` is given. Without one the budgets
            are those of the machine, and ``initialize`` can add nothing that concerns placement.
        remote_device: ``"cpu"`` or ``"nvme"``: the farthest place of the weights.
        dtype: what the weights compute in.
        enabled: False does nothing.
        pin_memory, mem_efficient_linear: accepted; memory is pinned where it helps, and linear layers keep nothing.

    Raises:
        ConfigError: the configuration, or arguments that contradict it. UnsupportedError: groups of model
        parallelism, or quantised weights.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,
        tensor_overrides: Any = None,
    ) -> None:
        groups = (zero_param_parallel_group, sequence_data_parallel_group)
        self._context: offload_context | None = None
        self._enabled = enabled
        if not enabled:
            return
        if mpu is not None:
            refuse_cut_models("zero.Init", mpu)
        for name, group in zip(_GROUPS, groups, strict=True):
            if group is not None and group is not _world():
                raise UnsupportedError(f"zero.Init({name}=...): all ranks are data-parallel; leave it out")
        if zero_quantized_weights or zero_quantized_nontrainable_weights:
            raise UnsupportedError("zero.Init: weights are never quantised; leave zero_quantized_weights out")
        if tensor_overrides:
            raise UnsupportedError("zero.Init(tensor_overrides=...): only parameters are changed; leave it out")
        if not comm.is_initialized():
            comm.init_distributed()
        self._group = data_parallel_group
        self._choice = RankChoice(data_parallel_group, values_of_rank_0=True)
        self._config = _configuration(config_dict_or_path, config, remote_device, dtype, self._choice.world_size)
        if module is not None:
            if not isinstance(module, nn.Module):
                raise UsageError(f"zero.Init(module=...) takes a torch.nn.Module, not {type(module).__name__}")
            if paging_engine(module) is None:
                take_over(self._config, module, self._choice)

    def __enter__(self) -> Init:
        if self._enabled and not context_is_open():
            self._context = _Context(self._config, group=self._group)
            self._context.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        context, self._context = self._context, None
        if context is not None:
            context.__exit__(kind, error, traceback)


def _world() -> Any:
    return comm.get_world_group() if comm.is_initialized() else None


def _configuration(
    source: Any, config: Any, remote_device: str | None, dtype: torch.dtype | None, world_size: int
) -> Config:
    if source is not None and config is not None and source is not config:
        raise ConfigError("zero.Init was given config_dict_or_path and config; give one of them")
    if remote_device not in _REMOTE:
        raise ConfigError(f"zero.Init(remote_device={remote_device!r}): expected 'cpu', 'nvme' or 'none'")
    if dtype is not None and dtype not in _PRECISIONS:
        raise ConfigError(f"zero.Init(dtype={dtype}): expected torch.float32, torch.bfloat16 or torch.float16")
    said = parse_config(source if config is None else config, world_size=world_size)
    changes: dict[str, Any] = {}
    if dtype is not None and _PRECISIONS[dtype] is not said.precision:
        if said.precision is not Precision.KEEP:
            raise ConfigError(f"zero.Init(dtype={dtype}), but the configuration says {said.precision.value}")
        changes["precision"] = _PRECISIONS[dtype].value
    if _REMOTE[remote_device] is not None:
        changes["offload_param"] = _REMOTE[remote_device]
        if remote_device == "nvme" and not said.nvme_path:
            raise ConfigError(
                "zero.Init(remote_device='nvme') needs a path: say zero_optimization.offload_param.nvme_path, or "
                "nvme_path, in the configuration"
            )
    return parse_config(said, world_size=world_size, **changes)


class GatheredParameters:
    """Within it, parameters are whole: ``ds_status`` says AVAILABLE. Their bytes come when they are used, as always,
    and what the program writes to them is kept, with or without ``modifier_rank``.

    It may name parameters that are not paged: these are whole anyway. Contexts may lie in each other.

    With several ranks every rank enters it. With ``modifier_rank`` that rank's values become everybody's when it ends;
    without, the ranks have to make the same edits.

    Args:
        params: a parameter, a module's ``parameters()``, or any iterable of parameters.
        modifier_rank: the rank whose edits count. With several ranks the parameters then stay in memory for as long as
            the context lasts.
        fwd_module: accepted, unnecessary.
        enabled: False does nothing.

    Raises:
        UsageError: something that is no tensor, or a rank that does not exist. ClosedError: the engine of a
        parameter was closed. BudgetError: on entering, with several ranks and ``modifier_rank``: the parameters do
        not fit into memory together; name fewer of them at a time.
    """

    def __init__(
        self,
        params: Tensor | Iterable[Tensor],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        self._handles: list[ParamHandle] = []
        self._source: int | None = None
        self._opened = 0
        if not enabled:
            return
        if isinstance(params, nn.Module) and not isinstance(params, Iterable):
            raise UsageError(f"GatheredParameters takes parameters: {type(params).__name__}.parameters()")
        given = [params] if isinstance(params, Tensor) or not isinstance(params, Iterable) else list(params)
        for param in given:
            if not isinstance(param, Tensor):
                raise UsageError(f"GatheredParameters takes parameters, not a {type(param).__name__}")
        _check_rank(modifier_rank)
        found = (handle_of(param) for param in given)
        self._handles = sorted(dict.fromkeys(handle for handle in found if handle is not None), key=_place)
        if modifier_rank is not None and any(handle.pager.link is not None for handle in self._handles):
            self._source = modifier_rank
            _check_all_ranks(self._handles)

    def __enter__(self) -> None:
        for handle in self._handles:
            if handle.pager.life.closed_because is not None:
                handle.pager.life.refuse_closed(handle.name)
        if self._source is not None:
            _pin(self._handles)
        self._opened += 1
        for handle in self._handles:
            handle.gathered += 1
            handle.edited_alone += self._source is not None

    def __exit__(self, kind: type[BaseException] | None = None, *error: object) -> None:
        if not self._opened:
            raise UsageError("GatheredParameters was left without having been entered")
        self._opened -= 1
        for handle in self._handles:
            handle.gathered -= 1
            handle.edited_alone -= self._source is not None
        if self._source is None:
            return
        try:
            if kind is None:
                for handle in self._handles:
                    _take_values_of(self._source, handle)
        finally:
            for handle in self._handles:
                handle.pager.unpin(handle)


def _place(handle: ParamHandle) -> tuple[int, int]:
    """An order of parameters that all ranks have."""
    unit = handle.unit
    return (-1, 0) if unit is None else (unit.index, unit.handles.index(handle))


def _check_all_ranks(handles: list[ParamHandle]) -> None:
    size = comm.get_world_size() if comm.is_initialized() else 1
    for handle in handles:
        link = handle.pager.link
        if link is None or link.ranks.world_size != size:
            raise UnsupportedError(
                f"GatheredParameters(modifier_rank=...): {handle.name} is not of all {size} ranks of the default "
                "group; make the same edits on every rank of its model, without modifier_rank"
            )


def _pin(handles: list[ParamHandle]) -> None:
    """Keep whole parameters in memory; none of them when one does not fit."""
    pinned: list[ParamHandle] = []
    with SHIELD:
        try:
            for handle in handles:
                handle.pager.pin(handle)
                pinned.append(handle)
        except BaseException:
            for handle in pinned:
                handle.pager.unpin(handle)
            raise


def _take_values_of(rank: int, handle: ParamHandle) -> None:
    param = handle.tensor
    if param is None:
        return
    with torch.no_grad():
        values = param.detach().clone()
        comm.broadcast(values, rank)
        param.copy_(values)


def _check_rank(modifier_rank: int | None) -> None:
    if modifier_rank is None:
        return
    size = comm.get_world_size() if comm.is_initialized() else 1
    if isinstance(modifier_rank, bool) or not isinstance(modifier_rank, int) or not 0 <= modifier_rank < size:
        raise UsageError(f"GatheredParameters(modifier_rank={modifier_rank!r}): the ranks are 0 to {size - 1}")


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Accepted, unnecessary: a parameter's bytes come where it is used.

    Raises:
        UsageError: no module, or no parameter.
    """
    if not isinstance(module, nn.Module) or not isinstance(parameter, nn.Parameter):
        raise UsageError(
            "register_external_parameter takes a torch.nn.Module and a torch.nn.Parameter, not "
            f"{type(module).__name__} and {type(parameter).__name__}"
        )


unregister_external_parameter = register_external_parameter


def is_zero_param(parameter: object) -> bool:
    """Whether a parameter is paged."""
    return isinstance(parameter, Tensor) and handle_of(parameter) is not None


@contextlib.contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[Any]:
    """The model of an engine, to generate with. It generates as it is, so nothing is unwrapped for the time."""
    yield model if isinstance(model, nn.Module) else model.module


def __getattr__(name: str) -> Any:
    if name in ("TiledLinear", "TiledLinearReturnBias"):
        return getattr(importlib.import_module("deepoffload.deepspeed.tiling"), name)
    from deepoffload.deepspeed.package_table import PACKAGE_NAMES

    return look_up(PACKAGE_NAMES, f"zero.{name}", __name__)
