"""A model is cut and placed by sizes as it would be with blocks: the same placement, the same refusal, to the byte."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from deepoffload.config import Config, GradientDtype, OptimizerConfig, Precision
from deepoffload.device import Tier
from deepoffload.errors import PlacementError
from deepoffload.estimate import MachineSpec
from deepoffload.native.aio import PAGE_BYTES
from deepoffload.runtime.choice import ChosenCut, Room, choose
from deepoffload.runtime.plan import cutter_of, dry_pager
from deepoffload.schedule.cost_model import StepOverlap
from tests.support.cuts_reference import reference_choice

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDTHS = (3, 33, 64, 200, 700)


class Layer(nn.Module):
    """Two linear layers and its own parameters, in one list or none."""

    def __init__(self, widths: tuple[int, ...], dtype: torch.dtype, *, listed: bool, frozen: bool, own: bool) -> None:
        super().__init__()
        parts = [nn.Linear(one, other, dtype=dtype) for one, other in zip(widths, widths[1:], strict=False)]
        if listed:
            self.parts = nn.ModuleList(parts)
        else:
            for number, part in enumerate(parts):
                self.add_module(f"part{number}", part)
        if own:
            self.scale = nn.Parameter(torch.empty(widths[0], 7, dtype=dtype))
        for param in parts[0].parameters():
            param.requires_grad_(not frozen)


@st.composite
def models(draw: st.DrawFn) -> nn.Module:
    widths = draw(st.lists(st.sampled_from(WIDTHS), min_size=2, max_size=4))
    model = nn.Module()
    with torch.device("meta"):
        model.embedding = nn.Embedding(draw(st.sampled_from((5, 400, 3000))), widths[0], dtype=torch.float32)
        layers = []
        for _ in range(draw(st.integers(1, 3))):
            like = {name: draw(st.booleans()) for name in ("listed", "frozen", "own")}
            dtype, times = draw(st.sampled_from(DTYPES)), draw(st.integers(1, 4))
            layers += [Layer(tuple(widths), dtype, **like) for _ in range(times)]
        model.layers = nn.ModuleList(layers)
        if draw(st.booleans()):
            model.head = nn.Linear(3, 5)
            model.head.weight = model.embedding.weight
    return model


@st.composite
def configs(draw: st.DrawFn) -> Config:
    state_dtype = draw(st.sampled_from(("fp32", "bf16", "8bit")))
    return Config(
        precision=draw(st.sampled_from(list(Precision))),
        gradient_dtype=draw(st.sampled_from([None, GradientDtype.FP32])),
        gradient_accumulation_steps=draw(st.sampled_from((1, 4))),
        offload_optimizer=draw(st.sampled_from((None, Tier.DEVICE, Tier.HOST, Tier.NVME))),
        offload_param=draw(st.sampled_from((None, Tier.HOST))),
        optimizer=draw(st.sampled_from((None, OptimizerConfig("adamw", {"state_dtype": state_dtype})))),
    )


def compared(model: nn.Module, config: Config, room: Room) -> PlacementError | ChosenCut:
    """What is chosen, or why not; it is that of the reference."""
    pager, gradients, handles = dry_pager(model)
    cutter = cutter_of(pager, gradients, config, [model], handles)
    try:
        expected, drafts = reference_choice([model], config, room)
    except PlacementError as error:
        try:
            choose(cutter, config, room)
        except PlacementError as mine:
            assert (str(mine), mine.enough_bytes) == (str(error), error.enough_bytes)
            return mine
        raise AssertionError(f"the reference refuses: {error}") from None
    choice = choose(cutter, config, room)
    assembly = cutter.declare(choice.cut)
    mine = choice.cut.division.drafts
    names = [[(d.name, [h.name for h in d.handles]) for d in each] for each in (mine, drafts)]
    assert names[0] == names[1]
    made = [block for draft in mine for block in draft.unit.blocks()]
    assert choice.content_bytes() == [block.nbytes for block in made]
    placement = choice.with_ids([block.id for block in made])
    by_id = {block.id: block for block in made}
    assert all((by_id[b.id].name, by_id[b.id].room_bytes) == (b.name, b.nbytes) for b in placement.blocks)
    assert plain(placement, [d.index for d in mine]) == plain(expected, [d.index for d in drafts])
    away = {block.id for block in made} - {block.id for block in placement.blocks}
    assert away == {made[number].id for number in choice.on_device}
    assert assembly.piece_bytes == choice.cut.piece_bytes
    return choice


def plain(placement: object, units: list[int]) -> object:
    """A placement without ids: these are numbers in the order in which blocks were made."""
    number = {block.id: place for place, block in enumerate(placement.blocks)}
    return replace(
        placement,
        blocks=tuple(replace(b, id=number[b.id], unit=units.index(b.unit)) for b in placement.blocks),
        resident=frozenset(number[b] for b in placement.resident),
        paged=frozenset(number[b] for b in placement.paged),
        updates="",  # the reference knows nothing of these
        accumulation="",
        step_overlap=StepOverlap.DEFERRED,
    )


@settings(max_examples=30)
@given(models(), configs(), st.data())
def test_by_size_is_block_by_block(model: nn.Module, config: Config, data: st.DataObject) -> None:
    rates = MachineSpec().bandwidths()
    whole = sum(param.numel() for param in model.parameters()) * 20
    nvme = data.draw(st.sampled_from((None, 0, whole // 3, 1 << 40)), label="nvme")
    device = data.draw(st.sampled_from((0, whole // 4, whole)), label="device")
    share = data.draw(st.sampled_from((0.0, 0.05, 0.2, 0.4, 0.8, 2.0)), label="memory")
    found = compared(model, config, Room(int(whole * share), nvme, rates, device))
    if isinstance(found, PlacementError) and found.enough_bytes is not None:
        for capacity in (found.enough_bytes - 1, found.enough_bytes):
            compared(model, config, Room(capacity, nvme, rates, device))


def test_a_search_makes_no_blocks_and_walks_through_the_model_once_for_each_size_of_module() -> None:
    with torch.device("meta"):
        model = nn.Sequential(
            *(Layer((700, 64, 700), DTYPES[0], listed=True, frozen=False, own=True) for _ in range(9))
        )
    pager, gradients, handles = dry_pager(model)
    cutter = cutter_of(pager, gradients, Config(), [model], handles)
    rates = MachineSpec().bandwidths()
    for capacity in (PAGE_BYTES, 1 << 20, 1 << 24):
        with suppress(PlacementError):
            choose(cutter, Config(), Room(capacity, 1 << 40, rates))
    # A layer, its list, the model, and two linear layers: a limit lies between two of five sizes, or outside of them.
    assert cutter.num_walks <= 6
    assert not list(pager.tiers.blocks())
