"""What is accepted trains: no run ends later for want of room, and a refusal names the least budget that works."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepoffload
from deepoffload.errors import BudgetError, PlacementError
from deepoffload.native.aio import PAGE_BYTES
from tests.runtime.budget_programs import LayerScale, Program, main
from tests.support.inspect import handle_of

PROGRAMS = 8


def test_random_programs_train_at_the_least_budget(tmp_path: Path) -> None:
    said: list[str] = []
    assert main(str(tmp_path), PROGRAMS, say=said.append) == 0, "\n".join(said)


def test_the_least_budget_is_the_least(tmp_path: Path) -> None:
    """Tested by bisection: what a refusal names is accepted, and nothing below it."""
    for seed in (0, 4, 7, 12):
        program = Program.drawn(seed)
        named = program.least_bytes(str(tmp_path))
        refused, accepted = 0, named // PAGE_BYTES
        while accepted - refused > 1:
            middle = (refused + accepted) // 2
            if program.accepted(str(tmp_path), middle * PAGE_BYTES) is None:
                accepted = middle
            else:
                refused = middle
        assert accepted * PAGE_BYTES == named, program


@pytest.mark.parametrize("seed", [21, 545, 692])
def test_a_budget_above_an_accepted_one_is_accepted(tmp_path: Path, seed: int) -> None:
    """Other budgets suggest other units and pieces, which may waste more of their pages."""
    program = Program.drawn(seed)
    least = program.least_bytes(str(tmp_path))
    for pages in range(1, 24):
        assert program.accepted(str(tmp_path), least + pages * PAGE_BYTES) is None, f"{pages} pages above {least}"


@pytest.mark.parametrize("seed", [2033])
def test_the_budget_that_is_named_for_views_is_enough_although_it_cuts_larger_units(tmp_path: Path, seed: int) -> None:
    """Each budget that counted them in the units of the one before was too small, three times."""
    program = Program.drawn(seed)
    with pytest.raises(BudgetError) as refused:
        program.train(str(tmp_path), program.least_bytes(str(tmp_path)))
    assert refused.value.enough_bytes is not None
    program.train(str(tmp_path), refused.value.enough_bytes)


class Weight(nn.Module):
    """One parameter and nothing else."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(numel))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight[: x.numel()] * x).sum() + self.weight.float().mean()


@contextmanager
def context(budget_bytes: int, swap: Path | None, **more: Any) -> Iterator[deepoffload.offload_context]:
    paths = {} if swap is None else {"nvme_path": str(swap)}
    with deepoffload.offload_context(host_budget=budget_bytes, debug={"poison": True}, **paths, **more) as entered:
        yield entered


def built(budget_bytes: int, swap: Path | None, build: Callable[[], nn.Module], **more: Any) -> nn.Module:
    torch.manual_seed(0)
    with context(budget_bytes, swap, **more):
        return build()


def trained(model: nn.Module, x: Tensor, steps: int = 3) -> None:
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        loss = model(x).square().mean()
        assert 0 <= loss.item() < 1e6
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_parameter_larger_than_the_budget_names_the_least_for_it(tmp_path: Path, precision: str) -> None:
    numel = 1 << 20

    def build() -> nn.Module:
        return Weight(numel)

    with pytest.raises(BudgetError, match="alone is larger than the budget") as refused:
        built(1 << 20, tmp_path, build, precision=precision)
    named = refused.value.enough_bytes
    assert named is not None and f"to at least {named} bytes" in str(refused.value)
    with pytest.raises(PlacementError):
        built(named - PAGE_BYTES, tmp_path, build, precision=precision)
    trained(built(named, tmp_path, build, precision=precision), torch.ones(8))


@pytest.mark.parametrize("numel", [(1 << 20) + 4096, 1 << 20])
def test_what_fits_without_nvme_fits_while_it_is_set_up_and_in_every_step(numel: int) -> None:
    """14 bytes per element in bf16, and 16 if what was registered in fp32 stayed until the unit is filled."""
    spare_bytes = 3 << 16
    model = built(14 * numel + spare_bytes, None, lambda: Weight(numel), precision="bf16")
    trained(model, torch.ones(8, dtype=torch.bfloat16))
    assert deepoffload.stats(model)["host_peak_bytes"] <= 14 * numel + spare_bytes


