"""What ranks do in the tests of contributions: real autograd makes gradients, which land in the shards of all ranks.

Weights lie whole on every rank here, so that only gradients are between ranks. Every rank runs the programs of all
ranks on plain modules, too, and so knows what its shards must hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from deepoffload.copies.rank_link import RankLink
from deepoffload.memory.arena import Arena
from deepoffload.memory.tier_manager import TierManager
from deepoffload.native import cpu_adam
from deepoffload.native.cpu_adam import DType
from deepoffload.optim.rank_gradients import RankGradients
from deepoffload.optim.rank_step import RankStep
from deepoffload.params.cut import cuts_of
from deepoffload.params.open_graphs import OpenGraphs
from deepoffload.params.pager import Pager
from deepoffload.params.shards import FlatTensor, shard_layout
from deepoffload.params.unit import BlockView, ParamHandle, Unit
from deepoffload.params.use_order import UseOrder
from deepoffload.ranks.group import open_group
from deepoffload.ranks.sums import mean_scale
from deepoffload.ranks.transport import open_exchange
from deepoffload.runtime.construct import adopt
from deepoffload.schedule.placement import BlockKind
from tests.support.inspect import owned_gradient
from tests.support.rank_processes import LONG_S

Backward = Callable[[nn.Module, int, int], None]
"""One micro-batch: the module, the rank whose it is, its number."""

BATCH = 5


class Block(nn.Module):
    """A unit with a tensor that is longer than a rank's range, one that is transposed, small ones, and one in fp32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide = nn.Linear(width, 3 * width)
        self.narrow = nn.Linear(3 * width, width, bias=False)
        self.narrow.weight = nn.Parameter(torch.empty(3 * width, width).normal_(std=0.1).t())
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.scale = nn.Parameter(torch.rand(width))

    def forward(self, x: Tensor, expert: int | None) -> Tensor:
        x = x + self.narrow(torch.tanh(self.wide(x)))
        if expert is not None:
            x = self.experts[expert](x)
        return (x.float() * self.scale).to(x.dtype)


