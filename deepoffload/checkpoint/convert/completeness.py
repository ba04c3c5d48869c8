"""What a run of another library lacks: an error where training would get other numbers, else a line in the log."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

from deepoffload.checkpoint.convert.deepspeed_files import STEP
from deepoffload.checkpoint.convert.tensors import Values
from deepoffload.checkpoint.convert.training_run import ADAM, TrainingRun
from deepoffload.errors import UsageError

log = logging.getLogger("deepoffload")

_COUNT_STEPS = (ADAM, "adagrad")
"""Kinds of optimizers whose update depends on the number of steps."""
_NAMES_SHOWN = 5


def check_complete(run: TrainingRun, where: str) -> None:
    """Check that optimizer state which is there is whole, and log what is not there at all.

    Raises:
        UsageError: a parameter lacks an array that others have, or the number of its steps.
    """
    check_arrays_alike(run.arrays, where)
    if run.kind in _COUNT_STEPS:
        uncounted = [name for name, held in run.arrays.items() if held and STEP not in run.small.get(name, {})]
        if uncounted:
            raise UsageError(
                f"{where} has optimizer state of {_listed(uncounted)}, and not the number of its steps ({STEP!r}), on "
                "which the next update depends: the checkpoint is not complete; save or copy it again"
            )
    if not any(run.arrays.values()) and not run.small:
        log.warning("%s has no optimizer state: weights alone are taken over", where)
        return
    idle = [name for name in run.trained() if not run.arrays.get(name) and not run.small.get(name)]
    if idle:
        log.warning("%s has no optimizer state of %s: taken as never updated", where, _listed(idle))


def check_arrays_alike(arrays: Mapping[str, Mapping[str, Values]], where: str) -> None:
    """Check that the parameters which have optimizer state have the same arrays.

    Raises:
        UsageError: one has lost some.
    """
    expected = {key for held in arrays.values() for key in held}
    for name, held in arrays.items():
        lacking = expected - held.keys()
        if held and lacking:
            raise UsageError(
                f"{where} has no {', '.join(sorted(lacking))} of {name[:80]}, and other parameters have it: the "
                "checkpoint is not complete; save or copy it again"
            )


def _listed(names: Collection[Any]) -> str:
    shown = ", ".join(str(name)[:80] for name in list(names)[:_NAMES_SHOWN])
    return f"{shown} and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else shown
