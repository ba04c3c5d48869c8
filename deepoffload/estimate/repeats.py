"""Layers that repeat are run a few times and counted as often as they are there.

Of a model of 80 equal layers the first, two in the middle, and the last are run. The two in the middle must do the
same, byte for byte and operator for operator; then all others in the middle do it, too. Where layers of several sorts
take turns, that holds for each layer between its neighbours (``layers``). A model of which it does not hold is run
whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn

from deepoffload.errors import UsageError
from deepoffload.estimate.dry_run import LossOf, NeedsValues, record
from deepoffload.estimate.expansion import Expansion, Kept
from deepoffload.estimate.kernels import KnownCalls
from deepoffload.estimate.layers import TIMES, Places, Stack, find_stacks, shortened
from deepoffload.estimate.lengths import ByLength, record_quickly
from deepoffload.estimate.progress import Report, silent
from deepoffload.estimate.recording import DryRun, NotRegular, Recording
from deepoffload.runtime.compute_types import KEEP_TYPES, ComputeTypes


def dry_run_quickly(
    model: nn.Module,
    loss_of: LossOf,
    *,
    windows: Sequence[nn.Module],
    unit_of: Mapping[int, int],
    types: ComputeTypes = KEEP_TYPES,
    recompute: bool = False,
    may_shorten: bool = True,
    by_length: ByLength | None = None,
    known: KnownCalls | None = None,
    progress: Report = silent,
) -> DryRun:
    """As :func:`deepoffload.estimate.dry_run.dry_run`, without running what is known.

    Args:
        recompute: as of :func:`deepoffload.estimate.dry_run.record`.
        may_shorten: ``model`` may have fewer layers while this runs.
        by_length: how to run it on shorter sequences, where that is enough.
        known: what other runs have found out of its kernels.
        progress: is told of what takes long.

    Raises:
        UsageError: the model cannot run without data, or gives no loss.
    """
    said: dict[str, Any] = {"windows": windows, "unit_of": unit_of, "types": types, "recompute": recompute}
    record_it = partial(record, model, **said, known=known or KnownCalls())
    stacks = find_stacks(model) if may_shorten else []
    places = Places.of(stacks, unit_of, model) if stacks else None
    for radius in RADII:
        if places is None:
            break
        runs = FewLayers(stacks, places, radius, record_it)
        try:
            return runs.whole(record_quickly(runs, loss_of, by_length, progress)).summary()
        except NotRegular:
            continue
        except NeedsValues:
            raise
        except UsageError:
            break  # perhaps because of the layers that were missing: the whole model tells
    whole = FewLayers((), Places({}, {}, ()), 0, record_it)
    return record_quickly(whole, loss_of, by_length, progress).summary()


RADII = (1, 2)
"""How many neighbours on each side may make a difference to what a layer does; the second is tried behind the first."""


LEAST_SHARE = 0.8
"""Runs with each layer once are worth their trouble where they have fewer layers than this share of the others."""


class FewLayers:
    """Runs of a model with few of its layers: in ``checked`` ones every layer between its neighbours is there twice, in
    ``least`` ones once."""

    def __init__(self, stacks: Sequence[Stack], places: Places, radius: int, record_it: Any) -> None:
        self._stacks, self._places, self._radius, self._record = stacks, places, radius, record_it
        self._twice = [stack.few(TIMES, radius) for stack in stacks]
        once = [stack.few(1, radius) for stack in stacks]
        self._once = once if sum(map(len, once)) < LEAST_SHARE * sum(map(len, self._twice)) else self._twice

    def checked(self, loss_of: LossOf, calls_max: int | None = None) -> Recording:
        with shortened(self._stacks, self._twice):
            return self._record(loss_of, calls_max=calls_max)

    def least(self, loss_of: LossOf) -> Recording:
        with shortened(self._stacks, self._once):
            return self._record(loss_of)

    def least_of(self, checked: Recording) -> Recording:
        """What :meth:`least` would give. Raises ``NotRegular`` where layers that should do the same do not."""
        return self._of(checked, self._twice, self._once)

    def checked_of(self, least: Recording) -> Recording:
        return self._of(least, self._once, self._twice)

    def whole(self, checked: Recording) -> Recording:
        """The recording of the whole model. Raises ``NotRegular`` as :meth:`least_of`."""
        return self._of(checked, self._twice, [range(len(stack.layers)) for stack in self._stacks])

    def _of(self, run: Recording, shown: Kept, wanted: Kept) -> Recording:
        if shown is wanted or not self._stacks:
            return run
        return Expansion(self._stacks, self._places, self._radius, shown, wanted).of(run)
