"""Every cell of the matrix: the same bits as plain PyTorch, in several budgets. ``MODELS=all`` runs each in all."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import deepoffload
from tests.models.matrix import FAMILIES, LIFE, LIKE_OTHERS, OWN, SETTINGS, OwnModel, outcome, own_setting
from tests.models.more_families import MORE
from tests.models.programs import Subject, kept_after_forward
from tests.models.seen import look, wrong
from tests.models.zoo import Family
from tests.support.paging import EVICTING, TIGHT, Paging, Setting, plain

pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
from transformers import Trainer  # noqa: E402, F401 - imported before the first test, as its modules are many

pytestmark = pytest.mark.filterwarnings("ignore")


ALL = os.environ.get("MODELS") == "all"
"""The long form: each cell under each setting."""


def lives() -> Iterator[Any]:
    """Each family with everything evicted; and most with the least budget, or a little more, in turns."""
    for number, family in enumerate(FAMILIES.values()):
        for setting in SETTINGS:
            little = setting is SETTINGS[number % 2] and family.name not in LIKE_OTHERS
            if ALL or setting is EVICTING or little:
                yield pytest.param(family, setting, id=f"{family}-{setting}")


def other_ways() -> Iterator[Any]:
    """Each with everything evicted or with a little more than the least budget, in turns."""
    for number, family in enumerate(FAMILIES.values()):
        for more, feature in enumerate(OWN):
            for turn, setting in enumerate((TIGHT, EVICTING)):
                if feature.suits(family) and (ALL or (number + more) % 2 == turn):
                    yield pytest.param(family, feature, setting, id=f"{family}-{feature.name}-{setting}")


LIVES, OTHER_WAYS = list(lives()), list(other_ways())


class Bench:
    """What plain PyTorch gives, each made once, and checkpoints on disk."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._lives: dict[str, dict[str, Any]] = {}
        self._own: dict[tuple[str, str], Any] = {}

    def life(self, family: Family) -> dict[str, Any]:
        if family.name not in self._lives:
            subject = Subject(family, plain(family.build), self.directory)
            torch.manual_seed(1)
            self._lives[family.name] = {f.name: f.program(subject) for f in LIFE if f.suits(family)}
        return self._lives[family.name]

    def own(self, family: Family, feature: OwnModel) -> Any:
        key = (family.name, feature.name)
        if key not in self._own:
            model = plain(lambda: feature.build(family, self.checkpoint(family, feature)), precision=feature.precision)
            torch.manual_seed(1)
            self._own[key] = feature.program(Subject(family, model, self.directory))
        return self._own[key]

    def checkpoint(self, family: Family, feature: OwnModel) -> str:
        """A directory with the family's weights in the feature's dtype; empty text where it asks for none."""
        if feature.checkpoint is None:
            return ""
        path = self.directory / f"{family.name}-{feature.checkpoint}"
        if not path.exists():
            plain(family.build, seed=3).to(getattr(torch, feature.checkpoint)).save_pretrained(path)
        return str(path)


@pytest.fixture(scope="module")
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    directory = tmp_path_factory.mktemp("zoo")
    for family in {item.callspec.params.get("family") for item in request.session.items if hasattr(item, "callspec")}:
        if isinstance(family, Family):
            family.build()
    gc.collect()
    gc.freeze()  # what these have imported is much, and need not be looked at by every collection
    yield Bench(directory)
    shutil.rmtree(directory)
    transformers.logging.enable_progress_bar()
    transformers.logging.set_verbosity(before)


@pytest.mark.parametrize(("family", "setting"), LIVES)
def test_life_of_a_model(bench: Bench, paging: Paging, family: Family, setting: Setting) -> None:
    """Everything that one model goes through, in a row. All that is wrong is reported, not only the first."""
    expected = bench.life(family)
    model = paging.build(family.build, setting, key=family.name)
    torch.manual_seed(1)
    subject = Subject(family, model, bench.directory)
    found = {}
    for feature in LIFE:
        if feature.suits(family):
            fault = wrong(expected[feature.name], look(feature, subject), outcome(family, feature, setting))
            found |= {feature.name: fault} if fault else {}
    assert not found, "\n".join(f"{name}: {fault}" for name, fault in found.items())
    assert deepoffload.stats(model)["evictions"] > 0, "nothing was evicted: this tested nothing"


@pytest.mark.parametrize("family", MORE, ids=str)
def test_life_of_other_families(bench: Bench, paging: Paging, family: Family) -> None:
    test_life_of_a_model(bench, paging, family, TIGHT)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=str)
def test_no_weights_are_kept_after_forward(bench: Bench, paging: Paging, family: Family) -> None:
    """The graph holds the activations of plain PyTorch, to the byte: no weight, no copy or cast of one. What is still
    in the arena is there because there was room; when everything must go, all but a few small ones does."""
    reference = Subject(family, plain(family.build), bench.directory)
    expected = {use_reentrant: kept_after_forward(reference, use_reentrant) for use_reentrant in (None, False, True)}
    for setting in (TIGHT, EVICTING):
        model = paging.build(family.build, setting, key=family.name)
        subject = Subject(family, model, bench.directory)
        for use_reentrant, wanted in expected.items():
            kept = kept_after_forward(subject, use_reentrant)
            assert kept.activation_bytes == wanted.activation_bytes, use_reentrant
            limit = deepoffload.stats(model)["host_budget_bytes"] if setting is TIGHT else 0.05 * kept.model_bytes
            assert kept.resident_weight_bytes <= limit, use_reentrant
        del model, subject
        gc.collect()


@pytest.mark.parametrize(("family", "feature", "setting"), OTHER_WAYS)
def test_other_ways_to_come_to_a_model(
    bench: Bench, paging: Paging, family: Family, feature: OwnModel, setting: Setting
) -> None:
    checkpoint = bench.checkpoint(family, feature)
    expected = bench.own(family, feature)
    paging.least_bytes(family.build, setting, key=family.name)
    model = paging.build(lambda: feature.build(family, checkpoint), own_setting(setting, feature), key=family.name)
    torch.manual_seed(1)
    seen = look(feature, Subject(family, model, bench.directory))
    fault = wrong(expected, seen, outcome(family, feature, setting))
    assert not fault, fault
