"""``tiled_loss``: the cross entropy of a linear head, without the logits of all tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deepoffload.config.units import parse_bytes
from deepoffload.errors import UsageError
from deepoffload.params.torch_private import has_values
from deepoffload.tiling.head_output import Lazily
from deepoffload.tiling.linear import LinearInTiles
from deepoffload.tiling.per_token import Factors, Losses, Tiles, losses_per_token

REDUCTIONS = ("mean", "sum", "none")
_IGNORED = -100
_PRODUCTS = (nn.Linear.forward, LinearInTiles.forward, Lazily.forward)
"""The forwards of heads that give the product with the weight, plus the bias."""


def tiled_loss(
    hidden: Tensor,
    head: nn.Module | Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    max_bytes: int | str = "32MiB",
) -> Tensor:
    """``F.cross_entropy(head(hidden).float(), targets)``, for some tokens at a time.

    The logits of all tokens are never there: the forward makes those of one tile after the other, and backward makes
    them again. A paged head is read once in each pass. Per token, the loss has the bits of the call above. The gradient
    of the head is a sum over tiles, which rounds otherwise than one product; for a head of 16 bits it is added up in
    fp32.

    Args:
        hidden: floating point, ``[..., features]``.
        head: an ``nn.Linear``, one that :func:`~deepoffload.tile_linear` has split, or the weight ``[classes,
            features]`` of one.
        targets: class numbers in int64, ``[...]``: one for each token.
        ignore_index: targets of this value count for nothing.
        reduction: ``"mean"`` over the tokens that count, ``"sum"`` or ``"none"``.
        label_smoothing: as ``F.cross_entropy`` has it. Not with a head that is split.
        max_bytes: of the fp32 logits of one tile. About twice as much is there at once. At least one token's.

    Returns:
        In fp32: one value, or one for each token.

    Raises:
        UsageError: shapes, types or values that do not fit each other, or a head with hooks or another forward;
            the message says which.

    Differentiable once. The idea is that of Liger and ALST (arXiv 2410.10989, 2506.13996).
    """
    _check_head(head)
    return loss_in_tiles(hidden, head, targets, ignore_index, reduction, label_smoothing, max_bytes)


def loss_in_tiles(
    hidden: Tensor,
    head: nn.Module | Tensor,
    targets: Tensor,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    max_bytes: int | str,
) -> Tensor:
    """:func:`tiled_loss` of a head whose hooks have run."""
    parts = _parts_of(head)
    _check(hidden, parts, targets, reduction, label_smoothing)
    try:
        limit = parse_bytes(max_bytes)
    except ValueError as error:
        raise UsageError(f"tiled_loss: max_bytes: {error}") from error
    if limit < 1:
        raise UsageError(f"tiled_loss: max_bytes={max_bytes!r} has to be positive")
    flat, labels = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    widest = max(len(part.weight) for part in parts)
    tokens = max(1, limit // (widest * 4))
    counted = labels != ignore_index
    num_classes = parts[-1].start + len(parts[-1].weight)
    if has_values(labels) and bool(((labels < 0) | (labels >= num_classes))[counted].any()):
        raise UsageError(f"tiled_loss: a target is none of the {num_classes} classes, and not ignore_index")
    if len(parts) == 1:
        weight, bias, _ = parts[0]
        tiles = Tiles(tokens, _CrossEntropy(ignore_index, label_smoothing))
        (found,) = losses_per_token(flat, weight, bias, labels, tiles)
    else:
        found = _over_classes(flat, parts, labels, counted, tokens)
    return _reduced(found, ~counted, reduction).view(targets.shape if reduction == "none" else ())


class _Part(NamedTuple):
    """Some classes of a head: those from ``start`` on."""

    weight: Tensor
    bias: Tensor | None
    start: int


def _check_head(head: nn.Module | Tensor) -> None:
    """Refuse a head whose call is more than the product with its weight: only the weight is used here."""
    for module in [head, *head.tiles] if isinstance(head, LinearInTiles) else [head]:
        if not isinstance(module, (nn.Linear, LinearInTiles)):
            continue
        kind = type(module)
        given = vars(module).get("forward")
        own_forward = (given is not None and not _is_ours(given)) or kind.forward not in _PRODUCTS
        hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
        if own_forward or any(not _is_ours(hook) for each in hooks for hook in each.values()):
            what = "another forward" if own_forward else "hooks"
            raise UsageError(
                f"tiled_loss: the head, a {kind.__name__}, has {what}, and only its weight and bias would be used; "
                "take F.cross_entropy(head(hidden), targets), or give the weight"
            )


def _is_ours(hook: object) -> bool:
    """Whether paging, or an estimate, has put it there, a hook or a forward: it changes no numbers."""
    module = getattr(hook, "__module__", None) or type(hook).__module__
    return module.startswith(("deepoffload.params.", "deepoffload.estimate."))


def _parts_of(head: nn.Module | Tensor) -> list[_Part]:
    if isinstance(head, LinearInTiles):
        return [_Part(tile.weight, tile.bias, start) for start, tile in head.placed_tiles()]
    if isinstance(head, nn.Linear):
        return [_Part(head.weight, head.bias, 0)]
    if isinstance(head, Tensor) and head.dim() == 2:
        return [_Part(head, None, 0)]
    raise UsageError(
        f"tiled_loss: head is a {type(head).__name__}; give it an nn.Linear, one that tile_linear has split, or the "
        "weight [classes, features] of one"
    )


def _check(hidden: Tensor, parts: list[_Part], targets: Tensor, reduction: str, label_smoothing: float) -> None:
    features = parts[0].weight.shape[1]
    if not hidden.is_floating_point() or hidden.dim() < 1 or hidden.shape[-1] != features:
        raise UsageError(
            f"tiled_loss: hidden is {hidden.dtype} {list(hidden.shape)}; the head takes floating point "
            f"[..., {features}]"
        )
    if targets.dtype is not torch.int64 or targets.shape != hidden.shape[:-1]:
        raise UsageError(
            f"tiled_loss: targets are {targets.dtype} {list(targets.shape)}; hidden {list(hidden.shape)} needs int64 "
            f"{list(hidden.shape[:-1])}, a class number for each token"
        )
    if reduction not in REDUCTIONS:
        raise UsageError(f"tiled_loss: reduction={reduction!r}; it is one of {', '.join(REDUCTIONS)}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise UsageError(f"tiled_loss: label_smoothing={label_smoothing!r} is not between 0 and 1")
    if label_smoothing and len(parts) > 1:
        raise UsageError("tiled_loss: label_smoothing with a head that tile_linear has split: leave the head whole")


class _CrossEntropy(Losses):
    """The loss of each token, 0 for those that do not count."""

    def __init__(self, ignore_index: int, label_smoothing: float) -> None:
        self._ignore_index = ignore_index
        self._smoothing = label_smoothing

    def values(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        torch.log_softmax(logits, 1, out=logits)
        found = F.nll_loss(logits, targets, reduction="none", ignore_index=self._ignore_index)
        if self._smoothing:
            found = (1 - self._smoothing) * found - logits.sum(1) * (self._smoothing / logits.shape[1])
            found.masked_fill_(targets == self._ignore_index, 0.0)
        return (found,)

    def factors(self, targets: Tensor, gradients: tuple[Tensor, ...], num_classes: int) -> Factors:
        of_loss = gradients[0].masked_fill(targets == self._ignore_index, 0.0)
        of_all = -of_loss * (self._smoothing / num_classes) if self._smoothing else None
        return Factors(of_loss, (self._smoothing - 1) * of_loss, of_all)

    def places(self, targets: Tensor, num_classes: int) -> Tensor:
        return targets.clamp(0, num_classes - 1)


class _SumAndTarget(Losses):
    """Of the classes from ``start`` on: the logarithm of the sum of their exponentials, and the target's logit where it
    is one of them, else 0."""

    count = 2

    def __init__(self, start: int) -> None:
        self._start = start

    def values(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        found = logits.gather(1, self.places(targets, logits.shape[1]).unsqueeze(1)).squeeze(1)
        return torch.logsumexp(logits, 1), found * self._here(targets, logits.shape[1])

    def factors(self, targets: Tensor, gradients: tuple[Tensor, ...], num_classes: int) -> Factors:
        of_sum, of_target = gradients
        return Factors(of_sum, of_target * self._here(targets, num_classes))

    def places(self, targets: Tensor, num_classes: int) -> Tensor:
        return (targets - self._start).clamp(0, num_classes - 1)

    def _here(self, targets: Tensor, num_classes: int) -> Tensor:
        return (targets >= self._start) & (targets < self._start + num_classes)


def _over_classes(hidden: Tensor, parts: list[_Part], targets: Tensor, counted: Tensor, tokens: int) -> Tensor:
    """The losses of a head that is split. All tokens go through one part before the next one comes, so that each part
    is read once in each pass."""
    sums, picked = [], []
    for weight, bias, start in parts:
        log_sum, target = losses_per_token(hidden, weight, bias, targets, Tiles(tokens, _SumAndTarget(start)))
        sums.append(log_sum)
        picked.append(target)
    losses = torch.logsumexp(torch.stack(sums), 0) - torch.stack(picked).sum(0)
    return torch.where(counted, losses, torch.zeros_like(losses))


def _reduced(losses: Tensor, ignored: Tensor, reduction: str) -> Tensor:
    """The sum or mean of losses as ``F.cross_entropy`` makes it: by the same kernel, so in the same order."""
    if reduction == "none":
        return losses
    classes = torch.where(ignored, _IGNORED, 0)
    return F.nll_loss(-losses.unsqueeze(1), classes, ignore_index=_IGNORED, reduction=reduction)
