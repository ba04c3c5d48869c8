"""What several ranks refuse, with an error on all of them; and that their sums are those of torch."""

from __future__ import annotations

from tests.ranks.bad_input_programs import give_all, train_next_to_torch
from tests.support.rank_processes import values_of

REFUSED = {
    "version": "ConfigError: the configuration differs between ranks: the version of deepoffload is ",
    "no device": "ConfigError: device xpu is not available: torch",
    "DTensor": "UnsupportedError: 1.weight is a DTensor: a model that is sharded already can be paged for inference",
    "DistributedDataParallel": "UnsupportedError: DistributedDataParallel around a paged model would not average",
    "replicate": "UnsupportedError: the model is wrapped (DDPSequential). DistributedDataParallel around a paged model",
    "replicate inside": "UnsupportedError: 2 is wrapped (DDPLinear). DistributedDataParallel around a paged model",
    "replicate inside, later": "UnsupportedError: 2 is wrapped (DDPLinear). DistributedDataParallel around a",
    "wrapped, later": "UnsupportedError: 12 is wrapped (DistributedDataParallel). DistributedDataParallel around a",
    "sharded inside, taken over": "UnsupportedError: 2 is sharded already (FullyShardedDataParallel): its weights",
    "sharded already, taken over": "UnsupportedError: 0.weight is a DTensor: a model that is sharded already",
    "fully_shard": "UnsupportedError: 0.weight is paged and cannot be sharded",
    "FullyShardedDataParallel": "UnsupportedError: 0.weight is paged and cannot be sharded",
    "other parameters": "UsageError: the ranks' optimizer.step() differ: 0.weight is updated on rank 0 alone",
    "frozen on one rank": "UsageError: the ranks' optimizer.step() differ: 2.weight is frozen on rank 1, and trained",
    "another optimizer": "UsageError: the ranks' optimizer.step() differ: 0.bias is updated with other numbers on rank",
}

READING = "ConfigError: rank 1 has failed at reading group=, mesh= and ranks=: "
INITIALIZING = "rank 1 has failed at initialize(): initialize"

GIVEN_BY_RANK_1 = {
    "mesh": f"{READING}mesh= has 2 dimensions ('a', 'b'); a model is partitioned over one.",
    "lokal": f"{READING}ranks = 'lokal': expected \"local\" for a model",
    "local": f'{READING}ranks="local" and group= contradict each other.',
    "device": 'ConfigError: rank 1 has failed at reading the configuration: device = "gpu0" is not known to torch',
    "two configurations": f"ConfigError: {INITIALIZING} was given config and config_params",
    "no model": f"UsageError: {INITIALIZING}(model=...) takes a torch.nn.Module, not NoneType",
    "data": "UsageError: what initialize() got differs between ranks: training_data is not given on rank 0",
}

WRAPPED_ON_RANK_1 = {
    "wrapped inside": "2 is wrapped (DistributedDataParallel). DistributedDataParallel around a paged model",
    "wrapped inside, taken over": "2 is wrapped (DDPLinear). DistributedDataParallel around a paged model",
}


def test_what_is_refused() -> None:
    first, second = values_of(give_all, 2)
    for name, text in REFUSED.items():
        assert first[name].startswith(text), (name, first[name])
        assert text.partition(": ")[2] in second[name], (name, second[name])
    for name, text in GIVEN_BY_RANK_1.items():
        assert first[name].startswith(text) and second[name] == first[name], (name, first[name], second[name])
    for name, text in WRAPPED_ON_RANK_1.items():
        assert second[name].startswith(f"UnsupportedError: {text}"), (name, second[name])
        assert first[name].startswith(f"UnsupportedError: rank 1 has failed at placing the model: {text}"), first[name]


def test_the_sum_of_two_ranks_is_that_of_torch() -> None:
    """It has one order only."""
    for ours, theirs, differing in values_of(train_next_to_torch, 2):
        assert ours == theirs
        assert not differing
