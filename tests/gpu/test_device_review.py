"""What goes wrong on a device when one looks away: edits through views, other streams, memory locked in part."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepoffload
from deepoffload import offload_context
from deepoffload.copies import pinning
from deepoffload.copies.accelerator import Accelerator
from deepoffload.memory.arena import Arena
from deepoffload.native.aio import PAGE_BYTES
from tests.support.inspect import pager_of, shown_memory_of, units_of
from tests.support.simulated_gpu import settings


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def build(hidden: int = 64, blocks: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(hidden) for _ in range(blocks)))


def paged(device: str, device_budget: int, **said: Any) -> tuple[nn.Module, Any]:
    with offload_context(device=device, device_budget=device_budget, host_budget="24MiB", **said) as context:
        model = build()
    return model, context.engine


def batch(seed: int, device: str) -> Tensor:
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(seed)).to(device)


def test_edits_through_a_view_that_is_gone_are_not_lost_to_the_norm(simulated_gpu: str) -> None:
    model, _ = paged(simulated_gpu, 4_000_000)
    plain = build().to(simulated_gpu)
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2, max_grad_norm=0.01)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for trained in (model, plain):
        trained(batch(0, simulated_gpu)).square().mean().backward()
        view = trained[1].up.weight.grad.view(-1)
        trained(batch(1, simulated_gpu)).square().mean().backward()
        view.mul_(-50.0)
        del view
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    assert norm > 0.01
    optimizer.step()
    reference.step()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.detach().clone(), theirs.detach(), rtol=1e-5, atol=1e-6)


def test_copies_take_memory_that_is_locked_in_part_or_chunk_by_chunk(
    simulated_gpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinning, "CHUNK_BYTES", 24 * PAGE_BYTES)  # blocks and ring slots cross the borders
    settings(pinned_max_bytes=100 * PAGE_BYTES)  # and some of them that of what is locked at all
    model, engine = paged(simulated_gpu, 400_000)
    plain = build().to(simulated_gpu)
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for number in range(2):
        for trained in (model, plain):
            trained(batch(number, simulated_gpu)).square().mean().backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.clone(), theirs.grad, rtol=1e-3, atol=1e-6)
        for stepping in (optimizer, reference):
            stepping.step()
            stepping.zero_grad()
    assert engine.stats()["host_locked_bytes"] == 100 * PAGE_BYTES, "all that may be, not only whole chunks"


@pytest.mark.parametrize("refused", [1, 5, 1000])
def test_a_refusal_to_lock_memory_is_tried_again_with_less(
    simulated_gpu: str, monkeypatch: pytest.MonkeyPatch, refused: int
) -> None:
    """A driver that refuses for a while costs smaller parts, and one that always does is not asked without end."""
    calls: list[int] = []

    def register(self: Accelerator, address: int, nbytes: int) -> str | None:
        calls.append(nbytes)
        return "error 304" if len(calls) <= refused else real(self, address, nbytes)

    real = Accelerator.register
    monkeypatch.setattr(pinning, "CHUNK_BYTES", 32 * PAGE_BYTES)
    monkeypatch.setattr(Accelerator, "register", register)
    arena = Arena(160 * PAGE_BYTES)
    pinned = pinning.PinnedArena(Accelerator(torch.device(simulated_gpu)), arena)
    for _ in range(3):
        parts = pinned.lock(PAGE_BYTES, 150 * PAGE_BYTES)
    ends = [start + nbytes for start, nbytes in parts]
    assert [PAGE_BYTES, *ends] == [*(start for start, _ in parts), 151 * PAGE_BYTES], "without gaps"
    if refused == 1000:
        assert pinned.locked_bytes == 0 and len(calls) == 3 * 6 and pinned.refusal == "error 304"
    else:
        assert pinned.locked_bytes == arena.capacity_bytes and pinned.refusal is None
        assert calls[:2] == [32 * PAGE_BYTES, 16 * PAGE_BYTES]
    pinned.release()


def test_edits_on_another_stream_are_seen(simulated_gpu: str) -> None:
    model, engine = paged(simulated_gpu, 400_000)
    wanted = model[1].up.weight.detach().clone()
    values = wanted.cpu()
    side = torch.simgpu.Stream()
    side.wait_stream(torch.accelerator.current_stream())
    with torch.simgpu.stream(side):
        view = model[1].up.weight.data
        view.copy_(values * 2, non_blocking=True)  # late: done when something waits for it
        del view
    shown_memory_of(engine).evict_all(frozenset())
    torch.accelerator.current_stream().wait_stream(side)
    assert torch.equal(model[1].up.weight.detach(), wanted * 2)


def test_the_budget_may_take_what_torch_keeps_for_later(simulated_gpu: str) -> None:
    accelerator = Accelerator(torch.device(simulated_gpu))
    before = accelerator.free_bytes()
    kept = torch.empty(64 << 20, dtype=torch.uint8, device=simulated_gpu)
    assert accelerator.free_bytes() == before - kept.numel()
    del kept
    assert accelerator.free_bytes() == before


def test_what_is_launched_after_the_last_use_holds_up_no_copy(simulated_gpu: str) -> None:
    model, engine = paged(simulated_gpu, 4_000_000)
    memory = shown_memory_of(engine)
    with torch.no_grad():
        model(batch(0, simulated_gpu))
    pager_of(engine).pump()
    memory.transfers.end()
    torch.accelerator.synchronize()
    later = torch.empty(1000, device=simulated_gpu).copy_(torch.ones(1000), non_blocking=True)  # for the next layers
    unit = units_of(engine)[0]
    memory.refresh(unit.weights)  # its update is made right before it is used next
    assert not memory.shows(unit.weights)
    offset = memory.arena.allocate(unit.weights.room_bytes)
    assert memory.arena.events_before(offset) == []
    memory.arena.free(offset, [])
    assert later.sum() == 1000
    torch.testing.assert_close(model(batch(0, simulated_gpu)), build().to(simulated_gpu)(batch(0, simulated_gpu)))


def test_a_state_dict_is_saved_that_does_not_fit_on_the_device(simulated_gpu: str) -> None:
    model, _ = paged(simulated_gpu, 160_000)  # one block, and no NVMe
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    expected = build().state_dict()
    for name, value in torch.load(file).items():
        assert torch.equal(value.cpu(), expected[name])
