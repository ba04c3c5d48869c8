"""The placement as text: aligned columns, human units, no dependencies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_COLUMNS = ("", "host", "NVMe", "blocks", "read/step", "written/step", "why")
_INFERENCE_COLUMNS = ("", "host", "NVMe", "blocks", "read/forward", "written", "why")


@dataclass(frozen=True)
class Row:
    """One line: what is meant, its bytes on each tier, resident of all blocks, bytes moved per step, and the reason.
    ``source_bytes``: what is read where a checkpoint has it."""

    name: str
    host_bytes: int = 0
    nvme_bytes: int = 0
    source_bytes: int = 0
    resident_blocks: int = 0
    num_blocks: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    reason: str = ""


@dataclass(frozen=True)
class Totals:
    """What stands below the rows."""

    capacity_bytes: int
    nvme_capacity_bytes: int | None
    minimum_bytes: int
    disk_seconds: float
    num_parameters: int | None
    host_ranks: int = 1
    """Ranks of the host, which have the same rows."""
    training: bool = True
    """Rows are of a training step; else of a forward pass."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """What else is said of training, by what it is about."""


def human_bytes(nbytes: int) -> str:
    """``nbytes`` in the largest binary unit that leaves at least 1 before the point: ``"1.5 GiB"``, ``"512 B"``."""
    value = float(nbytes)
    for unit in _UNITS:
        if abs(value) < 1024 or unit == _UNITS[-1]:
            break
        value /= 1024
    return f"{nbytes} B" if unit == "B" else f"{value:.1f} {unit}"


def render(rows: tuple[Row, ...], totals: Totals) -> str:
    """The rows, their sum, and lines on budgets and on what a step is expected to move."""
    total = Row(
        "total",
        host_bytes=sum(row.host_bytes for row in rows),
        nvme_bytes=sum(row.nvme_bytes for row in rows),
        source_bytes=sum(row.source_bytes for row in rows),
        resident_blocks=sum(row.resident_blocks for row in rows),
        num_blocks=sum(row.num_blocks for row in rows),
        read_bytes=sum(row.read_bytes for row in rows),
        written_bytes=sum(row.written_bytes for row in rows),
    )
    columns: tuple[str, ...] = _COLUMNS if totals.training else _INFERENCE_COLUMNS
    if totals.host_ranks > 1:
        each = f"of {totals.host_ranks} ranks"
        columns = ("", "memory, one rank", each, "NVMe, one rank", each, *columns[3:])
    cells = [columns, *(_cells(row, totals.host_ranks) for row in (*rows, total))]
    if total.source_bytes:
        sources = ["checkpoint", *(_size(row.source_bytes) for row in (*rows, total))]
        cells = [(*line[:3], source, *line[3:]) for line, source in zip(cells, sources, strict=True)]
    lines = _align(cells)
    notes = [f"{name}: {text}" for name, text in totals.notes.items() if totals.training and text]
    return "\n".join([*lines, _budgets(totals), _expectation(total, totals), *notes])


def _cells(row: Row, host_ranks: int) -> tuple[str, ...]:
    blocks = f"{row.resident_blocks}/{row.num_blocks}" if row.num_blocks else "-"
    sizes = (row.host_bytes, row.nvme_bytes, row.read_bytes, row.written_bytes)
    host, nvme, read, written = map(_size, sizes)
    if host_ranks == 1:
        return row.name, host, nvme, blocks, read, written, row.reason
    all_host, all_nvme = (_size(size * host_ranks) for size in sizes[:2])
    return row.name, host, all_host, nvme, all_nvme, blocks, read, written, row.reason


def _size(nbytes: int) -> str:
    return human_bytes(nbytes) if nbytes else "-"


def _align(cells: list[tuple[str, ...]]) -> list[str]:
    """Numbers to the right, the first and the last column to the left."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    last = len(widths) - 1
    lines = []
    for line in cells:
        parts = [
            text.ljust(width) if column in (0, last) else text.rjust(width)
            for column, (text, width) in enumerate(zip(line, widths, strict=True))
        ]
        lines.append("  ".join(parts).rstrip())
    return lines


def _budgets(totals: Totals) -> str:
    nvme = "none" if totals.nvme_capacity_bytes is None else human_bytes(totals.nvme_capacity_bytes)
    memory, least = human_bytes(totals.capacity_bytes), human_bytes(totals.minimum_bytes)
    several = totals.host_ranks > 1
    each = f"budget of each of the {totals.host_ranks} ranks" if several else "budget"
    shards = " for its shards" if several else ""
    return f"{each}: {memory} of memory{shards} ({least} needed at once), NVMe {nvme}"


def _expectation(total: Row, totals: Totals) -> str:
    moved = total.read_bytes + total.written_bytes
    what = "step" if totals.training else "forward pass"
    if not moved:
        return f"expected per {what}: nothing moves"
    if not totals.training:
        return (
            f"expected per forward pass: {human_bytes(moved)} read, {totals.disk_seconds:.2f} s of disk time, which is "
            "the least time per token of a batch of any size"
        )
    text = f"expected per step: {human_bytes(moved)} moved, {totals.disk_seconds:.2f} s of disk time"
    if totals.num_parameters:
        text += f", {moved / totals.num_parameters:.1f} bytes per parameter"
    return text
