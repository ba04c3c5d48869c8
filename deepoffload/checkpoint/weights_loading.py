"""Puts the stored weights of a checkpoint into a model, window by window."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from deepoffload.checkpoint import transformers_format
from deepoffload.checkpoint.block_reader import FileSpan, ReadsAhead
from deepoffload.checkpoint.expressions import Opener, Part, slabs
from deepoffload.checkpoint.own_ranges import changing_shard, is_scattered, owned_elements, owned_run, owned_runs
from deepoffload.checkpoint.source import StoredTensor
from deepoffload.checkpoint.values import clipped
from deepoffload.checkpoint.weights import (
    Target,
    WeightOpener,
    WeightPlan,
    discard_replaced,
    handle_of,
    names_of_shared,
    plan_weights,
)
from deepoffload.errors import UsageError
from deepoffload.params.unit import ParamHandle

_FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})
NAMES_SHOWN = 20

WINDOW_BYTES = 1 << 20
"""Stored bytes that are converted, or put into another order, at a time."""


@dataclass(frozen=True)
class StoredNames:
    """How the weights of a checkpoint are named.

    Attributes:
        hub_names, apart: as :func:`~deepoffload.checkpoint.weights.plan_weights` has them.
        left_out: names that were left out on purpose.
    """

    hub_names: bool
    left_out: frozenset[str]
    apart: bool

    def plan(self, module: nn.Module, opener_of: Callable[[Tensor], Opener]) -> WeightPlan:
        """What the tensors of a model are called there."""
        hub_names = self.hub_names and transformers_format.is_pretrained_model(module)
        return plan_weights(module, hub_names=hub_names, left_out=self.left_out, opener_of=opener_of, apart=self.apart)


@dataclass(frozen=True)
class WeightLoader:
    """The stored tensors that go into a model, checked against it."""

    plan: WeightPlan
    opener: WeightOpener
    stored: Mapping[str, StoredTensor]

    def load(self, reader: ReadsAhead, left_out: Callable[[Target], bool]) -> None:
        """Read everything into its place, in the order of the files.

        Args:
            left_out: whether somebody else fills a weight.

        Raises:
            UsageError: a checksum is wrong. IoFailure: a transfer failed. A part is loaded then.
        """
        ordered = [
            tensor
            for tensor in sorted(self.stored.values(), key=lambda tensor: (tensor.file, tensor.record.begin))
            if not all(left_out(target) for _, target in self.parts(tensor.name))
        ]
        coming: Counter[ParamHandle] = Counter()
        for tensor in ordered:
            for part, target in self.parts(tensor.name):
                if isinstance(target, ParamHandle):
                    coming[target] += part.stop - part.start
        discard_replaced(coming)
        reader.will_read(span for tensor in ordered for span in self._spans(tensor))
        for tensor in ordered:
            fill(self.plan, tensor, self.opener.targets)

    def _spans(self, tensor: StoredTensor) -> Iterator[FileSpan]:
        """What is going to be read of a tensor: with several ranks what this one owns."""
        done = 0
        for part, target in self.parts(tensor.name):
            numel = part.stop - part.start
            if not isinstance(target, ParamHandle) or target.cut is None:
                yield tensor.span(done, numel)
            elif (owned := owned_run(target)) is not None:
                if is_scattered(part.view):
                    yield tensor.span(done, numel)
                else:
                    for run in owned_runs(part, owned):
                        yield tensor.span(done + run.position, run.numel)
            done += numel

    def parts(self, name: str) -> Iterator[tuple[Part, Target]]:
        """What a stored tensor consists of, and of which parameter or ordinary tensor each part is."""
        for part in self.plan.expressions.parts(self.plan.tensors[name]):
            yield part, self.opener.targets[part.source.open]


CustomLoad = Callable[..., object]
"""Called as ``custom_load(src=state_dict, dst=module)``."""


@dataclass(frozen=True)
class CustomWeights:
    """Stored weights that a function of the program's puts into a model."""

    custom_load: CustomLoad
    stored: Mapping[str, Tensor]
    module: nn.Module

    def load(self) -> None:
        """Let the function do it; tied weights are there by all of their names. Raises what it raises."""
        source = dict(self.stored)
        for names in names_of_shared(self.module.state_dict(keep_vars=True)):
            known = next((name for name in names if name in source), None)
            if known is not None:
                source.update({name: source[known] for name in names if name not in source})
        self.custom_load(src=source, dst=self.module)


