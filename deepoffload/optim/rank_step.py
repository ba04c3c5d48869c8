"""One optimizer step that several ranks make together: they meet, and decide the same.

Each rank updates what it owns. So all must agree on whether the step is made, on which parameters have gradients, and
on every number that the update is made with. A digest of these is compared; ranks that differ raise, before anything
has changed.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from deepoffload.copies.rank_link import RankLink
from deepoffload.errors import RankError, UnsupportedError, UsageError
from deepoffload.memory.lock import SHIELD
from deepoffload.optim import outside_gradient
from deepoffload.optim.gradient_state import GradientState
from deepoffload.optim.handles import gradients_of, handle_of
from deepoffload.optim.rank_gradients import RankGradients
from deepoffload.optim.rule import UpdateJob
from deepoffload.optim.step_order import SteppingOptimizer, first_order, is_frozen, order_of, packed
from deepoffload.params.edits import look_for_edits
from deepoffload.params.pager import Pager
from deepoffload.params.unit import ParamHandle
from deepoffload.ranks.apart import differing_values
from deepoffload.ranks.sums import SquareSum
from deepoffload.ranks.words import ranks_in_words

log = logging.getLogger("deepoffload")

DIGEST_BYTES = 8
CONTENT_BIT = 128
"""Above the sum of all digests, ranks count those that are content with a step without gradients."""

EMPTY_STEP = (
    "engine.step() without engine.backward(loss): no gradient has come since the last update, so there is nothing to "
    "step with, and the schedule would advance; call engine.backward(loss) first"
)


class EmptyStepError(UsageError):
    """No rank has a gradient for a step that needs some. All ranks raise it, nothing has changed, and all may go on."""


class RankStep:
    """This rank's side of it.

    Args:
        pager: whose parameters are updated.
        optimizer: whose step it is; None where no rank can have joined.
    """

    def __init__(self, pager: Pager, gradients: RankGradients, optimizer: SteppingOptimizer | None = None) -> None:
        self._pager = pager
        self._lock = pager.lock
        self._gradients = gradients
        self._optimizer = optimizer
        self._link: RankLink = gradients.link

    @contextmanager
    def met(self) -> Iterator[None]:
        """Inside, all ranks have met, and every gradient of the step has landed. Gathers wait until the end: they show
        the weights after the step. An error inside is raised on all ranks.

        Raises:
            RankError: another rank has failed, or has not come in time.
        """
        met_before = self._gradients.met_before
        with self._lock if met_before is None else met_before, told_to_all(self._link):
            if met_before is None:
                self._meet()
            yield

    def _meet(self) -> None:
        self._gradients.contributions.announce_all()
        joined = SHIELD.outside(self._link.meet_step)
        self._gradients.all_launched()
        self._warn_of_idle()
        if joined:
            if self._optimizer is None:
                raise UnsupportedError(f"ranks {joined} have joined and cannot make this step")
            mine = order_of(self._optimizer, self._gradients)
            first_order(self._link.exchange_messages(packed(mine)))  # raises what all ranks raise

    def _warn_of_idle(self) -> None:
        """Of a step that a rank may have made by mistake: nothing else tells before the programs end."""
        idle = self._link.rounds.idle
        if not idle or self._gradients.has_warned_of_idle:
            return
        self._gradients.has_warned_of_idle = True
        if self._link.ranks.rank == idle[0]:
            log.warning(
                "%s: optimizer.step() without a backward since the step before, where other ranks have made one. Such "
                "a rank adds no gradient. If it makes more steps than the others, from here on the ranks meet at steps "
                "that are not the same ones of their programs. (This is said once.)",
                ranks_in_words(idle),
            )

    def agree(
        self,
        jobs: Mapping[ParamHandle, tuple[Tensor, UpdateJob]],
        settings: Mapping[str, object],
        overflow: bool,
    ) -> bool:
        """Whether any rank has seen an overflow.

        Args:
            jobs: what this rank updates, and how.
            settings: what else the update is made with, by name.

        Raises:
            UsageError: another rank updates something else, or with other numbers.
            EmptyStepError: there is nothing to update, and the programs of all ranks take that for a mistake.
        """
        shared = {id(job): f"{job.step} {job.hyper}" for _, job in jobs.values()}
        lines = sorted(f"{handle.name} {shared[id(job)]}" for handle, (_, job) in jobs.items())
        written = self._written(jobs)
        frozen = self._frozen(jobs)
        alike = {name: repr(value) for name, value in settings.items()}
        said = "\n".join([*lines, repr(alike), repr(written), repr(frozen)])
        mine = int.from_bytes(hashlib.blake2b(said.encode(), digest_size=DIGEST_BYTES).digest(), "little")
        together = self._link.exchange_sums(SquareSum(mine + (self._is_content << CONTENT_BIT), overflow))
        self._gradients.stepped.update(jobs)
        ranks = self._link.ranks
        content, digests = divmod(together.total, 1 << CONTENT_BIT)
        if digests != mine * ranks.world_size:
            self._compare_written(written)
            message = json.dumps([lines, frozen, alike]).encode()
            everybody = [json.loads(said) for said in self._link.exchange_messages(message)]
            raise UsageError(
                f"the ranks' optimizer.step() differ: {_first_apart(everybody)}. Give all ranks the same optimizer and "
                "schedule, and freeze and unfreeze the same parameters on all"
            )
        if not jobs and not content:
            raise EmptyStepError(EMPTY_STEP)
        return together.non_finite

    @property
    def _is_content(self) -> bool:
        """Whether this rank's program makes a step although nobody may have gradients. One that has joined follows."""
        has_joined = self._gradients.met_before is not None
        return not has_joined and (self._optimizer is None or not self._optimizer.needs_gradients)

    def _frozen(self, jobs: Iterable[ParamHandle]) -> list[str]:
        """Names of those of ``jobs`` that the program has frozen; where this rank has joined, those on the others."""
        if self._gradients.met_before is not None:
            return sorted(self._gradients.frozen_elsewhere.intersection(handle.name for handle in jobs))
        return sorted(handle.name for handle in jobs if is_frozen(handle))

    def _written(self, jobs: Iterable[ParamHandle]) -> dict[str, int]:
        """Checksums of what this rank's program has written since the last step, where the ranks have not compared it:
        weights past the doors ([Note: edits] in ``params.edits``), and tensors that it has assigned to ``.grad``. By
        name, in an order that all ranks have."""
        units = self._pager.units
        look_for_edits(units)
        found = {}
        for handle in (handle for unit in units for handle in unit.handles):
            if handle.uncompared is not None:
                found[handle.name], handle.uncompared = handle.uncompared, None
        for handle in jobs:
            if self._gradients.state_of(handle) is GradientState.USER:
                found[f"{handle.name}.grad"] = outside_gradient.checksum(handle)
        return dict(sorted(found.items()))

    def _compare_written(self, written: Mapping[str, int]) -> None:
        """Raise UsageError where the ranks have written other values; called on all of them."""
        of_rank = [json.loads(message) for message in self._link.exchange_messages(json.dumps(written).encode())]
        for name in sorted({name for found in of_rank for name in found}):
            values = [found.get(name) for found in of_rank]
            if len(set(values)) > 1:
                raise UsageError(differing_values(name, values))

    def sum_over_ranks(self, squares: SquareSum) -> SquareSum:
        """The sum of what all ranks own."""
        return self._link.exchange_sums(squares)


