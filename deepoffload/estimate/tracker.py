"""A forward and backward on fake tensors, watched: which kernels are called, what is alive, whose weights are used."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from deepoffload.estimate.kernels import Kernels
from deepoffload.estimate.recording import MALLOC_CHUNK_MAX_BYTES, LiveBytes, Op, Shape, Visit
from deepoffload.params.torch_private import DirectDispatchMode, fake_device, in_backward, tree_map
from deepoffload.runtime.compute_types import ComputeTypes

CALLS_APART = 4
"""The first calls of a kernel in a visit are told apart; this one and all behind it are one."""


class LoopSeen(Exception):
    """A recording was given up: the forward calls the same kernels again and again. ``visits``: until then."""

    def __init__(self, visits: tuple[Visit, ...]) -> None:
        super().__init__("the forward is a loop")
        self.visits = visits


class _Whole(nn.Module):
    """Runs something while a model has other parameters, until the end of it: backward may call the model again."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, run: Callable[[], None]) -> None:
        run()


class Fakes:
    """Parameters and buffers without bytes, for a call in the place of a model's own."""

    def __init__(self, model: nn.Module, types: ComputeTypes) -> None:
        self.by_name: dict[str, Tensor] = {}
        self.params: list[tuple[nn.Parameter, Tensor]] = []
        buffer_types = {id(buffer): dtype for buffer, dtype in types.buffers}
        made: dict[int, Tensor] = {}
        for prefix, module in model.named_modules():
            for key, param in module.named_parameters(prefix, recurse=False, remove_duplicate=False):
                if id(param) not in made:
                    made[id(param)] = torch.empty(param.shape, dtype=types.of(param), requires_grad=param.requires_grad)
                    self.params.append((param, made[id(param)]))
                self.by_name[key] = made[id(param)]
            for key, buffer in module.named_buffers(prefix, recurse=False, remove_duplicate=False):
                if id(buffer) not in made:
                    dtype = buffer_types.get(id(buffer), buffer.dtype)
                    made[id(buffer)] = torch.empty(buffer.shape, dtype=dtype)
                self.by_name[key] = made[id(buffer)]

    def run(self, model: nn.Module, run: Callable[[], None]) -> None:
        """Call ``run`` while ``model`` has these in place of its parameters."""
        state = {f"model.{name}": fake for name, fake in self.by_name.items()}
        # Every name that a parameter has in a module is said, with one name of the module. torch, which ties weights by
        # name, changes a module that has two names twice, and then gives it these back as its own.
        torch.func.functional_call(_Whole(model), state, (run,), tie_weights=False)


