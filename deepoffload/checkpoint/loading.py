"""Loads a checkpoint: check everything against what is there, then change it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from deepoffload.checkpoint.source import StoredTensor, TrainingSource
from deepoffload.checkpoint.state_files import memory_order
from deepoffload.checkpoint.state_loading import PieceLoader, split_master
from deepoffload.checkpoint.stored_param import LEADS, StoredParam
from deepoffload.checkpoint.values import clipped
from deepoffload.checkpoint.weights import Target, handle_of
from deepoffload.checkpoint.weights_loading import (
    CustomLoad,
    CustomWeights,
    WeightLoader,
    gathered,
    listed,
    match_weights,
)
from deepoffload.errors import UnsupportedError, UsageError
from deepoffload.optim.base import HostOptimizer
from deepoffload.optim.optimizer_parts import kind_of, needs_of_pieces, restore, restored_groups
from deepoffload.optim.ordinary import layout_of
from deepoffload.optim.rule import SCALE_SUFFIX
from deepoffload.optim.state import MASTER_PART_KEYS
from deepoffload.optim.state_dict import Group
from deepoffload.params.pager import Pager
from deepoffload.params.torch_private import outside_user_modes
from deepoffload.params.unit import ParamHandle

WITHOUT_OPTIMIZER = "load_optimizer_states=False loads the weights alone and leaves the optimizer as it is"


@dataclass(frozen=True)
class Wanted:
    """What of a checkpoint is loaded.

    Attributes:
        strict: weights that only one side has are an error.
        optimizer: its state; weights get their exact masters in either case.
        schedule: the state of the object called ``scheduler``.
        weights_only: nothing but the weights, with their masters.
        custom_load: puts the weights in, which are their own masters then.
    """

    strict: bool = True
    optimizer: bool = True
    schedule: bool = True
    weights_only: bool = False
    custom_load: CustomLoad | None = None

    def __post_init__(self) -> None:
        """Raises UsageError: ``custom_load`` cannot be called as it will be."""
        if self.custom_load is None:
            return
        try:
            inspect.signature(self.custom_load).bind(src={}, dst=None)
        except TypeError as error:
            raise UsageError(
                f"custom_load_fn is called as custom_load_fn(src=state_dict, dst=module), and {self.custom_load!r} "
                f"cannot be: {error}"
            ) from None
        except ValueError:
            pass  # a function in C, of which Python does not know the arguments

    @property
    def with_optimizer(self) -> bool:
        return self.optimizer and not self.weights_only


@dataclass(frozen=True)
class Loading:
    """A checkpoint that fits, ready to be put in.

    Attributes:
        stored: what the checkpoint has of each parameter, by ``id``.
        groups: the optimizer's with the settings of the checkpoint; None: the optimizer stays as it is.
        small: the rest of the optimizer's state, by parameter.
    """

    source: TrainingSource
    weights: WeightLoader | CustomWeights
    params: Mapping[str, nn.Parameter]
    stored: Mapping[int, StoredParam]
    optimizer: torch.optim.Optimizer | None
    groups: list[Group] | None
    small: Mapping[str, dict[str, Any]] = field(default_factory=dict)

    def apply(self, pagers: Sequence[Pager]) -> None:
        """Put weights, masters and optimizer state in.

        Raises:
            UsageError: a checksum is wrong. IoFailure: a transfer failed. A part is loaded then.
        """
        if isinstance(self.weights, CustomWeights):
            self.weights.load()
        with outside_user_modes(), torch.no_grad():
            if isinstance(self.weights, WeightLoader):
                self.weights.load(self.source.reader, self._is_corrected)
            if self.optimizer is not None and self.groups is not None:
                restore(self.optimizer, self.groups, self._in_memory())
            for pager in pagers:
                self._load_pieces(pager)
            self._correct_ordinary()

    def _is_corrected(self, target: Target) -> bool:
        """Whether a weight becomes what its master gives, so that the stored weight need not be put in first."""
        param = target.tensor if isinstance(target, ParamHandle) else target
        stored = self.stored.get(id(param))
        return param is not None and stored is not None and stored.corrects(param.dtype)

    def _load_pieces(self, pager: Pager) -> None:
        stored = {}
        for param in self.params.values():
            handle = handle_of(param)
            if handle is not None and handle.pager is pager and id(param) in self.stored:
                stored[handle] = self.stored[id(param)]
        ours = self.optimizer if isinstance(self.optimizer, HostOptimizer) and self.groups is not None else None
        needs = {} if ours is None else needs_of_pieces(ours, ours.param_groups)
        PieceLoader(pager, stored, needs, ours).load(self.source.reader)

    def _in_memory(self) -> dict[Tensor, dict[str, Any]]:
        """The optimizer's state of each parameter, without what goes into pieces."""
        ours = isinstance(self.optimizer, HostOptimizer)
        names = {id(param): name for name, param in self.params.items()}
        found: dict[Tensor, dict[str, Any]] = {}
        for group in self.groups or ():
            for param in group["params"]:
                name = names[id(param)]
                state = dict(self.small.get(name, {}))
                stored = self.stored.get(id(param))
                if stored is not None and not (ours and handle_of(param) is not None):
                    state.update(_ordinary_state(param, stored, ours=ours))
                if state:
                    found[param] = state
        return found

    def _correct_ordinary(self) -> None:
        """Ordinary weights that were saved in another type become what their master gives."""
        for param in self.params.values():
            stored = self.stored.get(id(param))
            if stored is not None and handle_of(param) is None and stored.corrects(param.dtype):
                master = stored.master(0, param.numel()).view(param.shape)
                param.detach().copy_(master.to(param.dtype))


