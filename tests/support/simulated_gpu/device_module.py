"""What ``torch.simgpu`` offers: the part of ``torch.cuda`` that training programs use."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch

NAME = "simgpu"


class Properties(NamedTuple):
    """Of a device."""

    name: str
    total_memory: int
    """In bytes."""


class Stream(torch.Stream):
    """A new stream of a device (of the current one by default); the priority says nothing here."""

    def __new__(cls, device: Any = None, priority: int = 0, **identity: Any) -> Stream:
        return super().__new__(cls, device=torch.device(NAME, index_of(device)), priority=priority, **identity)


def Event(enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> torch.Event:
    """An event; not recorded yet, it is over. No class, since torch measures time between its own events only."""
    return torch.Event(NAME, enable_timing=enable_timing, blocking=blocking, interprocess=interprocess)


def index_of(device: Any) -> int:
    """The number that any way to name a device stands for."""
    if isinstance(device, int):
        return device
    found = None if device is None else torch.device(device)
    if found is not None and found.type != NAME:
        raise ValueError(f"expected a {NAME} device, not {found}")
    return torch.accelerator.current_device_index() if found is None or found.index is None else found.index


def make(native: ModuleType) -> ModuleType:
    """The module to register with torch, over the compiled simulator."""
    module = ModuleType(f"torch.{NAME}", __doc__)
    for part in (_devices(native), _streams(), _memory(native), _random(native), _dtypes()):
        for name, value in part.items():
            setattr(module, name, value)
    return module


def _devices(native: ModuleType) -> dict[str, Any]:
    class device:
        """Makes a device the current one inside ``with``."""

        def __init__(self, which: Any) -> None:
            self._index = index_of(which)
            self._before = 0

        def __enter__(self) -> None:
            self._before = torch.accelerator.current_device_index()
            torch.accelerator.set_device_index(self._index)

        def __exit__(self, *exception: object) -> None:
            torch.accelerator.set_device_index(self._before)

    class device_of(device):
        """Makes a tensor's device the current one inside ``with``."""

        def __init__(self, tensor: torch.Tensor) -> None:
            super().__init__(tensor.device if tensor.device.type == NAME else None)

    def get_device_name(which: Any = None) -> str:
        return f"simulated GPU {index_of(which)}"

    def get_device_properties(which: Any = None) -> Properties:
        return Properties(get_device_name(which), native.memory(index_of(which))["size_bytes"])

    return {
        "device": device,
        "device_of": device_of,
        "is_available": lambda: native.device_count() > 0,
        "_initialized": True,  # torch.utils.checkpoint asks, before it keeps the state of the generators
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "_is_in_bad_fork": lambda: False,
        "device_count": native.device_count,
        "current_device": torch.accelerator.current_device_index,
        "set_device": lambda which: torch.accelerator.set_device_index(index_of(which)),
        "get_device_name": get_device_name,
        "get_device_properties": get_device_properties,
        "host_register": native.pin,
        "host_unregister": native.unpin,
        "cudart": lambda: SimpleNamespace(
            cudaHostRegister=lambda address, nbytes, flags: 0 if native.pin(address, nbytes) else 712,
            cudaHostUnregister=lambda address: 0 if native.unpin(address) else 713,
        ),
    }


def _streams() -> dict[str, Any]:
    class stream:
        """Makes a stream the current one of its device inside ``with``; ``None`` changes nothing."""

        def __init__(self, chosen: torch.Stream | None) -> None:
            self._chosen = chosen

        def __enter__(self) -> torch.Stream | None:
            return None if self._chosen is None else self._chosen.__enter__()

        def __exit__(self, *exception: Any) -> None:
            if self._chosen is not None:
                self._chosen.__exit__(*exception)

    return {
        "Stream": Stream,
        "Event": Event,
        "stream": stream,
        "current_stream": lambda which=None: torch.accelerator.current_stream(index_of(which)),
        "default_stream": lambda which=None: torch.Stream(
            stream_id=0, device_index=index_of(which), device_type=torch._C._autograd.DeviceType.PrivateUse1.value
        ),
        "set_stream": torch.accelerator.set_stream,
        "synchronize": lambda which=None: torch.accelerator.synchronize(index_of(which)),
    }


def _memory(native: ModuleType) -> dict[str, Any]:
    def mem_get_info(which: Any = None) -> tuple[int, int]:
        """Bytes that are free, and all."""
        now = native.memory(index_of(which))
        return now["size_bytes"] - now["reserved_bytes"], now["size_bytes"]

    def empty_cache() -> None:
        for index in range(native.device_count()):
            native.empty_cache(index)

    fractions: dict[int, float] = {}

    def set_fraction(fraction: float, which: Any = None) -> None:
        native.set_memory_fraction(fraction, index_of(which))
        fractions[index_of(which)] = fraction

    def reader(name: str) -> Any:
        return lambda which=None: native.memory(index_of(which))[name]

    return {
        "memory_allocated": reader("allocated_bytes"),
        "max_memory_allocated": reader("allocated_peak_bytes"),
        "memory_reserved": reader("reserved_bytes"),
        "max_memory_reserved": reader("reserved_peak_bytes"),
        "memory_counts": lambda which=None: native.memory(index_of(which)),
        "mem_get_info": mem_get_info,
        "reset_peak_memory_stats": lambda which=None: native.reset_peak(index_of(which)),
        "set_per_process_memory_fraction": set_fraction,
        "get_per_process_memory_fraction": lambda which=None: fractions.get(index_of(which), 1.0),
        "empty_cache": empty_cache,
        "clear_workspaces": native.clear_workspaces,
        "OutOfMemoryError": torch.OutOfMemoryError,
    }


def _random(native: ModuleType) -> dict[str, Any]:
    def manual_seed_all(seed: int) -> None:
        for index in range(native.device_count()):
            native.seed(index, seed)

    def get_rng_state(which: Any = None) -> torch.Tensor:
        return torch.frombuffer(bytearray(native.generator_state(index_of(which))), dtype=torch.uint8)

    def set_rng_state(state: torch.Tensor, which: Any = None) -> None:
        native.set_generator_state(index_of(which), state.numpy().tobytes())

    return {
        "manual_seed": lambda seed: native.seed(index_of(None), seed),
        "manual_seed_all": manual_seed_all,
        "initial_seed": lambda: native.initial_seed(index_of(None)),
        "get_rng_state": get_rng_state,
        "set_rng_state": set_rng_state,
        "get_rng_state_all": lambda: [get_rng_state(index) for index in range(native.device_count())],
    }


def _dtypes() -> dict[str, Any]:
    return {
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "is_bf16_supported": lambda including_emulation=True: True,
    }
