"""What a run takes on each tier, by purpose, for one rank."""

from __future__ import annotations

import math
from dataclasses import dataclass

from deepoffload.estimate.blocks import BlockPlan
from deepoffload.estimate.offloaded import Leaving
from deepoffload.estimate.recording import DryRun
from deepoffload.machine import FREED_BYTES_MAX
from deepoffload.schedule.cost_model import BlockKind, StepOverlap
from deepoffload.schedule.guess_room import GUESSES, kept_bytes

RUNTIME_BYTES = 22 << 20
"""Scratch memory of the operators' libraries in a running step."""

HOLES_FACTOR = 0.8
"""What glibc's malloc keeps of freed activations. It makes room for the alignment of a tensor next to it, and small
objects take what is left over there. So a hole is too small for the next tensor of its size, and each tensor that comes
and goes may leave one, until the holes are large enough for what comes. Their sum is about this times the root of the
largest tensor times all that a step takes from the heap: measured with glibc 2.36 over 11 models of transformers
(Llama, GPT-2, Qwen 2), of which all but one were within 31 MiB of it. A simulation of the allocator grows likewise
(``python -m benchmarks.estimate.peaks`` measures again)."""

HOLES_CHUNKS_MORE, FREED_CHUNKS = 1, 3
"""More of these for each further micro-batch of the vertical order: where activations are kept, and of what they free
where units run again (measured with 2, 4 and 6 of them). What one frees lies between what others keep."""

WAITING_CHUNKS, WAITING_CHUNKS_RECOMPUTING = 3, 2
"""More of these where gradients of tied weights wait: they take the places of logits that were freed (measured with
vocabularies of 4,096 and 16,384, and 2 and 4 micro-batches; two runs of one program differ by up to a tenth)."""

STAYING = Leaving()
LEFT = "activations that left"
WHOLE_COPIES, ON_THEIR_WAY = "whole copies", "gradients on their way"
"""Rows of several ranks; gradients of one rank are on their way from a device."""


@dataclass(frozen=True)
class MemoryRow:
    """Bytes of one purpose. ``device``: of a device with its own memory. ``pinned``: host memory that the device
    reads or writes (page-locked where the limits allow it). ``pageable``: other host memory."""

    name: str
    device: int = 0
    pinned: int = 0
    pageable: int = 0
    nvme: int = 0
    note: str = ""


@dataclass(frozen=True)
class MemoryEstimate:
    """Peaks of one rank. On a CPU device everything near is host memory, and ``device_bytes`` is 0.

    ``build_bytes``: host memory while the model is built; the peak of the run is the larger of that and a step's.
    """

    rows: tuple[MemoryRow, ...]
    build_bytes: int

    @property
    def device_bytes(self) -> int:
        return sum(row.device for row in self.rows)

    @property
    def pinned_bytes(self) -> int:
        return sum(row.pinned for row in self.rows)

    @property
    def host_bytes(self) -> int:
        return max(self.build_bytes, sum(row.pinned + row.pageable for row in self.rows))

    @property
    def left_bytes(self) -> int:
        """Of host memory, what activations take that left where they were made."""
        return sum(row.pinned + row.pageable for row in self.rows if row.name == LEFT)

    @property
    def left_nvme_bytes(self) -> int:
        """What they take on NVMe."""
        return sum(row.nvme for row in self.rows if row.name == LEFT)

    @property
    def nvme_bytes(self) -> int:
        return sum(row.nvme for row in self.rows)


