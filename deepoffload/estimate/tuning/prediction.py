"""What the cost model says of a candidate: its host budget is the largest one that leaves room for its activations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from deepoffload.config import AccumulationOrder, Config
from deepoffload.errors import DeepOffloadError
from deepoffload.estimate import measure
from deepoffload.estimate.kernels import KnownCalls
from deepoffload.estimate.machine import MachineSpec
from deepoffload.estimate.progress import Report, silent
from deepoffload.estimate.questions import Estimate, InOrder, estimate
from deepoffload.estimate.recording import DryRun, Op
from deepoffload.estimate.step_time import OpTimes
from deepoffload.estimate.subject import Subject
from deepoffload.estimate.tuning.candidates import Candidate
from deepoffload.estimate.tuning.choice import Prediction
from deepoffload.estimate.tuning.model import ModelForm

WHOLE_SHARE, WHOLE_MORE_BYTES = 1.05, 64 << 20
"""A budget for everything: alignment, and blocks that lie twice for a moment."""
ROUNDS = 5
"""How often each operator is timed."""
_MIB, _PAGE = 1 << 20, 4096


@dataclass
class CostModel:
    """Predicts candidates for one model on one machine. Memory of the machine that is not to be used is not in
    ``machine``. What has been worked out is kept: operators' seconds, and the model on shapes.

    Attributes:
        times_operators: whether operators are timed on this machine from now on.
    """

    form: ModelForm
    machine: MachineSpec
    config: Config
    progress: Report = silent
    times_operators: bool = False
    _op_times: dict[Op, float] = field(default_factory=dict)
    _known: KnownCalls = field(default_factory=KnownCalls)
    _subjects: dict[tuple[int, bool, bool], Subject] = field(default_factory=dict)
    _estimates: dict[tuple[Candidate, bool], Estimate] = field(default_factory=dict)

    def predict(self, candidate: Candidate) -> Prediction:
        """Never raises: what cannot be used says why."""
        tokens = candidate.micro_batch * candidate.accumulation * self.form.length * self.machine.ranks
        try:
            found = self._estimate(candidate)
        except DeepOffloadError as error:
            return Prediction(candidate, tokens, problem=str(error))
        return self._prediction(candidate, tokens, found)

    def _prediction(self, candidate: Candidate, tokens: int, found: Estimate) -> Prediction:
        budget = found.config.host_budget or 0
        in_order = self._in_order(candidate, found)
        if in_order is None:
            problem = found.problem or "its activations are not known"
            return Prediction(
                candidate, tokens, budget, problem=problem, least_memory_bytes=self._least_memory(candidate, found)
            )
        step, memory = in_order.step, in_order.memory
        whole = int(found.whole_bytes * WHOLE_SHARE * self.machine.ranks_per_node) + WHOLE_MORE_BYTES
        if candidate.offload_activations is None:
            budget = min(budget, whole)
        return Prediction(
            candidate,
            tokens,
            _rounded(budget),
            step.seconds,
            found.of_node(memory.host_bytes),
            found.of_node(memory.nvme_bytes),
            found.of_node(step.times.read_bytes + step.times.written_bytes + 2 * step.activation_bytes),
            self.times_operators,
        )

    def _least_memory(self, candidate: Candidate, found: Estimate) -> int:
        """Memory of a machine on which a candidate fits. Not looked for where activations leave: more of them stay
        then, which is another candidate; nor where the budget that was said is too small."""
        least, said = found.smallest_bytes, self.config.host_budget
        if least is None or candidate.offload_activations is not None:
            return 0
        if said is not None and said < found.of_node(least):
            return 0
        return found.of_node(found.beside_bytes + least) + _MIB

    @staticmethod
    def _in_order(candidate: Candidate, found: Estimate) -> InOrder | None:
        if not found.fits or found.step is None or found.memory is None:
            return None
        usual = InOrder(found.order, found.step, found.memory)
        return next((each for each in (usual, found.other_order) if each and each.order is candidate.order), None)

    def _estimate(self, candidate: Candidate) -> Estimate:
        """With the budget that was said, or less where activations need the room. An estimate of the horizontal order
        has the other one, too, which is enough where that fits into the same memory."""
        usual = replace(candidate, order=AccumulationOrder.HORIZONTAL)
        known = self._estimates.get((usual, self.times_operators))
        if known is not None and candidate.is_vertical and known.fits and known.other_order is not None:
            if known.of_node(known.other_order.memory.host_bytes) <= self.machine.host_memory_bytes:
                return known
        found = self._estimates[candidate, self.times_operators] = self._with_room(candidate)
        return found

    def _with_room(self, candidate: Candidate) -> Estimate:
        said = self.config.host_budget or self.machine.host_memory_bytes
        found = self._with_budget(candidate, said)
        room = _rounded(found.of_node(found.room_bytes))
        if found.fits or not 0 < room < said:
            return found
        return self._with_budget(candidate, room)

    def _with_budget(self, candidate: Candidate, host_budget: int) -> Estimate:
        several = candidate.accumulation > 1
        config = replace(
            self.config,
            host_budget=host_budget,
            train_micro_batch_size_per_gpu=candidate.micro_batch,
            gradient_accumulation_steps=candidate.accumulation,
            train_batch_size=candidate.micro_batch * candidate.accumulation * self.machine.ranks,
            accumulation_order=candidate.order if several else AccumulationOrder.HORIZONTAL,
            offload_activations=candidate.offload_activations,
        )
        time_ops: Callable[[DryRun], OpTimes] | None = self._time_ops if self.times_operators else None
        return estimate(self._subject(candidate), self.machine, config, time_ops=time_ops, progress=self.progress)

    def _subject(self, candidate: Candidate) -> Subject:
        key = (candidate.micro_batch, candidate.checkpointing, candidate.tiled_loss)
        if key not in self._subjects:
            micro, checkpointing, tiled = key
            subject = self.form.subject(micro, checkpointing=checkpointing, tiled=tiled)
            self._subjects[key] = replace(subject, known=self._known)
        return self._subjects[key]

    def _time_ops(self, run: DryRun) -> OpTimes:
        """Each sort of operator is timed once for all candidates."""
        new = {op: call for op, call in run.calls.items() if op not in self._op_times}
        if new:
            self._op_times |= measure.measure_ops(replace(run, calls=new), rounds=ROUNDS, progress=self.progress)
        return self._op_times


def _rounded(nbytes: int) -> int:
    """Down to what people can read, and to whole pages."""
    unit = _MIB if nbytes >= 64 * _MIB else _PAGE
    return nbytes // unit * unit
