"""What a kernel gives on fake tensors is worked out once: every later call gives what torch does, without asking it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from deepoffload.estimate.fake_maker import FakeMaker
from deepoffload.estimate.kernels import Kernels, KnownCalls
from deepoffload.params.torch_private import fake_tensors, tree_flatten

aten = torch.ops.aten

CALLS: dict[str, tuple[Any, Callable[[], tuple[Any, ...]]]] = {
    "a new tensor": (aten.add.Tensor, lambda: (torch.zeros(4, 6), torch.zeros(6))),
    "another type": (aten._to_copy.default, lambda: (torch.zeros(4, 6).to(torch.bfloat16).t(),)),
    "1 is an int": (aten.mul.Tensor, lambda: (torch.zeros(4, dtype=torch.int64), 1)),
    "1.0 is not": (aten.mul.Tensor, lambda: (torch.zeros(4, dtype=torch.int64), 1.0)),
    "a view": (aten.slice.Tensor, lambda: (torch.zeros(4, 6)[1:], 1, 2, 5)),
    "a view by its place": (aten.as_strided.default, lambda: (torch.zeros(24)[3:], [2, 3], [3, 1], 1)),
    "an expanded view": (aten.expand.default, lambda: (torch.zeros(4, 1), [4, 5])),
    "views in a list": (aten.split.Tensor, lambda: (torch.zeros(6, 4)[2:], 3)),
    "in place": (aten.add_.Tensor, lambda: (torch.zeros(4, 6), 2)),
    "several tensors": (aten.topk.default, lambda: (torch.zeros(4, 6), 2)),
    "a tensor and none": (aten.native_layer_norm.default, lambda: (torch.zeros(4, 6), [6], None, None, 1e-5)),
    "none among tensors": (
        aten.native_layer_norm_backward.default,
        lambda: (
            *(torch.zeros(4, 6), torch.zeros(4, 6), [6], torch.zeros(4, 1), torch.zeros(4, 1)),
            *(torch.zeros(6), torch.zeros(6), [True, False, True]),
        ),
    ),
    "of a list": (aten.cat.default, lambda: ([torch.zeros(2, 3), torch.zeros(4, 3)],)),
    "nothing": (aten.sum.dim_IntList, lambda: (torch.zeros(0, 3), [0])),
}


@contextmanager
def a_run(known: KnownCalls | None = None) -> Iterator[tuple[FakeMaker, Kernels]]:
    with fake_tensors() as (mode, kind):
        maker = FakeMaker(mode, kind)
        yield maker, Kernels(maker, known)


def like(out: Any, args: tuple[Any, ...]) -> list[Any]:
    """Everything about the tensors in ``out`` but their values, and whose memory they show."""
    made = [each for each in tree_flatten(out)[0] if isinstance(each, Tensor)]
    given = [each for each in tree_flatten(args)[0] if isinstance(each, Tensor)]
    found = []
    for tensor in made:
        shared = [number for number, each in enumerate(given) if storage(each) == storage(tensor)]
        place = tensor.storage_offset() if shared else tensor.untyped_storage().nbytes()
        same = [number for number, each in enumerate(given) if each is tensor]
        found.append((tuple(tensor.shape), tensor.stride(), tensor.dtype, place, shared, same))
    absent = [each is None for each in out] if isinstance(out, (tuple, list)) else []
    return [type(out) in (tuple, list), absent, *found]


def storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_is_known_gives_what_torch_gives(name: str) -> None:
    func, arguments = CALLS[name]
    args = arguments()
    expected = like(func(*args), args)
    with a_run() as (maker, kernels):
        ops = []
        for _ in range(3):
            args = arguments()
            out, made, op = kernels.call(func, args, {})
            assert like(out, args) == expected
            assert [id(tensor) for tensor in made] == [
                id(each) for each in tree_flatten(out)[0] if isinstance(each, Tensor)
            ]
            assert all(str(tensor.device) == "cpu" and maker.is_fake(tensor) for tensor in made)
            ops.append(op)
    assert ops[0] is ops[1] is ops[2] and (ops[0] is None) == func.is_view


def test_a_view_of_another_place_is_no_copy_of_the_first() -> None:
    with a_run() as (_, kernels):
        whole = torch.zeros(8, 4)
        for row in (0, 5, 2):
            (out, _, _), expected = kernels.call(aten.select.int, (whole[row:], 0, 1), {}), whole[row:][1]
            assert out.storage_offset() == expected.storage_offset() == 4 * (row + 1)
            assert storage(out) == storage(whole)


def test_what_depends_on_values_is_refused_every_time() -> None:
    with a_run() as (_, kernels):
        for _ in range(2):
            with pytest.raises(Exception, match="nonzero"):
                kernels.call(aten.nonzero.default, (torch.zeros(4),), {})


def test_known_calls_are_not_asked_of_torch_again() -> None:
    asked = []

    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            asked.append(func)
            return func(*args, **(kwargs or {}))

    known = KnownCalls()
    for _ in range(2):  # the second run knows what the first one has found out
        with a_run(known) as (_, kernels), Seen():
            x = torch.zeros(4, 6)
            for _ in range(5):
                kernels.call(aten.add.Tensor, (x, x), {})
                kernels.call(aten.transpose.int, (x, 0, 1), {})
    own = [func for func in asked if func is not aten.zeros.default and func.namespace != "prim"]
    assert own == [aten.add.Tensor, aten.transpose.int]


def test_a_tensor_made_here_has_the_attributes_of_one_that_torch_makes() -> None:
    with a_run() as (maker, _):
        made = [maker.fake((2, 3), (3, 1), torch.float32, torch.device("cpu"), None, 0) for _ in range(3)]
        theirs = torch.zeros(2, 3)
        for tensor in made:
            assert vars(tensor) == vars(theirs)
            assert type(tensor) is type(theirs) and tensor.requires_grad is False
            assert torch._C._dispatch_keys(tensor) == torch._C._dispatch_keys(theirs)
        made[1].requires_grad_().sum().backward()
        assert made[1].grad is not None and made[2].grad is None
