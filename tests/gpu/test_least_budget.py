"""What is accepted trains on a device, too, where the host's arena lends no pages."""

from __future__ import annotations

import pytest

from tests.runtime.budget_programs import main, run
from tests.support.gpu import Gpu

PROGRAMS = 6


def test_random_programs_train_at_the_least_budget(gpu: Gpu) -> None:
    said: list[str] = []
    assert main(str(gpu.nvme_path), PROGRAMS, say=said.append, device=gpu.device) == 0, "\n".join(said)


@pytest.mark.parametrize("seed", [29, 45])
def test_programs_that_went_wrong(gpu: Gpu, seed: int) -> None:
    """29: the way of gradients was counted twice in what is named without NVMe. 45: autograd's thread had leased too,
    so the update could not slide its own together, and room for its next piece lay in two places."""
    assert run(seed, str(gpu.nvme_path), gpu.device) is None