def fill(plan: WeightPlan, tensor: StoredTensor, targets: Mapping[Opener, Target] | None = None) -> None:
    """Put one stored tensor where its plan says. Of a weight that is cut for several ranks, what this one owns.

    Args:
        targets: what each opener of the plan opens, where that is a model.
    """
    done = 0
    window = max(1, WINDOW_BYTES // tensor.dtype.itemsize)
    for part in plan.expressions.parts(plan.tensors[tensor.name]):
        target = None if targets is None else targets[part.source.open]
        if isinstance(target, ParamHandle) and target.cut is not None:
            _fill_owned(target, part, tensor, done)
            done += part.stop - part.start
            continue
        with part.opened() as values:
            for view in slabs(values, part.start, part.stop, window):
                if view.is_contiguous() and view.is_cpu and view.dtype is tensor.dtype:
                    tensor.read_into(view.data_ptr(), done, view.numel())
                else:
                    view.copy_(tensor.read(done, view.numel()).view(view.shape))
                done += view.numel()


def _fill_owned(handle: ParamHandle, part: Part, tensor: StoredTensor, done: int) -> None:
    """Put this rank's elements of a part into its shard; ``done``: elements of the tensor before the part."""
    owned = owned_run(handle)
    window = max(1, WINDOW_BYTES // tensor.dtype.itemsize)
    with changing_shard(handle, owned) as shard:
        if shard is None or owned is None:
            return
        if is_scattered(part.view):
            for elements, positions in owned_elements(part, owned):
                first, last = int(positions[0]), int(positions[-1]) + 1
                values = tensor.read(done + first, last - first)
                shard[elements] = values[positions - first].to(shard.dtype)
            return
        for element, position, numel in owned_runs(part, owned):
            for at in range(0, numel, window):
                count = min(window, numel - at)
                view = shard[element - owned.start + at : element - owned.start + at + count]
                if view.dtype is tensor.dtype:
                    tensor.read_into(view.data_ptr(), done + position + at, count)
                else:
                    view.copy_(tensor.read(done + position + at, count))


def match_weights(
    module: nn.Module, stored: Mapping[str, StoredTensor], named: StoredNames, needs_all: str
) -> WeightLoader:
    """Compare names, shapes and types; changes nothing.

    Args:
        named: how the weights were saved.
        needs_all: not "": names that only one side has are an error, which ends so.

    Raises:
        UsageError: with the list of what does not fit.
    """
    opener = WeightOpener(to_write=True)
    plan = named.plan(module, opener.opener_of)
    missing = sorted(plan.tensors.keys() - stored.keys())
    unknown = sorted(stored.keys() - plan.tensors.keys() - plan.metadata.keys())  # those are further names of tied ones
    if needs_all and (missing or unknown):
        differs = listed("it lacks", missing) + listed("it also has", unknown)
        raise UsageError(f"the checkpoint is of another model: {differs}{needs_all}")
    wrong = []
    for name, tensor in plan.tensors.items():
        if name not in stored:
            continue
        have, want = stored[name], tensor
        if have.shape != tuple(want.shape):
            wrong.append(f"{name}: {have.shape}, the model's is {tuple(want.shape)}")
        elif have.dtype is not want.dtype and not (have.dtype in _FLOATS and want.dtype in _FLOATS):
            wrong.append(f"{name}: {have.dtype}, the model's is {want.dtype}")
        elif have.record.order is not None:
            wrong.append(f"{name}: its elements are in another order")
    if wrong:
        raise UsageError(f"the checkpoint is of another model: {listed('these do not fit:', wrong)}build it as it was")
    return WeightLoader(plan, opener, {name: tensor for name, tensor in stored.items() if name in plan.tensors})


def listed(what: str, names: list[str]) -> str:
    """``what`` and the first of ``names``, for a message; nothing when there are none."""
    if not names:
        return ""
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return f"{what} {', '.join(map(clipped, names[:NAMES_SHOWN]))}{more}; "


class _Into:
    """Opens a tensor that is made when it is first opened."""

    def __init__(self, value: Tensor, dtype: torch.dtype) -> None:
        handle = handle_of(value)
        self.shape, self.stride = (value.shape, value.stride()) if handle is None else (handle.shape, handle.stride)
        self.dtype = dtype
        self.made: Tensor | None = None

    def __call__(self) -> AbstractContextManager[Tensor]:
        if self.made is None:
            self.made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="cpu")
        return nullcontext(self.made)


def gathered(module: nn.Module, value: Tensor, stored: Mapping[str, StoredTensor], named: StoredNames) -> Tensor | None:
    """One parameter as it was saved, whole in ordinary memory and as its elements lie now: for parameters that are
    stored in parts or in another order. None when it is not stored."""
    into: list[_Into] = []

    def opener_of(other: Tensor) -> Opener:
        made = _Into(other, torch.float32)
        if other is value:
            into.append(made)
        return made

    plan = named.plan(module, opener_of)
    for name, tensor in plan.tensors.items():
        if name in stored and any(part.source.open in into for part in plan.expressions.parts(tensor)):
            if into[0].made is None:
                into[0].dtype = stored[name].dtype
            fill(plan, stored[name])
    return into[0].made if into else None
