"""Loads a checkpoint: check everything against what is there, then change it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from deepoffload.checkpoint.arguments import check_switches
from deepoffload.checkpoint.optimizer_matching import MatchedOptimizer, match_optimizer
from deepoffload.checkpoint.own_ranges import show_again
from deepoffload.checkpoint.remedies import OF_LOAD, Remedies
from deepoffload.checkpoint.several_ranks import meet
from deepoffload.checkpoint.source import StoredTensor, TrainingSource
from deepoffload.checkpoint.state_files import memory_order
from deepoffload.checkpoint.state_loading import PieceLoader, split_master
from deepoffload.checkpoint.stored_param import LEADS, StoredParam
from deepoffload.checkpoint.tile_places import StoredPlaces, StoredTile, places_of
from deepoffload.checkpoint.weights import Target, handle_of
from deepoffload.checkpoint.weights_loading import (
    CustomLoad,
    CustomWeights,
    StoredNames,
    WeightLoader,
    gathered,
    listed,
    match_weights,
)
from deepoffload.errors import UsageError
from deepoffload.memory.lock import SHIELD
from deepoffload.optim.base import HostOptimizer
from deepoffload.optim.foreign.packed import is_packed_key, without_arrays
from deepoffload.optim.optimizer_parts import needs_of_pieces, restore
from deepoffload.optim.ordinary import layout_of
from deepoffload.optim.rule import SCALE_SUFFIX
from deepoffload.optim.state import MASTER_PART_KEYS
from deepoffload.params.pager import Pager
from deepoffload.params.torch_private import outside_user_modes
from deepoffload.params.unit import ParamHandle
from deepoffload.ranks.joint_task import JointTask


@dataclass(frozen=True)
class Wanted:
    """What of a checkpoint is loaded.

    Attributes:
        strict: weights that only one side has are an error.
        optimizer: its state; weights get their exact masters in either case.
        schedule: the state of the object called ``scheduler``.
        weights_only: nothing but the weights, with their masters.
        custom_load: puts the weights in, which are their own masters then.
        remedies: what the call has for what does not fit.
    """

    strict: bool = True
    optimizer: bool = True
    schedule: bool = True
    weights_only: bool = False
    custom_load: CustomLoad | None = None
    remedies: Remedies = OF_LOAD

    @property
    def switches(self) -> dict[str, bool]:
        """By the names that calls have for them."""
        return {
            "load_module_strict": self.strict,
            "load_optimizer_states": self.optimizer,
            "load_lr_scheduler_states": self.schedule,
            "load_module_only": self.weights_only,
        }

    def __post_init__(self) -> None:
        """Raises UsageError: a switch is neither True nor False, or ``custom_load`` cannot be called as it will be."""
        check_switches(**self.switches)
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
        names: what the checkpoint calls each parameter, by ``id``: a tile as its layer.
        stored: what the checkpoint has of each parameter, by ``id``.
        state: what goes into the optimizer.
    """

    source: TrainingSource
    weights: WeightLoader | CustomWeights
    params: Mapping[str, nn.Parameter]
    names: Mapping[int, str]
    stored: Mapping[int, StoredParam]
    optimizer: torch.optim.Optimizer | None
    state: MatchedOptimizer

    def apply(self, pagers: Sequence[Pager], task: JointTask | None = None) -> None:
        """Put weights, masters and optimizer state in; with several ranks, ``task``, what this one owns.

        Raises:
            UsageError: a checksum is wrong. IoFailure: a transfer failed. A part is loaded then. Also what another rank
            has failed with.
        """
        if isinstance(self.weights, CustomWeights):
            self.weights.load()
        with outside_user_modes(), torch.no_grad():
            SHIELD.let_through(self._apply, (pagers, task))

    def _apply(self, pagers: Sequence[Pager], task: JointTask | None) -> None:
        if isinstance(self.weights, WeightLoader):
            self.weights.load(self.source.reader, self._is_corrected)
        self._correct_ordinary()
        if self.optimizer is not None and self.state.groups is not None:
            kept = [param for param in self.params.values() if self.names[id(param)] in self.state.kept]
            restore(self.optimizer, self.state.groups, self._in_memory(self.optimizer), kept)
        for pager in pagers:
            self._load_pieces(pager)
        meet(task)
        for pager in pagers:
            if pager.link is not None:
                show_again(pager)

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
        ours = self.optimizer if isinstance(self.optimizer, HostOptimizer) and self.state.groups is not None else None
        needs = {} if ours is None else needs_of_pieces(ours, ours.param_groups)
        PieceLoader(pager, stored, needs, ours).load(self.source.reader)

    def _in_memory(self, optimizer: torch.optim.Optimizer) -> dict[Tensor, dict[str, Any]]:
        """The optimizer's state of each parameter, without what goes into pieces."""
        ours = isinstance(optimizer, HostOptimizer)
        found: dict[Tensor, dict[str, Any]] = {}
        for group in self.state.groups or ():
            for param in group["params"]:
                name = self.names[id(param)]
                kept = optimizer.state.get(param, {}) if name in self.state.kept else {}
                state = dict(kept or self.state.small.get(name, {}))
                stored = self.stored.get(id(param))
                if stored is not None and not (ours and handle_of(param) is not None):
                    state = without_arrays({**state, **_ordinary_state(param, stored, ours=ours)})
                elif stored is not None and isinstance(optimizer, HostOptimizer) and optimizer.rule.foreign:
                    if name not in self.state.kept:
                        arrays = optimizer._arrays_of(param, group)
                        state.update({k: stored.arrays[k].whole() for k in stored.keys if k not in arrays})
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
        if is_packed_key(key):
            found[key] = array.read(0, array.record.numel)
        elif scales is None:
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
    named = _how_named(source)
    weights: WeightLoader | CustomWeights
    if wanted.custom_load is None:
        weights = match_weights(
            module, source.weights, named, needs_all=wanted.remedies.not_strict if wanted.strict else ""
        )
        saved, keys = _how_saved(weights), LEADS
    else:
        weights = CustomWeights(wanted.custom_load, source.mapped_weights(), module)
        saved, keys = {}, frozenset()
    if wanted.with_optimizer:
        keys |= {key for full in source.arrays if (key := full.rpartition(".")[2]) not in LEADS}
    params = dict(module.named_parameters())
    places = places_of(module, apart=named.apart)
    gather = partial(gathered, module, stored=source.weights, named=named)
    needs_all = wanted.remedies.not_strict if wanted.with_optimizer and wanted.strict else ""
    theirs = optimizer is not None and (not isinstance(optimizer, HostOptimizer) or optimizer.rule.foreign)
    by_param = _by_param(source, saved, keys, params, places, gather, needs_all, theirs)
    names = {key: place.name for key, place in places.items()}
    state = MatchedOptimizer()
    if wanted.with_optimizer:
        allows = wanted.remedies.without_optimizer
        state = match_optimizer(source, optimizer, names, by_param, strict=wanted.strict, allows=allows)
    return Loading(source, weights, params, names, by_param, optimizer, state)


