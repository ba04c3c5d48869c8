"""What all optimizers on the host have in common: ordinary ``torch.optim.Optimizer``s whose update is one native pass.

They take paged parameters and ordinary CPU parameters together. Paged parameters keep their state on the tier where
the engine placed it; ordinary ones keep it in ``optimizer.state`` as torch's own optimizers do.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor

from deepoffload.errors import DeepOffloadError, UnsupportedError
from deepoffload.native.cpu_adam import norm_of
from deepoffload.optim import checks
from deepoffload.optim.begun_step import BegunStep
from deepoffload.optim.gradients import Gradients
from deepoffload.optim.handles import adopt_newcomers, early_of, gradients_of, handle_of, speculation_of
from deepoffload.optim.held_state import HeldState
from deepoffload.optim.in_backward import InBackward
from deepoffload.optim.norm import squares_of
from deepoffload.optim.ordinary import OrdinaryUpdate, check_has_bytes
from deepoffload.optim.rank_step import RankStep, await_sums, rank_step_of, refuse_ordinary
from deepoffload.optim.rule import step_count
from deepoffload.optim.speculation.guess import GuessedStep
from deepoffload.optim.speculation.steps import backward_ended, confirm, end_of_step, settle
from deepoffload.optim.state_dict import load_into, pack
from deepoffload.optim.state_shards import all_fail_together
from deepoffload.optim.step_work import StepWork, find_work
from deepoffload.optim.update import HostUpdate
from deepoffload.optim.variation import Variation
from deepoffload.params.graph_modes import refuse_capture
from deepoffload.params.pager import Pager
from deepoffload.params.torch_compiler import leave_to_python, without_compiler
from deepoffload.params.unit import ParamHandle

_NOTHING = nullcontext()


class HostOptimizer(torch.optim.Optimizer, Variation):
    """Base of :class:`CPUAdam`, :class:`CPULion`, :class:`CPUAdagrad` and :class:`CPUSGD`.

    One optimizer at a time holds the state of a paged parameter. When another one updates that parameter it starts with
    fresh state, and from then on the first one refuses to.

    It has more methods than other classes, because many are ``torch.optim.Optimizer``'s own, which loops, schedules and
    trainers call.

    Args:
        max_grad_norm: clip the gradients of all groups together to this global L2 norm inside the update; squares are
            summed in float64 within 4096 elements, and exactly beyond. None: no clipping. ``param.grad`` keeps the
            unclipped values.

    Attributes:
        skip_non_finite: :meth:`step` changes nothing when a gradient holds an infinity or NaN. Off unless set.
        applied: whether the last :meth:`step` updated.
        overflow: whether it did not, because a gradient held an infinity or NaN.
        loss_scale: what losses are multiplied by before backward; :class:`TrainingEngine` says so in fp16.
        needs_gradients: a step for which no rank has a gradient is an error; :class:`TrainingEngine` says so.
        grad_norm: global L2 norm of the gradients at the last step, unclipped; None when nothing needed it.
    """

    grad_scale: Tensor | float
    """What the gradients are too large by. There only for the time of a call of :meth:`step`, by which it is set."""

    def __init__(self, params: Any, defaults: dict[str, Any], max_grad_norm: float | None) -> None:
        checks.clip_norm(max_grad_norm)
        self.max_grad_norm = None if max_grad_norm is None else float(max_grad_norm)
        self.skip_non_finite = False
        self._start()
        super().__init__(params, defaults)

    def _start(self) -> None:
        self.applied = False
        self.overflow = False
        self.loss_scale = 1.0
        self.needs_gradients = False
        self.grad_norm: float | None = None
        self._held = HeldState()
        self._ordinary = OrdinaryUpdate(self.rule)
        self._interrupted: BegunStep | None = None
        self._last_unscale = 1.0
        self._in_backward = InBackward()

    @property
    def cur_scale(self) -> float:
        """:attr:`loss_scale` by DeepSpeed's other name."""
        return self.loss_scale

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """torch's name. Where it is true, ``GradScaler.step`` sets ``grad_scale`` and ``found_inf`` and calls
        :meth:`step` at once. Else it unscales the gradients itself, which it refuses for fp16 ones.

        True for fp16 parameters only. With others a program may clip between unscaling and step; Lightning refuses to
        clip for an optimizer that claims this, also where nothing is scaled (``bf16-mixed``).
        """
        return any(param.dtype is torch.float16 for param, _ in self._each())

    def _defaults(self) -> dict[str, Any]:
        found: dict[str, Any] = self.defaults
        return found

    # -- groups ----------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; refuses settings out of range and parameters without values."""
        without_compiler(super().add_param_group)(param_group)
        try:
            self._check_group(self.param_groups[-1])
            adopt_newcomers(self.param_groups[-1:])
            refuse_ordinary(self.param_groups[-1:])
        except (ValueError, DeepOffloadError):
            self.param_groups.pop()
            raise
        for param in self.param_groups[-1]["params"]:
            handle = handle_of(param)
            if handle is None:
                continue
            with handle.pager.lock:  # another thread may be in its backward
                self._own(handle)

    def _own(self, handle: ParamHandle) -> None:
        """From now on this optimizer updates ``handle``."""
        handle.pager.held.updates(self, handle)
        if early_of(handle.pager) is not None:
            self._in_backward.refuse_looking_at_all(self.max_grad_norm, self.skip_non_finite)

    def _check_group(self, group: Mapping[str, Any]) -> None:
        self._check_settings(group)
        checks.each_once(group["params"])
        for param in group["params"]:
            handle = handle_of(param)
            if handle is None:
                check_has_bytes(param, self.rule.name)
            elif not group.get("master_weights", True):
                raise UnsupportedError(f"{handle.name} is paged: its fp32 master is kept; use master_weights=True")

    def _each(self) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        for group in self.param_groups:
            for param in group["params"]:
                yield param, group

    def _pagers(self) -> list[Pager]:
        handles = (handle_of(param) for param, _ in self._each())
        pagers = (handle.pager for handle in handles if handle is not None)
        return list({id(pager): pager for pager in pagers if isinstance(pager, Pager)}.values())

    # -- the step --------------------------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch; also ends what an interrupted forward left open, so that every gradient is seen."""
        for pager in self._pagers():
            pager.hooks.refuse_between_turns("optimizer.zero_grad()")
            pager.hooks.close_leaked()
            early = early_of(pager)
            if early is not None:
                await_sums(pager, self)
                with pager.lock:
                    self._in_backward.forget(self, early, set_to_none)
            speculation = speculation_of(pager)
            if speculation is not None:
                with pager.lock:
                    speculation.forget(self)
        if not set_to_none:
            without_compiler(super().zero_grad)(set_to_none)
            return
        for param, _ in self._each():
            handle = handle_of(param)
            if handle is None or handle.pager.gradients is None:
                param.grad = None
            else:
                handle.pager.gradients.assign(handle, None)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient. Returns what ``closure`` returned.

        A ``torch.amp.GradScaler`` may call this: fp16 gradients are then unscaled inside the update, others before it,
        and an overflow changes nothing.

        Raises:
            ClosedError: a parameter's engine was closed.
            UnsupportedError: a sparse gradient, or an element type that the kernels do not take.
            UsageError: another optimizer has taken over a paged parameter.
            ValueError: a setting of a group is out of range. Nothing has been changed in any of these.
            IoFailure: a transfer failed on the way. What was not updated yet will be when it is used next, or by
                another call of ``step()``, which resumes this step and makes no second one of the same gradients.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scale = getattr(self, "grad_scale", None)
        overflow = bool(getattr(self, "found_inf", 0.0))
        unscale = 1.0 if scale is None else 1.0 / float(scale)
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else _NOTHING:  # states are ordinary
            self.applied = self.apply_step(unscale=unscale, skip_non_finite=self.skip_non_finite, overflow=overflow)
        self.overflow = not self.applied
        return loss

    @torch.no_grad()
    def apply_step(self, *, unscale: float, skip_non_finite: bool, overflow: bool = False) -> bool:
        """The update with gradients multiplied by ``unscale`` first.

        Returns False, with nothing changed, when ``skip_non_finite`` is set and a gradient holds an infinity or NaN, or
        when ``overflow`` says that this is known already.
        """
        pagers = self._pagers()
        for pager in pagers:
            refuse_capture(pager.memory)
            pager.hooks.refuse_between_turns("optimizer.step()")
            pager.hooks.close_leaked()
            pager.catch_up_all(guesses=False)
        if self._goes_on():
            return True
        early = [found for found in map(early_of, pagers) if found is not None]
        if early:
            self._in_backward.refuse_looking_at_all(self.max_grad_norm, self.skip_non_finite)
        self._held.move_into_pieces(self)
        ranks = rank_step_of(pagers, self)
        with _NOTHING if ranks is None else ranks.met():
            updates = self._decide(pagers, unscale, skip_non_finite, overflow, ranks)
        self._last_unscale = unscale
        if updates is None:
            for pager in pagers:
                pager.end_of_step(self)
                end_of_step(self, pager)
            return False
        for update in updates:
            update.run(defer=update.pager.defer_updates)
        self._finish_step(pagers)
        return True

    def _decide(
        self, pagers: list[Pager], unscale: float, skip_non_finite: bool, overflow: bool, ranks: RankStep | None
    ) -> list[HostUpdate] | None:
        """What the step will do, from here on for certain; None when it is not made."""
        self._in_backward.refuse_changed(self.param_groups)
        work = find_work(self, self._held)
        if ranks is not None:
            refuse_ordinary(self.param_groups)
            settings = {"max_grad_norm": self.max_grad_norm, "skip_non_finite": skip_non_finite, "unscale": unscale}
            overflow = ranks.agree({**self._in_backward.made, **work.paged}, settings, overflow)
        backward_ended(self, pagers)
        grad_factor, finite = self._grad_factor(work, unscale, skip_non_finite, ranks)
        skipped = overflow or (skip_non_finite and not finite)
        settle(self, pagers, {handle: job for handle, (_, job) in work.paged.items()}, None if skipped else grad_factor)
        if skipped:
            return None
        return self._enter_step(work, pagers, grad_factor, whole=True)

    def _enter_step(self, work: StepWork, pagers: list[Pager], grad_factor: float, *, whole: bool) -> list[HostUpdate]:
        """From here on the step happens: it counts, ordinary parameters make it, and every unit has it to make.

        ``whole``: this is the full step, not a part of it inside backward. If it fails, the next :meth:`step`
        finishes it.
        """
        updates: list[HostUpdate] = []
        for pager in pagers:
            if pager.commits is not None:
                pager.commits.before_step()
        for pager in pagers:
            mine = {handle: job for handle, (_, job) in work.paged.items() if handle.pager is pager}
            updates.append(self._update(pager, gradients_of(pager), mine, grad_factor))
            updates[-1].take_edits()
        self._held.warn_of_lost_masters()
        with ExitStack() as locks:
            for pager in pagers:
                locks.enter_context(pager.lock)  # a Ctrl-C comes before all of this or after it
            self._count_step(work)
            self._ordinary.run([(param, self.state[param], job) for param, job in work.ordinary], grad_factor)
            for update in updates:
                confirm(self, update)
                update.hand_over()
            if whole:
                ordinary = (param for param, _ in self._each() if handle_of(param) is None)
                self._interrupted = BegunStep([update.gradients for update in updates], ordinary)
        return updates

    def _finish_step(self, pagers: Iterable[Pager]) -> None:
        for pager in pagers:
            pager.end_of_step(self)
            end_of_step(self, pager)
            early = early_of(pager)
            if early is not None:
                with pager.lock:
                    early.end_of_step(self)
                    self._in_backward.end_of_step()
        self._interrupted = None

    @torch.no_grad()
    def update_early(self, handles: list[ParamHandle], *, wait: bool = False) -> None:
        """Make the step of some parameters of one unit now, inside backward; with ``wait`` decide on it now, and make
        it when the pager catches up."""
        work = find_work(self, self._held, set(handles))
        self._in_backward.used(self.param_groups, work.paged)
        pagers = [handles[0].pager] if isinstance(handles[0].pager, Pager) else []
        for update in self._enter_step(work, pagers, 1.0, whole=False):
            try:
                update.run(defer=wait)
            finally:  # what a transfer leaves of it is made later, with gradients that make no second one
                for handle in update.jobs:
                    update.gradients.assign(handle, None)

    def guess_step(self, handles: Sequence[ParamHandle]) -> GuessedStep:
        """What the next :meth:`step` will be for some parameters, if nothing clips, overflows or changes until then."""
        work = find_work(self, self._held, set(handles))
        return GuessedStep({handle: job for handle, (_, job) in work.paged.items()}, self._expected_unscale())

    def surely_clips(self, squares: int) -> bool:
        """Whether the next step clips for certain, given the sum of squares of some of its gradients."""
        if self.max_grad_norm is None:
            return False
        return self.max_grad_norm / (norm_of(squares) * abs(self._expected_unscale()) + 1e-6) < 1.0

    def _expected_unscale(self) -> float:
        return self._last_unscale if self.loss_scale == 1.0 else 1.0 / float(self.loss_scale)

    def _goes_on(self) -> bool:
        """Whether this call of ``step`` repeats one that failed half-way: the gradients are still the same ones. Its
        rest has been made then."""
        begun = self._interrupted
        if begun is None:
            return False
        paged: defaultdict[Gradients, list[ParamHandle]] = defaultdict(list)
        for handle in (handle_of(param) for param, _ in self._each()):
            if handle is not None:
                paged[gradients_of(handle.pager, handle.name)].append(handle)
        if not begun.is_repeated(paged):
            self._interrupted = None
            return False
        self._finish_step(gradients.pager for gradients in begun.changes)
        return True

    def _count_step(self, work: StepWork) -> None:
        """The step counts, and the pieces hold this optimizer's state."""
        if self.rule.counts_steps:
            for param, job in (*work.paged.values(), *work.ordinary):
                state = self.state[param]
                if isinstance(state.get("step"), Tensor):
                    state["step"].fill_(job.step)  # in place, as in torch: state dicts show it
                else:
                    state["step"] = step_count(job.step)
        for handle, (_, job) in work.paged.items():
            if job.arrays:
                self._held.take(handle)

    def _grad_factor(
        self, work: StepWork, unscale: float, need_finite: bool, ranks: RankStep | None
    ) -> tuple[float, bool]:
        """Unscale times clip factor (as ``torch.nn.utils.clip_grad_norm_`` defines it), and whether all is finite."""
        if self.max_grad_norm is None and not need_finite:
            self.grad_norm = None
            return unscale, True
        owned = squares_of(work.paged, (param for param, _ in work.ordinary))
        total, non_finite = owned if ranks is None else ranks.sum_over_ranks(owned)
        finite = not non_finite
        norm = norm_of(total) * abs(unscale) if finite else math.nan
        self.grad_norm = norm
        if self.max_grad_norm is None or not math.isfinite(norm):
            return unscale, finite
        return unscale * min(1.0, self.max_grad_norm / (norm + 1e-6)), finite

    # -- state -----------------------------------------------------------------------------------------------------

    def state_dict(self, *, shards: bool = False) -> dict[str, Any]:
        """The state in torch's layout. It holds no memory for paged parameters.

        Args:
            shards: with several ranks only what this one owns, for the same number of ranks to load: of each paged
                parameter one run of elements, flat, in the order of the weight's memory. ``["shards"]`` says which.
                Nothing is gathered to read it. With one rank it is the whole state.

        As in torch, the tensors show later steps: ``copy.deepcopy`` makes a snapshot. The arrays of ordinary parameters
        are the optimizer's own. Arrays of paged parameters, and all that is stored in 8 bits or bf16, are values
        without bytes: each operation gets a copy in fp32, from which loading makes the same bits again, and
        ``torch.save`` and others that ask for addresses get mapped files without a name on ``nvme_path`` (else in
        ``TMPDIR``). What is written to such a value stays in the state dict; :meth:`load_state_dict` takes it over.
        To read one after another state was loaded, or another optimizer has taken over, is a ``UsageError``.
        16-bit parameters have one array more, which completes the weight to its fp32 master: ``"remainder"`` (int16,
        bf16) or ``"master"`` (fp32, fp16). With several ranks a rank that reads gathers the others' parts, also where
        it reads alone.
        """
        return pack(self, self._full_state(shards=shards), self._export_group, shards=shards)

    def _full_state(self, *, shards: bool = False) -> dict[Any, Any]:
        """``self.state`` with values of what the pieces hold."""
        return self._held.full(self, self._ordinary, shards=shards)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Replace state and settings by those of ``state_dict``, ours or that of torch's optimizer of the same kind.

        Everything is copied, piece by piece, so what ``torch.load(mmap=True)`` gives takes no memory; nothing changes
        when something does not fit. Load the weights first: a weight written later is its own fp32 master, which the
        next step logs. A ``state_dict`` without remainders leaves the masters as they are.

        Raises:
            ValueError: other parameter groups, shapes, or arrays than this optimizer's, or a setting out of range.
            UsageError: the state that a value of ``state_dict`` showed is no more, or the shards are those of another
                rank, of another number of ranks, or of a model that was cut otherwise.
            RankError: another rank does not come: with several ranks, all load the same.
        """
        for pager in self._pagers():
            gradients_of(pager)
        together = all_fail_together(self._pagers(), "loading optimizer state")
        load_into(self, state_dict, self._import_group, self._check_group, self._import_entry, together)

    def __getstate__(self) -> dict[str, Any]:
        # As torch's, so that hooks and schedulers' wrappers stay behind. Paged parameters are pickled and copied as
        # ordinary ones, and take their state along.
        return {
            "defaults": self.defaults,
            "state": self._full_state(),
            "param_groups": self.param_groups,
            "max_grad_norm": self.max_grad_norm,
            "skip_non_finite": self.skip_non_finite,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.defaults.pop("differentiable", None)  # torch adds it, and the next load would put it into the groups
        self._start()
        self.state = defaultdict(dict, self.state)
        self._held.move_into_pieces(self)
        for param, _ in self._each():
            if handle_of(param) is None and "remainder" in self.state.get(param, {}):
                self._ordinary.was_loaded(param)


# Dynamo cannot follow these. It cuts a compiled training step at each of them.
leave_to_python(HostOptimizer.__init__, "an optimizer of paged weights runs as Python")
leave_to_python(HostOptimizer.add_param_group, "an optimizer of paged weights runs as Python")
leave_to_python(HostOptimizer.zero_grad, "an optimizer of paged weights runs as Python")
leave_to_python(HostOptimizer.apply_step, "an optimizer of paged weights runs as Python")
