"""What ranks store of a model together is what one rank stores of it, before and after updates, bit for bit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import deepoffload
from deepoffload.config import Config, OptimizerConfig, Precision
from deepoffload.errors import PlacementError, UnsupportedError
from deepoffload.memory.form import SHARD
from deepoffload.native.cpu_adam import StateLayout
from deepoffload.optim.state import PieceView
from deepoffload.params.torch_private import outside_user_modes
from deepoffload.params.unit import ParamHandle
from tests.support.models import TinyGPT
from tests.support.ranks_in_one_process import InOneProcess, RankParts

Make = Callable[..., InOneProcess]


@pytest.fixture
def make() -> Iterator[Make]:
    """Builds the ranks, and gives everything back."""
    built: list[InOneProcess] = []

    def start(*args: Any, **kwargs: Any) -> InOneProcess:
        built.append(InOneProcess(*args, **kwargs))
        return built[-1]

    yield start
    for world in built:
        world.close()


def gpt(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(3)
    model = TinyGPT(width=96, depth=2).to(dtype)
    model.blocks[0].mlp[0].bias.requires_grad_(False)
    model.position.requires_grad_(False)
    return model


def lopsided() -> nn.Module:
    """The second of two ranks owns the bias, and both the weight."""
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(96, 200))


def wide() -> nn.Module:
    """One parameter's state lies in several pieces of a rank."""
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(800, 700))


def small() -> nn.Module:
    """Less than one block of elements in each unit: all ranks but one own nothing."""
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(8, 9), nn.Linear(9, 3))


def whole_weight(world: InOneProcess, number: int) -> Tensor:
    """A parameter's elements in the order of memory, of what the ranks store."""
    found = []
    for rank in world.ranks:
        handle = rank.handles[number]
        with rank.held(handle.block):
            start, elements = rank.own_elements(handle)
            assert not elements.numel() or start == sum(part.numel() for part in found)
            found.append(elements.clone())
    return torch.cat(found)


def state_of(parts: RankParts, handle: ParamHandle) -> dict[str, dict[int, Tensor]]:
    """What pieces hold of a parameter: by array, runs by where they begin. Arrays hold nothing before an update."""
    found: dict[str, dict[int, Tensor]] = defaultdict(dict)
    assert handle.unit is not None
    for piece in handle.unit.pieces:
        for part in piece.layout.segments:
            if piece.handles[part.tensor] is handle and parts.tiers.has_bytes(piece.block):
                with parts.held(piece.block):
                    view = PieceView(parts.tiers, piece)
                    if piece.kind is not StateLayout.FP32:
                        found["lead"][part.start] = view.stored_lead(part).clone()
                    for field in piece.format.fields if handle.state_owner is not None else ():
                        for key, stored in view.stored(field, field, part).items():
                            found[key][part.start] = stored.clone()
    return found


def joined(runs: dict[int, Tensor]) -> Tensor:
    return torch.cat([runs[start] for start in sorted(runs)])


def assert_the_same(world: InOneProcess) -> None:
    """The ranks' weights and state together are those of one rank."""
    for parts in (*world.ranks, world.one):
        parts.catch_up()
    for number, handle in enumerate(world.one.handles):
        with world.one.held(handle.block):
            _, expected = world.one.own_elements(handle)
            assert torch.equal(bits(whole_weight(world, number)), bits(expected)), handle.name
        wanted = state_of(world.one, handle)
        got: dict[str, dict[int, Tensor]] = defaultdict(dict)
        for rank in world.ranks:
            for key, runs in state_of(rank, rank.handles[number]).items():
                assert not got[key].keys() & runs.keys(), "two ranks keep the same state"
                got[key].update(runs)
        assert got.keys() == wanted.keys(), handle.name
        for key, runs in wanted.items():
            assert torch.equal(bits(joined(got[key])), bits(joined(runs))), f"{handle.name}: {key}"


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


PRECISIONS = [(torch.float32, Precision.KEEP), (torch.float32, Precision.BF16), (torch.float32, Precision.FP16)]
PRECISIONS += [(torch.bfloat16, Precision.KEEP), (torch.float16, Precision.KEEP), (torch.float64, Precision.BF16)]


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize(("dtype", "precision"), PRECISIONS)
def test_shards_together_are_the_weights(make: Make, world_size: int, dtype: torch.dtype, precision: Precision) -> None:
    world = make(lambda: gpt(dtype), world_size, Config(precision=precision))
    assert_the_same(world)
    for rank in world.ranks:
        for unit, plain in zip(rank.units, world.one.units, strict=True):
            assert unit.index == plain.index and unit.name == plain.name
            assert unit.layout is not None and unit.layout.world_size == world_size
            assert unit.weights.nbytes == unit.layout.shard_nbytes < unit.weights.shown_nbytes
            assert unit.weights.shown_nbytes == unit.layout.whole_nbytes
            assert [form.encoding for form in unit.weights.forms] == [SHARD] * len(unit.handles)
            if unit.gradients is not None:
                assert unit.gradient_layout is not None
                assert unit.gradients.shown_nbytes == unit.gradient_layout.whole_nbytes


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_state_is_kept_once(make: Make, world_size: int) -> None:
    world = make(gpt, world_size, Config(optimizer=OptimizerConfig("adamw", {"state_dtype": "8bit"})))
    kept: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for rank in world.ranks:
        for unit in rank.units:
            for piece in unit.pieces:
                for part in piece.layout.segments:
                    kept[piece.handles[part.tensor].name].append((part.start, part.start + part.numel))
    trained = [handle for handle in world.one.handles if handle.tensor is not None and handle.tensor.requires_grad]
    assert kept.keys() == {handle.name for handle in trained}
    for handle in trained:
        position = 0
        for begin, end in sorted(kept[handle.name]):
            assert begin == position
            position = end
        assert position == handle.numel


