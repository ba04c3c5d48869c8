"""What each rank does with random programs: it runs them paged, next to plain PyTorch, and says what differs."""

from __future__ import annotations

import gc
import logging
import re
from pathlib import Path

import torch

from deepoffload.errors import DeepOffloadError
from tests.fuzz.program import Program, generate, run
from tests.fuzz.verdict import Verdict, judge
from tests.support.halved import Halved
from tests.support.paging import QUICK_BACKEND
from tests.support.rank_paging import RankPaging

REFUSED = re.compile("[Ww]ith several ranks|views of it are held")
"""What only several ranks refuse: see docs/what_works.md."""


def suits(program: Program) -> bool:
    """Whether plain PyTorch says what is right, and several ranks take the setting."""
    return program.setting.step_overlap != "in_backward" and program.twin == "plain PyTorch"


def campaign(first: int, count: int, nvme_path: str) -> list[str]:
    """Run ``count`` programs from number ``first`` on. Returns how each ended."""
    logging.getLogger("deepoffload").setLevel(logging.ERROR)
    pagings = [RankPaging(Path(nvme_path), transport) for transport in ("memory", "group")]
    ended: list[str] = []
    while len(ended) < count:
        program = generate(first)
        if suits(program):
            ended.append(f"{_check(pagings[first % 2], program)}")
        first += 1
    return ended


def _check(paging: RankPaging, program: Program) -> Verdict:
    torch.manual_seed(program.seed)
    twin = program.net()
    halved = Halved(twin)
    expected = run(twin, program)
    halved.end()
    key = (program.kinds, program.checkpoints, program.tied)
    model = paging.build(program.net, program.setting, seed=program.seed, key=key, aio={"backend": QUICK_BACKEND})
    got = run(model, program)
    verdict = judge(program, expected, got)
    del model
    gc.collect()
    paging.close()
    if verdict.kind != "wrong":
        return Verdict(verdict.kind)
    if isinstance(got.error, DeepOffloadError) and REFUSED.search(verdict.reason):
        return Verdict("refused")
    return Verdict("wrong", f"{verdict.reason}\n{program}")
