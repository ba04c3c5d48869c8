"""A paged model changes type: what keeps the type works, what would change it is refused before anything changes."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
import torch
from torch import nn

from deepoffload.errors import UnsupportedError
from tests.support.loops import assert_same_bits, weights_of
from tests.support.models import mlp, rows
from tests.support.paging import TIGHT, Paging, plain


@pytest.mark.parametrize(
    "convert",
    [nn.Module.half, nn.Module.double, nn.Module.bfloat16, lambda model: model.to(torch.float16)],
    ids=["half", "double", "bfloat16", "to"],
)
def test_other_types_are_refused_and_nothing_changes(paging: Paging, convert: Callable[[nn.Module], None]) -> None:
    model = paging.build(mlp, TIGHT)
    with pytest.raises(UnsupportedError, match=r"0\.weight\.data = .*keeps its shape, dtype and device"):
        convert(model)
    assert_same_bits(weights_of(plain(mlp)), weights_of(model))
    assert_same_bits(plain(mlp)(rows()).detach(), model(rows()).detach())


def test_the_same_type_is_accepted(paging: Paging) -> None:
    model = paging.build(mlp, TIGHT)
    assert model.float().cpu().to(torch.float32) is model
    assert_same_bits(plain(mlp)(rows()).detach(), model(rows()).detach())


def test_a_single_parameter_is_pickled_as_an_ordinary_one(paging: Paging) -> None:
    model = paging.build(mlp, TIGHT)
    file = io.BytesIO()
    torch.save(model[0].weight, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert type(loaded) is nn.Parameter
    assert_same_bits(plain(mlp)[0].weight.detach(), loaded.detach())
