"""Programs that differ from rank to rank train to the same bits, and none of them hangs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.ranks import dropping_layers
from tests.ranks.training_programs import LEAST, Job, check_all, reference, train
from tests.support.rank_processes import values_of, values_of_each

IN_MEMORY: dict[str, Any] = {"host_budget": "64MiB"}
EVICTING = {"host_budget": "8MiB", "nvme_budget": "64MiB", "debug": {"evict_always": True}}
BY = tuple({"transport": transport, "timeout_s": 20} for transport in ("memory", "group"))


def test_programs_that_differ_train_as_one(tmp_path: Path) -> None:
    """Layers that some ranks leave out, or whose gradients come in parts or several times; contributions that wait for
    ranks that begin later; what one rank does between steps; rounds inside transforms of ``torch.func``, under a
    profiler and in modes of torch's selective checkpoints."""
    later = {"host_budget": "2200KiB", "nvme_budget": "64MiB"}
    jobs = [
        *(Job(uneven="layer drop", micro_batches=count, config=IN_MEMORY, steps=5) for count in (1, 2)),
        *(Job(uneven="repeats", micro_batches=2, config={**each, "precision": "fp32"}) for each in (IN_MEMORY, later)),
        Job("gpt-pairs", uneven="pairs", micro_batches=3, steps=3, config=later),
        Job(uneven="turns", before_step="turns", steps=2, config=later),
        *(Job(uneven="watched", micro_batches=2, config={**IN_MEMORY, "ranks": each}) for each in BY),
        *(Job(uneven="selective", micro_batches=2, config={**EVICTING, "ranks": each}) for each in BY),
        *(Job(between_steps=between, config=IN_MEMORY) for between in ("evaluation", "looks", "edits")),
    ]
    check_all(jobs, tmp_path)


def test_three_ranks_that_use_layers_in_other_orders_train_as_one(tmp_path: Path) -> None:
    """Also where memory has no room for a contribution that waits, where gradients of other layers come between those
    of one, and where weights are used past the forward of their module."""
    little, least = ({"host_budget": size, "nvme_budget": "64MiB"} for size in ("4MiB", "1MiB"))
    jobs = [
        *(Job(uneven="other order", data_ranks=3, config={**little, "ranks": each}) for each in BY),
        *(
            Job(model, uneven=how, data_ranks=3, micro_batches=2, config={**config, "ranks": BY[0]})
            for model, how in (("gpt-pairs", "places"), ("gpt-pairs-frozen", "places again"))
            for config in (IN_MEMORY, least)
        ),
    ]
    check_all(jobs, tmp_path, world_size=3)


def test_layers_that_ranks_leave_out_with_the_least_memory(tmp_path: Path) -> None:
    """No room is left in memory for contributions that wait."""
    expected = dropping_layers.train_alone(2)
    for got in values_of_each(dropping_layers.train, 2, [(by, str(tmp_path)) for by in ("memory", "group")]):
        assert got == expected


def test_layers_that_ranks_leave_out_where_all_has_to_stay_in_memory(tmp_path: Path) -> None:
    """Without NVMe, with the least memory that is accepted: there is no room in which gradients could wait for another
    rank. So sums begin without its part, and round otherwise."""
    job = Job(uneven="other order", micro_batches=3, steps=2, config={"host_budget": LEAST, "precision": "fp32"})
    expected = reference(job)
    for got in values_of(train, 2, job, str(tmp_path)):
        torch.testing.assert_close(torch.tensor(got.norms), torch.tensor(expected.norms), rtol=1e-5, atol=0)
