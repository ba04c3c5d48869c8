"""What ranks do in the tests of whole steps: weights, gradients and state are cut, and come by the real way.

The reference is one process: ordinary parameters that get the sums of all ranks' gradients, and the same optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from deepoffload.copies.payload_numbers import gradients_number, weights_number
from deepoffload.copies.rank_link import RankLink
from deepoffload.memory.arena import Arena
from deepoffload.optim.adam import CPUAdamW
from deepoffload.optim.rank_gradients import RankGradients
from deepoffload.params.open_graphs import OpenGraphs
from deepoffload.params.pager import Pager
from deepoffload.params.use_order import UseOrder
from deepoffload.params.window import Window
from deepoffload.ranks.group import open_group
from deepoffload.runtime.construct import Assembly, adopt
from deepoffload.runtime.device import open_rank_memory
from tests.ranks.contributing import Model, expected_sums, same, uneven
from tests.support.rank_processes import LONG_S

WIDTH = 64
COPY_BYTES = 8 << 20


@contextmanager
def paged(transport: str, model: nn.Module, *, defer: bool, evict_always: bool = False) -> Iterator[RankLink]:
    """Cut ``model`` for the ranks, one unit for each block."""
    group = open_group(torch.device("cpu"), timeout_s=LONG_S)
    assert group is not None
    graphs = OpenGraphs()
    order = UseOrder(graphs)
    with ExitStack() as last:
        last.callback(group.close)
        tiers, memory, link = open_rank_memory(
            Arena(64 << 20), None, order, group, transport=transport, timeout_s=LONG_S, poison=True, timeline=None
        )
        last.callback(tiers.close)
        last.callback(memory.close)
        pager = Pager(tiers, order, graphs, memory, defer_updates=defer, evict_always=evict_always, link=link)
        gradients = RankGradients(pager, link)
        assembly = Assembly(pager, gradients, 1 << 16)
        drafts = []
        for name, block in model.blocks.named_children():  # type: ignore[union-attr,operator]
            handles = [adopt(pager, param, f"blocks.{name}.{key}") for key, param in block.named_parameters()]
            drafts.append(assembly.declare(f"blocks.{name}", handles))
        memory.reserve(COPY_BYTES)
        gradients.contributions.reserve(pager.units)
        for draft in drafts:
            unit = draft.unit
            assert unit.layout is not None and unit.gradient_layout is not None and unit.gradients is not None
            memory.serve(unit.weights, weights_number(unit.index), unit.layout.sections)
            memory.serve(unit.gradients, gradients_number(unit.index), unit.gradient_layout.sections)
            assembly.fill(draft)
        pager.gradients = gradients
        windows = [Window(pager, block, name) for name, block in model.blocks.named_children()]  # type: ignore[union-attr,operator]
        for unit in pager.units:
            for handle in unit.handles:
                gradients.track(handle)
        group.gather_objects(None, "the test")  # nobody asks for units that another rank has still to make
        try:
            yield link
        except BaseException as error:
            link.fail(f"{type(error).__name__}: {error}")
            raise
        assert windows
        link.close()


def look_at(model: nn.Module) -> dict[str, Tensor]:
    """Every weight and every gradient, whole."""
    found = {name: param.detach().clone() for name, param in model.named_parameters()}
    for name, param in model.named_parameters():
        if param.grad is not None:
            found[f"{name}.grad"] = param.grad.detach().clone()
    return found


def train(
    transport: str, uneven_use: bool, micro_batches: int, defer: bool, evict_always: bool, by_torch: bool
) -> list[str]:
    """Three steps; names of what differs from the reference. ``by_torch``: torch clips."""
    program = uneven if uneven_use else same
    torch.manual_seed(0)
    plain, model = Model(WIDTH, torch.float32), Model(WIDTH, torch.float32)
    model.load_state_dict(plain.state_dict())
    clip = None if by_torch else 1.0
    reference = CPUAdamW(plain.parameters(), lr=1e-2, max_grad_norm=clip)
    differences: list[str] = []
    with paged(transport, model, defer=defer, evict_always=evict_always) as link:
        optimizer = CPUAdamW(model.parameters(), lr=1e-2, max_grad_norm=clip)
        for step in range(3):
            batches = range(step * micro_batches, (step + 1) * micro_batches)
            _give(plain, expected_sums(plain, program, link.ranks.world_size, batches))
            for micro_batch in batches:
                program(model, link.ranks.rank, micro_batch)
            if step == 1 or by_torch:
                differences += _differences(f"before step {step}", look_at(plain), look_at(model))
            if by_torch:
                norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0) for m in (plain, model)]
                differences += [] if torch.equal(*norms) else [f"norms {norms}"]
            reference.step()
            optimizer.step()
            differences += [] if reference.grad_norm == optimizer.grad_norm else [f"norm of step {step}"]
            reference.zero_grad()
            optimizer.zero_grad()
        differences += _differences("in the end", look_at(plain), look_at(model))
    return differences


def scale_losses(transport: str) -> tuple[list[bool], float]:
    """Three steps under torch's GradScaler, the second of which overflows on rank 1 alone. Returns which were made, and
    the scale in the end."""
    torch.manual_seed(0)
    model, applied = Model(WIDTH, torch.float16), []
    with paged(transport, model, defer=True) as link:
        optimizer = CPUAdamW(model.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(3):
            x = model.batch(link.ranks.rank, step) / 64
            for block in model.blocks:
                x = block(x, 0)
            loss = x.float().square().mean() * (1e30 if (step, link.ranks.rank) == (1, 1) else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            applied.append(optimizer.applied)
        scale = scaler.get_scale()
    return applied, scale


def _give(plain: nn.Module, sums: dict[str, Tensor]) -> None:
    for name, param in plain.named_parameters():
        param.grad = None
        if name in sums:
            param.grad = sums[name].as_strided(param.shape, param.stride())


def _differences(when: str, expected: dict[str, Tensor], found: dict[str, Tensor]) -> list[str]:
    if expected.keys() != found.keys():
        return [f"{when}: {sorted(expected.keys() ^ found.keys())}"]
    return [f"{when}: {name}" for name, value in expected.items() if not torch.equal(value, found[name])]
