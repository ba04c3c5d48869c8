"""Which type every weight and buffer has once the model is placed.

Weights take the type that ``precision`` names. These do not, and the program that loads the model in that type in
plain PyTorch has them the same way:

- what ``keep_fp32`` names, and what a model of transformers names in ``_keep_in_fp32_modules`` (for fp16) and
  ``_keep_in_fp32_modules_strict`` (for fp16 and bf16);
- a child that its module converts to the module's own ``dtype`` in each call (the routers of Switch Transformers and
  NLLB-MoE): a paged weight keeps its type, so it has that one from the start.

Buffers: see :func:`_as_loaded` and :func:`_follows`.
"""

from __future__ import annotations

import copy
import dis
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import isfunction
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from deepoffload.config import Buffers, Config, Precision
from deepoffload.errors import UsageError
from deepoffload.params.torch_private import get_data, outside_user_modes, set_data_elsewhere

log = logging.getLogger("deepoffload")

DTYPES = {Precision.BF16: torch.bfloat16, Precision.FP32: torch.float32, Precision.FP16: torch.float16}

_DTYPES_OF_BUFFERS = {Buffers(precision.value): dtype for precision, dtype in DTYPES.items()}

_LISTS = {
    torch.float16: ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"),
    torch.bfloat16: ("_keep_in_fp32_modules_strict",),
}
"""Where a model of transformers names what stays in fp32, by the type that the rest computes in."""

_NAMES_SHOWN = 3


@dataclass(frozen=True)
class ComputeTypes:
    """The types of a placed model.

    Attributes:
        dtype: of floating-point weights without an exception; None: as registered.
        exceptions: types of weights by ``id``.
        buffers: each floating-point buffer that changes its type, with the new one.
    """

    dtype: torch.dtype | None = None
    exceptions: Mapping[int, torch.dtype] = field(default_factory=dict)
    buffers: Sequence[tuple[Tensor, torch.dtype]] = ()

    def of(self, weight: Tensor) -> torch.dtype:
        """The type that a weight (still in its old type) computes in."""
        if not weight.is_floating_point():
            return weight.dtype
        return self.exceptions.get(id(weight), self.dtype or weight.dtype)


KEEP_TYPES = ComputeTypes()
"""Everything stays as it is."""


def compute_types(config: Config, roots: Sequence[nn.Module]) -> ComputeTypes:
    """Decide for ``roots``, whose tensors are as the program has registered them.

    Raises:
        UsageError: ``keep_fp32`` names something that none of them has.
    """
    dtype = DTYPES.get(config.precision)
    exceptions: dict[int, torch.dtype] = {}
    for root in roots:
        exceptions |= _converted_by_their_module(root)
        exceptions |= dict.fromkeys(_listed_by_transformers(root, dtype), torch.float32)
    exceptions |= dict.fromkeys(_asked_for(config.keep_fp32, roots), torch.float32)
    types = ComputeTypes(dtype, exceptions)
    return ComputeTypes(dtype, exceptions, [pair for root in roots for pair in _buffers(root, config.buffers, types)])


def convert_buffers(root: nn.Module, device: torch.device, types: ComputeTypes) -> None:
    """Buffers move to the device, and those of ``types`` take their type."""
    wanted = {id(buffer): dtype for buffer, dtype in types.buffers}
    staying = []
    with outside_user_modes():
        for name, buffer in root.named_buffers():
            dtype = wanted.get(id(buffer), buffer.dtype)
            if not buffer.is_meta and (buffer.dtype is not dtype or buffer.device != device):
                set_data_elsewhere(buffer, get_data(buffer).to(device, dtype))
            if buffer.is_floating_point() and dtype is not (types.dtype or dtype):
                staying.append(f"{name} ({str(dtype).removeprefix('torch.')})")
    if staying:
        log.info(
            'buffers that are not converted to %s: %s; buffers="compute" converts them, as model.to() does',
            str(types.dtype).removeprefix("torch."),
            _some(staying),
        )


# -- weights that keep another type ----------------------------------------------------------------------------------