@pytest.mark.parametrize("build", [gpt, small, wide])
@pytest.mark.parametrize("precision", [Precision.KEEP, Precision.BF16, Precision.FP16])
def test_what_is_made_has_the_sizes_that_were_placed(
    make: Make, build: Callable[[], nn.Module], precision: Precision
) -> None:
    """And all ranks place the same."""
    world = make(build, 2, Config(precision=precision), host_bytes=7 << 20)
    assert_sizes_as_placed(world)
    if build is wide:
        assert len(world.ranks[0].units[0].pieces) > 2


def assert_sizes_as_placed(world: InOneProcess) -> None:
    for rank in world.ranks:
        for draft, sizes in zip(rank.plan.drafts, rank.plan.chosen.sizes, strict=True):
            made = [(block.kind, block.nbytes, block.room_bytes) for block in draft.unit.blocks()]
            said = [(b.kind, b.nbytes, b.room_bytes) for b in sizes.blocks for _ in range(b.count)]
            assert made == said
            assert sizes.whole_weight_bytes == draft.unit.weights.shown_room_bytes
            if draft.unit.gradients is not None:
                assert sizes.whole_gradient_bytes == draft.unit.gradients.shown_room_bytes
    first, *others = [rank.plan for rank in world.ranks]
    for other in others:
        assert other.chosen.sizes == first.chosen.sizes
        assert other.placement == first.placement
    for sizes, *needed in zip(first.chosen.sizes, *(rank.set_up for rank in world.ranks), strict=True):
        peaks, nets = zip(*needed, strict=True)
        assert (sizes.set_up_peak_bytes, sizes.set_up_net_bytes) == (max(peaks), max(nets))


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "adamw": lambda model: deepoffload.CPUAdamW(model.parameters(), lr=0.01, weight_decay=0.1),
    "8bit": lambda model: deepoffload.CPUAdamW(model.parameters(), lr=0.01, state_dtype="8bit"),
    "bf16": lambda model: deepoffload.CPUAdam(model.parameters(), lr=0.01, state_dtype="bf16"),
    "amsgrad": lambda model: deepoffload.CPUAdam(model.parameters(), lr=0.01, amsgrad=True),
    "lion": lambda model: deepoffload.CPULion(model.parameters(), lr=0.01),
    "sgd": lambda model: deepoffload.CPUSGD(model.parameters(), lr=0.01),
    "momentum": lambda model: deepoffload.CPUSGD(model.parameters(), lr=0.01, momentum=0.9),
    "adagrad": lambda model: deepoffload.CPUAdagrad(model.parameters(), lr=0.01, initial_accumulator_value=0.5),
}


def set_gradients(world: InOneProcess, seed: int, without: Callable[[int], bool] = lambda number: False) -> None:
    """The same mean gradients on all ranks, each its part."""
    generator = torch.Generator().manual_seed(seed)
    for number, handle in enumerate(world.one.handles):
        value = torch.randn(handle.numel, generator=generator)
        if handle.tensor is not None and handle.tensor.requires_grad and not without(number):
            for parts in (*world.ranks, world.one):
                parts.set_gradient(parts.handles[number], value)


def step_all(world: InOneProcess, optimizers: list[Any]) -> None:
    """Each rank's part of a step. That they meet for it and agree on it is tested elsewhere."""
    for parts, optimizer in zip((*world.ranks, world.one), optimizers, strict=True):
        parts.step(optimizer)
        optimizer.zero_grad()


@pytest.mark.parametrize("build", [gpt, small])
@pytest.mark.parametrize("precision", [Precision.KEEP, Precision.BF16, Precision.FP16])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_updates_together_are_those_of_one_rank(
    make: Make, kind: str, precision: Precision, build: Callable[[], nn.Module]
) -> None:
    world = make(build, 3, Config(precision=precision))
    optimizers = [OPTIMIZERS[kind](parts.model) for parts in (*world.ranks, world.one)]
    set_gradients(world, 0, without=lambda number: number % 3 == 1)
    step_all(world, optimizers)
    set_gradients(world, 1)
    step_all(world, optimizers)
    assert_the_same(world)
    for shown in zip(*(parts.model.parameters() for parts in (*world.ranks, world.one)), strict=True):
        expected = shown[-1].detach().clone()
        for param in shown[:-1]:
            assert torch.equal(param.detach().clone(), expected)


