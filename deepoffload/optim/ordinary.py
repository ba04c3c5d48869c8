"""The update of ordinary parameters: the native pass of paged ones, with the state in ``optimizer.state``, on the CPU.
Parameters on another device are copied there and back.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deepoffload.errors import UnsupportedError, UsageError
from deepoffload.io.checksums import crc32c
from deepoffload.native import cpu_adam
from deepoffload.native.cpu_adam import Segment, StateDType, StateLayout
from deepoffload.optim.eight_bit import decode, encode, num_blocks, torch_dtype
from deepoffload.optim.gradients import NATIVE_DTYPES
from deepoffload.optim.rule import SCALE_SUFFIX, Hyper, Rule, UpdateJob, step_count
from deepoffload.optim.state import LAYOUTS, MASTER_PART_KEYS
from deepoffload.optim.threads import num_threads
from deepoffload.params.state_dict_values import LazyValue
from deepoffload.params.torch_private import is_wrapper

log = logging.getLogger("deepoffload")


def check_has_bytes(param: Tensor, name: str) -> None:
    """Raise for a parameter without values, and for one whose values are in other tensors."""
    if param.is_meta:
        raise UsageError(f"{name}: a parameter of shape {tuple(param.shape)} is on the meta device, without values")
    if is_wrapper(param):
        raise UnsupportedError(
            f"{name}: a parameter of shape {tuple(param.shape)} is a {type(param).__name__}, whose bytes are in the "
            "tensors that it wraps, perhaps on several ranks: give it to one of torch's optimizers"
        )


def check_ordinary(param: Tensor, name: str, state_dtype: str = "fp32") -> None:
    """Raise ``UnsupportedError`` for a gradient or parameter that the kernels do not take."""
    grad = param.grad
    if grad is None:
        return
    if param.dtype is grad.dtype is torch.complex64 and not grad.is_sparse:
        if state_dtype != "fp32":
            raise UnsupportedError(
                f"{name} keeps the states of complex parameters in fp32; one of shape {tuple(param.shape)} is "
                f"torch.complex64: give it a parameter group with state_dtype='fp32'"
            )
    elif grad.is_sparse or grad.dtype not in NATIVE_DTYPES or param.dtype not in NATIVE_DTYPES:
        raise UnsupportedError(
            f"{name} updates dense float32, bfloat16, float16 and complex64 parameters; one of shape "
            f"{tuple(param.shape)} is {param.dtype} with a {'sparse ' if grad.is_sparse else ''}{grad.dtype} gradient: "
            "convert it, or give it to one of torch's optimizers"
        )


def real(tensor: Tensor) -> Tensor:
    """A complex tensor as its real and imaginary parts, which are updated as separate numbers, as by torch's
    optimizers; any other as it is."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def sum_of_squares(grad: Tensor) -> tuple[int, bool]:
    """Sum of squares of a gradient (see :func:`~deepoffload.native.cpu_adam.land`), and whether it holds a non-finite
    value."""
    if not grad.numel():
        return 0, False
    grad = real(grad).to("cpu").contiguous()
    return cpu_adam.sum_of_squares(
        grad.data_ptr(), grad.numel(), dtype=NATIVE_DTYPES[grad.dtype], num_threads=num_threads()
    )


