"""Raw paged parameters given to transforms of ``torch.func``, outside of any module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepoffload
from tests.support.loops import assert_same_bits
from tests.support.models import rows
from tests.support.paging import EVICTING, RESIDENT, ROOMY, TIGHT, Paging, Same, Setting

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


def slope(w: Tensor) -> Tensor:
    return torch.tanh(rows() * w).square().sum()


UNSEEN: dict[str, Callable[[Tensor], Any]] = {
    "grad": lambda w: torch.func.grad(slope)(w),
    "grad_and_value": lambda w: torch.func.grad_and_value(slope)(w),
    "vjp": lambda w: torch.func.vjp(slope, w)[1](torch.ones(())),
    "jacrev": lambda w: torch.func.jacrev(lambda v: v.square().cumsum(0))(w),
    "jacfwd": lambda w: torch.func.jacfwd(lambda v: v.square().cumsum(0))(w),
    "hessian": lambda w: torch.func.hessian(lambda v: v.sin().prod())(w),
    "grad of grad": lambda w: torch.func.grad(lambda v: torch.func.grad(slope)(v).sum())(w),
    "grad by keyword": lambda w: torch.func.grad(lambda x, v: slope(v) * x.sum())(torch.ones(3), v=w),
    "without torch functions": lambda w: no_torch_function(lambda: (w.detach() * 2).sum()),
}
"""Those that take a parameter apart where no door sees it."""


def no_torch_function(compute: Callable[[], Tensor]) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return compute()


@pytest.mark.parametrize("setting", [RESIDENT, ROOMY, TIGHT, EVICTING], ids=str)
@pytest.mark.parametrize("form", UNSEEN)
def test_what_no_door_sees_is_right_or_refused(paging: Paging, form: str, setting: Setting) -> None:
    """Never without the bytes, and never with those from before an update that is still to come."""
    model = paging.build(Deep, setting)
    optimizer = deepoffload.CPUSGD(model.parameters(), lr=0.1)
    refused = 0
    for _ in range(2):
        model(rows()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for layer in model.layers:
            try:
                found = UNSEEN[form](layer.bias)
            except RuntimeError as error:
                assert "annot access data pointer" in str(error), error
                refused += 1
            else:
                assert_same_bits(UNSEEN[form](layer.bias.detach().clone()), found)
    assert refused == 0 or setting is not RESIDENT
