"""Ranks compare what they set up, share what their host has, and fail together."""

from __future__ import annotations

import pytest

from deepoffload.runtime.agreement import Agreement
from deepoffload.schedule.cost_model import Bandwidths
from tests.ranks import agreeing
from tests.support.rank_processes import run_ranks, values_of, values_of_each


def test_what_differs_is_one_error_that_names_it():
    differs = "UsageError: the model differs between ranks: "
    assert (
        values_of(agreeing.compare, 2)
        == [
            [
                "nothing",
                f"{differs}b is 2 on rank 0 and 3 on rank 1. Do so",
                f"{differs}rank 1 has no b. Do so",
                f"{differs}rank 1 has c, and rank 0 has not. Do so",
                f"{differs}rank 1 has a at another place in the order. Do so",
            ]
        ]
        * 2
    )


def test_what_fails_on_one_rank_fails_on_all():
    others, failed = values_of(agreeing.fail_in_the_middle, 2)
    assert failed == ["ConfigError: no such path", "BudgetError: too little", "OSError: [Errno 5] broken"]
    assert others == [
        "ConfigError: rank 1 has failed at measuring: no such path",
        "BudgetError: rank 1 has failed at measuring: too little",
        "RankError: rank 1 has failed at measuring: OSError: [Errno 5] broken",
    ]


def test_a_rank_that_dies_ends_the_others():
    left, died = run_ranks(agreeing.die_in_the_middle, 2)
    assert died.exit_code == 3
    assert left.value.startswith("RankError: rank 0 at comparing budgets: another rank has gone"), left


def test_configurations():
    differs, advice = "ConfigError: the configuration differs between ranks:", "Give all ranks the same configuration"
    said = [
        ({"host_budget": "1GiB", "timeline": True, "nvme_path": "/other"}, "nothing"),
        ({"host_budget": "1GiB"}, f"{differs} nvme_path is set on rank 0 and not set on rank 1"),
        (
            {"host_budget": "2GiB", "nvme_path": "/other"},
            f"{differs} host_budget is 1073741824 on rank 0 and 2147483648 on rank 1",
        ),
        (
            {"host_budget": "1GiB", "nvme_path": "/other", "gradient_accumulation_steps": 2},
            f"{differs} gradient_accumulation_steps is 1 on rank 0 and 2 on rank 1",
        ),
    ]
    first = {"host_budget": "1GiB", "nvme_path": "/one"}
    found = values_of_each(agreeing.compare_configurations, 2, [(first, second) for second, _ in said])
    for texts, (_, text) in zip(found, said, strict=True):
        assert texts[0] == texts[1] and texts[0].startswith(text)
        assert text == "nothing" or f"{text}. {advice}" in texts[0]


def test_models():
    differs = [
        "1.weight is float32[2, 4] (trained) on rank 0 and float32[5, 4] (trained) on rank 1",
        "rank 1 has 2.weight, and rank 0 has not",
        "0.bias is float32[4] (trained) on rank 0 and float32[4] (frozen) on rank 1",
        "0.weight is float32[4, 3] (trained) on rank 0 and bfloat16[4, 3] (trained) on rank 1",
        "0.seen is a buffer int32[1] on rank 0 and a buffer int32[2] on rank 1",
        "0.seen is a buffer int32[1] on rank 0 and a buffer int64[1] on rank 1",
        "rank 1 has 1.mask, and rank 0 has not",
    ]
    first, second = values_of(agreeing.compare_structures, 2)
    assert first == second and first[0] == "nothing"
    for text, what in zip(first[1:], differs, strict=True):
        assert text.startswith(
            f"UsageError: the model differs between ranks: {what}. Build the same model on all ranks"
        )


@pytest.mark.parametrize("paths", [["/a", "/a"], ["/a", "/b"]], ids=["one path", "two paths"])
def test_a_hosts_budgets_and_disks_are_shared(paths):
    first, second = values_of(agreeing.share_a_host, 2, paths)
    for ranks, budgets, _, sharers, _, least in (first, second):
        assert ranks == 2
        assert (budgets.host_bytes, budgets.nvme_bytes) == (99, 50)
        assert budgets.reasons[-1].startswith("ranks: all take what the one with the least has, 99 B of host memory")
        assert sharers == paths.count("/a")
        assert least == Bandwidths(1.0, 4.0, 3.0, 4.0)
    assert len(first[2]) == 2 and first[4] == 1.0
    if paths[0] == paths[1]:
        assert second[2] == [] and second[4] == 1.0
    else:
        assert second[2][0] >= first[2][1] and second[4] == 2.0  # after each other: both may lie on one disk


def test_one_rank_asks_nobody():
    agreement = Agreement(None)
    assert agreement.gather(3, "anything") == [3]
    agreement.compare({"a": "1"}, "the model", error=ValueError)
    with pytest.raises(OSError, match="as it is"), agreement.together("opening"):
        raise OSError("as it is")
