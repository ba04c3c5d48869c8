"""What goes wrong on a device when one looks away: edits through views, other streams, memory that is locked in part."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import deepoffload
from deepoffload import offload_context


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def build(hidden: int = 64, blocks: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(hidden) for _ in range(blocks)))


def paged(device: str, device_budget: int, **settings: Any) -> tuple[nn.Module, Any]:
    with offload_context(device=device, device_budget=device_budget, host_budget="24MiB", **settings) as context:
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
