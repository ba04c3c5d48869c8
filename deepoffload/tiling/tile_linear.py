"""``tile_linear``: splits the large linear layers of a model while it is built."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn

from deepoffload.config.units import format_bytes, parse_bytes
from deepoffload.errors import UnsupportedError, UsageError
from deepoffload.native.cpu_adam import STATE_BLOCK
from deepoffload.params.unit import ParamHandle
from deepoffload.runtime.registration import registered_in
from deepoffload.tiling.linear import LinearInTiles

VECTOR = 16
"""Rows that kernels compute together."""


def tile_linear(model: nn.Module, max_bytes: int | str = "64MiB") -> list[str]:
    """Replace every ``nn.Linear`` of ``model`` whose weight is above ``max_bytes`` by tiles of its output features.

    Call it inside ``offload_context``, when the model is built and before there is an optimizer. Each tile is a
    separate ``nn.Linear``, and can be a unit: a layer then trains in a budget that cannot hold its weight. A layer
    that is above the budget waits in ordinary memory until it is split. Names stay the model's in ``state_dict``,
    ``load_state_dict``, ``save_pretrained``, ``load_pretrained`` and ``TrainingState``; ``named_parameters`` has the
    tiles (``fc.tiles.0.weight``). A model outside of every context is split, too: paged numbers are those of
    that model.

    Args:
        max_bytes: of a tile's weight, in the type in which it is registered; bytes or text. The last tile of a layer
            may be smaller than the others.

    Returns:
        The names of the layers that were split; none where no weight is above ``max_bytes``.

    Raises:
        UsageError: ``max_bytes`` is not positive or below one row of a layer; ``model`` is such a layer itself, or was
            placed already. UnsupportedError: the weight is tied, or has hooks. Nothing has been changed then.

    Source: memory-centric tiling of ZeRO-Infinity (arXiv 2104.07857, 5.1.3).
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"tile_linear takes a torch.nn.Module, not {type(model).__name__}")
    limit = _limit(max_bytes)
    found = list(_large(model, limit))
    places = _places_of(model)
    for name, linear in found:
        _check(name, linear, limit, places)
    names = [name for name, _ in found]
    del places
    while found:
        name, linear = found[0]
        slots = [param.__dict__.get("_slot") for param in linear.parameters()]
        tiled = _split(linear, rows_of(linear.in_features, linear.weight, limit))
        for name in [name for name, other in found if other is linear]:
            parent, _, key = name.rpartition(".")
            setattr(model.get_submodule(parent), key, tiled)
        found = [(name, other) for name, other in found if other is not linear]
        del linear
        _give_back(slots)
    return names


def _limit(max_bytes: int | str) -> int:
    try:
        limit = parse_bytes(max_bytes)
    except ValueError as error:
        raise UsageError(f"tile_linear: max_bytes: {error}") from error
    if limit < 1:
        raise UsageError(f"tile_linear: max_bytes={max_bytes!r} has to be positive")
    return limit


def _large(model: nn.Module, limit: int) -> Iterator[tuple[str, nn.Linear]]:
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.Linear) and module.weight.nbytes > limit:
            if type(module) is nn.Linear:
                yield name, module
            else:
                raise UnsupportedError(
                    f"tile_linear: {name} is a {type(module).__name__}, and only an nn.Linear itself can be split; "
                    "call tile_linear before its class is changed, or raise max_bytes above "
                    f"{format_bytes(module.weight.nbytes)}"
                )


_Places = dict[int, list[tuple[nn.Module, str]]]
"""Where each parameter is registered, by ``id``: modules and names."""


def _places_of(model: nn.Module) -> _Places:
    found: _Places = {}
    for prefix, module in model.named_modules():
        for key, param in module._parameters.items():
            if param is not None:
                found.setdefault(id(param), []).append((module, f"{prefix}.{key}" if prefix else key))
    return found


def _check(name: str, linear: nn.Linear, limit: int, places: _Places) -> None:
    weight = linear.weight
    if not name:
        raise UsageError("tile_linear: the model is itself the layer to be split; give the module that holds it")
    slot = weight.__dict__.get("_slot")
    if isinstance(slot, ParamHandle) and slot.unit is not None:
        raise UsageError(
            f"tile_linear: {name} was placed when its offload_context ended; call tile_linear inside the context"
        )
    row_bytes = linear.in_features * weight.element_size()
    if limit < row_bytes:
        raise UsageError(
            f"tile_linear: max_bytes={limit} is below one row of {name}, {row_bytes} bytes; give at least that"
        )
    for param in (each for each in (weight, linear.bias) if each is not None):
        owners, names = zip(*places[id(param)], strict=True)
        outside = [type(owner).__name__ for owner in registered_in(cast(nn.Parameter, param)) if owner not in owners]
        if len(names) > 1 or outside:
            with_what = ", ".join([*(other for other in names if not other.startswith(f"{name}.")), *outside])
            raise UnsupportedError(
                f"tile_linear: a parameter of {name} is tied to {with_what}: tiles would be separate weights. Raise "
                f"max_bytes above {format_bytes(weight.nbytes)}, or untie them (tie_word_embeddings=False)"
            )
        if param._backward_hooks:
            raise UnsupportedError(f"tile_linear: a parameter of {name} has hooks; put them on after tile_linear")
    if linear._forward_hooks or linear._forward_pre_hooks or linear._backward_hooks or linear._backward_pre_hooks:
        raise UnsupportedError(f"tile_linear: {name} has hooks, which its tiles would not have; put them on afterwards")


def rows_of(in_features: int, weight: Tensor, limit: int) -> int:
    """Output features of a tile: tiles are about equal, and at most ``limit`` bytes. Where that leaves room they begin
    where blocks of 8-bit state do, so that it can be stored under the layer's name."""
    most = limit // (in_features * weight.element_size())
    num_tiles = -(-weight.shape[0] // most)
    even = -(-weight.shape[0] // num_tiles)
    for grain in (STATE_BLOCK, VECTOR):
        rows = min(-(-even // grain) * grain, most // grain * grain)
        if rows:
            return rows
    return even


def _give_back(slots: list[object]) -> None:
    """What a layer took that is gone goes back at once, not only when the context ends."""
    for slot in slots:
        if isinstance(slot, ParamHandle) and slot.tensor is None and slot.block is not None:
            pager = slot.pager
            with pager.lock:
                if pager.link is None:  # ranks give back together, when the model is placed
                    pager.tiers.discard(slot.block)


def _split(linear: nn.Linear, rows: int) -> LinearInTiles:
    """The tiles of a layer, with its values."""
    tiles = [
        _tile(linear, start, min(start + rows, linear.out_features)) for start in range(0, linear.out_features, rows)
    ]
    return LinearInTiles(tiles).train(linear.training)


def _tile(linear: nn.Linear, start: int, stop: int) -> nn.Linear:
    with torch.device("meta"):
        tile = nn.Linear(linear.in_features, stop - start, bias=linear.bias is not None)
    for field in ("weight", "bias"):
        whole = getattr(linear, field)
        if whole is not None:
            with torch.no_grad():
                values = whole[start:stop].clone()
            setattr(tile, field, nn.Parameter(values, whole.requires_grad))
    return tile
