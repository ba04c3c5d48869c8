"""Every model of the matrix under every setting: ``python -m tests.accumulation.campaign NVME_PATH [--quick] [--gpu]
[FAMILY ...]``.

Compares the vertical order with a plain loop, bit for bit, with activations kept and computed again: in three
precisions and under autocast, for 1, 2, 3 and 8 micro-batches, with and without the two kinds of activation
checkpoints. It takes more than an hour; ``--quick`` runs six cells of each family. ``--gpu`` runs them on the simulated
GPU, where micro-batches run one after the other. Of the parametrizations, spectral
norm behind the model's own checkpoints differs: it counts each forward, also those inside backward.
"""

from __future__ import annotations

import importlib
import itertools
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.accumulation.loops import HORIZONTAL, HORIZONTAL_AGAIN, PLAIN, VERTICAL, VERTICAL_AGAIN, Steps
from tests.models.programs import checkpoints
from tests.models.zoo import FAMILIES, Family
from tests.support.loops import assert_same_bits
from tests.support.paging import EVICTING, TIGHT, Paging, Setting


class Cell(NamedTuple):
    """One way to train a model.

    Attributes:
        precision: of the weights, or ``"autocast"``.
        reentrant: the kind of its activation checkpoints; None: it has none.
    """

    setting: Setting
    precision: str
    micro_batches: int
    reentrant: bool | None

    def __str__(self) -> str:
        return f"{self.setting} {self.precision} {self.micro_batches} {self.reentrant}"


PRECISIONS = ("keep", "bf16", "fp16", "autocast")
EVERY = [
    Cell(setting, precision, count, reentrant)
    for setting, precision, reentrant in itertools.product((EVICTING, TIGHT), PRECISIONS, (None, False, True))
    for count in ((1, 2, 3, 8) if reentrant is None else (3,))
]
QUICK = [
    Cell(EVICTING, "bf16", 3, None),
    Cell(TIGHT, "keep", 8, None),
    Cell(TIGHT, "fp16", 2, None),
    Cell(TIGHT, "autocast", 3, None),
    Cell(EVICTING, "keep", 3, False),
    Cell(TIGHT, "bf16", 3, True),
]
AUTOCAST = partial(torch.autocast, "cpu", dtype=torch.bfloat16)


def wrong(paging: Paging, family: Family, cell: Cell, ways: tuple[str, ...], steps: int = 2) -> str | None:
    """How other ways differ from the first one; None where they do not."""
    under_autocast = cell.precision == "autocast"
    setting = replace(cell.setting, precision="keep" if under_autocast else cell.precision)
    runs: list[dict[str, Any]] = []
    for how in ways:
        model = paging.build(family.build, setting, key=family.name)
        asked = Steps(family.loss, lambda seed: seed, cell.micro_batches, steps)
        with checkpoints(model, cell.reentrant):
            made = (replace(asked, around=AUTOCAST) if under_autocast else asked).run(model, how)
        if cell.reentrant is not None:
            del made["buffers"]  # the model's checkpoints count batches twice, in the order in which they run again
        runs.append(made)
        del model
    for how, run in zip(ways[1:], runs[1:], strict=True):
        try:
            assert_same_bits(runs[0], run, how, nan_is_wrong=setting.precision != "fp16")
        except AssertionError as difference:
            return str(difference)
    return None


def main(arguments: list[str]) -> int:
    torch.set_num_threads(1)
    cells = QUICK if "--quick" in arguments else EVERY
    ways = (PLAIN, VERTICAL, VERTICAL_AGAIN)
    if "--gpu" in arguments:
        importlib.import_module("tests.support.on_simulated_gpu")
        ways = (PLAIN, HORIZONTAL, HORIZONTAL_AGAIN)
    folder, *names = [argument for argument in arguments if not argument.startswith("--")]
    faults = 0
    with tempfile.TemporaryDirectory(dir=folder) as inside:
        paging = Paging(Path(inside))
        for name, cell in itertools.product(names or FAMILIES, cells):
            found = wrong(paging, FAMILIES[name], cell, ways)
            faults += found is not None
            print(name, cell, found or "same", flush=True)
    return min(faults, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