def await_sums(pager: Pager, optimizer: SteppingOptimizer) -> None:
    """With several ranks, return when nothing is on its way of the gradients of what ``optimizer`` updates."""
    gradients = pager.gradients
    if isinstance(gradients, RankGradients):
        handles = (handle_of(param) for param, _ in optimizer._each())
        gradients.await_sums(handle for handle in handles if handle is not None and handle.pager is pager)


@contextmanager
def told_to_all(link: RankLink) -> Iterator[None]:
    """An error inside is raised on all ranks."""
    try:
        yield
    except (RankError, EmptyStepError):
        raise
    except BaseException as error:
        link.fail(f"{type(error).__name__}: {error}")
        raise


def rank_step_of(pagers: Sequence[Pager], optimizer: SteppingOptimizer) -> RankStep | None:
    """What a step of ``optimizer`` over the parameters of ``pagers`` needs with several ranks; None with one.

    Raises:
        UnsupportedError: they are of several engines.
    """
    found = [(pager, gradients_of(pager)) for pager in pagers if pager.link is not None]
    if not found:
        return None
    pager, gradients = found[0]
    if len(pagers) > 1 or not isinstance(gradients, RankGradients):
        raise UnsupportedError(
            "an optimizer over models of several offload contexts is not there yet with several ranks: build the "
            "models in one context, or give each its own optimizer"
        )
    return RankStep(pager, gradients, optimizer)


def refuse_ordinary(groups: Iterable[Mapping[str, Any]]) -> None:
    """Raise ``UnsupportedError`` where an optimizer has ordinary parameters next to those that several ranks share.
    They may be there if they have no elements."""
    params = [param for group in groups for param in group["params"] if param.numel()]
    handles = [handle_of(param) for param in params]
    if any(handle is not None and handle.pager.link is not None for handle in handles) and None in handles:
        shape = tuple(params[handles.index(None)].shape)
        raise UnsupportedError(
            f"the optimizer has an ordinary parameter, of shape {shape}, next to paged ones: with several ranks nobody "
            "adds its gradients up. Build it inside offload_context, with the model"
        )


def _first_apart(everybody: Sequence[tuple[Sequence[str], Sequence[str], Mapping[str, str]]]) -> str:
    """The first parameter of whose update the ranks say different things: its name, and what it is updated with. Else
    the first setting that differs. Each says what it updates, what of that it has frozen, and its settings."""
    said = [dict(line.split(" ", 1) for line in lines) for lines, _, _ in everybody]
    for name in sorted({name for updates in said for name in updates}):
        having = [rank for rank, updates in enumerate(said) if name in updates]
        if len(having) < len(said):
            return f"{name} is updated on {ranks_in_words(having)} alone"
        others = [rank for rank in having if said[rank][name] != said[0][name]]
        if others:
            return (
                f"{name} is updated with other numbers on {ranks_in_words(others)} than on rank 0: step and settings "
                f"are {said[others[0]][name]} and {said[0][name]}"
            )
        freezing = [rank for rank, (_, frozen, _) in enumerate(everybody) if name in frozen]
        if 0 < len(freezing) < len(said):
            training = [rank for rank in having if rank not in freezing]
            return f"{name} is frozen on {ranks_in_words(freezing)}, and trained on {ranks_in_words(training)}"
    settings = [each for _, _, each in everybody]
    name = next(name for name in settings[0] if len({each[name] for each in settings}) > 1)
    values = [each[name] for each in settings]
    others = [rank for rank, value in enumerate(values) if value != values[0]]
    return f"{name} is {values[others[0]]} on {ranks_in_words(others)}, and {values[0]} on rank 0"
