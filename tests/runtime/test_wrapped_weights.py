"""Weights that are tensors around other tensors, as torchao's: what is inside is paged, and read where it lies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from deepoffload import offload_context, stats
from deepoffload.memory.block import is_backed
from tests.support.inspect import units_of

WIDTH, DEPTH = 96, 12


class Scaled(Tensor):
    """int8 numbers and a scale for each row, which compute as a weight in fp32."""

    @staticmethod
    def __new__(cls, numbers: Tensor, scales: Tensor) -> Scaled:
        made: Scaled = Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=scales.dtype, requires_grad=False)
        return made

    def __init__(self, numbers: Tensor, scales: Tensor) -> None:
        self.numbers, self.scales = numbers, scales

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["numbers", "scales"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: None, size: Any, stride: Any) -> Scaled:
        return cls(inner["numbers"], inner["scales"])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            x, weight, *rest = args
            return F.linear(x, weight.numbers * weight.scales[:, None], *rest)
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].numbers, args[0].scales)
        raise TypeError(f"{func} of scaled numbers")


def build(checkpoint: Path) -> Any:
    """The weights are mapped from a checkpoint."""
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)]
    with safe_open(checkpoint, framework="pt") as file:
        for number, layer in enumerate(layers):
            inner = [file.get_slice(f"{number}.{name}")[...] for name in ("numbers", "scales")]
            layer.weight = nn.Parameter(Scaled(*inner), requires_grad=False)
    return nn.Sequential(*layers)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    values = {}
    for number in range(DEPTH):
        values[f"{number}.numbers"] = torch.randint(-128, 127, (WIDTH, WIDTH), dtype=torch.int8)
        values[f"{number}.scales"] = torch.rand(WIDTH) / 1000
    save_file(values, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@torch.no_grad()
def test_what_is_inside_is_paged_where_it_lies(checkpoint: Path, nvme_path: Path) -> None:
    plain = build(checkpoint)
    said: dict[str, Any] = {"host_budget": "128KiB", "nvme_path": str(nvme_path), "debug": {"poison": True}}
    with offload_context(inference=True, **said):
        model = build(checkpoint)
    handles = [handle for unit in units_of(model) for handle in unit.handles]
    assert sum(handle.dtype is torch.int8 for handle in handles) == DEPTH
    assert all(is_backed(unit.weights) for unit in units_of(model)), "something was copied"
    x = torch.randn(3, WIDTH)
    for _ in range(3):
        assert torch.equal(model(x), plain(x))
    weight = model[0].weight  # it holds the bytes
    assert type(weight) is Scaled
    assert torch.equal(model(x), plain(x))
    assert torch.equal(weight.numbers, plain[0].weight.numbers) and torch.equal(weight.scales, plain[0].weight.scales)
    found = stats(model)
    assert found["evictions"] > DEPTH and found["disk_bytes_read"] > DEPTH * WIDTH * WIDTH


@torch.no_grad()
def test_what_cannot_be_taken_apart_stays_as_it_is(checkpoint: Path, nvme_path: Path) -> None:
    """Shared weights, models that take another type, and training."""
    plain = build(checkpoint)
    for changes in ({"inference": True}, {"inference": True, "precision": "bf16"}, {}):
        with offload_context(host_budget="1MiB", nvme_path=str(nvme_path), **changes):  # type: ignore[arg-type]
            model = build(checkpoint)
            model[1].weight = model[0].weight
        kept = [type(layer.weight) is Scaled and "weight" in layer._parameters for layer in model]
        assert kept[0] and kept[1] and model[0].weight is model[1].weight
        assert all(kept) or changes == {"inference": True}
    assert torch.equal(model[0](torch.eye(WIDTH)), plain[0](torch.eye(WIDTH)))
