"""Stored and shown are two things: weights that are stored in another form than the program is shown, through the same
pager, doors and windows as all others, compared with plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepoffload
from deepoffload.errors import UnsupportedError
from deepoffload.memory.arena import Arena
from deepoffload.memory.block import Block
from deepoffload.memory.form import Form
from deepoffload.memory.tier_manager import TierManager
from deepoffload.native.aio import PAGE_BYTES
from deepoffload.params.open_graphs import OpenGraphs
from deepoffload.params.use_order import UseOrder
from deepoffload.schedule.placement import BlockKind
from tests.support.encodings import EncodedModel, Encoding, Fp32ShownAsBf16, Int8ShownAsFp32
from tests.support.loops import assert_same_bits, to_bf16

WIDTH = 96
LAYERS = 6


class Net(nn.Module):
    """Layers with norms; each module with parameters is a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(LAYERS))
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + torch.relu(layer(norm(x)))
        return x


def build() -> Net:
    torch.manual_seed(0)
    return Net()


def rows(seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed)).to(dtype)


Encode = Callable[..., EncodedModel]


@pytest.fixture
def encode(tmp_path: Path) -> Iterator[Encode]:
    """Pages models, and gives everything back."""
    made: list[EncodedModel] = []

    def make(model: nn.Module, encoding: type[Encoding], *, device_bytes: int, host_bytes: int = 512 << 10) -> Any:
        made.append(EncodedModel(model, encoding, tmp_path, device_bytes=device_bytes, host_bytes=host_bytes))
        return made[-1]

    yield make
    for each in made:
        each.close()
    assert list(tmp_path.iterdir()) == []


def shown_room_bytes(encoded: EncodedModel) -> int:
    return sum(unit.weights.shown_room_bytes for unit in encoded.units)


def stored_room_bytes(encoded: EncodedModel) -> int:
    return sum(unit.weights.room_bytes for unit in encoded.units)


def train(model: nn.Module, steps: int = 3) -> list[Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    seen: list[Any] = []
    for step in range(steps):
        x = rows(step, torch.bfloat16).requires_grad_()
        loss = model(x).float().square().mean()
        loss.backward()
        seen += [loss.detach(), x.grad, [param.grad.clone() for param in model.parameters()]]
        seen.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, [param.detach().clone() for param in model.parameters()]]