class OrdinaryUpdate:
    """Steps ordinary parameters, and notices when the program has changed a weight between two steps.

    A 16-bit weight has an fp32 master. For bf16 the weight is the master rounded to nearest even, and
    ``state["remainder"]`` (int16) is the difference. For fp16 it is ``state["master"]``. A weight that the program
    changed becomes its own master again. For bf16, the tensor's version counter shows the change since the last step,
    and a checksum that since the state was loaded: who loads a model after its optimizer writes every weight, with the
    same values or with others. Writes through ``param.data`` do not move the counter; after a step the remainder then
    stays, which is at most half a unit in the last place of the weight.
    """

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self._versions: dict[int, int] = {}
        self._loaded: dict[int, int] = {}
        self._lost: list[str] = []

    def was_loaded(self, param: Tensor) -> None:
        """The state of a parameter was loaded: its remainder belongs to the weight as it is now."""
        self._loaded[id(param)] = _crc_of(param)

    def run(self, jobs: list[tuple[Tensor, dict[str, Any], UpdateJob]], grad_factor: float) -> None:
        """Update each parameter from its gradient times ``grad_factor``, in one native call per layout."""
        by_layout: dict[StateLayout, list[tuple[Tensor, dict[str, Any], UpdateJob]]] = {}
        for param, state, job in jobs:
            layout = layout_of(param, job.master_weights)
            if param.numel():
                by_layout.setdefault(layout, []).append((param, state, job))
                self.follow_weight(param, state)
            else:
                _init_state(param, state, layout, job)  # as torch: loading expects it
        warn_of_lost_masters(self._lost)
        self._lost.clear()
        for layout, chosen in by_layout.items():
            self._run_layout(layout, chosen, grad_factor)

    def follow_weight(self, param: Tensor, state: dict[str, Any]) -> None:
        """Make the fp32 master the exact value of a weight which the program has set since the last step."""
        if "remainder" in state:
            if id(param) in self._loaded:
                crc = _crc_of(param)
                if crc != self._loaded[id(param)]:
                    self._loaded[id(param)] = crc
                    self._lost.append(f"one of shape {tuple(param.shape)}")
                    state["remainder"].zero_()
            elif self._versions.get(id(param), param._version) != param._version:
                state["remainder"].zero_()
        elif "master" in state:
            weight = param.detach().to("cpu")
            changed = state["master"].to(weight.dtype) != weight
            if bool(changed.any()):
                state["master"][changed] = weight[changed].float()

    def _run_layout(
        self, layout: StateLayout, jobs: list[tuple[Tensor, dict[str, Any], UpdateJob]], grad_factor: float
    ) -> None:
        segments: list[Segment] = []
        hypers: list[Hyper] = []
        keep: list[Tensor] = []
        copies: list[tuple[Tensor, Tensor]] = []
        for param, state, job in jobs:
            if not hypers or hypers[-1] is not job.hyper:
                hypers.append(job.hyper)
            _init_state(param, state, layout, job)
            weight = param.detach()
            if not weight.is_contiguous() or weight.is_conj() or not weight.is_cpu:
                weight = weight.to("cpu").resolve_conj().contiguous()
                copies.append((param, weight))
            grad = param.grad.to("cpu").resolve_neg()  # type: ignore[union-attr]
            weight, grad = real(weight), real(grad).contiguous()
            keep += [weight, grad]
            arrays = {field: state[key].data_ptr() for key, field in job.addressed.items()}
            lead = MASTER_PART_KEYS.get(layout)
            if lead is not None:
                arrays[lead] = state[lead].data_ptr()
            segments.append(
                Segment(
                    numel=weight.numel(),
                    hyper_index=len(hypers) - 1,
                    grad=grad.data_ptr(),
                    grad_dtype=NATIVE_DTYPES[grad.dtype],
                    weight=weight.data_ptr(),
                    weight_dtype=NATIVE_DTYPES[weight.dtype],
                    **arrays,
                )
            )
        self.rule.kernel(segments, hypers, layout, grad_factor=grad_factor, num_threads=num_threads())
        for param, weight in copies:
            param.copy_(weight)
        params = [param for param, _, _ in jobs]
        torch.autograd.graph.increment_version(params)  # graphs that saved the old values must not go on
        if params[0].dtype is torch.bfloat16:
            self._versions.update((id(param), param._version) for param in params)
            for param in params:
                self._loaded.pop(id(param), None)


def warn_of_lost_masters(lost: list[str]) -> None:
    """Say that weights were written after their masters were loaded.

    Args:
        lost: which; nothing is said where there are none.
    """
    if lost:
        log.warning(
            "the weights of %d parameters (%s, ...) were written after load_state_dict() of their optimizer: their "
            "fp32 masters begin at the rounded weights; load the weights first, then the optimizer",
            len(lost),
            min(lost),
        )


def _crc_of(param: Tensor) -> int:
    """CRC-32C of a parameter's bytes."""
    values = param.detach().to("cpu").contiguous()
    return crc32c(values.data_ptr(), values.nbytes)


def _init_state(param: Tensor, state: dict[str, Any], layout: StateLayout, job: UpdateJob) -> None:
    """Make the arrays that do not exist yet, and dense fp32 ones of those that a program has put there."""
    for key, field in job.arrays.items():
        dtype = param.dtype if param.is_complex() else torch_dtype(job.state_dtype, field)
        if key not in state:
            state[key] = torch.empty(param.shape, dtype=dtype, device="cpu")
            real(state[key]).fill_(job.initial.get(key, 0.0))
            if job.state_dtype is StateDType.EIGHT_BIT:
                state[key + SCALE_SUFFIX] = torch.zeros(num_blocks(param.numel()), dtype=torch.float32, device="cpu")
        elif state[key].dtype is not dtype:
            _store_as(job.state_dtype, state, key, field, param)
        else:
            state[key] = _dense(state[key], dtype, param, key)
    lead = MASTER_PART_KEYS.get(layout)
    if lead is None:
        return
    dtype = torch.int16 if lead == "remainder" else torch.float32
    if lead in state:
        state[lead] = _dense(state[lead], dtype, param, lead)
    elif lead == "remainder":
        state[lead] = torch.zeros(param.shape, dtype=dtype, device="cpu")
    else:
        state[lead] = param.detach().to(device="cpu", dtype=dtype).contiguous()


