"""``tile_mlp``: computes MLPs for some tokens at a time, so that their wide activations never exist for all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from deepoffload.errors import UnsupportedError, UsageError
from deepoffload.params.code_scan import mark_careful
from deepoffload.params.torch_private import tree_flatten

ENDINGS = ("MLP", "FeedForward", "FFN")
"""How the classes of MLPs are called."""

MIXING = (nn.MultiheadAttention, nn.RNNBase, nn.modules.batchnorm._BatchNorm)
"""Layers that look at several tokens, as classes called ``...Attention`` and convolutions wider than 1 do."""


class TokensInTiles:
    """Stands before the class of a module whose calls are to run in tiles of tokens.

    Attributes:
        num_tiles: at most so many.
    """

    num_tiles = 1

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        run: Callable[..., Tensor] = super().forward  # type: ignore[misc]
        rows = _rows_of(self, run, args, kwargs)  # type: ignore[arg-type]  # it stands before a module
        dim = len(rows) - 1
        largest = max(1, -(-rows[dim] // self.num_tiles))
        found = []
        for start in range(0, max(rows[dim], 1), largest):
            size = min(largest, rows[dim] - start)
            cut = partial(_part, dim=dim, start=start, size=size)
            own = [cut(value) for value in args]
            named = {name: cut(value) for name, value in kwargs.items()}
            if torch.is_grad_enabled():
                out = checkpoint(run, *own, use_reentrant=False, **named)
            else:
                out = run(*own, **named)
            if not isinstance(out, Tensor) or out.shape[:-1] != (*rows[:dim], size):
                raise UnsupportedError(
                    f"tile_mlp: {type(self).__name__} gives something else than one tensor with a row for each token; "
                    "leave this module out of modules="
                )
            found.append(out)
        return torch.cat(found, dim=dim)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class below has no name under which pickle could find it.
        return _unpickled, (type(self).__mro__[2], self.num_tiles), self.__dict__


def _rows_of(
    module: nn.Module, run: Callable[..., Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[int, ...]:
    """The shape of what is computed by itself, ``[..., tokens]``, which every tensor of the call begins with.

    Raises:
        UnsupportedError: the call cannot be cut by tokens.
    """
    leave_out = "leave this module out of modules="
    first = args[0] if args else kwargs.get(next(iter(signature(run).parameters), ""))
    given = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)]
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    rows = tuple(first.shape[:-1]) if isinstance(first, Tensor) else ()
    if not rows or len(tensors) < len(given) or any(tuple(each.shape[: len(rows)]) != rows for each in tensors):
        shapes = ", ".join(str(list(value.shape)) for value in given)
        raise UnsupportedError(
            f"tile_mlp: {type(module).__name__} is called with tensors of shapes {shapes or '(no tensor)'}. What can "
            "be cut is one [..., tokens, features], and others that begin with the same [..., tokens], such as a "
            f"residual, or the routing of experts; {leave_out}"
        )
    if len(tensors) == 1 and any(param is not None and param.dim() == 3 for param in module._parameters.values()):
        raise UnsupportedError(
            f"tile_mlp: {type(module).__name__} has stacked experts and is called without their routing, so it tells "
            f"them by the places of tokens, which parts would not have; {leave_out}"
        )
    return rows


def _part(value: Any, dim: int, start: int, size: int) -> Any:
    """What some of the tokens get of an argument."""
    return value.narrow(dim, start, size) if isinstance(value, Tensor) else value


def tile_mlp(model: nn.Module, tiles: int = 8, modules: Iterable[str | type[nn.Module]] | None = None) -> list[str]:
    """Let MLPs of ``model`` compute ``tiles`` parts of a sequence one after the other.

    The activations inside an MLP then take one part in ``tiles`` of their memory: backward runs each part forward
    again, behind torch's activation checkpoint. A paged weight is fetched once for all parts, where the budget holds
    the weights of one MLP. Names stay as they are; the modules get another class, a subclass of what it was.
    Numbers are those of the same call on a model in memory. The forward has the bits of the whole sequence where
    kernels compute rows alike; gradients of weights are sums over parts, and round otherwise.

    Args:
        tiles: how many parts; a sequence of fewer tokens has fewer. The last part may be shorter.
        modules: classes, or names or endings of names (``"mlp"`` is every ``layers.3.mlp``). Not said: modules
            whose class is called ``...MLP``, ``...FeedForward`` or ``...FFN``. Each has to compute every token by
            itself, from a first tensor ``[..., tokens, features]``. Other tensors of the call are cut with it where
            they begin with the same ``[..., tokens]``: a residual (Bloom, MPT), the chosen experts and their weights
            (``modules="experts"``). What is no tensor goes to every part as it is.

    Returns:
        The names of the modules.

    Raises:
        UsageError: ``tiles`` is below 1, nothing is found, or a module is an MLP in another one. A module is tiled
            already. UnsupportedError: a module has a layer that looks at several tokens. Nothing has been changed
            then. UnsupportedError also in its first call, for a module that takes or gives other tensors.

    Source: TiledMLP of ALST (arXiv 2506.13996).
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"tile_mlp takes a torch.nn.Module, not {type(model).__name__}")
    if isinstance(tiles, bool) or not isinstance(tiles, int) or tiles < 1:
        raise UsageError(f"tile_mlp: tiles={tiles!r} has to be a whole number from 1 on")
    wanted = None if modules is None else _checked(modules)
    found = {name: module for name, module in model.named_modules() if _is_wanted(name, module, wanted)}
    if not found:
        what = f"whose class is called ...{', ...'.join(ENDINGS)}" if wanted is None else f"that {list(wanted)} names"
        raise UsageError(
            f"tile_mlp: {type(model).__name__} has no module {what}; modules= takes classes, names or their endings"
        )
    for name, module in found.items():
        if isinstance(module, TokensInTiles):
            raise UsageError(f"tile_mlp: {name or 'the model'} is computed in tiles already")
        inner = next((other for other in found if other != name and other.startswith(f"{name}." if name else "")), None)
        if inner is not None:
            raise UsageError(f"tile_mlp: {inner} is part of {name or 'the model'}; name one of the two")
        mixing = next((part for part in module.modules() if _mixes(part)), None)
        if mixing is not None:
            raise UnsupportedError(
                f"tile_mlp: {name or 'the model'} has {type(mixing).__name__}, which looks at several tokens at once, "
                "and parts of a sequence would change its numbers; leave this module out of modules="
            )
    for module in found.values():
        module.__class__ = _in_tiles(type(module), tiles)
        mark_careful(module)  # its parts run again in backward, without the windows around it
    return list(found)