@pytest.mark.parametrize("precision", [Precision.KEEP, Precision.BF16, Precision.FP16])
@pytest.mark.parametrize("defer_updates", [False, True])
@pytest.mark.parametrize("build", [gpt, lopsided, small])
def test_edits_by_the_program_are_kept(
    make: Make, precision: Precision, defer_updates: bool, build: Callable[[], nn.Module]
) -> None:
    """Also those of weights that no update changes, on a rank that owns nothing of what an update changes."""
    world = make(build, 2, Config(precision=precision), defer_updates=defer_updates)
    optimizers = [OPTIMIZERS["adamw"](parts.model) for parts in (*world.ranks, world.one)]
    numels = [handle.numel for handle in world.one.handles]
    for seed, without in enumerate([lambda n: numels[n] > 1000, lambda n: False, lambda n: numels[n] <= 1000]):
        set_gradients(world, seed, without)
        every = [param for parts in (*world.ranks, world.one) for param in parts.model.parameters()]
        with torch.no_grad():
            for param in every:
                param.sum()  # all ranks have copies now, before one of them asks the others for what they write
            for param in every:
                param.mul_(1.5).add_(seed)
        step_all(world, optimizers)
        assert_the_same(world)


@pytest.mark.parametrize("precision", [Precision.KEEP, Precision.BF16, Precision.FP16])
def test_shards_that_pass_through_little_memory(make: Make, precision: Precision, tmp_path: Path) -> None:
    """What is registered, shards, gradients and state leave memory for each other."""
    world = make(gpt, 3, Config(precision=precision), host_bytes=1 << 20, nvme_path=tmp_path)
    assert all(rank.plan.placement.paged for rank in world.ranks)
    optimizers = [OPTIMIZERS["adamw"](parts.model) for parts in (*world.ranks, world.one)]
    for seed in range(3):
        set_gradients(world, seed)
        step_all(world, optimizers)
    assert_the_same(world)


def test_what_a_rank_stores_has_no_address_of_the_whole(make: Make) -> None:
    world = make(gpt, 2)
    for rank in world.ranks:
        handle = max(rank.handles, key=lambda handle: handle.numel)
        assert handle.cut is not None
        run = handle.cut.run()
        assert run is not None and 0 < run.numel < handle.numel
        with rank.held(handle.block):
            for asked in (handle.address, handle.host_view):
                with outside_user_modes(), pytest.raises(UnsupportedError, match=f"{handle.name} is cut for several"):
                    asked()
            begin = handle.element_address(run.start)
            assert begin == rank.tiers.address(handle.block) + handle.form.offset_stored
            assert handle.element_address(run.start + 5) == begin + 5 * handle.itemsize
            with pytest.raises(ValueError, match="not rank"):
                handle.element_address(run.numel if run.start == 0 else 0)


class Layers(nn.Module):
    """Linear layers and a table, trained or frozen, in different types."""

    def __init__(self, widths: list[int], dtypes: list[torch.dtype], frozen: list[bool]) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.table = nn.Embedding(7, widths[0])
        layers = [nn.Linear(one, other) for one, other in pairwise(widths)]
        for layer, dtype, still in zip(layers, dtypes, frozen, strict=False):
            layer.to(dtype).requires_grad_(not still)
        self.layers = nn.ModuleList(layers)


@settings(max_examples=40)
@given(
    st.lists(st.sampled_from([1, 3, 64, 90, 200]), min_size=2, max_size=5),
    st.lists(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), min_size=4, max_size=4),
    st.lists(st.booleans(), min_size=4, max_size=4),
    st.sampled_from(list(Precision)),
    st.integers(2, 5),
    st.sampled_from(["fp32", "bf16", "8bit"]),
    st.integers(20, 24),
)
def test_any_model_is_shared_out(
    widths: list[int],
    dtypes: list[torch.dtype],
    frozen: list[bool],
    precision: Precision,
    world_size: int,
    state_dtype: str,
    budget_power: int,
) -> None:
    config = Config(precision=precision, optimizer=OptimizerConfig("adamw", {"state_dtype": state_dtype}))
    start = partial(InOneProcess, lambda: Layers(widths, dtypes, frozen), world_size, config)
    try:
        world = start(host_bytes=1 << budget_power)
    except PlacementError as error:
        assert error.enough_bytes is not None
        world = start(host_bytes=error.enough_bytes)  # the least that does for every rank, all the time
    try:
        assert_sizes_as_placed(world)
        every = (*world.ranks, world.one)
        optimizers = [deepoffload.CPUAdamW(parts.model.parameters(), state_dtype=state_dtype) for parts in every]
        for seed in range(2):
            set_gradients(world, seed)
            step_all(world, optimizers)
        assert_the_same(world)
    finally:
        world.close()
