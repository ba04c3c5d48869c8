"""``save_pretrained`` of any module: names, types, ties, buffers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, load_model
from torch import nn

import deepoffload
from deepoffload.errors import ClosedError, UnsupportedError, UsageError

Paged = Callable[..., Any]


class Mixed(nn.Module):
    """Parameters and buffers of several types and layouts, tied, frozen, empty, scalar."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(33, 16)
        self.head = nn.Linear(16, 33, bias=False)
        self.head.weight = self.embedding.weight
        self.norm = nn.BatchNorm1d(16)
        self.turned = nn.Parameter(torch.randn(7, 5).t())
        self.scalar = nn.Parameter(torch.tensor(3.5))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("strided", torch.arange(12, dtype=torch.int64).view(3, 4)[:, ::2])
        self.register_buffer("passing", torch.randn(3), persistent=False)


def expected(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("is_paged", [True, False])
def test_every_tensor_of_the_state_dict_is_stored(is_paged: bool, paged: Paged, tmp_path: Path) -> None:
    model = paged(Mixed) if is_paged else Mixed()
    deepoffload.save_pretrained(model, tmp_path)
    got = load_file(tmp_path / "model.safetensors")
    reference = expected(Mixed())
    assert got.keys() == reference.keys() - {"head.weight"}
    for name, value in got.items():
        assert value.dtype is reference[name].dtype, name
        assert torch.equal(value, reference[name]), name


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(33, 16)
        self.head = nn.Linear(16, 33)
        self.head.weight = self.embedding.weight


def test_safetensors_loads_tied_modules(paged: Paged, tmp_path: Path) -> None:
    model = paged(Tied)
    deepoffload.save_pretrained(model, tmp_path)
    other = Tied()
    load_model(other, tmp_path / "model.safetensors")
    assert torch.equal(other.head.weight, model.embedding.weight.data)
    assert torch.equal(other.head.bias, model.head.bias.data)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.bfloat16])
def test_other_types(dtype: torch.dtype, paged: Paged, tmp_path: Path) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 3, dtype=dtype), nn.Linear(3, 3))

    model = paged(make)
    deepoffload.save_pretrained(model, tmp_path)
    got = load_file(tmp_path / "model.safetensors")
    for name, value in make().state_dict().items():
        assert got[name].dtype is value.dtype
        assert torch.equal(got[name], value)


def test_shards_hold_at_most_what_is_asked_for(paged: Paged, tmp_path: Path) -> None:
    model = paged(lambda: nn.Sequential(*[nn.Linear(32, 32) for _ in range(6)], nn.Linear(32, 256)))
    deepoffload.save_pretrained(model, tmp_path, max_shard_size=9000)
    files = sorted(tmp_path.glob("model-*.safetensors"))
    sizes = [sum(t.numel() * 4 for t in load_file(path).values()) for path in files]
    assert sorted(sizes)[-1] == 32 * 256 * 4  # larger than a shard, so it is one of its own
    assert sorted(sizes)[-2] <= 9000
    assert len(files) == int(files[0].name[-17:-12])


def test_the_weights_of_the_moment_are_saved(paged: Paged, tmp_path: Path) -> None:
    model = paged(lambda: nn.Linear(16, 16))
    with torch.no_grad():
        model.weight.fill_(2.0)
        model.bias.data[3] = 7.0
    deepoffload.save_pretrained(model, tmp_path)
    got = load_file(tmp_path / "model.safetensors")
    assert torch.equal(got["weight"], torch.full((16, 16), 2.0))
    assert got["bias"][3] == 7.0


def test_inside_inference_mode_and_with_a_default_device(paged: Paged, tmp_path: Path) -> None:
    model = paged(Mixed)
    with torch.inference_mode(), torch.device("meta"):
        deepoffload.save_pretrained(model, tmp_path)
    assert torch.equal(load_file(tmp_path / "model.safetensors")["turned"], Mixed().turned)


class WithState(nn.Linear):
    def get_extra_state(self) -> object:
        return {"calls": 3}

    def set_extra_state(self, state: object) -> None:
        self.state = state


def refused_modules() -> list[tuple[str, Callable[[], nn.Module]]]:
    complex_layer = nn.Linear(2, 2)
    complex_layer.register_buffer("table", torch.zeros(2, dtype=torch.complex64))
    return [
        ("_extra_state", lambda: WithState(2, 2)),
        ("table is torch.complex64", lambda: complex_layer),
        ("meta", lambda: nn.Linear(2, 2, device="meta")),
    ]


@pytest.mark.parametrize(("message", "make"), refused_modules(), ids=["extra state", "complex", "meta"])
def test_what_the_format_cannot_hold_is_refused_before_anything_is_written(
    message: str, make: Callable[[], nn.Module], tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        deepoffload.save_pretrained(make(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_arguments_that_cannot_be_used(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(UnsupportedError, match="safe_serialization"):
        deepoffload.save_pretrained(model, tmp_path / "out", safe_serialization=False)
    for size in ("5 parsecs", 0, -3, None):
        with pytest.raises(UsageError, match="max_shard_size"):
            deepoffload.save_pretrained(model, tmp_path / "out", max_shard_size=size)
    with pytest.raises(UsageError, match=r"torch\.nn\.Module, not OrderedDict"):
        deepoffload.save_pretrained(model.state_dict(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_closed_engine_cannot_be_saved(paged: Paged, tmp_path: Path) -> None:
    engine, *_ = deepoffload.initialize(model=paged(Mixed))
    engine.close()
    with pytest.raises(ClosedError, match="closed"):
        deepoffload.save_pretrained(engine, tmp_path / "out")
    assert not (tmp_path / "out").exists()
