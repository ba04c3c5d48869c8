"""What TrainingState does around the bytes: tags, other objects, pruning, refusals."""

from __future__ import annotations

import gc
import json
import os
import random
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, MultiStepLR, OneCycleLR, SequentialLR

import deepoffload
from deepoffload.checkpoint.values import decode, encode
from deepoffload.errors import ClosedError, UnsupportedError, UsageError
from tests.checkpoint.training import adamw, snapshot, steps
from tests.support.loops import assert_same_bits
from tests.support.models import batch, mlp, next_token_loss, rows
from tests.support.paging import TIGHT, Paging


class Run:
    """A small model that is trained on random rows."""

    def __init__(self, paging: Paging, seed: int = 0, **others: Any) -> None:
        self.model = paging.build(mlp, TIGHT, seed=seed)
        self.optimizer = adamw(self.model)
        made = {name: make(self.optimizer) for name, make in others.items()}
        self.others = made
        self.state = deepoffload.TrainingState(self.model, self.optimizer, **made)

    def train(self, count: int = 1) -> list[Tensor]:
        losses = []
        for _ in range(count):
            loss = self.model(rows()).square().mean()
            loss.backward()
            losses.append(loss.detach())
            self.optimizer.step()
            self.optimizer.zero_grad()
            for other in self.others.values():
                if hasattr(other, "step"):
                    other.step()
        return losses


@pytest.fixture
def run(paging: Paging) -> Run:
    made = Run(paging)
    made.train()
    return made


class Sampler:
    """As a program's own: what it draws depends on its state."""

    def __init__(self) -> None:
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


SCHEDULES: dict[str, Any] = {
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (step + 1)),
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, 10),
    "steps": lambda optimizer: MultiStepLR(optimizer, [1, 3, 3]),
    "one_cycle": lambda optimizer: OneCycleLR(optimizer, 1e-2, total_steps=20),
    "sequence": lambda optimizer: SequentialLR(
        optimizer, [LambdaLR(optimizer, lambda step: 0.1 * (step + 1)), CosineAnnealingLR(optimizer, 9)], [2]
    ),
}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_schedules_and_other_objects_go_on(kind: str, paging: Paging, tmp_path: Path) -> None:
    first = Run(paging, scheduler=SCHEDULES[kind], sampler=lambda optimizer: Sampler())
    first.train(2)
    first.others["sampler"].position = 17
    first.state.save(tmp_path)
    second = Run(paging, seed=1, scheduler=SCHEDULES[kind], sampler=lambda optimizer: Sampler())
    second.state.load(tmp_path)
    assert second.others["sampler"].position == 17
    assert_same_bits(first.others["scheduler"].state_dict(), second.others["scheduler"].state_dict())
    assert_same_bits(first.train(3), second.train(3))
    assert_same_bits(snapshot(first.model, first.optimizer), snapshot(second.model, second.optimizer))


def test_random_generators_go_on(run: Run, tmp_path: Path) -> None:
    def draw() -> list[float]:
        return [
            random.random(),
            random.gauss(0, 1),
            float(np.random.rand()),
            float(np.random.randn()),
            float(torch.rand(1)),
        ]

    draw()
    run.state.save(tmp_path)
    expected = draw()
    run.state.load(tmp_path)
    assert draw() == expected


def test_an_engine_can_load_what_it_has_saved_itself(run: Run, tmp_path: Path) -> None:
    run.train(2)
    expected = snapshot(run.model, run.optimizer)
    assert run.state.save(tmp_path) == str(tmp_path / "global_step3")
    run.train(2)
    assert run.state.step == 5
    loaded = run.state.load(tmp_path)
    assert (loaded.folder, loaded.step, run.state.step) == (str(tmp_path / "global_step3"), 3, 3)
    assert_same_bits(expected, snapshot(run.model, run.optimizer))


def test_gradients_of_a_step_that_was_made_do_not_hinder(run: Run, tmp_path: Path) -> None:
    """Many loops call ``zero_grad`` before the next backward only."""
    run.model(rows()).square().mean().backward()
    run.optimizer.step()
    run.state.save(tmp_path)
    run.model(rows()).square().mean().backward()
    with pytest.raises(UsageError, match="between backward and step: the gradient of .*zero_grad"):
        run.state.save(tmp_path)
    run.optimizer.zero_grad()
    run.state.save(tmp_path)


def test_loading_drops_gradients(run: Run, tmp_path: Path) -> None:
    run.state.save(tmp_path)
    run.model(rows()).square().mean().backward()
    run.state.load(tmp_path)
    assert all(param.grad is None for param in run.model.parameters())


