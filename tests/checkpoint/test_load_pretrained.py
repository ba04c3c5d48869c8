"""``load_pretrained``: the values of ``load_state_dict(load_file(path))``, and nothing of a file that is wrong."""

from __future__ import annotations

import errno
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import deepoffload
from deepoffload.checkpoint.plain_files import open_files
from deepoffload.checkpoint.plain_reader import PlainReader
from deepoffload.errors import IoFailure, UsageError
from tests.support.models import TinyGPT

Paged = Callable[..., Any]
Make = Callable[[str], nn.Module]


class Mixed(nn.Module):
    """Weights that lie in memory in another order than in a file, ties, buffers, other types, empty and 0-d tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.randn(300, 70).t())
        self.cut = nn.Parameter(torch.randn(5, 7, 11).permute(2, 0, 1))
        self.narrow = nn.Parameter(torch.randn(33, 3).half())
        self.scalar = nn.Parameter(torch.randn(()))
        self.wide = nn.Parameter(torch.randn(5000))
        self.first = nn.Linear(9, 9)
        self.second = nn.Linear(9, 9)
        self.second.weight = self.first.weight
        self.register_buffer("table", torch.randn(40))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("none", torch.empty(0, 4))


def another(make: Callable[[], nn.Module], **types: torch.dtype) -> dict[str, Tensor]:
    """The state dict of a model with other values, some in other types."""
    torch.manual_seed(99)
    state = {name: (value.detach() + 1).contiguous() for name, value in make().state_dict().items()}
    return {name: value.to(types.get(name.replace(".", "_"), value.dtype)) for name, value in state.items()}


def bits(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype is value.dtype, name
        assert torch.equal(found[name], value), name


TYPES = {"turned": torch.bfloat16, "narrow": torch.float32, "wide": torch.float64, "table": torch.float16}


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("make", "types"), [(Mixed, TYPES), (lambda: TinyGPT(dropout=0.0), {})])
def test_values_are_those_of_load_state_dict(
    make: Callable[[], nn.Module], types: Any, precision: str, inside: bool, paged: Paged, tmp_path: Path
) -> None:
    path = tmp_path / "weights.safetensors"
    save_file(another(make, **types), path)

    def built(load: Callable[[nn.Module], object]) -> nn.Module:
        def run() -> nn.Module:
            model = make()
            if inside:
                load(model)
            return model

        torch.manual_seed(1)
        model = paged(run, precision=precision)
        if not inside:
            load(model)
        return model

    expected = built(lambda model: model.load_state_dict(load_file(path)))
    found = built(lambda model: deepoffload.load_pretrained(model, path))
    assert_same(bits(found), bits(expected))


def test_an_ordinary_model_is_loaded_too(tmp_path: Path) -> None:
    save_file(another(Mixed, **TYPES), tmp_path / "model.safetensors")
    expected, found = Mixed(), Mixed()
    expected.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert deepoffload.load_pretrained(found, tmp_path) == ([], [])
    assert_same(bits(found), bits(expected))


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_files_of_save_pretrained_come_back(name: str, make_model: Make, paged: Paged, tmp_path: Path) -> None:
    plain = make_model(name)
    plain.save_pretrained(tmp_path / "saved", max_shard_size="60KB")
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 1
    model = paged(lambda: make_model(name))
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    deepoffload.load_pretrained(model, tmp_path / "saved")
    assert_same(bits(model), bits(plain))


def test_training_goes_on_from_the_loaded_values(paged: Paged, tmp_path: Path) -> None:
    """The master is the loaded weight, and a graph from before is refused."""
    save_file({"weight": torch.full((4, 4), 0.5), "bias": torch.zeros(4)}, tmp_path / "one.safetensors")
    model = paged(lambda: nn.Linear(4, 4), precision="bf16", step_overlap="deferred")
    optimizer = deepoffload.CPUSGD(model.parameters(), lr=0.25)
    model(torch.ones(1, 4).bfloat16()).sum().backward()
    optimizer.step()  # pending: it comes before what is loaded
    optimizer.zero_grad()
    old = model(torch.ones(1, 4, dtype=torch.bfloat16, requires_grad=True)).sum()
    deepoffload.load_pretrained(model, tmp_path / "one.safetensors")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        old.backward()
    model(torch.ones(1, 4).bfloat16()).sum().backward()
    optimizer.step()
    assert torch.equal(model.weight.float(), torch.full((4, 4), 0.25))


def test_names_that_only_one_side_has(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(2, 3), "other": torch.zeros(1)}, tmp_path / "one.safetensors")
    model = nn.Linear(3, 2)
    before = bits(model)
    with pytest.raises(UsageError, match="missing there: bias; unknown to the model: other; strict=False loads"):
        deepoffload.load_pretrained(model, tmp_path / "one.safetensors")
    assert_same(bits(model), before)
    found = deepoffload.load_pretrained(model, tmp_path / "one.safetensors", strict=False)
    assert found.missing_keys == ["bias"]
    assert found.unexpected_keys == ["other"]
    assert not model.weight.any()
    assert torch.equal(model.bias, before["bias"])


def written(path: Path, header: Any, values: bytes = bytes(24)) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + values)


def record(**said: Any) -> dict[str, Any]:
    return {"weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24], **said}}


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: path.write_bytes(b"abc"), "no safetensors file, or is cut off"),
        (lambda path: path.write_bytes(struct.pack("<Q", 1 << 40) + b"{}"), "cannot be 1099511627776 bytes long"),
        (lambda path: written(path, b"{nonsense"), "is damaged"),
        (lambda path: written(path, []), "its header is no object"),
        (lambda path: written(path, record(), bytes(23)), "is cut off: it has .* and weight ends at byte"),
        (lambda path: written(path, record(), bytes(25)), "1 bytes that belong to no tensor"),
        (lambda path: written(path, record(dtype="F7")), "weight of .* has the dtype 'F7'"),
        (lambda path: written(path, record(shape=[2, -3])), r"weight of .* has the shape \[2, -3\]"),
        (lambda path: written(path, record(shape=[2, 4])), r"weight of .* needs 32 bytes for F32\[2, 4\]"),
        (lambda path: written(path, record(data_offsets=[8, 32]), bytes(32)), "weight of .* has a hole before it"),
        (
            lambda path: written(path, {**record(), "b": record()["weight"]}),
            "weight of .* overlaps what lies before it",
        ),
        (lambda path: written(path, record(shape=[3, 2])), r"weight of one.safetensors is \[3, 2\]"),
        (lambda path: path.unlink(), "cannot be read: No such file"),
        (lambda path: (path.unlink(), path.mkdir()), "has neither model.safetensors nor"),
    ],
)
def test_what_is_wrong_is_said_before_anything_changes(damage: Callable[[Path], Any], said: str, tmp_path: Path):
    path = tmp_path / "one.safetensors"
    written(path, record())
    damage(path)
    model = nn.Linear(3, 2, bias=False)
    before = bits(model)
    with pytest.raises(UsageError, match=said) as error:
        deepoffload.load_pretrained(model, path)
    assert str(tmp_path) in str(error.value)
    assert_same(bits(model), before)


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ({"weight_map": {"weight": "../one.safetensors"}}, "is no safetensors file next to it"),
        ({"weight_map": {"bias": "one.safetensors"}}, "says that bias is in one.safetensors, but no file has it"),
        ({"weight_map": []}, "no weight_map"),
        ({"weight_map": {"weight": "two.safetensors"}}, "two.safetensors cannot be read: No such file"),
    ],
)
def test_an_index_that_is_wrong(index: Any, said: str, tmp_path: Path) -> None:
    written(tmp_path / "one.safetensors", record())
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UsageError, match=said):
        deepoffload.load_pretrained(nn.Linear(3, 2, bias=False), tmp_path)


@pytest.mark.parametrize("damage", ["replaced", "removed", "overwritten", "overwritten while it is read"])
def test_a_file_that_changes_after_its_header_was_read(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "one.safetensors"
    written(path, record())
    files = open_files(path)
    tensor = files[0].tensors["weight"]
    memory = torch.empty(2, 3)
    reader = PlainReader(files, lambda nbytes: None)
    if damage == "overwritten while it is read":
        reader.read_into(memory.data_ptr(), tensor, 0, 6)
        reader.check()
    if damage == "replaced":
        written(tmp_path / "two.safetensors", record(), bytes(range(24)))
        os.replace(tmp_path / "two.safetensors", path)
    elif damage == "removed":
        path.unlink()
    else:
        with open(path, "ab") as file:
            file.write(b"x")
    with pytest.raises(IoFailure, match="written to") as error:
        reader.read_into(memory.data_ptr(), tensor, 0, 6)
        reader.check()
    assert error.value.filename == str(path) and error.value.errno == errno.ESTALE
    reader.close()
