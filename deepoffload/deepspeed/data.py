"""The loader that ``initialize`` makes of ``training_data``, and what an engine does to a batch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler

from deepoffload.config import Config
from deepoffload.errors import UsageError
from deepoffload.runtime.engine import Engine

log = logging.getLogger("deepoffload")

Collate = Callable[[list[Any]], Any]

_SEEDS = 1 << 62
"""torch's seeds have 64 bits, and a sampler adds the epoch to its own."""


def make_loader(
    config: Config, data: Any, collate_fn: Collate | None, sampler: Sampler[int] | None = None
) -> DataLoader[Any] | None:
    """Micro-batches in random order; None without ``data``.

    Args:
        sampler: which samples this rank draws; None: all of them, in an order that torch's generator decides.

    Raises:
        UsageError: ``data`` is no dataset.
    """
    if data is None:
        return None
    try:
        return DataLoader(
            data,
            batch_size=config.train_micro_batch_size_per_gpu,
            shuffle=None if sampler is not None or isinstance(data, IterableDataset) else True,
            sampler=sampler,
            drop_last=config.dataloader_drop_last,
            collate_fn=collate_fn,
        )
    except (TypeError, ValueError) as error:
        raise UsageError(f"initialize(training_data=...): {type(data).__name__} is no dataset: {error}") from error


def compare_data(core: Engine, loader: DataLoader[Any] | None) -> None:
    """Raise UsageError on all ranks where some have given data, and others have not. Collective."""
    given = {"training_data": "given" if loader is not None else "not given"}
    core.agreement.compare(given, "what initialize() got", "Give all ranks the dataset, or none", error=UsageError)


def split_over_ranks(
    loader: DataLoader[Any] | None, core: Engine, config: Config, collate_fn: Collate | None
) -> DataLoader[Any] | None:
    """The loader of this rank's share; ``loader`` itself with one rank. Collective: the order is rank 0's, which
    ``torch.manual_seed`` decides there."""
    if core.ranks.world_size == 1 or loader is None:
        return loader
    seed = core.agreement.gather(torch.initial_seed() % _SEEDS, "sharing the seed of the data's order")[0]
    data = loader.dataset
    if isinstance(data, IterableDataset):
        if core.ranks.rank == 0:
            log.warning(
                "initialize(training_data=...): %s is an IterableDataset, so it decides itself what each of the %d "
                "ranks draws. Where it does not, all of them draw the same samples: let its __iter__ take every "
                "world_size-th one, from torch.distributed.get_rank() on",
                type(data).__name__,
                core.ranks.world_size,
            )
        return loader
    sampler: Sampler[int] = DistributedSampler(
        data,
        num_replicas=core.ranks.world_size,
        rank=core.ranks.rank,
        seed=seed,
        drop_last=config.dataloader_drop_last,
    )
    return make_loader(config, data, collate_fn, sampler)


def shared_loader(
    data: Any,
    engine: Engine,
    config: Config,
    *,
    batch_size: int | None,
    shuffled: bool,
    sampler: Sampler[int] | None,
    collate_fn: Collate | None,
    pin_memory: bool,
    workers: int | None,
) -> DataLoader[Any]:
    """What ``engine.deepspeed_io`` gives: this rank's share of ``data``, in an order that is the same in every run.

    Raises:
        UsageError: ``data`` is no dataset, or nobody says a batch size.
    """
    size = config.train_micro_batch_size_per_gpu if batch_size is None else batch_size
    if size is None:
        raise UsageError("engine.deepspeed_io: say batch_size, or train_micro_batch_size_per_gpu in the configuration")
    iterable = isinstance(data, IterableDataset)
    if not iterable and not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        raise UsageError(f"engine.deepspeed_io: {type(data).__name__} is no dataset of torch")
    if sampler is None and not iterable:
        ranks = engine.ranks
        sampler = DistributedSampler(data, num_replicas=ranks.world_size, rank=ranks.rank, shuffle=shuffled)
    return DataLoader(
        data,
        batch_size=size,
        sampler=sampler,
        drop_last=config.dataloader_drop_last,
        collate_fn=collate_fn,
        pin_memory=pin_memory and torch.accelerator.is_available(),
        num_workers=workers or 0,
    )


def to_half(value: Any) -> Any:
    """Floating-point tensors in tuples, lists and dicts as fp16."""
    if isinstance(value, Tensor):
        return value.half() if value.is_floating_point() else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(to_half, value))
    if isinstance(value, (list, tuple)):
        return type(value)(map(to_half, value))
    if isinstance(value, dict):
        return {key: to_half(item) for key, item in value.items()}
    return value