def _asked_for(said: Sequence[str | type], roots: Sequence[nn.Module]) -> set[int]:
    """``id`` of each parameter and buffer that ``keep_fp32`` means: by its class or by its name."""
    found: set[int] = set()
    for what in said:
        matches = [id(tensor) for root in roots for tensor in _meant(what, root)]
        if not matches:
            shown = what if isinstance(what, str) else what.__name__
            names = [name for root in roots for name, _ in root.named_parameters()]
            raise UsageError(
                f"keep_fp32 names {shown!r}, and the model has no module of such a class and no parameter or buffer "
                f"with such a part in its name; parameters are {_some(names)}"
            )
        found.update(matches)
    return found


def _meant(what: str | type, root: nn.Module) -> Iterator[Tensor]:
    for module in root.modules():
        names = (kind.__name__ for kind in type(module).__mro__)
        if what in names if isinstance(what, str) else isinstance(module, what):
            yield from _tensors(module)
    if isinstance(what, str):
        for name, tensor in _named_tensors(root):
            if f".{what}." in f".{name}.":
                yield tensor


def _listed_by_transformers(root: nn.Module, dtype: torch.dtype | None) -> Iterator[int]:
    """As its ``from_pretrained(dtype=...)`` does it: a pattern may match anywhere in the name."""
    for module in root.modules():
        patterns = [
            pattern.replace("*", ".*")
            for attribute in (_LISTS.get(dtype, ()) if dtype is not None else ())
            for pattern in getattr(module, attribute, None) or ()
        ]
        if patterns:
            any_of_them = re.compile("|".join(patterns))
            for name, tensor in _named_tensors(module):
                if tensor.dtype is not dtype and any_of_them.search(name):
                    yield id(tensor)


def _converted_by_their_module(root: nn.Module) -> dict[int, torch.dtype]:
    """Weights of children that a method of their module assigns again (``self.gate = self.gate.to(self.dtype)``), where
    the module says in its own attribute ``dtype`` which type it computes in."""
    found: dict[int, torch.dtype] = {}
    for module in root.modules():
        dtype = module.__dict__.get("dtype")
        if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
            for name in _assigned_in_methods(type(module)) & module._modules.keys():
                child = module._modules[name]
                if child is not None:
                    found |= {id(tensor): dtype for tensor in _tensors(child)}
    return found


def _assigned_in_methods(kind: type) -> set[str]:
    """Attributes of ``self`` that methods of a class assign, those of construction left out."""
    methods = [
        value
        for ancestor in kind.__mro__
        if issubclass(ancestor, nn.Module) and ancestor is not nn.Module
        for name, value in vars(ancestor).items()
        if isfunction(value) and name != "__init__"
    ]
    return {
        instruction.argval
        for method in methods
        for instruction in dis.get_instructions(method)
        if instruction.opname == "STORE_ATTR"
    }


# -- buffers ---------------------------------------------------------------------------------------------------------


def _buffers(root: nn.Module, wish: Buffers, types: ComputeTypes) -> Iterator[tuple[Tensor, torch.dtype]]:
    below = _Below()
    around: dict[int, nn.Module] = {id(child): module for module in root.modules() for child in module.children()}
    everything = _DTYPES_OF_BUFFERS.get(wish) or types.dtype or _usual(root.parameters())
    loaded = _as_loaded(root, types.dtype) if wish is Buffers.KEEP and types.dtype is not None else {}
    seen: set[int] = set()
    for module in root.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if not buffer.is_floating_point() or is_lazy(buffer) or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            dtype = types.exceptions.get(id(buffer)) or loaded.get(id(buffer))
            if dtype is None and wish is not Buffers.KEEP:
                dtype = everything
            if dtype is None and types.dtype is not None:
                is_table = name in module._non_persistent_buffers_set and buffer.itemsize > types.dtype.itemsize
                dtype = _follows(buffer, is_table, module, around, types, below)
            if dtype is not None and dtype is not buffer.dtype:
                yield buffer, dtype


