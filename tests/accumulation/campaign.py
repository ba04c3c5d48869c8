"""Every model of the matrix under every setting: ``python -m tests.accumulation.campaign [NVME_PATH] [FAMILY ...]``.

Compares both orders of ``accumulate`` with a plain loop, bit for bit, in three precisions, for 1, 2, 3 and 8
micro-batches, with and without the two kinds of activation checkpoints. It takes about half an hour. Of the
parametrizations, spectral norm behind checkpoints differs: it counts each forward, also those inside backward.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.accumulation.loops import HORIZONTAL, PLAIN, VERTICAL, Steps
from tests.models.programs import checkpoints
from tests.models.zoo import FAMILIES, Family
from tests.support.loops import assert_same_bits
from tests.support.paging import EVICTING, TIGHT, Paging, Setting


def wrong(
    paging: Paging, family: Family, setting: Setting, micro_batches: int, reentrant: bool | None, steps: int = 2
) -> str | None:
    """How the orders differ from the plain loop; None where they do not."""
    runs: list[dict[str, Any]] = []
    for how in (PLAIN, HORIZONTAL, VERTICAL):
        model = paging.build(family.build, setting, key=family.name)
        with checkpoints(model, reentrant):
            made = Steps(family.loss, lambda seed: seed, micro_batches, steps).run(model, how)
        if reentrant is not None:
            del made["buffers"]  # a checkpoint counts batches twice, in the order in which it runs them again
        runs.append(made)
        del model
    for how, run in zip((HORIZONTAL, VERTICAL), runs[1:], strict=True):
        try:
            assert_same_bits(runs[0], run, how, nan_is_wrong=setting.precision != "fp16")
        except AssertionError as difference:
            return str(difference)
    return None


def main(arguments: list[str]) -> int:
    torch.set_num_threads(1)
    names = arguments[1:] or list(FAMILIES)
    faults = 0
    with tempfile.TemporaryDirectory(dir=arguments[0] if arguments else None) as folder:
        paging = Paging(Path(folder))
        for name in names:
            family = FAMILIES[name]
            for setting, precision, reentrant in itertools.product(
                (EVICTING, TIGHT), ("keep", "bf16", "fp16"), (None, False, True)
            ):
                for micro_batches in (1, 2, 3, 8) if reentrant is None else (3,):
                    asked = replace(setting, precision=precision)
                    found = wrong(paging, family, asked, micro_batches, reentrant)
                    faults += found is not None
                    print(name, setting, precision, micro_batches, reentrant, found or "same", flush=True)
    return min(faults, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
