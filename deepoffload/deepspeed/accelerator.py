"""``get_accelerator()``: DeepSpeed's questions about the device, asked of torch.

A machine without an accelerator is described as by DeepSpeed's CPU accelerator. ``DS_ACCELERATOR=cpu`` asks for that
description on other machines, too.
"""

from __future__ import annotations

import contextlib
import functools
import os
import resource
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deepoffload.deepspeed.names import AbsentNameError
from deepoffload.errors import UsageError
from deepoffload.machine import measure, resident_bytes

_NOT_HERE = {
    **dict.fromkeys(
        ("build_extension", "create_op_builder", "get_op_builder", "op_builder_dir"),
        "no operators are built while a program runs; the kernels come with the package",
    ),
    **dict.fromkeys(
        ("capture_to_graph", "create_graph", "replay_graph", "is_current_stream_capturing"),
        "a captured graph fixes addresses, and those of weights change",
    ),
    **dict.fromkeys(
        (
            *("register_host_memory", "unregister_host_memory", "unpin_memory", "pin_memory_alignment"),
            *("pin_empty", "pin_empty_like"),
        ),
        "the engine pins its own arena; torch.empty(..., pin_memory=True) gives pinned memory",
    ),
    **dict.fromkeys(
        ("export_envs", "visible_devices_envs", "set_visible_devices_envs"),
        "there is no launcher; torchrun starts processes",
    ),
    **dict.fromkeys(("get_rss", "reset_rss", "max_mem"), "memory_allocated and max_memory_allocated have it on a CPU"),
    **dict.fromkeys(
        ("prefer_triton_grouped_mm", "set_compile_backend", "supports_nvtx_domain"),
        "it is for kernels of DeepSpeed's",
    ),
}
"""Calls of DeepSpeed's accelerators that only its own code makes."""

_TENSORS = {
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "DoubleTensor": torch.float64,
    "FloatTensor": torch.float32,
    "HalfTensor": torch.float16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
}
_MEMORY = (
    "memory_allocated",
    "max_memory_allocated",
    "reset_max_memory_allocated",
    "memory_reserved",
    "max_memory_reserved",
    "reset_peak_memory_stats",
    "memory_stats",
    "empty_cache",
)
_OLD_MEMORY = {
    "memory_cached": "memory_reserved",
    "max_memory_cached": "max_memory_reserved",
    "reset_max_memory_cached": "reset_peak_memory_stats",
    "reset_max_memory_allocated": "reset_peak_memory_stats",
}


