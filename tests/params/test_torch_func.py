"""Raw paged parameters given to transforms of ``torch.func``, outside of any module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.models import rows
from tests.support.paging import Same

FORMS: dict[str, Callable[[Tensor], Any]] = {
    "vmap": lambda w: torch.vmap(lambda row: row.square().sum())(w),
    "vmap of columns": lambda w: torch.vmap(lambda column, x: column * x, in_dims=(1, 0))(w, rows(seed=2).T[:, 0]),
    "vmap in chunks": lambda w: torch.vmap(lambda row: row.square().sum(), chunk_size=8)(w),
    "vmap of vmap": lambda w: torch.vmap(torch.vmap(torch.sin))(w),
    "vmap with the whole": lambda w: torch.vmap(lambda x, w: torch.tanh(x @ w), in_dims=(0, None))(rows(), w),
    "jvp": lambda w: torch.func.jvp(lambda v: torch.tanh(rows() @ v), (w,), (torch.ones(64, 64),)),
    "jvp along": lambda w: torch.func.jvp(lambda v: torch.tanh(rows() @ v), (torch.ones(64, 64),), (w,)),
    "jvp along itself": lambda w: torch.func.jvp(lambda v: torch.tanh(rows() @ v), (w,), (w,)),
}


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@pytest.mark.parametrize("form", FORMS)
def test_of_raw_parameters(same: Same, form: str) -> None:
    def program(model: Deep) -> Any:
        with torch.no_grad():
            for _ in range(2):
                model(rows())
        found = FORMS[form](model.layers[3].weight)
        return [value.detach().clone() for value in (found if isinstance(found, tuple) else (found,))]

    same(Deep, program, room=4.0)
