"""What is accepted trains on a device, too, where the host's arena lends no pages."""

from __future__ import annotations

from tests.runtime.budget_programs import main
from tests.support.gpu import Gpu

PROGRAMS = 6


def test_random_programs_train_at_the_least_budget(gpu: Gpu) -> None:
    said: list[str] = []
    assert main(str(gpu.nvme_path), PROGRAMS, say=said.append, device=gpu.device) == 0, "\n".join(said)
