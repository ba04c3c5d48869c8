"""Durable steps: what a new process finds after everything that a program may do between commits; what is refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.checkpoint.durable_model import PLACES, WIDTH, Run, image
from tests.checkpoint.training import ALL
from tests.support.disks import folder_on_disk
from tests.support.loops import assert_same_bits


def edit_in_place(run: Run) -> None:
    with torch.no_grad():
        run.model.layers[1].weight.mul_(0.9)


def edit_through_data(run: Run) -> None:
    run.model.layers[2].weight.data.add_(0.01)


def take_a_view(run: Run) -> None:
    run.views.append(run.model.layers[0].weight.detach())


def edit_through_views(run: Run) -> None:
    with torch.no_grad():
        for view in run.views:
            view.mul_(1.01)


def drop_views(run: Run) -> None:
    run.views.clear()


def shrink_in_forward(run: Run) -> None:
    run.model.layers[3].shrinks = not run.model.layers[3].shrinks


def load_what_was_given(run: Run) -> None:
    run.optimizer.load_state_dict(run.optimizer.state_dict())


def new_data(run: Run) -> None:
    run.model.head.weight.data = run.model.head.weight.detach().clone() * 0.5


def unfreeze(run: Run) -> None:
    run.model.table.requires_grad_(True)


def look(run: Run) -> None:
    float(run.model.layers[0].weight.detach().sum())


def evaluate(run: Run) -> None:
    run.model.eval()
    with torch.no_grad():
        run.model(torch.ones(2, WIDTH, dtype=run.model.head.weight.dtype))
    run.model.train()


HAZARDS: tuple[Callable[[Run], None], ...] = (
    edit_in_place,
    edit_through_data,
    take_a_view,
    edit_through_views,
    drop_views,
    shrink_in_forward,
    load_what_was_given,
    new_data,
    unfreeze,
    look,
    evaluate,
)


def program(dice: random.Random, steps: int) -> list[list[Callable[[Run], None]]]:
    """What happens after each step's commit."""
    return [[dice.choice(HAZARDS) for _ in range(dice.choice((0, 1, 2)))] for _ in range(steps)]


@pytest.mark.parametrize(
    ("place", "overlap"),
    [
        (place, overlap)
        for number, place in enumerate(PLACES)
        for turn, overlap in enumerate(("deferred", "none"))
        if ALL or number % 2 == turn
    ],
)
@pytest.mark.parametrize("seed", range(20 if ALL else 1))
def test_what_a_death_leaves_is_a_step_as_it_was_committed(place: str, overlap: str, seed: int, tmp_path: Path) -> None:
    dice = random.Random(f"{place} {overlap} {seed}")
    every, precision = dice.choice((1, 1, 2)), dice.choice(("keep", "bf16", "fp16"))
    hazards = program(dice, 8)
    said = {**PLACES[place], "step_overlap": overlap, "precision": precision}
    plain = Run(host_budget="64MiB", step_overlap="none", precision=precision)
    expected = [{}]
    for after in hazards:
        plain.step()
        expected.append(plain.everything())
        for hazard in after:
            hazard(plain)
    plain.close()
    swap = folder_on_disk(tmp_path / "swap")
    run = Run(**said, durability={"every": every, "path": str(swap)})
    promised = 0
    images = []
    for number, after in enumerate(hazards, 1):
        run.step()
        wait = dice.random() < 0.2
        run.state.commit(wait=wait)
        promised = number if wait else max(promised, number - every)
        for hazard in (None, *after):
            if hazard is not None:
                hazard(run)
            if dice.random() < 0.3:
                images.append((number, promised, tmp_path / f"image{len(images)}"))
                image(swap, images[-1][-1])
    run.close()
    seen_late = any(shrink_in_forward in after for after in hazards)  # then a step can be lost, and close cannot help
    images.append((len(hazards), promised if seen_late else len(hazards), swap))
    for number, promise, where in images:
        resumed = Run(**said, durability={"every": every, "path": str(where)})
        step = resumed.state.resume()
        assert promise <= step <= number, (where, hazards)
        if step:
            assert_same_bits(expected[step], resumed.everything())
        resumed.close()
