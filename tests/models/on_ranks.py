"""What each rank of a test does with the models of the matrix: every program of one after the other.

All ranks do the same with the same data. The mean of equal gradients is that gradient, bit for bit, so plain PyTorch in
one process says what is right; it adds each gradient as often as there are ranks (``tests.support.halved``).
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from tests.models.matrix import FAMILIES, LIFE, outcome
from tests.models.programs import Subject
from tests.models.seen import look, wrong
from tests.models.zoo import Family
from tests.support.halved import Halved
from tests.support.paging import Setting, plain
from tests.support.rank_paging import RankPaging


@dataclass(frozen=True)
class Job:
    """One model's life under one setting.

    Attributes:
        family: its name.
        transport: how bytes get from rank to rank.
    """

    family: str
    setting: Setting
    transport: str

    def __str__(self) -> str:
        return f"{self.family}, {self.setting}, {self.transport}"


def live(jobs: Sequence[Job], nvme_path: str, directory: str) -> list[str]:
    """Returns what differs from plain PyTorch. ``directory``: where programs of all ranks save models."""
    warnings.simplefilter("ignore")
    logging.getLogger("deepoffload").setLevel(logging.ERROR)
    from transformers.utils import logging as of_transformers

    of_transformers.set_verbosity_error()
    of_transformers.disable_progress_bar()
    dist.init_process_group("gloo")  # the programs in plain PyTorch share their distributed checkpoints
    pagings = {transport: RankPaging(Path(nvme_path), transport) for transport in ("memory", "group")}
    faults: list[str] = []
    for job in jobs:
        found = _life(FAMILIES[job.family], job.setting, pagings[job.transport], Path(directory))
        pagings[job.transport].close()
        faults += [f"{job}: {fault}" for fault in found]
    dist.destroy_process_group()
    return faults


def _life(family: Family, setting: Setting, paging: RankPaging, directory: Path) -> list[str]:
    subject = Subject(family, plain(family.build), directory, folder=f"plain on rank {dist.get_rank()}")
    halved = Halved(subject.model)
    torch.manual_seed(1)
    expected = {feature.name: feature.program(subject) for feature in LIFE if feature.suits(family)}
    halved.end()
    subject = Subject(family, paging.build(family.build, setting, key=family.name), directory)
    torch.manual_seed(1)
    found = []
    for feature in LIFE:
        if feature.suits(family):
            fault = wrong(expected[feature.name], look(feature, subject), outcome(family, feature, setting))
            found += [f"{feature.name}: {fault}"] if fault else []
    return found