def _ordinary_state(param: Tensor, stored: StoredParam, *, ours: bool) -> dict[str, Tensor]:
    """Arrays as ``optimizer.state`` holds them; for torch's own optimizers without 8-bit codes and masters."""
    found: dict[str, Tensor] = {}
    for key in stored.keys:
        array = stored.arrays[key]
        scales = stored.arrays.get(key + SCALE_SUFFIX)
        if scales is None:
            found[key] = array.whole().contiguous()
        elif ours and array.record.order is None:
            found[key], found[key + SCALE_SUFFIX] = array.whole(), scales.whole()
        else:
            found[key] = stored.whole(key)
    lead = MASTER_PART_KEYS.get(layout_of(param, True)) if ours and param.dtype in _HALVES else None
    if lead is not None and stored.weight_dtype is not None:
        if stored.weight_dtype is param.dtype:
            if lead in stored.arrays:
                found[lead] = stored.arrays[lead].whole().contiguous()
        elif LEADS & stored.arrays.keys() or stored.weight_dtype is torch.float32:
            master = stored.master(0, param.numel()).view(param.shape)
            found[lead] = split_master(master) if lead == "remainder" else master
    return found


_HALVES = frozenset({torch.bfloat16, torch.float16})


# -- checking --------------------------------------------------------------------------------------------------------


def match(
    source: TrainingSource, module: nn.Module, optimizer: torch.optim.Optimizer | None, wanted: Wanted
) -> Loading:
    """Compare a checkpoint with the objects that it will be loaded into; changes nothing.

    Raises:
        UsageError: with the list of what does not fit and the argument that would allow it.
    """
    hub_names, left_out = _how_named(source)
    weights: WeightLoader | CustomWeights
    if wanted.custom_load is None:
        weights = match_weights(module, source.weights, hub_names=hub_names, left_out=left_out, strict=wanted.strict)
        saved, keys = _how_saved(weights), LEADS
    else:
        weights = CustomWeights(wanted.custom_load, source.mapped_weights(), module)
        saved, keys = {}, frozenset()
    if wanted.with_optimizer:
        keys |= {key for full in source.arrays if (key := full.rpartition(".")[2]) not in LEADS}
    params = dict(module.named_parameters())
    gather = partial(gathered, module, stored=source.weights, hub_names=hub_names, left_out=left_out)
    by_param = _by_param(source, saved, keys, params, gather, with_optimizer=wanted.with_optimizer)
    if not wanted.with_optimizer:
        return Loading(source, weights, params, by_param, optimizer, None)
    groups, small = _match_optimizer(source, optimizer, params, by_param)
    return Loading(source, weights, params, by_param, optimizer, groups, small)


def _how_named(source: TrainingSource) -> tuple[bool, frozenset[str]]:
    """Whether weights have their names on the hub, and which were left out."""
    layout = source.training.get("weights")
    names = layout.get("left_out") if isinstance(layout, dict) else None
    if not isinstance(layout, dict) or not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UsageError(f"{source.folder} is damaged: it does not say how its weights are named")
    return bool(layout.get("hub_names")), frozenset(names)


def _by_param(
    source: TrainingSource,
    saved: Mapping[int, _Saved],
    keys: Set[str],
    params: Mapping[str, nn.Parameter],
    gather: Callable[[Tensor], Tensor | None],
    *,
    with_optimizer: bool,
) -> dict[int, StoredParam]:
    arrays: dict[str, dict[str, StoredTensor]] = {}
    for full, array in source.arrays.items():
        name, _, key = full.rpartition(".")
        if key in keys:
            arrays.setdefault(name, {})[key] = array
    unknown = sorted(arrays.keys() - params.keys())
    if unknown and with_optimizer:
        raise UsageError(
            f"the checkpoint is of another model: {listed('it has optimizer state of', unknown)}{WITHOUT_OPTIMIZER}"
        )
    found = {}
    for name, param in params.items():
        handle = handle_of(param)
        shape, stride = (param.shape, param.stride()) if handle is None else (handle.shape, handle.stride)
        order = memory_order(shape, stride) if handle is not None else None
        mine, weight = arrays.get(name, {}), saved.get(id(param) if handle is None else id(handle))
        if mine or weight is not None:
            whole, dtype = (None, None) if weight is None else (weight.whole, weight.dtype)
            made = StoredParam(name, tuple(shape), tuple(stride), order, mine, whole, dtype, partial(gather, param))
            found[id(param)] = made
    return found


