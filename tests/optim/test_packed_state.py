"""``deepoffload.paged`` for classes whose state has other shapes than the parameter, or lies in lists, as SOAP's."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepoffload
from deepoffload.errors import UnsupportedError
from tests.optim.deferred import train_on_text
from tests.optim.foreign_kinds import ChangesLateInList, OtherShapes, PlainLoop
from tests.optim.soap import SOAP
from tests.optim.test_foreign import Kind, copy_of, shown, train
from tests.support.loops import assert_same_bits, weights_of
from tests.support.models import TinyGPT, llama, mixtral, rows
from tests.support.paging import EVICTING, RESIDENT, SERIAL, TIGHT, Paging, Setting, plain

KINDS = (Kind(SOAP, {"lr": 0.01, "max_precond_dim": 40}), Kind(OtherShapes))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Many small decompositions: on a busy machine their threads would wait for each other most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def build(*, turned: bool = True) -> nn.Module:
    """Matrices of several forms, one with another order of memory (``turned``), and vectors."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 12, bias=False))
    if turned:
        model[0].weight = nn.Parameter(model[0].weight.detach().T.contiguous().T)
    return model


STRAIGHT = partial(build, turned=False)
"""What is loaded has the order of rows; SOAP's bits depend on that."""


def pair(
    paging: Paging, setting: Setting, kind: Kind, *, turned: bool = True
) -> tuple[nn.Module, Any, nn.Module, PlainLoop]:
    made = partial(build, turned=turned)
    model, twin = paging.build(made, setting, key="packed"), plain(made, precision=setting.precision)
    return model, kind.paged(model.parameters()), twin, PlainLoop(twin, kind.plain)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_same_bits_as_the_class_itself(paging: Paging, kind: Kind) -> None:
    for setting in (SERIAL, EVICTING, RESIDENT, replace(TIGHT, precision="bf16")):
        model, optimizer, twin, reference = pair(paging, setting, kind)
        assert_same_bits(train(twin, reference, range(5)), train(model, optimizer, range(5)))
        assert_same_bits(weights_of(twin), weights_of(model))
        assert_same_bits(shown(reference.inner), shown(optimizer))
        kept = [value for entry in optimizer.state.values() for value in entry.values() if torch.is_tensor(value)]
        assert sum(value.nbytes for value in kept) < 5000


@pytest.mark.parametrize(
    ("family", "setting"),
    [
        (partial(TinyGPT, width=32, depth=1, checkpointing=False), TIGHT),
        (partial(llama, num_hidden_layers=1), replace(EVICTING, precision="bf16")),
        (partial(mixtral, num_hidden_layers=1), EVICTING),
    ],
    ids=["gpt", "llama", "mixtral"],
)
def test_soap_on_language_models(paging: Paging, family: Any, setting: Setting) -> None:
    """Tied embeddings, vectors, and stacked experts, whose three dimensions have a matrix each. The fourth step takes
    bases that the third has refined."""
    kind, found = KINDS[0], []
    twin = plain(family, precision=setting.precision)
    model = paging.build(family, setting, key=("soap", family.func))
    for each, optimizer in ((twin, PlainLoop(twin, kind.plain)), (model, kind.paged(model.parameters()))):
        torch.manual_seed(5)
        found.append((train_on_text(each, optimizer, 4, 1), weights_of(each)))
    assert_same_bits(*found)
    assert deepoffload.stats(model)["evictions"] > 0


def test_the_state_goes_in_and_out(paging: Paging) -> None:
    """Of SOAP, through files; loading into the class itself changes types of other ones, as torch does."""
    kind = KINDS[0]
    model, optimizer, twin, reference = pair(paging, EVICTING, kind, turned=False)
    train(twin, reference, range(3))
    model.load_state_dict(twin.state_dict())
    optimizer.load_state_dict(copy_of(reference.inner.state_dict()))
    assert_same_bits(shown(reference.inner), shown(optimizer))
    train(model, optimizer, range(3, 5))
    train(twin, reference, range(3, 5))
    assert_same_bits(shown(reference.inner), shown(optimizer))
    back = plain(STRAIGHT)
    back.load_state_dict(weights_of(model))
    again = kind.plain(back.parameters())
    again.load_state_dict(copy_of(optimizer.state_dict()))
    copied, of_copied = pickle.loads(pickle.dumps((model, optimizer)))
    expected = train(back, again, range(5, 7))
    assert_same_bits(expected, train(model, optimizer, range(5, 7)))
    assert_same_bits(expected, train(copied, of_copied, range(5, 7)))  # neither has an engine
    assert_same_bits(weights_of(back), weights_of(model))
    assert_same_bits(weights_of(back), weights_of(copied))


def test_a_state_dict_shows_later_steps_and_goes_back(paging: Paging) -> None:
    model = paging.build(build, TIGHT, key="packed")
    optimizer = KINDS[0].paged(model.parameters())
    train(model, optimizer, range(2))
    live = optimizer.state_dict()
    first, saved, weights = live["state"][0]["Q"][0], copy_of(live), weights_of(model)
    assert first.shape == (32, 32) and live["state"][0]["Q"][1] == []
    assert torch.equal(first, saved["state"][0]["Q"][0])
    train(model, optimizer, range(2, 5))
    expected = weights_of(model)
    assert not torch.equal(first, saved["state"][0]["Q"][0])
    model.load_state_dict(weights)
    optimizer.load_state_dict(saved)
    train(model, optimizer, range(2, 5))
    assert_same_bits(expected, weights_of(model))
    saved["state"][0]["Q"][0] = torch.zeros(5, 5)
    with pytest.raises(ValueError, match=r"Q \(5x5\).*SOAP keeps .*Q \(32x32\)"):
        optimizer.load_state_dict(saved)


def test_checkpoints(paging: Paging, tmp_path: Path) -> None:
    """Into another engine, and into the class itself."""
    for kind in KINDS:
        model = paging.build(STRAIGHT, TIGHT, key="packed")
        optimizer = kind.paged(model.parameters())
        train(model, optimizer, range(3))
        folder = tmp_path / str(kind)
        deepoffload.TrainingState(model, optimizer).save(folder)
        train(model, optimizer, range(3, 5))
        other = paging.build(STRAIGHT, EVICTING, key="packed", seed=9)
        again = kind.paged(other.parameters())
        deepoffload.TrainingState(other, again).load(folder)
        train(other, again, range(3, 5))
        assert_same_bits(weights_of(model), weights_of(other))
        assert_same_bits(shown(optimizer), shown(again))
        if kind.made is SOAP:  # torch changes types of others
            twin = plain(STRAIGHT)
            itself = kind.plain(twin.parameters())
            deepoffload.TrainingState(twin, itself).load(folder)
            train(twin, itself, range(3, 5))
            assert_same_bits(weights_of(model), weights_of(twin))


def test_refused_with_state_in_bf16_and_when_a_list_grows(paging: Paging) -> None:
    model = paging.build(build, replace(TIGHT, step_overlap="none"), key="packed")
    optimizer = KINDS[0].paged(model.parameters(), state_dtype="bf16")
    model(rows(width=64)).square().mean().backward()
    before = weights_of(model)
    with pytest.raises(UnsupportedError, match=r"GG \(32x32\).* use state_dtype='fp32'"):
        optimizer.step()
    assert_same_bits(before, weights_of(model))
    late = deepoffload.paged(ChangesLateInList, model.parameters())
    train(model, late, range(3))
    with pytest.raises(UnsupportedError, match=r"after this step its state is bases \(5x5, 5x5\)"):
        train(model, late, range(3, 4))
