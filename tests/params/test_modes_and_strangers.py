"""User modes, transforms, foreign tensor classes and wrappers around a paged model; writes that pass no door."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import deepoffload
from deepoffload.errors import UnsupportedError
from tests.support.inspect import handle_of
from tests.support.loops import assert_same_bits, gradients_of, weights_of
from tests.support.models import mlp, rows
from tests.support.paging import EVICTING, RESIDENT, TIGHT, Paging, Same, plain


def backward(model: nn.Module, seed: int = 1) -> None:
    model(rows(seed=seed)).square().mean().backward()


class Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_dispatch_modes_do_not_see_transfers(same: Same) -> None:
    """Selective checkpointing counts operations: ours must not be among them."""

    def program(model: nn.Module) -> Any:
        with torch.no_grad(), Names() as mode:
            model(rows())
        return [name for name in mode.seen if "detach" not in name and "randn" not in name]

    same(mlp, program)


def test_default_device_meta(same: Same) -> None:
    def program(model: nn.Module) -> Any:
        x = rows()
        with torch.device("meta"):
            output = model(x)
        output.square().mean().backward()
        return output.detach(), gradients_of(model)

    same(mlp, program)


def test_inference_mode_and_training_after_it(same: Same) -> None:
    """Bytes fetched in inference mode must not become inference tensors, which can never be trained again."""

    def program(model: nn.Module) -> Any:
        with torch.inference_mode():
            shown = model(rows()).clone()
        backward(model)
        assert not any(param.is_inference() for param in model.parameters())
        return shown.clone(), gradients_of(model)

    same(mlp, program)


def test_functional_call(same: Same) -> None:
    def program(model: nn.Module) -> Any:
        own = dict(model.named_parameters())
        doubled = {name: 2 * param for name, param in own.items()}
        output = torch.func.functional_call(model, doubled, (rows(),))
        other = torch.func.functional_call(model, own, (rows(seed=2),))
        (output.square().mean() + other.sum()).backward()
        return output.detach(), other.detach(), gradients_of(model)

    same(mlp, program, room=4.0)


def test_vmap_over_inputs(same: Same) -> None:
    def program(model: nn.Module) -> Any:
        with torch.no_grad():
            return torch.func.vmap(model)(torch.stack([rows(seed=1), rows(seed=2)]))

    same(mlp, program, room=4.0)


@pytest.mark.parametrize("detached", [True, False], ids=["detached", "raw"])
@pytest.mark.parametrize("trained", [0, 2])
def test_gradients_by_torch_func(same: Same, detached: bool, trained: int) -> None:
    """Raw parameters pass no door: the windows of the modules that are called with them find them."""

    def program(model: nn.Module) -> Any:
        optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2)
        for seed in range(trained):
            model(rows(seed=seed)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        params = {name: param.detach() if detached else param for name, param in model.named_parameters()}

        def loss(params: dict[str, Tensor]) -> Tensor:
            return torch.func.functional_call(model, params, (rows(),)).square().mean()

        return {name: grad.clone() for name, grad in torch.func.grad(loss)(params).items()}

    same(mlp, program, room=8.0)


class Marked(Tensor):
    """A foreign class with its own operation."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result + 1 if func is torch.matmul and result is not NotImplemented else result


def test_activations_of_a_foreign_class(same: Same) -> None:
    def program(model: nn.Sequential) -> Any:
        x = rows().as_subclass(Marked)
        inside = model(x)
        outside = torch.matmul(x, model[0].weight)  # outside of every window: through the door
        assert type(inside) is Marked and type(outside) is Marked
        (inside.sum() + outside.sum()).backward()
        return inside.detach().as_subclass(Tensor), outside.detach().as_subclass(Tensor), gradients_of(model)

    same(mlp, program)


@pytest.mark.parametrize("size", [(1,), (3, 5), ()], ids=str)
@pytest.mark.parametrize(
    "use",
    [
        lambda p: Tensor.fill_(p, 3.0),
        lambda p: Tensor.zero_(p),
        lambda p: Tensor.mul_(p, 2.0),
        lambda p: torch._fused_sgd_(
            [p], [torch.ones(p.shape)], [], weight_decay=0.0, momentum=0.0, lr=0.1, dampening=0.0, nesterov=False,
            maximize=False, is_first_step=True,
        ),
        lambda p: p.detach().numpy(),
        lambda p: Tensor.data_ptr(p),
        lambda p: Tensor.sum(p),
        lambda p: Tensor.clone(p),
        lambda p: Tensor.tolist(p),
        lambda p: torch.cat([p.detach().flatten(), torch.ones(2)]),
        lambda p: torch.ones(2, *p.shape) + p,
    ],
    ids="fill zero mul fused numpy data_ptr sum clone tolist cat add".split(),
)  # fmt: skip
def test_neither_writes_to_a_stand_in_nor_reads_of_it(paging: Paging, use: Any, size: tuple[int, ...]) -> None:
    """Where no door is passed and the bytes are away: a read would show no weight, a write would change a scalar."""

    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.small = nn.Parameter(torch.ones(size))
            self.body = mlp()

    model = paging.build(Small, EVICTING, key=("small", size))
    model.body(rows())
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        with pytest.raises(RuntimeError, match="annot access data pointer|single memory location"):
            use(model.small)
    assert_same_bits(torch.ones(size), model.small.detach().clone())


def test_distributed_data_parallel_is_refused(paging: Paging, tmp_path: Any) -> None:
    """Also where memory does not hold all weights at once, which it would send to the other ranks."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        for setting in (RESIDENT, replace(TIGHT, room=1.0)):
            model = paging.build(mlp, setting)
            with pytest.raises(UnsupportedError, match="DistributedDataParallel around a paged model"):
                nn.parallel.DistributedDataParallel(model, init_sync=setting is not RESIDENT)(rows())
            del model
    finally:
        torch.distributed.destroy_process_group()


def test_metadata_brings_no_bytes(paging: Paging) -> None:
    model = paging.build(mlp, EVICTING)
    weight = model[0].weight
    slot = handle_of(weight)
    assert slot.storage is None
    for look in (
        "shape dtype device ndim requires_grad is_leaf grad_fn layout nbytes itemsize _version grad is_cuda"
    ).split():
        getattr(weight, look)
    assert (weight.size(), weight.dim(), weight.numel(), weight.stride(), len(weight)) == (
        (64, 64),
        2,
        4096,
        (64, 1),
        64,
    )
    assert weight.is_contiguous() and weight.storage_offset() == 0 and hash(weight) == id(weight)
    weight.register_hook(lambda grad: grad).remove()
    lazy = model.state_dict()["0.weight"]
    for tensor in (weight, lazy):
        assert not tensor.is_shared() and not tensor.is_pinned()
    assert slot.storage is None, "a question about the tensor brought its bytes"


def test_hooks_put_on_before_the_type_changes_still_fire(paging: Paging) -> None:
    """When the context ends weights become bf16; hooks of the parameter, not of its old node, live on."""
    from dataclasses import replace

    seen: list[torch.dtype] = []

    def build() -> nn.Module:
        model = mlp()
        model[0].weight.register_hook(lambda grad: seen.append(grad.dtype))
        model[2].weight.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.dtype))
        return model

    model = paging.build(build, replace(EVICTING, precision="bf16"))
    reference = plain(mlp, precision="bf16")
    seen.clear()
    for net in (reference, model):
        net(rows().bfloat16()).float().square().mean().backward()
    assert seen == [torch.bfloat16, torch.bfloat16]
    assert_same_bits(gradients_of(reference), gradients_of(model))
    assert_same_bits(weights_of(reference), weights_of(model))