def estimate_memory(
    blocks: BlockPlan,
    run: DryRun | None,
    *,
    process_bytes: int,
    has_device: bool = False,
    together: int = 1,
    written: frozenset[int] | None = None,
    overlap: StepOverlap | None = None,
    leaving: Leaving = STAYING,
    shared_bytes: int = 0,
) -> MemoryEstimate:
    """Memory of a run with this placement.

    Args:
        written: blocks that a simulated run has written: a gradient that never has to leave memory takes no place on
            NVMe. None: not known, all of them may.
        overlap: when the updates of the simulated run are made. None: as the placement says.
        run: None where only model states are asked for.
        process_bytes: what the process takes before there is a model (Python, torch, the program's libraries).
        has_device: activations and the weights in use are in a device's own memory, and the arena is page-locked; with
            several ranks, of the arena what bytes pass through to the device and back.
        together: how many micro-batches go through the model side by side. All of them come to the last unit before the
            first backward begins.
        shared_bytes: of the gradient of each weight that the last unit and others use.
        leaving: which activations leave where they are made, next to what ``blocks`` takes of the host budget.
    """
    placement = blocks.placement
    pins_blocks = has_device and blocks.rank is None
    rows = []
    for kind in (BlockKind.WEIGHT, BlockKind.GRADIENT, BlockKind.STATE):
        near = blocks.kind_bytes(kind, placement.resident)
        away = placement.paged & written if kind is BlockKind.GRADIENT and written is not None else placement.paged
        far = sum(blocks.extent_bytes(b) for b in placement.blocks if b.kind is kind and b.id in away)
        rows.append(_near(kind.value, near, pins_blocks, nvme=far))
    if (overlap or placement.step_overlap) is StepOverlap.SPECULATIVE:
        rows.append(MemoryRow(GUESSES, nvme=kept_bytes(placement), note="what they change, kept until the step"))
    if blocks.rank is not None:
        share = blocks.rank
        note = f"of units, gathered from all ranks{', on their way to the device' if has_device else ''}"
        rows.append(_near(WHOLE_COPIES, share.taken_bytes, has_device, note=note))
        slots = share.slots_bytes if has_device else 0
        note = "to the ranks that own them"
        rows.append(MemoryRow(ON_THEIR_WAY, pinned=slots, pageable=share.way_bytes - slots, note=note))
    elif blocks.ring_bytes:
        rows.append(MemoryRow(ON_THEIR_WAY, pinned=blocks.ring_bytes, note="from the device"))
    total_bytes = sum(block.nbytes for block in placement.blocks)
    arena_bytes = min(placement.capacity_bytes, total_bytes)
    dynamic = arena_bytes - placement.resident_bytes
    window = placement.window
    slots = min(window.ring_bytes, dynamic)
    rows.append(_near("slots for state", slots, pins_blocks, note=f"{window.ring_pieces} pieces" if slots else ""))
    rows.append(_near("prefetch window", dynamic - slots, pins_blocks, note="weights and gradients in use and ahead"))
    if run is not None:
        rows += _activations(run, has_device, together, leaving, shared_bytes)
        if has_device:
            taken, state = blocks.device_bytes, ", and optimizer state with a device_budget"
            note = f"in one piece: weights{state if blocks.rank is None else ', whole'}"
            rows.append(MemoryRow("units on the device", device=taken, note=note))
    rows.append(MemoryRow("process", pageable=process_bytes, note="Python, torch and other libraries"))
    arena = placement.capacity_bytes + blocks.ring_bytes if blocks.rank is None else blocks.rank.arena_bytes
    built = min(arena, _built_bytes(blocks) + blocks.ring_bytes)
    return MemoryEstimate(tuple(rows), process_bytes + built + blocks.largest_bytes)


def _built_bytes(blocks: BlockPlan) -> int:
    """Of the arena, while parameters move one by one into their units. The state takes part where it gets what
    rounding the weights leaves over."""
    placement = blocks.placement
    sizes = {kind: sum(b.nbytes for b in placement.blocks if b.kind is kind) for kind in BlockKind}
    made = sizes[BlockKind.WEIGHT] + (
        sizes[BlockKind.STATE] if 4 * sizes[BlockKind.WEIGHT] < 3 * blocks.registered_bytes else 0
    )
    largest = max((b.nbytes for b in placement.blocks if b.kind is BlockKind.WEIGHT), default=0)
    return max(blocks.registered_bytes, made) + largest


def _near(name: str, nbytes: int, pinned: bool, nvme: int = 0, note: str = "") -> MemoryRow:
    return MemoryRow(name, pinned=nbytes if pinned else 0, pageable=0 if pinned else nbytes, nvme=nvme, note=note)


def _activations(run: DryRun, has_device: bool, together: int, leaving: Leaving, shared_bytes: int) -> list[MemoryRow]:
    def row(name: str, nbytes: int, note: str) -> MemoryRow:
        return MemoryRow(name, device=nbytes if has_device else 0, pageable=0 if has_device else nbytes, note=note)

    saved = run.saved_bytes - run.head_bytes
    of_all = f" of {together} micro-batches" if together > 1 else ""
    kept = f"kept for backward{of_all}" + (", the rest is recomputed" if run.recomputes else "")
    places = leaving.places(together * saved, recomputes=run.recomputes)
    rows = [
        row("activations", places.stay, kept),
        row("logits and loss", run.head_bytes, "what the head and the loss keep"),
        row("work in progress", run.peak_bytes - run.saved_bytes, "at the peak, gradients before they land among it"),
    ]
    if places.part:
        once = ", written and read once per step" if places.nvme else ""
        note = f"in their part of the host budget{' and on NVMe' if places.nvme else ''}{once}"
        rows.append(_near(LEFT, places.part, has_device, nvme=places.nvme, note=note))
    if together > 1 and shared_bytes:
        rows.append(row("gradients that wait", together * shared_bytes, "of weights that several units use"))
    if together > 1 and run.recomputes and not has_device:
        freed = min((together - 1) * FREED_CHUNKS * run.largest_chunk_bytes, FREED_BYTES_MAX)
        rows.append(row("freed by micro-batches", freed, "what malloc holds until a micro-batch gives it back"))
    if not has_device:
        chunks = 0 if run.recomputes else HOLES_CHUNKS_MORE * (together - 1)
        if together > 1 and shared_bytes:
            chunks += WAITING_CHUNKS_RECOMPUTING if run.recomputes else WAITING_CHUNKS
        holes = RUNTIME_BYTES + chunks * run.largest_chunk_bytes
        holes += int(HOLES_FACTOR * math.sqrt(run.largest_chunk_bytes * run.heap_bytes))
        rows.append(MemoryRow("held by malloc", pageable=holes, note="freed activations that are not given back"))
    return rows