class Many(nn.Module):
    """Weights of unlike sizes, one after the other."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Weight(size) for size in sizes])

    def forward(self, x: Tensor) -> Tensor:
        return sum(part(x) for part in self.parts)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("sizes", [(1000, 90_000, 3000, 200_000, 17), (300_000, 11, 5000, 5000), (70_000,) * 4])
def test_without_nvme_the_budget_that_is_named_trains(sizes: tuple[int, ...], precision: str) -> None:
    with pytest.raises(PlacementError) as refused:
        built(1 << 20, None, lambda: Many(sizes), precision=precision)
    assert refused.value.enough_bytes is not None
    model = built(refused.value.enough_bytes, None, lambda: Many(sizes), precision=precision)
    dtype = next(model.parameters()).dtype
    trained(model, torch.ones(8, dtype=dtype))


def named_by(budget_bytes: int, swap: Path | None, build: Callable[[], nn.Module]) -> int:
    """The budget that the refusal of this one names, which is also in its text."""
    with pytest.raises(PlacementError) as refused:
        built(budget_bytes, swap, build)
    named = refused.value.enough_bytes
    assert named is not None and f"to at least {named} bytes" in str(refused.value)
    return named


@pytest.mark.parametrize("has_nvme", [True, False])
def test_one_refusal_names_a_budget_for_all_of_the_model(tmp_path: Path, has_nvme: bool) -> None:
    """Also for the layers that come after the first one that does not fit."""
    swap = tmp_path if has_nvme else None

    def build() -> nn.Module:
        layer = nn.TransformerEncoderLayer(64, 4, 4096, dropout=0.0)
        return nn.Sequential(nn.Linear(8, 64), nn.TransformerEncoder(layer, 2), nn.Linear(64, 2048))

    named = named_by(1 << 16, swap, build)
    with pytest.raises(PlacementError):
        built(named - PAGE_BYTES, swap, build)
    built(named, swap, build)


def test_a_tied_weight_is_counted_once(tmp_path: Path) -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Embedding(1000, 64), nn.Linear(64, 64), nn.Linear(64, 1000, bias=False))
        model[2].weight = model[0].weight
        shared = nn.Parameter(torch.zeros(1 << 16))
        for name in ("first", "second"):
            child = nn.Module()
            child.weight = shared
            model.add_module(name, child)
        return model

    named = named_by(1 << 16, None, build)
    built(named, None, build)
    with pytest.raises(PlacementError):
        built(named - PAGE_BYTES, None, build)


def test_weights_that_are_replaced_while_the_model_is_built_need_room_for_both() -> None:
    """Without NVMe. What the finished model needs would be less."""

    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1 << 14))
        for param in model.parameters():
            param.requires_grad_(False)
        model[1] = nn.Linear(64, 4)
        return model

    built(named_by(1 << 16, None, build), None, build)


def test_an_error_of_the_program_in_a_model_that_is_only_counted_is_told_with_the_budget(tmp_path: Path) -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(8, 8), nn.Embedding(8192, 8))
        assert float(model[1].weight.sum().detach()) == float(model[1].weight.sum().detach())
        return model

    with pytest.raises(PlacementError, match="what was built until, without its bytes: .*meta") as refused:
        built(1 << 16, tmp_path, build)
    assert refused.value.enough_bytes is not None and refused.value.__context__ is not None
    built(refused.value.enough_bytes, tmp_path, build)


def test_a_model_whose_bytes_are_loaded_is_refused_at_its_first_weight_that_does_not_fit(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 2048), nn.Linear(2048, 64))
    loaded: list[str] = []

    def build() -> nn.Module:
        held = nn.Sequential(model)
        for name, param in list(model.named_parameters()):
            layer, _, key = name.rpartition(".")
            setattr(model.get_submodule(layer), key, nn.Parameter(torch.zeros(param.shape)))
            loaded.append(name)
        return held

    named = named_by(1 << 16, tmp_path, build)
    assert loaded == ["0.weight", "0.bias"]
    built(named, tmp_path, build)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(*[LayerScale(96, 384) for _ in range(4)])
        self.down, self.last = nn.Linear(96, 192), LayerScale(192, 768)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.down(self.first(x)))


def least(swap: Path, build: Callable[[], nn.Module]) -> int:
    budget = 1 << 18
    while True:
        try:
            built(budget, swap, build)
            return budget
        except BudgetError as error:
            assert error.enough_bytes is not None and error.enough_bytes > budget
            budget = error.enough_bytes


def test_views_that_only_autograd_would_keep_hold_no_memory(tmp_path: Path) -> None:
    budget = least(tmp_path, Scaled)
    for share in (1.0, 1.1, 1.25, 1.5):
        model = built(int(budget * share), tmp_path, Scaled)
        loss = model(torch.randn(2, 96))
        handles = [handle_of(p) for p in model.parameters()]
        assert not any(handle.aliased() for handle in handles), "a graph keeps the memory of weights"
        loss.sum().backward()
        trained(model, torch.randn(2, 96))


def test_views_that_the_program_keeps_cut_no_room_in_pieces(tmp_path: Path) -> None:
    """Small weights that cannot move lie anywhere in memory; large ones get the pieces between them."""
    model = built(least(tmp_path, Scaled) + 8 * PAGE_BYTES, tmp_path, Scaled)
    held = [block.gamma.detach() for block in (*model.first, model.last)]
    expected = [view.clone() for view in held]
    for _ in range(3):
        model(torch.randn(2, 96)).sum().backward()
        model.zero_grad()
    assert all(torch.equal(view, value) for view, value in zip(held, expected, strict=True))
    trained(model, torch.randn(2, 96))
    assert not any(torch.equal(view, value) for view, value in zip(held, expected, strict=True)), "views see updates"
    assert deepoffload.stats(model)["host_peak_bytes"] <= deepoffload.stats(model)["host_budget_bytes"]


def test_an_error_in_training_names_who_holds_the_room_and_what_is_enough(tmp_path: Path) -> None:
    """Views that the program keeps are not known before. With the budget that the error names it trains."""
    budget, errors = least(tmp_path, Scaled), 0
    while True:
        model = built(budget, tmp_path, Scaled)
        held = [block.fc1.bias.detach() for block in model.first]
        try:
            trained(model, torch.randn(2, 96))
        except BudgetError as error:
            text = str(error)
            assert "fc1 (weight)" in text and "still referred to by the program" in text, text
            assert error.enough_bytes is not None and f"to {error.enough_bytes} bytes" in text
            assert f"by {error.enough_bytes - deepoffload.stats(model)['host_budget_bytes']:,.0f} bytes" in text
            budget, errors = error.enough_bytes, errors + 1
            assert errors < 6
        else:
            break
        del held, model
    assert errors > 0, "four units were held in the room of three"


@contextmanager
def collections() -> Iterator[list[int]]:
    """Full garbage collections that somebody asks for."""
    seen: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and info["generation"] == 2:
            seen.append(1)

    gc.collect()
    gc.disable()
    gc.callbacks.append(note)
    try:
        yield seen
    finally:
        gc.callbacks.remove(note)
        gc.enable()


def test_garbage_is_collected_only_where_that_can_help(no_other_engine: None, tmp_path: Path) -> None:
    budget = least(tmp_path, Scaled)
    with collections() as seen:
        model = built(budget, tmp_path, Scaled)
        trained(model, torch.randn(2, 96), steps=2)
    assert not seen, "no other engine, and no view that holds memory"
    with collections() as seen:
        held = [block.fc1.bias.detach() for block in model.first]
        with pytest.raises(BudgetError):
            trained(model, torch.randn(2, 96))
    assert 0 < len(seen) < 4, "each shortage, not each block, is worth one"
    held[0].cycle = held  # type: ignore[attr-defined]
    del held
    trained(model, torch.randn(2, 96))  # the cycle is found, and gives its memory back


def test_other_settings_accept_the_same_budget(tmp_path: Path) -> None:
    program = Program.drawn(1)
    budget = program.least_bytes(str(tmp_path))
    for overlap in ("none", "deferred"):
        for prefetch in (True, False):
            replace(program, overlap=overlap, prefetch=prefetch).train(str(tmp_path), budget)
