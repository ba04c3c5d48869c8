"""An estimate for people, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from deepoffload.config.units import format_bytes
from deepoffload.estimate.advice import advice
from deepoffload.estimate.machine import MachineSpec
from deepoffload.estimate.questions import Estimate, InOrder
from deepoffload.estimate.zero_infinity import PublishedValue

_SECONDS_PER_DAY = 86400.0


def text(estimate: Estimate) -> str:
    """The whole answer as lines of text."""
    subject, machine = estimate.subject, estimate.machine
    lines = [
        (
            f"{subject.name}: {subject.num_parameters:,} parameters ({subject.source}); "
            f"{subject.batch.size} x {subject.batch.length} tokens, precision {estimate.config.precision.value}"
        ),
        (
            f"on {machine.name}: {_size_of(machine)}, host {format_bytes(machine.host_memory_bytes)}, "
            f"NVMe {format_bytes(machine.nvme_bytes)}"
        ),
        "",
        (
            f"It {'fits' if estimate.fits else 'does not fit'}. Per rank: weights, gradients and optimizer state "
            f"{format_bytes(estimate.whole_bytes)}; NVMe budget {format_bytes(estimate.nvme_bytes or 0)}"
        ),
        _host_budget(estimate),
    ]
    lines += ["", *_memory(estimate)] if estimate.memory is not None else []
    if estimate.blocks is not None and estimate.blocks.rank is not None:
        lines += ["", *estimate.blocks.table().splitlines()]
    lines += ["", *_step(estimate)] if estimate.step is not None and estimate.fits else []
    return "\n".join([*lines, "", advice(estimate)])


def _size_of(machine: MachineSpec) -> str:
    """Hosts, and what each has."""
    text = f"{machine.nodes} x {machine.devices_per_node} "
    if not machine.has_device:
        return text + ("ranks" if machine.ranks > 1 else "devices")
    ranks = f", {machine.ranks_per_device} ranks on each" if machine.ranks_per_device > 1 else ""
    return f"{text}devices of {format_bytes(machine.device_memory_bytes)}{ranks}"


def _host_budget(estimate: Estimate) -> str:
    """Each figure that there is of it, and what it is."""
    capacity, config, ranks = estimate.capacity_bytes, estimate.config, estimate.machine.ranks_per_node
    said = "as said" if config.host_budget is not None else "not said: what the engine takes by itself"
    whole = estimate.of_node(capacity + estimate.leaving_bytes)
    if ranks > 1:
        said = f"{format_bytes(whole)} for the {ranks} of a host, {said}"
    elif estimate.leaving_bytes:
        said = f"{format_bytes(whole)} {said}"
    if estimate.leaving_bytes:
        said += f", less {format_bytes(estimate.leaving_bytes)} for activations"
    text = f"host budget{' per rank' if ranks > 1 else ''}: {format_bytes(capacity)} ({said})"
    if estimate.blocks is not None and estimate.blocks.rank is not None:
        shards = estimate.blocks.placement.capacity_bytes
        text += (
            f", of which {format_bytes(shards)} for shards and {format_bytes(capacity - shards)} for whole copies of "
            "units and gradients on their way"
        )
    if estimate.smallest_bytes:
        text += f" (the least is {format_bytes(estimate.smallest_bytes)})"
    text += f"; activations and processes leave room for {format_bytes(estimate.room_bytes)}"
    if estimate.fits and estimate.room_bytes < capacity:
        text += ", which is less, but the model does not fill its budget"
    return text


def _memory(estimate: Estimate) -> list[str]:
    memory = estimate.memory
    if memory is None:
        return []
    head = ("per rank", "device", "pinned", "pageable", "NVMe", "")
    rows: list[tuple[str, ...]] = [head]
    for row in memory.rows:
        rows.append((row.name, *map(_size, (row.device, row.pinned, row.pageable, row.nvme)), row.note))
    pageable = sum(row.pageable for row in memory.rows)
    total = (memory.device_bytes, memory.pinned_bytes, pageable, memory.nvme_bytes)
    rows.append(("in a step", *map(_size, total), ""))
    lines = table(rows)
    lines.append(
        f"host peak per rank {format_bytes(memory.host_bytes)} (while building {format_bytes(memory.build_bytes)}); "
        f"per node: host {format_bytes(estimate.node_host_bytes)}, NVMe {format_bytes(estimate.node_nvme_bytes)}"
    )
    machine = estimate.machine
    if machine.has_device:
        taken = format_bytes(memory.device_bytes * machine.ranks_per_device)
        lines[-1] += f"; per device: {taken} of {format_bytes(machine.device_memory_bytes)}"
    return lines


def _step(estimate: Estimate) -> list[str]:
    step = estimate.step
    if step is None:
        return []
    times = step.times
    order = f" in {estimate.order.value} order" if estimate.config.gradient_accumulation_steps > 1 else ""
    lines = [
        (
            f"step{order}: {step.seconds:.3g} s = forward {times.forward_s:.3g} + backward {times.backward_s:.3g} + "
            f"update {times.update_s:.3g}, of which {times.wait_s:.3g} s wait for the disk; bound by {step.bound}; "
            f"updates {step.step_overlap.value}"
        ),
        (
            f"{step.tokens_per_s * estimate.machine.ranks:,.0f} tokens/s, efficiency {step.efficiency:.0%} "
            f"(the share of the step that computes the model), {step.flops / step.seconds / 1e12:.3g} TFLOP/s per rank"
        ),
        (
            f"disk per step: {format_bytes(times.read_bytes)} read, {format_bytes(times.written_bytes)} written, busy "
            f"{times.busy_s:.3g} s"
        ),
    ]
    if estimate.machine.ranks > 1:
        read, written = (format_bytes(estimate.of_node(nbytes)) for nbytes in (times.read_bytes, times.written_bytes))
        lines[-1] += f"; by all ranks of a node {read} read, {written} written"
    if times.link_s:
        lines.append(
            f"from other ranks per step: weights {format_bytes(step.from_others.gathered_bytes)}, gradients "
            f"{format_bytes(step.from_others.reduced_bytes)}, {times.link_s:.3g} s"
        )
    if times.to_device_bytes or times.from_device_bytes:
        ranks = estimate.machine.ranks_per_device
        there, back = (format_bytes(nbytes * ranks) for nbytes in (times.to_device_bytes, times.from_device_bytes))
        lines.append(f"over the bus of each device per step: {there} to it, {back} from it, busy {times.bus_s:.3g} s")
    if step.activation_bytes:
        lines.append(
            f"activations: {format_bytes(step.activation_bytes)} go to NVMe and come back in each step, for which it "
            f"waits {step.activation_wait_s:.3g} s more"
        )
    if times.written_bytes:
        lines.append(_endurance(estimate))
    if estimate.other_order is not None:
        lines.append(_other_order(estimate, estimate.other_order))
    return lines


def _other_order(estimate: Estimate, other: InOrder) -> str:
    """A step in the other order of accumulation, in one line."""
    step, times = other.step, other.step.times
    return (
        f"in {other.order.value} order: {step.seconds:.3g} s, of which {times.wait_s:.3g} s wait for the disk; "
        f"{format_bytes(times.read_bytes)} read, {format_bytes(times.written_bytes)} written; host peak "
        f"{format_bytes(estimate.of_node(other.memory.host_bytes))}; vertical: deepoffload.accumulate, train_batch or "
        "VerticalTrainer take all micro-batches through each unit together"
    )


def _endurance(estimate: Estimate) -> str:
    step, steps = estimate.step, estimate.steps_of_endurance
    if step is None or steps is None:
        return "endurance: say nvme_endurance_bytes (TBW) in the machine file to see how many steps the drives last"
    days = steps * step.seconds / _SECONDS_PER_DAY
    return f"endurance: the drives' rated writes last {steps:,.0f} steps, {days:,.0f} days of training"


def _size(nbytes: int) -> str:
    return format_bytes(nbytes) if nbytes else "-"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligned columns: the first and the last to the left, the others to the right."""
    last = len(rows[0]) - 1
    widths = [max(len(row[column]) for row in rows) for column in range(last + 1)]
    return [
        "  ".join(
            text.ljust(width) if column in (0, last) else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def comparison(rows: Sequence[PublishedValue]) -> list[str]:
    """Published and computed numbers side by side."""
    cells = [("", "published", "formula", "deviation", "")]
    for row in rows:
        numbers = (f"{row.published:.3g}", f"{row.ours:.3g}", f"{row.deviation:+.0%}")
        cells.append((row.what, *numbers, f"{row.unit}{'; ' if row.note else ''}{row.note}"))
    return table(cells)


def as_json(estimate: Estimate) -> dict[str, Any]:
    """Everything as plain values; bytes, seconds."""
    subject, step, memory, blocks = estimate.subject, estimate.step, estimate.memory, estimate.blocks
    found: dict[str, Any] = {
        "model": {
            "name": subject.name,
            "source": subject.source,
            "parameters": subject.num_parameters,
            "batch": asdict(subject.batch),
        },
        "notes": list(subject.notes),
        "machine": estimate.machine.to_json(),
        "precision": estimate.config.precision.value,
        "fits": estimate.fits,
        "problem": estimate.problem,
        "advice": advice(estimate),
        "budget_bytes": estimate.capacity_bytes,
        "smallest_budget_bytes": estimate.smallest_bytes,
        "largest_budget_bytes": estimate.room_bytes,
        "model_bytes": estimate.whole_bytes,
        "nvme_budget_bytes": estimate.nvme_bytes or 0,
    }
    if memory is not None:
        found["memory"] = {
            "rows": [asdict(row) for row in memory.rows],
            "device_bytes": memory.device_bytes,
            "each_device_bytes": memory.device_bytes * estimate.machine.ranks_per_device,
            "pinned_bytes": memory.pinned_bytes,
            "host_peak_bytes": memory.host_bytes,
            "build_bytes": memory.build_bytes,
            "nvme_bytes": memory.nvme_bytes,
            "node_host_bytes": estimate.node_host_bytes,
            "node_nvme_bytes": estimate.node_nvme_bytes,
        }
    if blocks is not None:
        found["placement"] = blocks.table()
    if step is not None:
        found["step"] = asdict(step.times) | {
            "seconds": step.seconds,
            "reduced_bytes": step.from_others.reduced_bytes,
            "compute_s": step.compute_s,
            "bound": step.bound,
            "step_overlap": step.step_overlap.value,
            "efficiency": step.efficiency,
            "tokens_per_s": step.tokens_per_s * estimate.machine.ranks,
            "flops": step.flops,
            "activation_bytes": step.activation_bytes,
            "activation_wait_s": step.activation_wait_s,
            "steps_of_endurance": estimate.steps_of_endurance,
            "order": estimate.order.value,
        }
    if estimate.other_order is not None:
        other = estimate.other_order
        found["other_order"] = asdict(other.step.times) | {
            "seconds": other.step.seconds,
            "order": other.order.value,
            "host_peak_bytes": other.memory.host_bytes,
        }
    return found