def _how_named(source: TrainingSource) -> StoredNames:
    """Whether weights have their names on the hub, and which were left out."""
    layout = source.training.get("weights")
    names = layout.get("left_out") if isinstance(layout, dict) else None
    if not isinstance(layout, dict) or not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UsageError(f"{source.folder} is damaged: it does not say how its weights are named")
    return StoredNames(bool(layout.get("hub_names")), frozenset(names), bool(layout.get("apart")))


def _by_param(
    source: TrainingSource,
    saved: Mapping[int, _Saved],
    keys: Set[str],
    params: Mapping[str, nn.Parameter],
    places: StoredPlaces,
    gather: Callable[[Tensor], Tensor | None],
    needs_all: str,
    shapes_vary: bool,
) -> dict[int, StoredParam]:
    """What the checkpoint has of each parameter.

    Args:
        shapes_vary: as for :class:`StoredParam`.
        needs_all: not "": optimizer state of what is no parameter of the model is an error, which ends so.
    """
    arrays: dict[str, dict[str, StoredTensor]] = {}
    for full, array in source.arrays.items():
        name, _, key = full.rpartition(".")
        if key in keys:
            arrays.setdefault(name, {})[key] = array
    unknown = sorted(arrays.keys() - {place.name for place in places.values()})
    if unknown and needs_all:
        raise UsageError(
            f"the checkpoint is of another model: {listed('it has optimizer state of', unknown)}{needs_all}"
        )
    found = {}
    for param in params.values():
        handle, place = handle_of(param), places[id(param)]
        name = place.name
        shape, stride = (param.shape, param.stride()) if handle is None else (handle.shape, handle.stride)
        order = memory_order(shape, stride) if handle is not None else None
        mine: Mapping[str, StoredTensor] = arrays.get(name, {})
        if place.shape != tuple(shape):
            mine = {key: StoredTile(array, place, tuple(shape), key) for key, array in mine.items()}
        weight = saved.get(id(param) if handle is None else id(handle))
        if mine or weight is not None:
            whole, dtype = (None, None) if weight is None else (weight.whole, weight.dtype)
            made_by = partial(gather, param)
            found[id(param)] = StoredParam(
                name, tuple(shape), tuple(stride), order, mine, whole, dtype, made_by, shapes_vary=shapes_vary
            )
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
