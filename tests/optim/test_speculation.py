"""Updates on a guess change no bit: those of the serial step, where guesses are right, wrong, or both in turns."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import deepoffload
from deepoffload.errors import PlacementError
from deepoffload.memory.transfers import TierCounters
from deepoffload.optim.speculation.unit_choice import StepOutcome, UnitChoice
from deepoffload.runtime.context import engine_of
from deepoffload.schedule.speculation import PhaseWaits
from tests.optim.deferred import sorted_state, units_guessed
from tests.optim.speculation_campaign import compare
from tests.optim.speculation_matrix import FROZEN, LORA, UNUSED, Cell
from tests.support.inspect import pager_of, units_of
from tests.support.loops import assert_same_bits, weights_of
from tests.support.models import TinyGPT, batch, mlp, next_token_loss, rows
from tests.support.paging import EVICTING, ROOMY, TIGHT, Paging, Setting

CLIPPED = {"never": (), "always": range(8), "sometimes": (4, 6, 7)}
"""Which of the steps clip."""

GROWTH_BYTES_MAX = 4 << 20


def guessing(setting: Setting, **changes: Any) -> Setting:
    return replace(setting, step_overlap="speculative", **changes)


def serial(setting: Setting, **changes: Any) -> Setting:
    return replace(setting, step_overlap="none", **changes)


def gpt(checkpointing: bool | None = None) -> TinyGPT:
    return TinyGPT(width=32, depth=3, num_heads=2, checkpointing=checkpointing)


def run(model: nn.Module, optimizer: Any, clipped: Any, limits: list[float], accumulate: int = 1) -> Any:
    """``limits``: of the norm, for each step. Where there are none yet, this run looks at its gradients and makes them,
    so that the steps in ``clipped`` clip by little: only the last gradients tell."""
    torch.manual_seed(7)
    losses, given = [], list(limits)
    for step in range(8):
        optimizer.max_grad_norm = given[step] if given else None
        for micro in range(accumulate):
            loss = next_token_loss(model, batch(10 * step + micro)) / accumulate
            loss.backward()
            losses.append(loss.detach().clone())
        if not given:
            norm = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
            limits.append(optimizer_limit := norm * (0.99 if step in clipped else 2.0))
            optimizer.max_grad_norm = optimizer_limit
        optimizer.step()
        optimizer.zero_grad()
        losses.append(torch.tensor(optimizer.grad_norm))
    return losses, weights_of(model), sorted_state(optimizer)


@pytest.mark.parametrize(
    ("precision", "kind", "also"),
    [
        ("keep", "never", (TIGHT, 1)),
        ("bf16", "always", (ROOMY, 3)),
        ("keep", "sometimes", (ROOMY, 3)),
        ("bf16", "sometimes", (TIGHT, 1)),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value[0]}",
)
def test_same_bits_and_guesses_are_made(paging: Paging, precision: str, kind: str, also: tuple[Setting, int]) -> None:
    """With everything evicted; and in another budget, some with three micro-batches (``also``)."""

    def train(setting: Setting, limits: list[float], accumulate: int) -> tuple[Any, dict[str, float]]:
        model = paging.build(gpt, replace(setting, precision=precision), key="speculation")
        optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        return run(model, optimizer, CLIPPED[kind], limits, accumulate), deepoffload.stats(model)

    for setting, accumulate in (also, (EVICTING, 1)):
        limits: list[float] = []
        expected, _ = train(serial(setting), limits, accumulate)
        got, stats = train(guessing(setting), limits, accumulate)
        assert_same_bits(expected, got, f"{setting} ")
        if setting is EVICTING:
            assert (stats["speculated"] > 0) == (kind != "always"), stats
            assert (stats["rolled_back"] > 0) == (kind != "never"), stats


@pytest.mark.parametrize(
    "cell",
    [
        Cell("Mixtral", EVICTING, "keep", reentrant=True),
        Cell("T5", TIGHT, "fp16", accumulate=3, part=UNUSED),
        Cell("Llama", ROOMY, part=LORA),
        Cell("BERT", EVICTING, reentrant=False, part=FROZEN),
    ],
    ids=str,
)
def test_models_of_many_kinds(paging: Paging, cell: Cell) -> None:
    stats = cell.compare(paging)
    assert stats["speculated"] > 0 and stats["rolled_back"] > 0, stats


def train_steps(model: nn.Module, optimizer: Any, steps: int = 3) -> None:
    for seed in range(steps):
        optimizer.zero_grad()
        model(rows(seed=seed).to(model[0].weight.dtype)).float().square().mean().backward()
        optimizer.step()


def test_a_guess_is_made_in_backward_and_confirmed_by_the_step(paging: Paging) -> None:
    model = paging.build(partial(mlp, depth=6), guessing(EVICTING), key="mlp")
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2, max_grad_norm=1e6)
    train_steps(model, optimizer)
    before = deepoffload.stats(model)
    optimizer.zero_grad()
    model(rows(seed=9)).square().mean().backward()
    guessed = units_guessed(model)
    assert 0 < guessed < len(units_of(model)), "a share of the units is updated in backward"
    optimizer.step()
    after = deepoffload.stats(model)
    assert after["speculated"] - before["speculated"] == guessed and after["rolled_back"] == before["rolled_back"]
    assert units_guessed(model) == 0


def test_the_order_after_an_undone_guess_is_foreseen(paging: Paging) -> None:
    """Else plans for the next two steps are wrong, and each update that was undone waits for the disk."""
    for _ in range(10):
        seen, rolled_back = _undone_in_steps_7_and_8(paging)
        if len({share for share, *_ in seen[4:]}) == 1:  # else other units were chosen, by how long steps waited
            break
    assert [rest for _, *rest in seen[6:]] == [[True, 0]] * 6, seen
    assert rolled_back > 0


def _undone_in_steps_7_and_8(paging: Paging) -> tuple[list[tuple[float, bool, int]], float]:
    """Of each step: the share of the state that is guessed, whether units were, and how many uses were not foreseen.
    And how many guesses were undone."""
    model = paging.build(partial(mlp, depth=6), guessing(TIGHT, room=2.5), key="mlp")
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2, max_grad_norm=1e6)
    trace, seen = pager_of(model).order.trace, []
    for seed in range(12):
        mismatches = trace.stats().mismatches
        model(rows(seed=seed)).square().mean().backward()
        guessed = units_guessed(model)
        optimizer.max_grad_norm = 1e-6 if seed in (7, 8) else 1e6
        optimizer.step()
        optimizer.max_grad_norm = 1e6
        optimizer.zero_grad()
        share = deepoffload.stats(model)["speculation_share"]
        seen.append((share, guessed > 0, trace.stats().mismatches - mismatches))
    return seen, deepoffload.stats(model)["rolled_back"]


def test_with_a_tenth_of_the_guesses_wrong_bits_are_the_same_and_nothing_grows(paging: Paging) -> None:
    ended = compare(paging, 60)
    first, *others = ended.sizes
    assert all((each.nvme_bytes, each.blocks) == (first.nvme_bytes, first.blocks) for each in others), ended.sizes
    assert others[-1].process_bytes - first.process_bytes <= GROWTH_BYTES_MAX, ended.sizes
    assert ended.stats["speculated"] > 0 and ended.stats["rolled_back"] > 0, ended


@pytest.mark.parametrize("said", [False, True])
def test_a_loop_whose_number_of_micro_batches_changes(paging: Paging, said: bool) -> None:
    def train(setting: Setting) -> tuple[Any, dict[str, float]]:
        model = paging.build(partial(mlp, depth=6), setting, key="mlp")
        optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2, max_grad_norm=1e6)
        for step, count in enumerate((1, 1, 1, 3, 3, 3, 2, 1, 1)):
            for micro in range(count):
                if said and micro == count - 1:
                    deepoffload.last_micro_batch(model)
                model(rows(seed=10 * step + micro)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return (weights_of(model), sorted_state(optimizer)), deepoffload.stats(model)

    expected, _ = train(serial(EVICTING))
    got, stats = train(guessing(EVICTING))
    assert_same_bits(expected, got)
    assert stats["speculated"] > 0 and (stats["rolled_back"] == 0 or not said), stats


def test_the_table_has_disk_space_for_what_guesses_keep(paging: Paging) -> None:
    tables = {}
    for setting in (guessing(TIGHT), replace(TIGHT, step_overlap="deferred")):
        model = paging.build(partial(mlp, depth=6), setting, key="mlp")
        placement = engine_of(model).placement
        assert placement is not None
        tables[setting.step_overlap] = {row.name: row.nvme_bytes for row in placement.rows}
        assert sum(tables[setting.step_overlap].values()) == placement.nvme_bytes
        assert deepoffload.stats(model)["nvme_capacity_bytes"] >= placement.nvme_bytes
        del model
    kept = tables["speculative"].pop("updates on a guess")
    assert tables["speculative"] == tables["deferred"]
    assert 0 < kept < sum(tables["deferred"].values())


def test_where_nothing_is_said_guesses_begin_when_steps_wait_long(paging: Paging) -> None:
    def train(setting: Setting, waits_s: float, steps: int) -> tuple[Any, dict[str, float]]:
        model = paging.build(partial(mlp, depth=6), setting, key="mlp")
        optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2, max_grad_norm=1e6)
        for step in range(steps):
            output = model(rows(seed=step))
            pager_of(model).tiers.counters.wait_s += waits_s  # as a slow disk would have made forward wait
            output.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return (weights_of(model), sorted_state(optimizer)), deepoffload.stats(model)

    expected, _ = train(serial(EVICTING), 0.0, 14)
    got, stats = train(replace(EVICTING, step_overlap=None), 60.0, 14)
    assert_same_bits(expected, got)
    assert stats["speculated"] > 0 and stats["rolled_back"] == 0, stats
    _, stats = train(replace(TIGHT, step_overlap=None), -60.0, 14)
    assert stats["speculated"] == 0 == stats["speculation_share"], stats


@pytest.mark.parametrize(
    "config",
    [
        {"debug": {"copies": True}, "host_budget": "8MiB", "device_budget": "1MiB"},
        {"durability": True},
        {"inference": True},
        {"nvme_budget": "least"},
    ],
)
def test_where_nothing_is_said_all_is_accepted_that_deferred_updates_are(paging: Paging, config: Any) -> None:
    def placed(step_overlap: str | None, **more: Any) -> Any:
        least = paging.least_bytes(partial(mlp, depth=6), TIGHT, key="mlp")
        with deepoffload.offload_context(
            nvme_path=str(paging.nvme_path), step_overlap=step_overlap, **{"host_budget": 2 * least, **config, **more}
        ) as context:
            mlp(depth=6)
        assert context.engine is not None and context.engine.placement is not None
        assert context.engine.gradients.speculation is None
        return context.engine.placement

    more: dict[str, Any] = {}
    if config.get("nvme_budget"):
        with pytest.raises(PlacementError) as refused:
            placed("deferred", nvme_budget=16 << 10)
        more = {"nvme_budget": refused.value.enough_nvme_bytes}
    deferred, unsaid = placed("deferred", **more), placed(None, **more)
    assert (deferred.rows, deferred.nvme_bytes) == (unsaid.rows, unsaid.nvme_bytes)
    assert unsaid.updates.startswith("deferred: ") or config.get("inference"), unsaid.updates


class Numbered:
    def __init__(self, index: int) -> None:
        self.index = index


def test_units_that_a_step_leaves_out_do_not_change_the_choice() -> None:
    """Layer drop leaves out others in each step. The order of the rest is known only as long as the same are chosen."""
    choice = UnitChoice(TierCounters(), asked_for=True)
    units: list[Any] = [Numbered(index) for index in range(8)]

    def step(left_out: tuple[int, ...]) -> set[int]:
        found = {unit.index for unit in units if unit.index not in left_out and choice.completed(unit, 1000)}
        choice.step_ended({}, StepOutcome(PhaseWaits(1.0, 0.0, 0.0), wrong=False, confirms=False))
        return found

    step(())
    chosen = step(())
    assert 0 < len(chosen) < 8
    for left_out in ((0, 3), (1,), (2, 5, 7), ()):
        assert step(left_out) == chosen - set(left_out)