class DeviceCalls:
    """What DeepSpeed's ``get_accelerator()`` gives. Made by that function.

    Its methods are many because they are DeepSpeed's. The memory calls are torch's own where there is an accelerator.
    On a CPU they say what the process has resident.

    Args:
        kind: torch's name of the kind of device, such as ``"cpu"`` or ``"cuda"``.
    """

    def __init__(self, kind: str) -> None:
        self._name = kind
        self._module: Any = None if kind == "cpu" else torch.get_device_module(kind)

    # -- which device ----------------------------------------------------------------------------------------------

    def device_name(self, device_index: int | None = None) -> str:
        """``"cpu"``, ``"cuda"``, or with an index ``"cuda:0"``. (A CPU has no index.)"""
        if device_index is None or self._module is None:
            return self._name
        return f"{self._name}:{int(device_index)}"

    def device(self, device_index: int | None = None) -> Any:
        """A context in which new tensors of the device go to this one."""
        if self._module is None or device_index is None:
            return contextlib.nullcontext()
        return self._module.device(int(device_index))

    def set_device(self, device_index: int) -> None:
        """Use this device from now on. Of a CPU there is one."""
        if self._module is not None:
            self._module.set_device(int(device_index))

    def current_device(self) -> int:
        """The index of the device in use."""
        return 0 if self._module is None else int(self._module.current_device())

    def current_device_name(self) -> str:
        return self._name if self._module is None else f"{self._name}:{self.current_device()}"

    def device_count(self) -> int:
        """How many devices there are. On a CPU, as in DeepSpeed, what the launcher says in ``LOCAL_SIZE``, else 1."""
        if self._module is None:
            return max(1, int(os.environ.get("LOCAL_SIZE") or 1))
        return int(self._module.device_count())

    def is_available(self) -> bool:
        return True if self._module is None else bool(self._module.is_available())

    def communication_backend_name(self) -> str:
        """What process groups of this device's tensors run on."""
        return {"cuda": "nccl", "xpu": "xccl"}.get(self._name, "gloo")

    def on_accelerator(self, tensor: Tensor) -> bool:
        """Whether a tensor lies on a device of this kind."""
        return bool(tensor.device.type == self._name)

    # -- waiting ---------------------------------------------------------------------------------------------------

    def is_synchronized_device(self) -> bool:
        """Whether a call returns only when its work is done."""
        return self._module is None

    use_host_timers = resolves_data_dependency = handles_memory_backpressure = is_synchronized_device

    def synchronize(self, device_index: int | None = None) -> None:
        """Wait for the device's work."""
        if self._module is not None:
            self._module.synchronize() if device_index is None else self._module.synchronize(device_index)

    def stream(self, stream: Any) -> Any:
        """A context in which work goes to ``stream``; nothing on a CPU."""
        return contextlib.nullcontext() if self._module is None or stream is None else self._module.stream(stream)

    def Stream(self, *args: Any, **kwargs: Any) -> Any:  # noqa: N802 - DeepSpeed's name
        """A new stream; None on a CPU."""
        return None if self._module is None else self._module.Stream(*args, **kwargs)

    def current_stream(self, device_index: int | None = None) -> Any:
        return None if self._module is None else self._module.current_stream(device_index)

    def default_stream(self, device_index: int | None = None) -> Any:
        return None if self._module is None else self._module.default_stream(device_index)

    @property
    def Event(self) -> Any:  # noqa: N802 - DeepSpeed's name
        """The class of events; None on a CPU."""
        return None if self._module is None else self._module.Event

    # -- random numbers --------------------------------------------------------------------------------------------

    def random(self) -> Any:
        return torch.random

    def get_rng_state(self, device_index: int | None = None) -> Tensor:
        if self._module is None:
            return torch.get_rng_state()
        state: Tensor = self._module.get_rng_state(*(() if device_index is None else (device_index,)))
        return state

    def set_rng_state(self, new_state: Tensor, device_index: int | None = None) -> None:
        if self._module is None:
            torch.set_rng_state(new_state)
        else:
            self._module.set_rng_state(new_state, *(() if device_index is None else (device_index,)))

    def manual_seed(self, seed: int) -> Any:
        return torch.manual_seed(seed) if self._module is None else self._module.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> Any:
        return torch.manual_seed(seed) if self._module is None else self._module.manual_seed_all(seed)

    def initial_seed(self) -> int:
        return int(torch.initial_seed() if self._module is None else self._module.initial_seed())

    def default_generator(self, device_index: int) -> torch.Generator:
        generator: torch.Generator = (
            torch.default_generator if self._module is None else self._module.default_generators[device_index]
        )
        return generator

    # -- memory ----------------------------------------------------------------------------------------------------

    def total_memory(self, device_index: int | None = None) -> int:
        """Bytes of the device's memory; of a CPU what this process may use (cgroup limits too)."""
        if self._module is None:
            return measure().memory_total_bytes
        return int(self._module.get_device_properties(self._index(device_index)).total_memory)

    def available_memory(self, device_index: int | None = None) -> int:
        """Bytes of it that are free."""
        if self._module is None:
            return measure().memory_available_bytes
        return int(self._module.mem_get_info(self._index(device_index))[0])

    def _index(self, device_index: int | None) -> int:
        return self.current_device() if device_index is None else device_index

    # -- types -----------------------------------------------------------------------------------------------------

    def is_bf16_supported(self) -> bool:
        return True if self._module is None else bool(self._module.is_bf16_supported())

    def is_fp16_supported(self) -> bool:
        """Whether fp16 computes. (It does on the CPU, slowly.)"""
        return True

    def is_fp64_supported(self) -> bool:
        return self._name != "mps"

    def is_triton_supported(self) -> bool:
        return self._name == "cuda"

    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.float16, *([torch.bfloat16] if self.is_bf16_supported() else [])]

    # -- the rest --------------------------------------------------------------------------------------------------

    def pin_memory(self, tensor: Tensor, make_copy: bool = True, match_shape: bool = True) -> Tensor:
        """A page-locked copy; the tensor itself on a CPU, which copies nothing to a device.

        Args:
            make_copy, match_shape: accepted; the copy has the values and the shape.
        """
        return tensor if self._module is None else tensor.pin_memory()

    def is_pinned(self, tensor: Tensor) -> bool:
        return False if self._module is None else tensor.is_pinned()

    def range_push(self, msg: str, domain: Any = None, category: Any = None) -> None:
        """Open a range for a profiler of the device's vendor."""
        if self._name == "cuda":
            torch.cuda.nvtx.range_push(msg)

    def range_pop(self, domain: Any = None) -> None:
        if self._name == "cuda":
            torch.cuda.nvtx.range_pop()

    def lazy_call(self, callback: Callable[[], Any]) -> None:
        """Run ``callback`` now; the device is ready."""
        callback()

    def get_compile_backend(self) -> str:
        return "inductor"

    def __getattr__(self, name: str) -> Any:
        if name in _TENSORS and not name.startswith("__"):
            return functools.partial(torch.tensor, dtype=_TENSORS[name], device=self.current_device_name())
        if name in _MEMORY or name in _OLD_MEMORY:
            if self._module is None:
                return functools.partial(_of_process, name)
            return getattr(self._module, _OLD_MEMORY.get(name, name))
        if name in _NOT_HERE:
            raise AbsentNameError(f"get_accelerator().{name} is not in deepoffload: {_NOT_HERE[name]}")
        raise AttributeError(f"get_accelerator() has no {name!r}; use torch.accelerator or torch.{self._name}")


def _of_process(name: str, device_index: int | None = None) -> Any:
    """The memory calls where the CPU computes: bytes that the process has resident, and the most that it had."""
    if name in ("empty_cache", "reset_peak_memory_stats", *_OLD_MEMORY):
        return None if not name.endswith("cached") or name.startswith("reset") else _of_process(_OLD_MEMORY[name])
    resident = resident_bytes()
    peak = max(resident, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)  # the kernel counts it now and then
    if name == "memory_stats":
        return {"allocated_bytes.all.current": resident, "allocated_bytes.all.peak": peak}
    return peak if name.startswith("max") else resident


@functools.cache
def get_accelerator() -> DeviceCalls:
    """The device of this machine, with the calls of DeepSpeed's accelerators."""
    asked = os.environ.get("DS_ACCELERATOR")
    found = torch.accelerator.current_accelerator(check_available=True)
    there = "cpu" if found is None else found.type
    if asked not in (None, "", "cpu", there):
        raise UsageError(f"DS_ACCELERATOR={asked} in the environment, but torch sees {there}; unset it, or say cpu")
    return DeviceCalls("cpu" if asked == "cpu" else there)


def is_current_accelerator_supported() -> bool:
    """True: what torch computes on is what the engine computes on."""
    return True