def _follows(
    buffer: Tensor,
    is_table: bool,
    module: nn.Module,
    around: Mapping[int, nn.Module],
    types: ComputeTypes,
    below: _Below,
) -> torch.dtype | None:
    """The type of the weights that a buffer follows as in ``module.to(dtype)``, None where it stays as it is.

    It follows the weights of its own module if it has their type (the statistics of a batch norm). In a module without
    weights those around it count (a frozen batch norm), but a table, which is computed and not saved with them, is not
    made narrower (the frequencies of a rotary embedding).
    """
    weights = [param for param in module.parameters(recurse=False) if param.is_floating_point()]
    at: nn.Module | None = module
    while not weights and not is_table and at is not None:
        weights = below.weights(at)
        at = around.get(id(at))
    if not weights or any(weight.dtype is not buffer.dtype for weight in weights):
        return None
    wanted = {types.of(weight) for weight in weights}
    if len(wanted) > 1 and at is not module:  # a few of the weights around it are kept in fp32
        wanted -= {torch.float32}
    return wanted.pop() if len(wanted) == 1 else None


def _as_loaded(root: nn.Module, dtype: torch.dtype) -> dict[int, torch.dtype]:
    """The types of buffers in models of transformers, by ``id``, as ``from_pretrained(dtype=...)`` leaves them.

    Which of its tables a model computes in fp32 on purpose does not show in a model that was built in fp32, so the
    model is built once more, in ``dtype`` and without bytes.
    """
    found: dict[int, torch.dtype] = {}
    inside: set[int] = set()
    for name, module in root.named_modules():
        config = module.__dict__.get("config")
        if id(module) in inside or config is None or not hasattr(type(module), "_from_config"):
            continue
        inside.update(id(child) for child in module.modules())
        wide = [buffer for buffer in module.buffers() if buffer.is_floating_point() and buffer.dtype is not dtype]
        if not wide or _usual(module.parameters()) is dtype:
            continue  # there is nothing to convert, or it was loaded in that type
        mine = dict(module.named_buffers(remove_duplicate=False))
        for key, twin in _twin(type(module), config, dtype, name).items():
            buffer = mine.get(key)
            if buffer is not None and buffer.shape == twin.shape and twin.is_floating_point():
                found[id(buffer)] = twin.dtype
    return found


def _twin(kind: Any, config: Any, dtype: torch.dtype, name: str) -> dict[str, Tensor]:
    """Buffers of the same model built in ``dtype`` on the meta device; none where it cannot be built without bytes."""
    try:
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            return dict(kind._from_config(copy.deepcopy(config), dtype=dtype).named_buffers())
    except Exception as error:  # code of the model's own, which nobody else runs without bytes
        log.warning(
            "%s cannot be built without bytes (%s: %s), so which of its buffers are fp32 on purpose is a guess: tables "
            'that are computed and not saved stay in fp32; buffers="compute" converts them',
            name or kind.__name__,
            type(error).__name__,
            error,
        )
        return {}


class _Below:
    """The floating-point weights of a module and all below it, looked up once."""

    def __init__(self) -> None:
        self._known: dict[int, list[nn.Parameter]] = {}

    def weights(self, module: nn.Module) -> list[nn.Parameter]:
        if id(module) not in self._known:
            self._known[id(module)] = [param for param in module.parameters() if param.is_floating_point()]
        return self._known[id(module)]


def _usual(params: Iterable[nn.Parameter]) -> torch.dtype | None:
    """The floating-point type that most elements have."""
    numel: dict[torch.dtype, int] = {}
    for param in params:
        if param.is_floating_point() and not is_lazy(param):
            numel[param.dtype] = numel.get(param.dtype, 0) + param.numel()
    return max(numel, key=lambda dtype: numel[dtype], default=None)


# -- names -----------------------------------------------------------------------------------------------------------


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    for _, tensor in _named_tensors(module):
        yield tensor


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Floating-point parameters and buffers by each of their names."""
    for name, param in module.named_parameters(remove_duplicate=False):
        if param.is_floating_point():
            yield name, param
    for name, buffer in module.named_buffers(remove_duplicate=False):
        if buffer.is_floating_point():
            yield name, buffer


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more
