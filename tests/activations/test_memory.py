"""What the process takes while activations leave."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from deepoffload.machine import FREED_BYTES_MAX, FreedMemory
from tests.support.inspect import pager_of
from tests.support.memory_watch import give_back, resident_bytes
from tests.support.paging import RESIDENT, Paging

ROWS, WIDTH, LAYERS, TILES = 16384, 64, 32, 8
INPUT_BYTES = ROWS * WIDTH * 4
PART_BYTES = 4 * INPUT_BYTES


class Tiled(nn.Module):
    """A layer, and a perceptron in tiles of the rows, each behind a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def perceptron(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.down(F.gelu(self.up(x)))
        return found

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.mix, x, use_reentrant=False)
        return torch.cat([checkpoint(self.perceptron, part, use_reentrant=False) for part in x.chunk(TILES)])


class Counted(FreedMemory):
    def look(self) -> None:
        self.looks = getattr(self, "looks", 0) + 1


def test_what_layers_have_freed_does_not_stay(paging: Paging) -> None:
    """Holes between what lives on are given back: they would grow by more than all inputs."""
    config = {"offload_activations": "nvme", "activation_budget": PART_BYTES}
    with paging.context(RESIDENT, (64 << 20) + PART_BYTES, **config):
        model = nn.Sequential(*(Tiled() for _ in range(LAYERS)))
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    for _ in range(2):  # the first time memory for what stays is new, too
        give_back()
        before = resident_bytes()
        loss = model(x).square().mean()
        grown = resident_bytes() - before
        del loss
    assert grown < FREED_BYTES_MAX + PART_BYTES + 8 * INPUT_BYTES < LAYERS * 2 * INPUT_BYTES


def test_backward_gives_back_at_each_gradient(paging: Paging) -> None:
    """Else what one layer has freed would stay until the next one's input comes."""
    config = {"offload_activations": "nvme", "activation_budget": PART_BYTES}
    with paging.context(RESIDENT, (64 << 20) + PART_BYTES, **config):
        model = nn.Sequential(*(Tiled() for _ in range(2)))
    counted = Counted()
    assert pager_of(model).freed is not None
    pager_of(model).freed = counted
    loss = model(torch.randn(64, WIDTH)).square().mean()
    counted.looks = 0
    loss.backward()
    assert counted.looks >= len(list(model.parameters()))