class _Saved(NamedTuple):
    """How a parameter was saved: its type, and the stored tensor when that is all of it, element by element."""

    dtype: torch.dtype
    whole: StoredTensor | None


def _how_saved(weights: WeightLoader) -> dict[int, _Saved]:
    """By ``id`` of the handle of a paged parameter, or of an ordinary tensor."""
    found = {}
    for name, tensor in weights.stored.items():
        parts = list(weights.parts(name))
        for part, target in parts:
            base, view = part.source.base, part.view
            same = view.shape == base.shape and view.stride() == base.stride() and base.is_contiguous()
            whole = tensor if len(parts) == 1 and same and part.stop - part.start == base.numel() else None
            found[id(target)] = _Saved(tensor.dtype, whole)
    return found


def _match_optimizer(
    source: TrainingSource,
    optimizer: torch.optim.Optimizer | None,
    params: Mapping[str, nn.Parameter],
    by_param: Mapping[int, StoredParam],
) -> tuple[list[Group] | None, dict[str, dict[str, Any]]]:
    saved = source.training.get("optimizer")
    if saved is None and optimizer is None:
        return None, {}
    if saved is None or optimizer is None:
        which = "the checkpoint has no optimizer" if saved is None else "there is no optimizer to load into"
        raise UsageError(f"{which}; {WITHOUT_OPTIMIZER}")
    try:
        kind, settings, names, small = saved["kind"], saved["groups"], saved["params"], saved["states"]
        known = {id(param): name for name, param in params.items()}
        own = [[known.get(id(param), "") for param in group["params"]] for group in optimizer.param_groups]
        if kind != kind_of(optimizer):
            raise UsageError(
                f"the checkpoint has the state of another optimizer: {clipped(str(kind))}, and this is "
                f"{type(optimizer).__name__} ({kind_of(optimizer)}); {WITHOUT_OPTIMIZER}"
            )
        if len(settings) != len(own) or len(names) != len(own):
            raise UsageError(
                f"the checkpoint has {len(settings)} parameter groups, the optimizer {len(own)}; {WITHOUT_OPTIMIZER}"
            )
        _match_groups(names, own)
        try:
            groups = restored_groups(optimizer, settings)
        except (ValueError, UnsupportedError) as error:
            raise UsageError(
                f"the optimizer cannot have the settings of the checkpoint: {clipped(str(error))}"
            ) from error
        if isinstance(optimizer, HostOptimizer):
            _match_arrays(optimizer, groups, small, by_param)
        states = {name: _checked_state(state) for name, state in small.items()}
    except UsageError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise UsageError(
            f"{source.folder} is damaged: it does not describe its optimizer ({clipped(repr(error))})"
        ) from error
    return groups, states


def _checked_state(state: Mapping[str, Any]) -> dict[str, Any]:
    found = {str(key): value for key, value in state.items()}
    if "step" in found:
        float(found["step"])
    return found


def _match_groups(saved: Sequence[Sequence[str]], own: Sequence[Sequence[str]]) -> None:
    for index, (theirs, mine) in enumerate(zip(saved, own, strict=True)):
        lacking, more = sorted(set(mine) - set(theirs)), sorted(set(theirs) - set(mine))
        if lacking or more:
            raise UsageError(
                f"parameter group {index} is another one than the checkpoint's: "
                f"{listed('the checkpoint lacks', lacking)}{listed('it also has', more)}{WITHOUT_OPTIMIZER}"
            )


def _match_arrays(
    optimizer: HostOptimizer,
    groups: list[Group],
    small: Mapping[str, Mapping[str, Any]],
    by_param: Mapping[int, StoredParam],
) -> None:
    """Parameters that have made steps have every array that the optimizer needs."""
    lacking = []
    for handle, (arrays, _) in needs_of_pieces(optimizer, groups).items():
        stored = by_param.get(id(handle.tensor))
        if stored is None or not (stored.keys or "step" in small.get(stored.name, {})):
            continue
        lacking += [f"{stored.name}.{key}" for key in arrays if key not in stored.arrays]
    if lacking:
        raise UsageError(
            f"the checkpoint has no state of this optimizer: {listed('it lacks', lacking)}{WITHOUT_OPTIMIZER}"
        )