def layout_of(param: Tensor, master_weights: bool) -> StateLayout:
    """Where the fp32 value of an ordinary parameter lives."""
    if param.is_complex():
        return StateLayout.FP32
    return StateLayout.BF16 if param.dtype is torch.bfloat16 and not master_weights else LAYOUTS[param.dtype]


def _store_as(dtype: StateDType, state: dict[str, Any], key: str, field: str, param: Tensor) -> None:
    """Convert an array that was loaded, or is left from another setting of ``state_dtype``."""
    scales = state.pop(key + SCALE_SUFFIX, None)
    values = state[key] if scales is None else decode(state[key], scales, field)
    values = _dense(values, torch.float32, param, key)
    if dtype is StateDType.EIGHT_BIT:
        state[key], state[key + SCALE_SUFFIX] = encode(values, field)
    else:
        state[key] = values.to(torch_dtype(dtype, field))


def plain_array(state: Mapping[str, Any], key: str, *, like: bool = False) -> Tensor:
    """An array of a parameter's state, as the fp32 values that it stands for; ``like``: its form is enough."""
    value: Tensor = state[key]
    if key + SCALE_SUFFIX in state:
        return value.to("meta", torch.float32) if like else decode(value, state[key + SCALE_SUFFIX], key)
    if value.dtype is not torch.bfloat16:
        return value
    return value.to("meta", torch.float32) if like else value.float()


def is_stored_otherwise(state: Mapping[str, Any], key: str) -> bool:
    """Whether an array of a parameter's state is stored in another type than fp32."""
    value = state[key]
    return isinstance(value, Tensor) and (value.dtype is torch.bfloat16 or key + SCALE_SUFFIX in state)


def plain_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter's state with 8-bit arrays as the fp32 values that they stand for."""
    scales = {key for key in state if key.endswith(SCALE_SUFFIX) and key.removesuffix(SCALE_SUFFIX) in state}
    return {
        key: plain_array(state, key) if key + SCALE_SUFFIX in scales else value
        for key, value in state.items()
        if key not in scales
    }


def _dense(array: Tensor, dtype: torch.dtype, param: Tensor, key: str) -> Tensor:
    if type(array) is LazyValue:
        array = array.clone()  # the kernel writes to what its address is of
    if array.dtype is dtype and array.shape == param.shape and array.is_contiguous() and array.device.type == "cpu":
        return array
    if array.shape != param.shape:
        raise ValueError(f"{key} has shape {tuple(array.shape)}, the parameter {tuple(param.shape)}")
    return array.to(device="cpu", dtype=dtype).contiguous()


def import_state(
    entry: Mapping[str, Any], shape: torch.Size, arrays: Mapping[str, str], *, copy: bool, dtype: torch.dtype
) -> dict[str, Any]:
    """A parameter's part of a loaded ``state_dict``, with ``step`` as a tensor.

    Args:
        copy: arrays become dense ones of ``dtype`` on the CPU; else they stay as they are.
    """
    state: dict[str, Any] = {}
    for key, value in entry.items():
        if value is None:
            continue  # torch's SGD writes a momentum buffer that does not exist yet as None
        if key == "step":
            state[key] = step_count(value)
            if not 0 <= state[key].item() < math.inf:
                raise ValueError(f"step is {state[key].item()}: it counts the steps that were made")
            continue
        known = key in arrays or key in MASTER_PART_KEYS.values() or key == "max_exp_avg_sq"
        if known and isinstance(value, Tensor):
            if value.shape != shape:
                raise ValueError(f"{key} has shape {tuple(value.shape)}, the parameter {tuple(shape)}")
            value = value.detach()
            if copy:
                value = value.to(device="cpu", dtype=torch.int16 if key == "remainder" else dtype)
                value = value.clone(memory_format=torch.contiguous_format)
        if type(value) is LazyValue and key not in arrays and key not in MASTER_PART_KEYS.values():
            value = value.clone()  # it is kept, and what it shows may be of a state that this one replaces
        state[key] = value
    return state
