"""What each use of a step costs: seconds of the program, and where a device computes, of the device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from deepoffload.estimate.blocks import BlockPlan
from deepoffload.estimate.machine import MachineSpec
from deepoffload.estimate.recording import DryRun, Op
from deepoffload.schedule.accumulation_order import SWITCH_S
from deepoffload.schedule.clock import TimedUse
from deepoffload.schedule.cost_model import UPDATE_BYTES_PER_BYTE, BlockKind, Workload, update_seconds
from deepoffload.schedule.events import Phase
from deepoffload.schedule.simulated_device import DeviceWork, TimedDevice
from deepoffload.schedule.uses import StepUse, UnitBlocks

OpTimes = Mapping[Op, float]

KEEPING_BYTES_PER_BYTE = 2
"""Of what stays in memory, a guess reads and writes once more what it changes, to keep what it was. Where a device
computes it writes to another place instead, which is no more traffic than in place."""

STAYING_SHARE = 1 / 4
"""Of ``piece_overhead_s``, for a piece that stays in memory: nothing is planned, started or waited for (measured: 44 us
where others took 200)."""

DEVICE_SHARE = 0.5
"""A device's weights take at most this part of its memory, where nobody says how much."""


class StepCosts:
    """Seconds of everything that a step computes."""

    def __init__(
        self,
        blocks: BlockPlan,
        units: Mapping[int, UnitBlocks],
        run: DryRun,
        machine: MachineSpec,
        op_times: OpTimes,
        workload: Workload,
        pieces_in_one: Mapping[int, int],
    ) -> None:
        self._units = units
        self._visits = run.visits
        backward = (number for number, visit in enumerate(run.visits) if visit.backward)
        self._backward_from = next(backward, len(run.visits))
        self._content = blocks.content_bytes
        self._state_bytes = {n: sum(self._content[block] for block in unit.state) for n, unit in units.items()}
        self._machine = machine
        self._op_times = op_times
        self._bandwidths = machine.bandwidths()
        k = workload.accumulation_steps
        self._again = (k - 1) / k  # landings that add to what is there
        self._together = workload.together
        self._switch_s = SWITCH_S if workload.together > 1 else 0.0
        self._plan_s = machine.plan_overhead_s if blocks.placement.paged else 0.0
        self._trained = blocks.trained_by_unit
        self._pieces_in_one = pieces_in_one
        self._rank = blocks.rank
        self._ring_bytes = blocks.ring_bytes
        self._staying = blocks.placement.resident
        weights_bytes = blocks.kind_bytes(BlockKind.WEIGHT, frozenset(self._content))
        self._weights_stay = machine.has_device and weights_bytes <= DEVICE_SHARE * machine.device_memory_bytes
        self._keeps_elsewhere = machine.has_device and self._rank is None

    def device(self) -> TimedDevice | None:
        """The machine's device, or this rank's share of it; None where the program computes itself."""
        if not self._machine.has_device:
            return None
        bus, rank = self._machine.bus_bytes_per_s, self._rank
        if rank is not None:
            return TimedDevice(bus, rank.slots_bytes, arriving_bytes=rank.copies_bytes, program_lands=True)
        return TimedDevice(bus, self._ring_bytes)

    def timed(self, uses: Iterable[StepUse]) -> list[TimedUse]:
        """With a device whose memory holds all weights, they come to it in the step's first use of them, since its
        update has changed them. (Those of several ranks come and go as whole copies.)"""
        found: list[TimedUse] = []
        there: set[int] = set()
        for use in uses:
            coming = [unit for unit in use.units if unit not in there] if self._rank is None else []
            found.append(self._timed(use, coming))
            if self._weights_stay and use.phase is not Phase.UPDATE:
                there.update(use.units)
        return found

    def _timed(self, use: StepUse, coming: Sequence[int]) -> TimedUse:
        seconds = self._update_s(use) if use.phase is Phase.UPDATE else self._visit_s(use)
        again = use.phase is Phase.FORWARD and min(use.visits) > self._backward_from
        timed, updates = TimedUse(use.use, use.phase, seconds, again=again), use.phase is Phase.UPDATE
        if self._machine.has_device:
            work = None if updates else self._device_work(use, coming)
            timed = replace(timed, device_work=work, in_backward=use.in_backward)
        if self._rank is None:
            return timed
        weights = tuple(self._units[unit].weights for unit in use.units)
        if updates:
            return replace(timed, changed=weights)
        return replace(timed, link_s=0.0 if self._machine.has_device else self._reduce_s(use), shown=weights)

    def _reduce_s(self, use: StepUse) -> float:
        """In which the gradients that land in a use are added up over the ranks."""
        if self._rank is None:
            return 0.0
        reduce_s = sum(self._rank.reduce_s(unit) * count / self._trained[unit] for unit, count in self._landed(use))
        return self._together * reduce_s

    def _landed(self, use: StepUse) -> list[tuple[int, int]]:
        """Units whose gradients land in a use, and how many of them, for each micro-batch."""
        return [item for number in use.visits for item in self._visits[number].landed.items()]

    def _visit_s(self, use: StepUse) -> float:
        """Of the program: where a device computes, it launches."""
        machine = self._machine
        ops = [item for number in use.visits for item in self._visits[number].ops.items()]
        seconds = sum(count * machine.op_overhead_s for _, count in ops) + self._switch_s
        if not machine.has_device:
            seconds += sum(count * self._op_s(op) for op, count in ops)
        if use.phase is Phase.FORWARD:
            seconds += machine.visit_overhead_s
        seconds = self._together * seconds + self._plan_s
        landings = self._landed(use)
        seconds += self._together * machine.landing_overhead_s * sum(count for _, count in landings)
        if self._rank is not None:  # what the program itself takes to ask for whole copies and to announce its part
            asked = len(use.units) * (use.phase is Phase.FORWARD) + self._together * len(landings)
            seconds += asked * machine.round_overhead_s
        if machine.has_device:
            return seconds
        return seconds + self._together * sum(self._landing_s(unit, count) for unit, count in landings)

    def _device_work(self, use: StepUse, coming: Sequence[int]) -> DeviceWork:
        landings = self._landed(use)
        out_bytes = sum(self._gradient_bytes(unit) * count / self._trained[unit] for unit, count in landings)
        computed_s = sum(count * self._op_s(op) for n in use.visits for op, count in self._visits[n].ops.items())
        # with several ranks they come to where the others read them, and adding them up is the link's
        landing_s = 0.0 if self._rank is not None else sum(self._landing_s(unit, count) for unit, count in landings)
        landing_s += update_seconds(round(out_bytes), self._bandwidths)  # the bus's writes
        reduce_s = self._reduce_s(use)
        return DeviceWork(
            self._machine.ranks_per_device * self._together * computed_s,
            sum(self._content[self._units[unit].weights] for unit in coming),
            round(self._together * out_bytes),
            self._together * landing_s + reduce_s,
            reduce_s,
        )

    def _gradient_bytes(self, unit: int) -> int:
        """What leaves the device of a unit's gradients."""
        if self._rank is not None:
            return self._rank.gradient_bytes[unit]
        gradients = self._units[unit].gradients
        return 0 if gradients is None else self._content[gradients]

    def _op_s(self, op: Op) -> float:
        machine = self._machine
        measured = self._op_times.get(op)
        if measured is not None:
            return measured
        return max(op.flops / machine.flops_per_s, op.nbytes / machine.device_bytes_per_s)

    def _landing_s(self, unit: int, count: int) -> float:
        """A pass over gradients: read what autograd made, write it to the block, or read, add and write. With several
        ranks they are copied for the ranks that own them, at the rate of copies, and the link's rate has the rest.

        ``count``: of how many of the unit's parameters.
        """
        gradients = self._units[unit].gradients
        if gradients is None:
            return 0.0
        part = count / self._trained[unit]
        if self._rank is not None:
            return 2 * self._rank.contribution_bytes[unit] * part / self._machine.device_bytes_per_s
        touched = self._content[gradients] * (2 + self._again) * part
        return update_seconds(round(touched), self._bandwidths)

    def _update_s(self, use: StepUse) -> float:
        """The piece and the weights are read and written, the gradients read. For a guess, what stays in memory is
        copied before."""
        (number,) = use.units
        unit = self._units[number]
        piece = unit.state[use.piece]
        share = self._content[piece] / self._state_bytes[number]
        weights = self._content[unit.weights]
        gradients = 0 if unit.gradients is None else self._content[unit.gradients]
        touched = UPDATE_BYTES_PER_BYTE * (self._content[piece] + share * weights) + share * gradients
        if use.guess and not self._keeps_elsewhere:
            kept = self._content[piece] * (piece in self._staying) + share * weights * (unit.weights in self._staying)
            touched += KEEPING_BYTES_PER_BYTE * kept
        piece_s = self._machine.piece_overhead_s * (STAYING_SHARE if piece in self._staying else 1)
        fixed = (piece_s + self._plan_s) * self._pieces_in_one.get(piece, 1)
        return update_seconds(round(touched), self._bandwidths) + fixed