def _mixes(module: nn.Module) -> bool:
    """Whether a layer looks at several tokens, as far as its class tells."""
    sizes = module.kernel_size if isinstance(module, nn.modules.conv._ConvNd) else ()
    is_attention = type(module).__name__.endswith("Attention")
    return is_attention or isinstance(module, MIXING) or any(size > 1 for size in sizes)


def _checked(modules: Iterable[str | type[nn.Module]]) -> Sequence[str | type[nn.Module]]:
    given = [modules] if isinstance(modules, (str, type)) else list(modules)
    for each in given:
        if not (isinstance(each, str) and each) and not (isinstance(each, type) and issubclass(each, nn.Module)):
            raise UsageError(f"tile_mlp: modules= takes names and classes of modules, not {each!r}")
    return given


def _is_wanted(name: str, module: nn.Module, wanted: Sequence[str | type[nn.Module]] | None) -> bool:
    if wanted is None:
        return type(module).__name__.endswith(ENDINGS) and not isinstance(module, (nn.ModuleList, nn.ModuleDict))
    return any(
        isinstance(module, each) if isinstance(each, type) else name == each or name.endswith(f".{each}")
        for each in wanted
    )


def _in_tiles(kind: type[nn.Module], num_tiles: int) -> type[nn.Module]:
    return type(kind.__name__, (TokensInTiles, kind), {"num_tiles": num_tiles, "__module__": kind.__module__})


def _unpickled(kind: type[nn.Module], num_tiles: int) -> nn.Module:
    made: nn.Module = object.__new__(_in_tiles(kind, num_tiles))
    return made
