"""Says once where ranks train ordinary parameters apart, next to a model that they share.

A prompt that is made after the context, a head around a frozen model, or a second model belong to nobody here: each
rank has a copy, and a gradient of its micro-batches. Nothing adds these up, unless the program or another library does.
So the first steps of all optimizers are looked at: where ranks step with different gradients, they train different
models. That may be meant, so it is a warning.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from deepoffload.optim.handles import handle_of
from deepoffload.params.torch_private import optimizer_step_hooks
from deepoffload.ranks.collectives import LinkError
from deepoffload.ranks.group import RankGroup
from deepoffload.ranks.limited_store import LimitedStore
from deepoffload.ranks.words import ranks_in_words
from deepoffload.runtime.rank_facts import is_distributed
from deepoffload.runtime.watch_hooks import WatchHook, remove_dead

log = logging.getLogger("deepoffload")

STEPS = 8
"""So many steps with ordinary parameters are looked at. Micro-batches that differ show in the first one."""
SAMPLES = 1 << 16
"""So many elements of a gradient, evenly spread, are looked at."""

_APART = (
    "%s step with different gradients for an ordinary parameter of shape %s, next to %s, which they share: nobody adds "
    "its gradients up over ranks, so each rank trains its copy apart. Build its module inside offload_context with the "
    "model, or average its gradients over the ranks before the step. (This is said once.)"
)


class TrainedApart:
    """Looks at what optimizers of this process step with that is not paged.

    Args:
        store: what all ranks can read and write, with keys that nobody else uses.
        rank, world_size: of this process.
        roots: the models that the ranks share.
    """

    def __init__(self, store: LimitedStore, rank: int, world_size: int, roots: Sequence[nn.Module]) -> None:
        self._store, self._rank = store, rank
        self._others = [other for other in range(world_size) if other != rank]
        self._names = " and ".join(type(root).__name__ for root in roots)
        self._steps_left = STEPS
        remove_dead(optimizer_step_hooks)
        self._hook = WatchHook(self, "before_step")
        self._hook.handles = (register_optimizer_step_pre_hook(self._hook),)

    def remove(self) -> None:
        remove_dead(optimizer_step_hooks)
        self._hook.remove()

    def before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Compare what it steps with to what the other ranks' does, as far as they have come. The last one to come sees
        all of them; nobody waits."""
        mine = list(_ordinary_gradients(optimizer)) if self._steps_left else []
        if not mine:
            return
        self._steps_left -= 1
        said = [(list(grad.shape), _sampled_sum(grad)) for grad in mine]
        step = f"{self._steps_left} steps before the last one"
        with suppress(LinkError):  # what needs the store says that it has gone
            self._store.set(f"{self._rank}, {step}", json.dumps(said))
            for rank in self._others:
                theirs = f"{rank}, {step}"
                shape = _first_apart(said, json.loads(self._store.get(theirs))) if self._store.check(theirs) else None
                if shape is not None:
                    self._steps_left = 0
                    ranks = ranks_in_words(sorted((self._rank, rank)))
                    log.warning(_APART, ranks, tuple(shape), self._names)
                    return


def watch_ordinary(group: RankGroup | None, roots: Sequence[nn.Module]) -> list[TrainedApart]:
    """What watches the optimizers of one of several ranks, that share ``roots``."""
    if group is None:
        return []
    store = LimitedStore(group.client("ordinary gradients"))
    return [TrainedApart(store, group.ranks.rank, group.ranks.world_size, roots)]


def _ordinary_gradients(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """The dense ones of parameters that are neither paged nor divided among ranks by torch."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            grad = None if handle_of(param) is not None or is_distributed(param) else param.grad
            if type(grad) is Tensor and grad.layout is torch.strided:
                yield grad


def _sampled_sum(grad: Tensor) -> int:
    """Of the bits of some elements as whole numbers: the same for the same values, in any order."""
    values = grad.detach().resolve_conj().resolve_neg().reshape(-1)
    samples = values[:: max(1, values.numel() // SAMPLES)].contiguous()
    return int(samples.view(torch.int16 if samples.itemsize == 2 else torch.uint8).sum(dtype=torch.int64))


def _first_apart(mine: Sequence[Any], theirs: Sequence[Any]) -> list[int] | None:
    """The shape of the first gradient that differs; None where all are alike. Ranks that step with other parameters
    have divided them: those are no copies."""
    if [shape for shape, _ in mine] != [shape for shape, _ in theirs]:
        return None
    return next((shape for (shape, own), (_, other) in zip(mine, theirs, strict=True) if own != other), None)