def test_latest_names_the_newest_and_tags_are_replaced(run: Run, tmp_path: Path) -> None:
    run.state.save(tmp_path, tag="one")
    run.train()
    run.state.save(tmp_path, tag="two")
    run.train()
    expected = snapshot(run.model, run.optimizer)
    run.state.save(tmp_path, tag="one")
    assert (tmp_path / "latest").read_text() == "one"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "one", "two"]
    run.train()
    assert run.state.load(tmp_path).step == 3
    assert_same_bits(expected, snapshot(run.model, run.optimizer))
    assert run.state.load(tmp_path, "two").step == 2


def test_keep_last_removes_older_ones_of_ours_only(run: Run, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir(parents=True)
    (tmp_path / "notes" / "text").write_text("mine")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "manifest.json").write_text("{}")
    for tag in ("b", "a", "d"):
        run.state.save(tmp_path, tag)
    run.state.save(tmp_path, "c", keep_last=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "d", "half", "latest", "notes"]
    run.state.save(tmp_path, "d", keep_last=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d", "half", "latest", "notes"]
    with pytest.raises(UsageError, match="keep_last"):
        run.state.save(tmp_path, keep_last=0)


def test_directories_that_cannot_be_used(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here first")
    with pytest.raises(UsageError, match="is a file"):
        run.state.save(tmp_path / "file")
    with pytest.raises(UsageError, match="nothing to load"):
        run.state.load(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="nothing to load"):
        run.state.load(tmp_path)
    run.state.save(tmp_path, "one")
    with pytest.raises(UsageError, match="no checkpoint 'two' in .*there are: one"):
        run.state.load(tmp_path, "two")
    (tmp_path / "two").symlink_to(tmp_path / "one")
    with pytest.raises(UsageError, match="link"):
        run.state.load(tmp_path, "two")
    (tmp_path / "latest").write_text("../one")
    with pytest.raises(UsageError, match="latest is damaged"):
        run.state.load(tmp_path)


def test_objects_that_cannot_be_saved(paging: Paging) -> None:
    model = paging.build(mlp, TIGHT)
    with pytest.raises(UsageError, match="loader=.*no state_dict"):
        deepoffload.TrainingState(model, loader=object())  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="Sampler is a class; give an object of it"):
        deepoffload.TrainingState(model, loader=Sampler)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="takes a torch.nn.Module, not list"):
        deepoffload.TrainingState([model])  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="takes a torch optimizer"):
        deepoffload.TrainingState(model, model)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for others, message in (
        ({"again": optimizer}, r"again=\.\.\.\) is the optimizer, which is saved already; leave again out"),
        ({"again": model}, r"again=\.\.\.\) is the model, which is saved already"),
        ({"head": model[0]}, r"head=\.\.\.\) is a part of the model, which is saved already"),
        (dict.fromkeys(("one", "two"), torch.optim.lr_scheduler.StepLR(optimizer, 1)), "is the same object as one"),
    ):
        with pytest.raises(UsageError, match=message):
            deepoffload.TrainingState(model, optimizer, **others)
    with pytest.raises(UsageError, match="none of the model's"):
        deepoffload.TrainingState(model, torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0))
    state = deepoffload.TrainingState(model)
    with pytest.raises(UsageError, match="a TrainingState already"):
        deepoffload.TrainingState(model)
    del state
    deepoffload.TrainingState(model)


class Large:
    """What a program has at hand while it saves."""


def test_nothing_keeps_what_the_caller_holds(paging: Paging, tmp_path: Path) -> None:
    """Until Python's next collection of cycles, which may be long."""

    def save_and_load() -> list[weakref.ref[Any]]:
        large, run = Large(), Run(paging)
        run.train()
        gc.collect()
        gc.disable()
        run.state.save(tmp_path)
        run.state.load(tmp_path)
        run.state.save(tmp_path, wait=False).wait()  # type: ignore[union-attr]
        with pytest.raises(UsageError, match="no checkpoint"):
            run.state.load(tmp_path, "nothing")
        return [weakref.ref(large), weakref.ref(run.state)]

    try:
        assert [reference() for reference in save_and_load()] == [None, None]
    finally:
        gc.enable()


def test_moments_at_which_nothing_can_be_saved(run: Run, tmp_path: Path) -> None:
    problems = []

    def hook(*_: object) -> None:
        try:
            run.state.save(tmp_path)
        except UsageError as error:
            problems.append(str(error))

    handle = run.model[2].register_forward_hook(hook)
    run.model(rows())
    handle.remove()
    assert len(problems) == 1 and "save inside a forward of the model" in problems[0]
    child = os.fork()
    if not child:
        try:
            run.state.save(tmp_path)
        except ClosedError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    deepoffload.runtime.context.engine_of(run.model).close()
    with pytest.raises(ClosedError):
        run.state.save(tmp_path)
    assert not list(tmp_path.iterdir())


