"""Parameters that come to a model after it was placed: adapters, a new head. Several ranks take them in together.

The ranks meet, and compare the names, the types and the values of what has come. Then each takes it in. Where that
fails on one rank, for which there may be no room, all of them undo it. Until they know that, the values stay where the
program has put them.

Where units of a replaced head are given back, the ranks do that here, too: before all of them have dropped a unit,
another one may ask for its bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from torch import Tensor

from deepoffload.copies.payload_numbers import LATE_NUMBER, gradients_number, late_index, weights_number
from deepoffload.copies.rank_link import RankLink
from deepoffload.errors import UsageError
from deepoffload.io.checksums import crc32c
from deepoffload.params.torch_private import get_data, outside_user_modes
from deepoffload.params.unit import ParamHandle, Unit
from deepoffload.ranks.edited import Edited
from deepoffload.ranks.notices import kind_of
from deepoffload.runtime.agreement import first_difference
from deepoffload.runtime.construct import Assembly, Taken
from deepoffload.runtime.rank_facts import described
from deepoffload.runtime.rank_units import join_units

ComingUnit = tuple[str, Sequence[tuple[str, Tensor]]]
"""The name of a unit, and its parameters with theirs."""

_ADVICE = (
    "Add the same modules on all ranks, in the same place of the program, with the same values: seed the random "
    "numbers alike before (torch.manual_seed)"
)


class Newcomers:
    """Takes in what has come.

    Args:
        assembly: makes units of it.
        link: to the other ranks; None with one.
    """

    def __init__(self, assembly: Assembly, link: RankLink | None) -> None:
        self._assembly, self._link = assembly, link
        self._pager, self._gradients = assembly.pager, assembly.gradients

    def take_in(self, units: Sequence[ComingUnit]) -> list[ParamHandle]:
        """Make units of parameters that have come. To be called with the pager's lock held.

        Raises:
            BudgetError: there is no room, perhaps on another rank. What has come stays ordinary.
            UsageError: something else has come to another rank; the message names the first such parameter.
            RankError: another rank has failed, or is elsewhere.
        """
        taken: list[Taken] = []
        if self._link is None:
            for name, params in units:
                taken.append(self._assembly.take_in(name, params))
        elif units:
            taken = self._together(self._link, units)
        return [handle for one in taken for handle in one.handles]

    def _together(self, link: RankLink, units: Sequence[ComingUnit]) -> list[Taken]:
        link.meet_edit(LATE_NUMBER, Edited(0))
        self._compare(link, units)
        taken: list[Taken] = []
        failure: Exception | None = None
        try:
            for name, params in units:
                taken.append(self._assembly.bring_in(name, params))
                join_units(self._pager.memory, self._gradients, [taken[-1].unit])
        except Exception as error:
            failure = error
        try:
            self._hear(link, failure)
        except BaseException:
            for one in reversed(taken):
                self._forget(link, one.unit)
                self._assembly.undo(one)
            raise
        for one in taken:
            self._assembly.track(one)
        return taken

    def _compare(self, link: RankLink, units: Sequence[ComingUnit]) -> None:
        """Raise UsageError on all ranks where something else has come to one. Where nothing differs, give back what all
        of them have dropped, and count units alike: one that has failed before may have made fewer of them."""
        facts = [fact for _, params in units for fact in map(_fact, params)]
        dead = [unit.index for unit in self._pager.units if all(handle.tensor is None for handle in unit.handles)]
        digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
        mine = json.dumps([digest, dead, self._pager.life.unit_count])
        said = [json.loads(message) for message in link.exchange_messages(mine.encode())]
        if len({digest for digest, *_ in said}) > 1:
            everybody = [json.loads(message) for message in link.exchange_messages(json.dumps(facts).encode())]
            differs = first_difference([[(name, fact) for name, fact in facts] for facts in everybody])
            raise UsageError(f"what came after the model was placed differs between ranks: {differs}. {_ADVICE}")
        self._pager.life.unit_count = max(count for *_, count in said)
        over = set(dead).intersection(*(dead for _, dead, _ in said))
        for unit in self._pager.life.free_dead_units(self._pager.units, self._pager.tiers, self._gradients, over):
            self._forget(link, unit)

    @staticmethod
    def _hear(link: RankLink, failure: Exception | None) -> None:
        """Raise what this rank has failed with, or another one."""
        mine = [] if failure is None else [type(failure).__name__, f"{failure}"]
        said = [json.loads(message) for message in link.exchange_messages(json.dumps(mine).encode())]
        if failure is not None:
            raise failure
        for rank, theirs in enumerate(said):
            if theirs:
                name, text = theirs
                raise kind_of(name)(f"rank {rank} cannot take in what came after the model was placed: {text}")

    @staticmethod
    def _forget(link: RankLink, unit: Unit) -> None:
        for number in (
            weights_number(unit.index),
            gradients_number(unit.index),
            gradients_number(late_index(unit.index)),
        ):
            link.show_no_longer(number)


def _fact(named: tuple[str, Tensor]) -> tuple[str, str]:
    """What ranks compare of a parameter."""
    name, param = named
    with outside_user_modes():
        values = get_data(param).detach().to("cpu").contiguous()
        return name, f"{described(param)} with checksum {crc32c(values.data_ptr(), values.nbytes):08x}"
