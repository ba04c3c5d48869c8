"""Every model of the matrix under every setting: ``python -m tests.accumulation.campaign NVME_PATH [FAMILY ...]``.

Compares the vertical order with a plain loop, bit for bit, with activations kept and computed again: in three
precisions and under autocast, for 1, 2, 3 and 8 micro-batches, with and without the two kinds of activation
checkpoints. It takes more than an hour. Behind the model's own checkpoints the parametrizations come without spectral
norm, which counts each forward, also those inside backward: it differs there.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import random
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.accumulation.loops import HORIZONTAL, HORIZONTAL_AGAIN, PLAIN, VERTICAL, VERTICAL_AGAIN, Steps
from tests.models.programs import checkpoints
from tests.models.zoo import FAMILIES, Family, Stack, parametrized
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
WITHOUT_SPECTRAL_NORM = replace(
    FAMILIES["parametrizations"],
    name="parametrizations without spectral norm",
    build=lambda: Stack(partial(parametrized, spectral=False), 2),
)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("nvme_path")
    parser.add_argument("families", nargs="*", default=list(FAMILIES), metavar="FAMILY")
    parser.add_argument("--quick", action="store_true", help="six cells of each family")
    parser.add_argument("--gpu", action="store_true", help="the simulated one: one micro-batch after the other")
    parser.add_argument("--shuffle", type=int, help="in another order: a seed")
    parser.add_argument("--from", dest="first", type=int, default=0, help="begin with the cell of this number")
    parser.add_argument("--count", type=int, help="so many cells; all that are left when not said")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    ways = (PLAIN, VERTICAL, VERTICAL_AGAIN)
    if chosen.gpu:
        importlib.import_module("tests.support.on_simulated_gpu")
        ways = (PLAIN, HORIZONTAL, HORIZONTAL_AGAIN)
    cells = list(itertools.product(chosen.families, QUICK if chosen.quick else EVERY))
    if chosen.shuffle is not None:
        random.Random(chosen.shuffle).shuffle(cells)
    wanted, faults = list(enumerate(cells))[chosen.first :][: chosen.count], 0
    with tempfile.TemporaryDirectory(dir=chosen.nvme_path) as inside:
        paging = Paging(Path(inside))
        for number, (name, cell) in wanted:
            counts = name == "parametrizations" and cell.reentrant is not None
            found = wrong(paging, WITHOUT_SPECTRAL_NORM if counts else FAMILIES[name], cell, ways)
            faults += found is not None
            print(f"{number:5}  {name} {cell} {found or 'same'}", flush=True)
    print(f"{len(wanted) - faults} of {len(wanted)} cells, of {len(cells)}: same")
    sys.exit(faults > 0)


if __name__ == "__main__":
    main()