class Slow(Sampler):
    """Lets another thread come between."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.go_on = threading.Event(), threading.Event()

    def state_dict(self) -> dict[str, Any]:
        self.reached.set()
        assert self.go_on.wait(200)
        return {}


def test_two_threads_do_not_save_at_once(paging: Paging, tmp_path: Path) -> None:
    slow = Slow()
    run = Run(paging, slow=lambda optimizer: slow)
    thread = threading.Thread(target=run.state.save, args=(tmp_path,))
    thread.start()
    assert slow.reached.wait(200)
    with pytest.raises(UsageError, match="another thread"):
        run.state.load(tmp_path)
    slow.go_on.set()
    thread.join()
    assert (tmp_path / "latest").exists()


@contextmanager
def unchanged(run: Run) -> Iterator[None]:
    before = snapshot(run.model, run.optimizer)
    yield
    assert_same_bits(before, snapshot(run.model, run.optimizer))


def test_checkpoints_of_something_else_change_nothing(paging: Paging, run: Run, tmp_path: Path) -> None:
    other = paging.build(lambda: mlp(depth=4), TIGHT)
    deepoffload.TrainingState(other, adamw(other)).save(tmp_path / "shallow")
    other = paging.build(lambda: mlp(width=32), TIGHT)
    deepoffload.TrainingState(other, adamw(other)).save(tmp_path / "narrow")
    other = paging.build(mlp, TIGHT)
    optimizer = deepoffload.CPULion(other.parameters(), lr=0.1)
    lion = deepoffload.TrainingState(other, optimizer)
    lion.save(tmp_path / "lion")
    other2 = paging.build(mlp, TIGHT)
    groups = [{"params": [param]} for param in other2.parameters()]
    deepoffload.TrainingState(other2, deepoffload.CPUAdamW(groups)).save(tmp_path / "groups")
    weights = paging.build(mlp, TIGHT, seed=3)
    deepoffload.TrainingState(weights).save(tmp_path / "weights")
    cases = {
        "shallow": "another model: it lacks .*load_module_strict=False",
        "narrow": r"another model: these do not fit: .*\(32, 32\)",
        "lion": "another optimizer: lion.*load_optimizer_states=False",
        "groups": "12 parameter groups, the optimizer 1.*load_optimizer_states=False",
        "weights": "has no optimizer; load_optimizer_states=False",
    }
    with unchanged(run):
        for name, message in cases.items():
            with pytest.raises(UsageError, match=message):
                run.state.load(tmp_path / name)
    run.state.load(tmp_path / "weights", load_optimizer_states=False)
    for name, param in weights.named_parameters():
        assert torch.equal(param, run.model.get_parameter(name))
    run.state.load(tmp_path / "lion", load_module_only=True)
    run.state.load(tmp_path / "shallow", load_module_strict=False, load_optimizer_states=False)
    run.train()


def test_other_objects_have_to_be_the_same(paging: Paging, run: Run, tmp_path: Path) -> None:
    run.state.save(tmp_path)
    other = Run(paging, seed=1, sampler=lambda optimizer: Sampler())
    with unchanged(other), pytest.raises(UsageError, match="it lacks sampler"):
        other.state.load(tmp_path)
    other.state.save(tmp_path, "with_sampler")
    with unchanged(run), pytest.raises(UsageError, match="it also has sampler"):
        run.state.load(tmp_path)


@pytest.mark.parametrize("saved_with", [True, False])
def test_the_argument_that_allows_another_schedule_is_named(saved_with: bool, paging: Paging, tmp_path: Path) -> None:
    with_it, without = Run(paging, scheduler=SCHEDULES["cosine"]), Run(paging, seed=1)
    saved, loading = (with_it, without) if saved_with else (without, with_it)
    saved.train()
    saved.state.save(tmp_path)
    problem = "it also has scheduler" if saved_with else "it lacks scheduler"
    with unchanged(loading), pytest.raises(UsageError, match=f"{problem}; .*load_lr_scheduler_states=False"):
        loading.state.load(tmp_path)
    loading.state.load(tmp_path, load_lr_scheduler_states=False)
    assert_same_bits(snapshot(saved.model, saved.optimizer), snapshot(loading.model, loading.optimizer))


def test_more_than_another_schedule_names_what_is_enough(paging: Paging, tmp_path: Path) -> None:
    saved = Run(paging, scheduler=SCHEDULES["cosine"], sampler=lambda optimizer: Sampler())
    saved.state.save(tmp_path)
    run = Run(paging, seed=1)
    with unchanged(run), pytest.raises(UsageError, match="it also has sampler, scheduler; .*load_module_only=True"):
        run.state.load(tmp_path)
    run.state.load(tmp_path, load_module_only=True)


def test_a_newer_format_says_so(run: Run, tmp_path: Path) -> None:
    from deepoffload.io.checksums import crc32c_of

    folder = Path(run.state.save(tmp_path))
    first, rest = (folder / "manifest.json").read_bytes().split(b"\n", 1)
    rest = rest.replace(b'"version":1', b'"version":2')
    (folder / "manifest.json").write_bytes(b'{"crc32c": "%08x",\n' % crc32c_of(rest) + rest)
    with unchanged(run), pytest.raises(UnsupportedError, match="version 2 of the format.*written by deepoffload"):
        run.state.load(tmp_path)


# -- values ----------------------------------------------------------------------------------------------------------

VALUES: list[Any] = [
    None,
    True,
    -3,
    10**40,
    1.5,
    float("inf"),
    -0.0,
    "text\n\u20ac\ud7ff",
    b"\0\xff",
    [1, [2, (3,)]],
    (),
    {"a": {"$": 1}, "b": [{}]},
    {1: "one", (2, "x"): None, None: 3, b"k": 4, 1.5: 2, False: 0},
    OrderedDict(b=1, a=2),
    Counter("hello"),
    torch.arange(6).view(2, 3),
    torch.tensor(2.5),
    torch.tensor(7),
    torch.tensor([True, False]),
    torch.tensor(float("nan")),
    torch.ones(0, 3, dtype=torch.float16),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_come_back_with_their_types(value: Any) -> None:
    tensors: dict[str, Tensor] = {}
    text = json.dumps(encode({"x": value}, "client_state", tensors), allow_nan=False)
    found = decode(json.loads(text), "here", tensors.__getitem__)["x"]
    assert type(found) is type(value) and repr(found) == repr(value)
    if isinstance(value, Tensor):
        assert_same_bits(value, found, nan_is_wrong=False)


def test_values_that_contain_themselves() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(UnsupportedError, match="inside of 64 other containers"):
        encode(value, "client_state", {})


def test_an_object_with_such_a_value_leaves_no_files(paging: Paging, tmp_path: Path) -> None:
    sampler = Sampler()
    run = Run(paging, sampler=lambda optimizer: sampler)
    sampler.position = {1, 2}  # type: ignore[assignment]
    with pytest.raises(UnsupportedError, match=r"\['sampler'\]\['position'\] is of type set"):
        run.state.save(tmp_path / "out")
    assert not (tmp_path / "out").exists()


# -- after changes of the model --------------------------------------------------------------------------------------


def test_after_a_head_was_replaced_and_weights_unfrozen(paging: Paging, tmp_path: Path) -> None:
    def build(seed: int) -> tuple[Any, Any]:
        model = paging.build(mlp, TIGHT, seed=seed)
        for param in model[0].parameters():
            param.requires_grad_(False)
        optimizer = adamw(model)
        train(model, optimizer)
        model[10] = nn.Linear(64, 64)
        model[0].requires_grad_(True)
        train(model, optimizer)
        for param in optimizer.param_groups[0]["params"][-2:]:
            del optimizer.state[param]  # torch's state_dict() does not take it either
        del optimizer.param_groups[0]["params"][-2:]
        optimizer.add_param_group({"params": [*model[10].parameters(), *model[0].parameters()], "lr": 1e-2})
        return model, optimizer

    def train(model: Any, optimizer: Any, count: int = 2) -> list[Tensor]:
        losses = []
        for _ in range(count):
            loss = model(rows()).square().mean()
            loss.backward()
            optimizer.step()
            model.zero_grad()
            losses.append(loss.detach())
        return losses

    model, optimizer = build(0)
    train(model, optimizer)
    deepoffload.TrainingState(model, optimizer).save(tmp_path)
    expected = {"losses": train(model, optimizer), **snapshot(model, optimizer)}
    model, optimizer = build(1)
    deepoffload.TrainingState(model, optimizer).load(tmp_path)
    assert_same_bits(expected, {"losses": train(model, optimizer), **snapshot(model, optimizer)})


def test_a_weight_that_the_program_has_set_is_its_own_master(paging: Paging, tmp_path: Path) -> None:
    from dataclasses import replace

    from tests.checkpoint.training import gpt

    outcomes = []
    for saved in (False, True):
        model = paging.build(gpt, replace(TIGHT, precision="bf16"))
        optimizer = adamw(model)
        torch.manual_seed(2)
        steps(model, optimizer, 0, 2)
        with torch.no_grad():
            model.position.mul_(1.01)
            model.blocks[0].ln1.weight.data = torch.full((32,), 0.7, dtype=torch.bfloat16)
        if saved:
            deepoffload.TrainingState(model, optimizer).save(tmp_path)
            model = paging.build(gpt, replace(TIGHT, precision="bf16"), seed=3)
            optimizer = adamw(model)
            deepoffload.TrainingState(model, optimizer).load(tmp_path)
        outcomes.append({"losses": steps(model, optimizer, 2, 2), **snapshot(model, optimizer)})
    assert_same_bits(*outcomes)
    assert next_token_loss(model, batch(1)).isfinite()