class Tracker(DirectDispatchMode):
    """Sees every kernel call: counts what is alive, and who computes."""

    def __init__(self, fakes: Fakes, kernels: Kernels, unit_of: Mapping[int, int], calls_max: int | None) -> None:
        super().__init__()
        self.head_bytes = 0
        self.in_backward = False
        self.visits: list[Visit] = [Visit(False, ())]
        self.spans: list[LiveBytes] = [LiveBytes(0, False)]
        self.largest_chunk_bytes = 0
        self.recomputes = False
        self.calls: dict[Op, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {}
        self.made_bytes: dict[Op, tuple[int, ...]] = {}
        self._calls_max = calls_max
        self._kernels = kernels
        self._over = False
        self._sizes: dict[int, tuple[int, int]] = {}  # bytes, and the number of the visit that made them
        self._since_entry: set[int] = set()
        self._unit_by_storage: dict[int, int] = {}
        self._unit_by_param: dict[int, int] = {}
        self._unit_of = unit_of
        self._inside: list[tuple[int, ...]] = []
        for tensor in fakes.by_name.values():
            self._sizes[tensor.untyped_storage()._cdata] = (0, 0)
        self._fakes = fakes
        for param, fake in fakes.params:
            unit = unit_of.get(id(param))
            if unit is not None:
                self._unit_by_storage[fake.untyped_storage()._cdata] = unit
                self._unit_by_param[id(fake)] = unit

    # -- who is used -----------------------------------------------------------------------------------------------

    @contextmanager
    def hooked(self, windows: Sequence[nn.Module]) -> Any:
        """Hooks where the engine has its own: entering and leaving windows, unpacked weights, landed gradients."""
        with ExitStack() as stack:
            for module in windows:
                # dict.fromkeys keeps one of each and their order, which sets do not
                units = tuple(
                    dict.fromkeys(self._unit_of[id(p)] for p in module.parameters() if id(p) in self._unit_of)
                )
                stack.callback(module.register_forward_pre_hook(self._enter(units)).remove)
                # always: checkpointing ends a recomputation with an exception, inside the last module it needs
                stack.callback(module.register_forward_hook(self._leave, always_call=True).remove)
            for _, fake in self._fakes.params:
                if fake.requires_grad:
                    stack.callback(fake.register_post_accumulate_grad_hook(self._land).remove)
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack))
            yield

    def _enter(self, units: tuple[int, ...]) -> Callable[..., None]:
        def enter(*_: Any) -> None:
            self._inside.append(units)
            self._visit(False, units)
            if not self.in_backward:
                self._since_entry.clear()

        return enter

    def _leave(self, *_: Any) -> None:
        self._inside.pop()

    def _visit(self, backward: bool, units: tuple[int, ...]) -> None:
        if (self.visits[-1].backward, self.visits[-1].units) != (backward, units):
            self.visits.append(Visit(backward, units))
            self._begin_span()

    def _begin_span(self) -> None:
        self.spans.append(LiveBytes(len(self.visits) - 1, self.in_backward))

    def _pack(self, tensor: Tensor) -> Any:
        unit = self._unit_by_storage.get(tensor.untyped_storage()._cdata)
        return tensor if unit is None else (unit, tensor)

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, tuple):
            self._visit(True, packed[:1])
            return packed[1]
        return packed

    def _land(self, param: Tensor) -> None:
        unit = self._unit_by_storage.get(param.untyped_storage()._cdata)
        if unit is not None:
            self._visit(True, (unit,))
            self.visits[-1].landed[unit] += 1
        param.grad = None

    def _note_doors(self, args: tuple[Any, ...]) -> None:
        """What a kernel takes of weights that no window shows: such a use passes the parameter's own door."""
        for arg in args:
            for tensor in arg if isinstance(arg, (list, tuple)) else (arg,):
                unit = self._unit_by_param.get(id(tensor))
                if unit is not None and not (self._inside and unit in self._inside[-1]):
                    self._visit(False, (unit,))

    # -- what it takes ---------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default and isinstance(args[0], Tensor):
            return fake_device(args[0])  # autograd asks this more often than it calls kernels
        # Backward itself computes without a graph. A recomputation makes one, be its module's hooks part of it or not.
        self.recomputes |= torch.is_grad_enabled() and in_backward()
        if not self.in_backward or self._inside:
            self._note_doors(args)
        out, made, op = self._kernels.call(func, args, kwargs)
        fresh = tuple(self._note(tensor) for tensor in made)
        if op is not None:
            self._count(op, func, args, kwargs, fresh)
        return out

    def _note(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return 0
        size = storage.nbytes()
        self._sizes[key] = (size, len(self.visits) - 1)
        self._since_entry.add(key)
        self._change(size)
        if size <= MALLOC_CHUNK_MAX_BYTES:
            self.largest_chunk_bytes = max(self.largest_chunk_bytes, size)
        weakref.finalize(storage, self._gone, key).atexit = False
        return size

    def _gone(self, key: int) -> None:
        if self._over:
            return  # of what the model itself keeps until it is called again
        size, made_in = self._sizes.pop(key)
        if made_in != len(self.visits) - 1:
            self.spans[-1].freed[made_in] += size
        self._change(-size)
        self._since_entry.discard(key)

    def _change(self, nbytes: int) -> None:
        span = self.spans[-1]
        span.net_bytes += nbytes
        span.over_bytes = max(span.over_bytes, span.net_bytes)

    def end(self) -> None:
        self._over = True

    def end_forward(self) -> None:
        self.head_bytes = sum(self._sizes[key][0] for key in self._since_entry)
        self.in_backward = True
        self._begin_span()

    def _count(self, op: Op, func: Any, args: Any, kwargs: dict[str, Any], fresh: tuple[int, ...]) -> None:
        ops, span = self.visits[-1].ops, self.spans[-1]
        ops[op] += 1
        call = op, min(ops[op], CALLS_APART)
        span.over_by_call[call] = max(span.over_by_call.get(call, span.net_bytes), span.net_bytes)
        if op not in self.calls:
            self.calls[op] = (func, *tree_map(_shape_only, (args, kwargs)))
            self.made_bytes[op] = fresh
        if self._calls_max is not None and ops[op] > self._calls_max and not self.in_backward:
            raise LoopSeen(tuple(self.visits))


def _shape_only(value: Any) -> Any:
    return Shape(tuple(value.shape), tuple(value.stride()), value.dtype) if isinstance(value, Tensor) else value