class Model(nn.Module):
    def __init__(self, width: int, dtype: torch.dtype, blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        for block in self.blocks:
            for name, param in block.named_parameters():
                if name != "scale":
                    param.data = param.data.to(dtype)
        self.width, self.dtype = width, dtype

    def batch(self, *seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(hash(seed) % (1 << 31))
        return torch.randn(BATCH, self.width, generator=generator).to(self.dtype)


def same(model: Model, rank: int, micro_batch: int) -> None:
    """All ranks use everything but one expert."""
    x = model.batch(rank, micro_batch)
    for block in model.blocks:
        x = block(x, 0) + block(x, 1)
    x.float().square().sum().backward()


def uneven(model: Model, rank: int, micro_batch: int) -> None:
    """Each rank uses another expert; rank 0 none, and no other rank than 1 uses the last block."""
    x = model.batch(rank, micro_batch)
    for number, block in enumerate(model.blocks):
        if number < 2 or rank == 1:
            x = block(x, None if rank == 0 else rank % 2)
    x.float().square().sum().backward()


def reentrant(model: Model, rank: int, micro_batch: int) -> None:
    """Backwards inside a backward; each block's second use is another gradient of the same parameters."""
    x = model.batch(rank, micro_batch).requires_grad_()
    for block in model.blocks:
        for _ in range(2):
            x = checkpoint(block, x, 0, use_reentrant=True)
    x.float().square().sum().backward()


def changing(model: Model, rank: int, micro_batch: int) -> None:
    """All ranks use another expert in each micro-batch: gradients come that nobody expects, others stay away."""
    x = model.batch(rank, micro_batch)
    for block in model.blocks:
        x = block(x, micro_batch % 3)
    x.float().square().sum().backward()


def overflowing(model: Model, rank: int, micro_batch: int) -> None:
    """The last rank's gradients are not finite in the second step."""
    x = model.batch(rank, micro_batch)
    for block in model.blocks:
        x = block(x, 0)
    (x.float().square().sum() * (float("inf") if (rank, micro_batch) == (1, 1) else 1.0)).backward()


PROGRAMS = {
    "same": same,
    "uneven": uneven,
    "reentrant": reentrant,
    "changing": changing,
    "overflowing": overflowing,
}


def gradients_of(model: Model, program: Backward, rank: int, micro_batch: int) -> dict[str, list[Tensor]]:
    """What autograd makes on a rank, by parameter; more than one where it makes several."""
    found: dict[str, list[Tensor]] = {}
    hooks = []
    for name, param in model.named_parameters():

        def keep(tensor: Tensor, name: str = name) -> None:
            assert tensor.grad is not None
            found.setdefault(name, []).append(tensor.grad.clone(memory_format=torch.preserve_format))
            tensor.grad = None

        hooks.append(param.register_post_accumulate_grad_hook(keep))
    program(model, rank, micro_batch)
    for hook in hooks:
        hook.remove()
    return found


def expected_sums(model: Model, program: Backward, world_size: int, micro_batches: range) -> dict[str, Tensor]:
    """Sums in the order (micro-batch, rank, which gradient of the parameter), in fp32 and the order of memory."""
    sums: dict[str, Tensor] = {}
    order = {name: param.stride() for name, param in model.named_parameters()}
    for micro_batch in micro_batches:
        of_ranks = [gradients_of(model, program, rank, micro_batch) for rank in range(world_size)]
        for name, stride in order.items():
            for made in (made for found in of_ranks for made in found.get(name, [])):
                grad = torch.empty_strided(made.shape, stride).copy_(made)
                flat = grad.as_strided((grad.numel(),), (1,))
                sums[name] = _added(sums.get(name), flat, mean_scale(world_size))
    return sums


def _added(total: Tensor | None, part: Tensor, scale: float) -> Tensor:
    """By torch where the product is exact, else by the kernel that lands a single rank's."""
    if scale.as_integer_ratio()[1] == round(1 / scale):
        return part * scale if total is None else total + part * scale
    accumulate = total is not None
    total = torch.empty_like(part) if total is None else total
    settings = {"dtype": DType.FP32, "scale": scale, "accumulate": accumulate, "num_threads": 1}
    cpu_adam.land_parts(total.data_ptr(), [part.data_ptr()], part.numel(), **settings)  # type: ignore[arg-type]
    return total


@dataclass
class Side:
    """One rank: a paged model whose gradients are cut."""

    link: RankLink
    pager: Pager
    gradients: RankGradients
    model: Model
    handles: dict[str, ParamHandle]

    @property
    def ranks(self):  # type: ignore[no-untyped-def]
        return self.link.ranks

    def step(self) -> RankStep:
        return RankStep(self.pager, self.gradients)


@contextmanager
def side(transport: str, width: int, dtype: torch.dtype, blocks: int = 3) -> Iterator[Side]:
    group = open_group(torch.device("cpu"), timeout_s=LONG_S)
    assert group is not None
    exchange = open_exchange(group, transport)
    graphs = OpenGraphs()
    tiers = TierManager(Arena(64 << 20), None, UseOrder(graphs), poison=True)
    link = RankLink(group, exchange, tiers.lock, timeout_s=LONG_S)
    pager = Pager(tiers, tiers.policy, graphs, link=link)  # type: ignore[arg-type]
    gradients = RankGradients(pager, link)
    torch.manual_seed(0)
    model = Model(width, dtype, blocks)
    handles = {name: adopt(pager, param, name) for name, param in model.named_parameters()}
    for index, name in enumerate(dict.fromkeys(name[: len("blocks.0")] for name in handles)):
        mine = [handle for key, handle in handles.items() if key.startswith(name)]
        _make_unit(pager, gradients, index, name, mine)
        model.blocks[index].register_forward_pre_hook(lambda *_, index=index: link.on_forward((index,)))
    pager.gradients = gradients
    gradients.contributions.reserve(pager.units)
    for handle in handles.values():
        gradients.track(handle)
    group.gather_objects(None, "the test")  # nobody sends parts of units that another rank has still to make
    try:
        yield Side(link, pager, gradients, model, handles)
    except BaseException as error:
        link.fail(str(error))
        raise
    link.close()
    group.close()


def _make_unit(pager: Pager, gradients: RankGradients, index: int, name: str, handles: list[ParamHandle]) -> None:
    assert pager.link is not None
    ranks, tiers = pager.link.ranks, pager.tiers
    handles = sorted(handles, key=lambda handle: str(handle.dtype))
    weights = tiers.create(name, BlockKind.WEIGHT, 64)
    unit = Unit(index, name, handles, weights, BlockView(pager))
    tensors = [FlatTensor(handle.numel, 4, handle.dtype) for handle in handles]
    unit.gradient_layout = layout = shard_layout(tensors, ranks.world_size)
    unit.gradients = block = tiers.create(f"{name}.grad", BlockKind.GRADIENT, layout.shard_nbytes)
    cuts = cuts_of(layout, ranks.rank)
    gradients.give_block(block, handles, cuts, [torch.float32] * len(handles))
    pager.units.append(unit)
    for handle in handles:
        handle.unit = unit


def check(here: Side, expected: dict[str, Tensor]) -> dict[str, tuple[int, bool]]:
    """This rank's runs are those of ``expected``, bit for bit. Returns its sums of squares."""
    squares = {}
    for name, handle in here.handles.items():
        assert here.gradients.present(handle) == (name in expected), name
        if name not in expected:
            continue
        owned = owned_gradient(here.gradients, handle)
        if owned is not None:
            start, found = owned
            wanted = expected[name][start : start + found.numel()].contiguous()
            assert torch.equal(found.view(torch.int32), wanted.view(torch.int32)), name
        squares[name] = here.gradients.sum_of_squares(handle)
    return squares


def accumulate(
    transport: str, program_name: str, dtype: torch.dtype, width: int, micro_batches: int, blocks: int = 3
) -> dict[str, object]:
    """Two steps; returns the sums of squares of this rank and of the whole gradients, in the last one."""
    program = PROGRAMS[program_name]
    torch.manual_seed(0)
    plain = Model(width, dtype, blocks)
    with side(transport, width, dtype, blocks) as here:
        for step in range(2):
            batches = range(step * micro_batches, (step + 1) * micro_batches)
            expected = expected_sums(plain, program, here.ranks.world_size, batches)
            for micro_batch in batches:
                program(here.model, here.ranks.rank, micro_batch)
            with here.step().met():
                squares = check(here, expected)
            for handle in here.handles.values():
                here.gradients.assign(handle, None)
        whole = {
            name: cpu_adam.sum_of_squares(total.data_ptr(), total.numel(), dtype=DType.FP32, num_threads=1)
            for name, total in expected.items()
        }
        stats = here.link.stats()
    return {"squares": squares, "whole": whole, "mixed_rounds": stats["mixed_rounds"], "rounds": stats["rounds"]}
