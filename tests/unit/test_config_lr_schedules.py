"""The schedules against the formulas written out, and against a stateful scheduler as DeepSpeed steps it."""

from __future__ import annotations

import math

import pytest
import torch

from deepoffload.config import parse_config
from deepoffload.config.lr_schedules import SCHEDULES, betas_at, lr_at

BASE = 3e-4


def schedule(kind, **params):
    result = parse_config({"scheduler": {"type": kind, "params": params}}).scheduler
    assert result is not None and result.params.keys() == SCHEDULES[kind].keys()
    return result


def rates(scheduler, steps, group=0):
    return [lr_at(scheduler, step, BASE, group) for step in range(steps)]


def close(values):
    return pytest.approx(values, rel=1e-12, abs=1e-18)


def test_warmup_log():
    # DeepSpeed's first two updates both have the smallest rate: the one before its scheduler ever stepped, and log(1).
    scheduler = schedule("WarmupLR", warmup_min_lr=1e-5, warmup_max_lr=1e-3, warmup_num_steps=10)
    gamma = [0.0] + [math.log(i + 1) / math.log(10) for i in range(10)] + [1.0] * 4
    assert rates(scheduler, 15) == close([1e-5 + (1e-3 - 1e-5) * share for share in gamma])


def test_warmup_linear_up_to_the_optimizers_own_rate():
    scheduler = schedule("WarmupLR", warmup_num_steps=4, warmup_type="linear")
    assert rates(scheduler, 8) == close([BASE * share for share in (0, 0, 0.25, 0.5, 0.75, 1, 1, 1)])


def test_warmup_of_one_step_counts_as_two():
    scheduler = schedule("WarmupLR", warmup_num_steps=1, warmup_max_lr=1.0)
    assert rates(scheduler, 4) == close([0.0, 0.0, 1.0, 1.0])


def test_warmup_per_group():
    scheduler = schedule("WarmupLR", warmup_min_lr=[0, 0.5], warmup_max_lr=[1, 2], warmup_num_steps=2)
    assert rates(scheduler, 4, group=0) == close([0, 0, 1, 1])
    assert rates(scheduler, 4, group=1) == close([0.5, 0.5, 2, 2])


def test_warmup_decay():
    scheduler = schedule(
        "WarmupDecayLR", total_num_steps=10, warmup_max_lr=1.0, warmup_num_steps=4, warmup_type="linear"
    )
    expected = [0, 0, 0.25, 0.5, 0.75] + [(10 - i) / 6 for i in range(4, 10)] + [0, 0, 0]
    assert rates(scheduler, 14) == close(expected)


def test_warmup_cosine():
    scheduler = schedule(
        "WarmupCosineLR",
        total_num_steps=12,
        warmup_min_ratio=0.1,
        warmup_num_steps=4,
        cos_min_ratio=0.2,
        warmup_type="linear",
    )
    warm = [0.0] + [0.1 + 0.9 * i / 4 for i in range(4)]
    fall = [0.2 + 0.8 * (1 + math.cos(math.pi * (i - 3) / 8)) / 2 for i in range(4, 12)]
    assert rates(scheduler, 16) == close([BASE * ratio for ratio in (*warm, *fall, 0.2, 0.2, 0.2)])


@pytest.mark.parametrize("staircase", [False, True])
def test_range_test(staircase):
    scheduler = schedule(
        "LRRangeTest",
        lr_range_test_min_lr=1e-4,
        lr_range_test_step_size=4,
        lr_range_test_step_rate=2.0,
        lr_range_test_staircase=staircase,
    )
    whole = math.floor if staircase else float
    assert rates(scheduler, 11) == close([1e-4 * (1 + 2 * whole(step / 4)) for step in range(11)])


def one_cycle(**params):
    return schedule("OneCycle", **{"cycle_min_lr": 0.1, "cycle_max_lr": 0.5, "cycle_first_step_size": 4, **params})


def test_one_cycle_without_decay():
    scale = [0, 0.25, 0.5, 0.75, 1, 0.75, 0.5, 0.25, 0, 0, 0]
    assert rates(one_cycle(), 11) == close([0.1 + 0.4 * share for share in scale])
    betas = [betas_at(one_cycle(), step) for step in range(11)]
    # The first update has the smallest momentum and not the largest: DeepSpeed sets it so.
    momenta = [0.8] + [0.9 - 0.1 * share for share in scale[1:]]
    assert [beta for beta, _ in betas] == close(momenta) and {beta2 for _, beta2 in betas} == {0.99}


def test_one_cycle_uneven_with_stairs_and_decay():
    scheduler = one_cycle(
        cycle_second_step_size=2,
        cycle_first_stair_count=2,
        cycle_second_stair_count=1,
        decay_step_size=2,
        decay_lr_rate=0.5,
        decay_mom_rate=0.1,
    )
    scale = [0, 0, 0.5, 0.5, 1, 0, 0]
    decay = [0.1 / (1 + 0.5 * passed / 2) for passed in (1, 2, 3)]
    assert rates(scheduler, 10) == close([*(0.1 + 0.4 * share for share in scale), *decay])
    assert [betas_at(scheduler, step)[0] for step in (7, 8)] == close([0.9 * (1 + 0.1 * p / 2) for p in (1, 2)])


def test_the_momentum_of_one_cycle_decays_without_the_rate():
    scheduler = one_cycle(decay_step_size=2, decay_mom_rate=0.1)
    ended = next(step for step in range(1, 99) if betas_at(scheduler, step)[0] > 0.9)
    assert betas_at(scheduler, ended)[0] == close(0.9 * 1.05) and lr_at(scheduler, ended, BASE) == close(0.1)


def test_stairs_keep_the_peak_of_an_uneven_cycle():
    for first in range(1, 40):
        scheduler = one_cycle(cycle_first_step_size=first, cycle_second_step_size=7, cycle_first_stair_count=3)
        assert lr_at(scheduler, first, BASE) == close(0.5)


def test_only_one_cycle_sets_betas():
    assert betas_at(one_cycle(cycle_momentum=False), 3) is None
    assert betas_at(schedule("WarmupLR"), 3) is None


def test_with_torchs_lambda_scheduler():
    scheduler = schedule("WarmupDecayLR", total_num_steps=20, warmup_max_lr=1e-2, warmup_num_steps=5)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=BASE)
    torch_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_at(scheduler, step, BASE) / BASE)
    for step in range(25):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(lr_at(scheduler, step, BASE), rel=1e-12)
        optimizer.step()
        torch_scheduler.step()
