"""``deepspeed.utils``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from deepoffload.deepspeed.names import submodules
from deepoffload.deepspeed.utils.fp32_access import safe_get_full_fp32_param as safe_get_full_fp32_param
from deepoffload.deepspeed.utils.fp32_access import safe_get_full_grad as safe_get_full_grad
from deepoffload.deepspeed.utils.fp32_access import safe_get_full_optimizer_state as safe_get_full_optimizer_state
from deepoffload.deepspeed.utils.fp32_access import safe_get_local_fp32_param as safe_get_local_fp32_param
from deepoffload.deepspeed.utils.fp32_access import safe_get_local_grad as safe_get_local_grad
from deepoffload.deepspeed.utils.fp32_access import safe_get_local_optimizer_state as safe_get_local_optimizer_state
from deepoffload.deepspeed.utils.fp32_access import safe_set_full_fp32_param as safe_set_full_fp32_param
from deepoffload.deepspeed.utils.fp32_access import safe_set_full_grad as safe_set_full_grad
from deepoffload.deepspeed.utils.fp32_access import safe_set_full_optimizer_state as safe_set_full_optimizer_state
from deepoffload.deepspeed.utils.fp32_access import safe_set_local_fp32_param as safe_set_local_fp32_param
from deepoffload.deepspeed.utils.fp32_access import safe_set_local_grad as safe_set_local_grad
from deepoffload.deepspeed.utils.fp32_access import safe_set_local_optimizer_state as safe_set_local_optimizer_state
from deepoffload.deepspeed.utils.fp32_access import safe_update_full_grad_vectorized as safe_update_full_grad_vectorized
from deepoffload.deepspeed.utils.groups import get_data_parallel_group as get_data_parallel_group
from deepoffload.deepspeed.utils.groups import get_data_parallel_rank as get_data_parallel_rank
from deepoffload.deepspeed.utils.groups import get_data_parallel_world_size as get_data_parallel_world_size
from deepoffload.deepspeed.utils.groups import get_model_parallel_rank as get_model_parallel_rank
from deepoffload.deepspeed.utils.groups import get_model_parallel_world_size as get_model_parallel_world_size
from deepoffload.deepspeed.utils.leaf_modules import set_z3_leaf_module as set_z3_leaf_module
from deepoffload.deepspeed.utils.leaf_modules import set_z3_leaf_modules as set_z3_leaf_modules
from deepoffload.deepspeed.utils.leaf_modules import set_z3_leaf_modules_by_name as set_z3_leaf_modules_by_name
from deepoffload.deepspeed.utils.leaf_modules import set_z3_leaf_modules_by_suffix as set_z3_leaf_modules_by_suffix
from deepoffload.deepspeed.utils.leaf_modules import unset_z3_leaf_modules as unset_z3_leaf_modules
from deepoffload.deepspeed.utils.logging import log_dist as log_dist
from deepoffload.deepspeed.utils.logging import log_dist_once as log_dist_once
from deepoffload.deepspeed.utils.logging import logger as logger
from deepoffload.deepspeed.utils.logging import set_log_level_from_string as set_log_level_from_string

_Function = TypeVar("_Function", bound=Callable[..., Any])


class RepeatingLoader:
    """A loader that starts again when it has ended."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


@contextlib.contextmanager
def _on_device(dtype: torch.dtype | None, device: str, enabled: bool) -> Iterator[None]:
    if not enabled:
        yield
        return
    before = torch.get_default_dtype()
    with torch.device(device):
        torch.set_default_dtype(before if dtype is None else dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def OnDevice(  # noqa: N802 - DeepSpeed's name
    dtype: torch.dtype | None, device: str = "meta", enabled: bool = True
) -> contextlib.AbstractContextManager[None]:
    """A context in which new tensors lie on ``device`` and have ``dtype`` where none is said."""
    return _on_device(dtype, device, enabled)


def instrument_w_nvtx(func: _Function) -> _Function:
    """The function as it is; ``torch.profiler`` names functions."""
    return func


_MODULES = ("groups", "init_on_device", "logging", "tensor_fragment", "timer", "zero_to_fp32", "zero_to_torch")

__getattr__ = submodules(__name__, _MODULES, "utils")