@pytest.mark.parametrize("room", [0.4, 1.5])
def test_weights_stored_as_fp32_train_as_the_bf16_that_is_shown(encode: Encode, room: float) -> None:
    expected = train(to_bf16(build()))
    model = build()
    shown_bytes = sum(-(-p.numel() * 2 // PAGE_BYTES) * PAGE_BYTES for p in model.parameters())
    encoded = encode(model, Fp32ShownAsBf16, device_bytes=int(shown_bytes * room) // PAGE_BYTES * PAGE_BYTES)
    assert stored_room_bytes(encoded) > 1.5 * shown_room_bytes(encoded)
    assert_same_bits(expected, train(model))
    assert encoded.memory.arena.peak_bytes <= encoded.memory.capacity_bytes
    assert encoded.tiers.counters.evictions > 0, "the stored bytes went to NVMe, too"
    for unit, module in zip(encoded.units, [*model.norms, *model.layers], strict=True):
        stored = encoded.stored(unit)
        for handle, param in zip(unit.handles, module.parameters(), strict=True):
            form = handle.form
            part = stored[form.offset_stored : form.offset_stored + form.nbytes_stored].view(torch.float32)
            assert torch.equal(part.view(param.shape), param.detach().float())


def test_what_nobody_writes_keeps_its_stored_precision(encode: Encode) -> None:
    model, plain = build(), build()
    encoded = encode(model, Fp32ShownAsBf16, device_bytes=64 << 10)
    with torch.no_grad():
        model(rows(0, torch.bfloat16))
        model.layers[1].weight.mul_(2)
    encoded.memory.evict_all(frozenset())
    units = {unit.name: unit for unit in encoded.units}
    weight_bytes = WIDTH * WIDTH * 4
    untouched = encoded.stored(units["layers.0"])[:weight_bytes].view(torch.float32).view(WIDTH, WIDTH)
    written = encoded.stored(units["layers.1"])[:weight_bytes].view(torch.float32).view(WIDTH, WIDTH)
    assert torch.equal(untouched, plain.layers[0].weight)
    assert torch.equal(written, plain.layers[1].weight.detach().bfloat16().mul(2).float())


class Adapted(nn.Module):
    """LoRA's shape: a frozen model, and small trained weights next to each of its layers."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = net.requires_grad_(False)
        torch.manual_seed(1)
        self.down = nn.ModuleList(nn.Linear(WIDTH, 4, bias=False) for _ in range(LAYERS))
        self.up = nn.ModuleList(nn.Linear(4, WIDTH, bias=False) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for norm, layer, down, up in zip(self.net.norms, self.net.layers, self.down, self.up, strict=True):
            y = norm(x)
            x = x + torch.relu(layer(y) + up(down(y)))
        return x


def dequantised(model: Net) -> Net:
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(Int8ShownAsFp32.dequantised(param))
    return model


def train_adapters(model: Adapted, steps: int = 3) -> list[Any]:
    trained = [*model.down.parameters(), *model.up.parameters()]
    optimizer = deepoffload.CPUAdamW(trained, lr=1e-2)
    seen: list[Any] = []
    for step in range(steps):
        x = rows(step, torch.float32).requires_grad_()
        loss = model(x).square().mean()
        loss.backward()
        seen += [loss.detach(), x.grad, [param.grad.clone() for param in trained]]
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, [param.detach().clone() for param in trained]]


@pytest.mark.parametrize("layers_on_device", [1, 3])
def test_int8_codes_are_shown_dequantised(encode: Encode, layers_on_device: int) -> None:
    expected = train_adapters(Adapted(dequantised(build())))
    net = build()
    layer_bytes = (WIDTH * WIDTH + WIDTH) * 4 + 4 * PAGE_BYTES
    encoded = encode(net, Int8ShownAsFp32, device_bytes=layers_on_device * layer_bytes, host_bytes=320 << 10)
    layers = [unit for unit in encoded.units if unit.name.startswith("layers")]
    assert all(unit.weights.shown_nbytes > 3.5 * unit.weights.nbytes for unit in layers)
    assert_same_bits(expected, train_adapters(Adapted(net)))
    numbers = encoded.memory.stats()
    assert numbers["device_evictions"] > 0 and numbers["device_bytes_out"] == 0
    assert numbers["device_peak_bytes"] <= numbers["device_budget_bytes"]


def in_place(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.mul_(2)


def new_data(weight: nn.Parameter) -> None:
    weight.data = torch.zeros(weight.shape)


def through_a_view(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight[0].fill_(3)


@pytest.mark.parametrize("write", [in_place, new_data, through_a_view])
def test_a_write_that_cannot_be_taken_back_is_refused(encode: Encode, write: Callable[[nn.Parameter], None]) -> None:
    net = build().requires_grad_(False)
    encoded = encode(net, Int8ShownAsFp32, device_bytes=256 << 10)
    values = [param.clone() for param in net.parameters()]
    with pytest.raises(UnsupportedError, match=r"layers\.2 are stored as int8 codes .* Write to a copy"):
        write(net.layers[2].weight)
        encoded.memory.evict_all(frozenset())
    encoded.memory.evict_all(frozenset())
    assert_same_bits(values, [param.clone() for param in net.parameters()])


class Rescaling(nn.Linear):
    """Writes to its own weight in its forward, where it has no doors."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.mul_(0.5)
        return super().forward(x)


def test_a_write_inside_a_window_is_refused_when_the_window_ends(encode: Encode) -> None:
    torch.manual_seed(0)
    module = Rescaling(WIDTH, WIDTH).requires_grad_(False)
    model = nn.Sequential(module)
    encoded = encode(model, Int8ShownAsFp32, device_bytes=256 << 10)
    values = module.weight.clone()
    with pytest.raises(UnsupportedError, match="stored as int8 codes"):
        model(rows(0, torch.float32))
    assert torch.equal(module.weight, values)
    encoded.memory.evict_all(frozenset())
    assert not encoded.memory.shows(encoded.units[0].weights), "nothing leases it"


def test_the_update_where_the_weight_is_stored_is_refused(encode: Encode) -> None:
    model = build()
    encode(model, Fp32ShownAsBf16, device_bytes=256 << 10)
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2)
    model(rows(0, torch.bfloat16)).float().square().mean().backward()
    with pytest.raises(UnsupportedError, match=r"norms\.0\.weight is stored as fp32 and shown as torch\.bfloat16"):
        optimizer.step()


class NotShown(Int8ShownAsFp32):
    """Knows no way from what is stored to what is shown."""

    def bring(self, block: Block, shown: Tensor) -> None:
        raise UnsupportedError(f"{block.name} is stored for another device")


def test_what_cannot_be_shown_is_refused_and_holds_nothing(encode: Encode) -> None:
    net = build().requires_grad_(False)
    encoded = encode(net, NotShown, device_bytes=256 << 10)
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=r"norms\.0 is stored for another device"):
            net(rows(0, torch.float32))
    assert encoded.memory.arena.used_bytes == 0
    assert not any(unit.weights.leases or unit.weights.copying for unit in encoded.units)


class FailsOnce(Fp32ShownAsBf16):
    """Finds no memory to work in, the first time that something is taken back."""

    failed = False

    def take_back(self, block: Block, shown: Tensor) -> None:
        if not self.failed:
            self.failed = True
            raise torch.OutOfMemoryError("no memory for what is taken back")
        super().take_back(block, shown)


def test_what_the_program_wrote_is_not_lost_when_it_cannot_be_taken_back_now(encode: Encode) -> None:
    net = build().requires_grad_(False)
    encoded = encode(net, FailsOnce, device_bytes=64 << 10)
    wanted = net.layers[3].weight * 2
    net.layers[3].weight.mul_(2)
    with pytest.raises(torch.OutOfMemoryError):
        encoded.memory.evict_all(frozenset())
    encoded.memory.evict_all(frozenset())
    assert not any(encoded.memory.shows(unit.weights) for unit in encoded.units)
    assert torch.equal(net.layers[3].weight, wanted)


def test_a_state_dict_has_what_is_shown(encode: Encode) -> None:
    net = build().requires_grad_(False)
    encode(net, Int8ShownAsFp32, device_bytes=64 << 10)
    for name, value in dequantised(build()).state_dict().items():
        assert torch.equal(net.state_dict()[name], value)
        assert torch.equal(copy.deepcopy(net.state_dict()[name]), value)


def test_the_arena_itself_shows_nothing_else_than_it_stores() -> None:
    tiers = TierManager(Arena(1 << 20), None, UseOrder(OpenGraphs()))
    try:
        with pytest.raises(UnsupportedError, match=r"layer is stored as fp32, .* needs a device with copies"):
            tiers.create("layer", BlockKind.WEIGHT, 8, forms=(Form(0, 8, 0, 4, "fp32"),))
    finally:
        tiers.close()
