"""What ``ds_nvme_bench`` prints and writes."""

from __future__ import annotations

import importlib.util
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from deepoffload.cli.nvme.types import Pattern, Result, Sample, Setting
from deepoffload.config.units import format_bytes
from deepoffload.errors import ConfigError

TABLE_COLUMNS = 120
COLUMNS = ("backend", "block", "depth", "kind", "files")


def table_rows(results: Sequence[Result], patterns: Sequence[Pattern]) -> tuple[list[str], list[list[str]]]:
    """Head and rows, the fastest first: MB/s with the spread in per cent, CPU seconds per GB, number of samples."""
    by_setting: dict[Setting, dict[Pattern, Result]] = {}
    for result in results:
        by_setting.setdefault(result.setting, {})[result.pattern] = result
    head = [*COLUMNS, *(f"{pattern.value} MB/s" for pattern in patterns), "CPU s/GB", "n"]
    rows = []
    for setting, found in sorted(by_setting.items(), key=lambda item: -_mean_rate(item[1])):
        cells = [
            setting.backend,
            format_bytes(setting.block_bytes),
            str(setting.queue_depth),
            "direct" if setting.direct else "buffered",
            str(setting.files),
        ]
        cells += [_rate_cell(found.get(pattern)) for pattern in patterns]
        cells.append(
            "/".join(f"{found[pattern].cpu_s_per_gb:.3f}" if pattern in found else "-" for pattern in patterns)
        )
        rows.append([*cells, str(max(len(result.samples) for result in found.values()))])
    return head, rows


def print_table(head: list[str], rows: list[list[str]]) -> None:
    """With rich where it is installed, else plain."""
    if importlib.util.find_spec("rich") is not None:
        from rich.console import Console
        from rich.table import Table

        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in head:
            table.add_column(name, justify="left" if name in ("backend", "kind") else "right", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        # A narrow terminal wraps the lines; rich would cut names and figures short instead.
        Console(width=max(Console().width, TABLE_COLUMNS)).print(table)
        return
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    for row in [head, *rows]:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


def sample_json(sample: Sample) -> dict[str, Any]:
    """The sample and its rate."""
    return {**asdict(sample), "bytes_per_s": sample.bytes_per_s}


def result_json(result: Result) -> dict[str, Any]:
    """Setting, pattern, median, spread, and every sample."""
    return {
        **asdict(result.setting),
        "pattern": result.pattern.value,
        "bytes_per_s": result.bytes_per_s,
        "spread": result.spread,
        "cpu_s_per_gb": result.cpu_s_per_gb,
        "samples": [sample_json(sample) for sample in result.samples],
    }


def check_output(path: str, flag: str) -> None:
    """Before anything is measured.

    Raises:
        ConfigError: a file cannot be written there.
    """
    directory = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path):
        raise ConfigError(f"{flag}: {path} is a directory; name a file")
    if not os.path.isdir(directory) or not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigError(f"{flag}: no file can be written in {directory}; name a directory that exists and is yours")


def write_json(path: str, report: dict[str, Any]) -> None:
    """Whole or not at all; ``-`` prints it."""
    text = json.dumps(report, indent=1)
    if path == "-":
        print(text)
        return
    directory = os.path.dirname(os.path.abspath(path))
    with tempfile.NamedTemporaryFile("w", dir=directory, suffix=".tmp", delete=False, encoding="utf-8") as file:
        file.write(text + "\n")
    os.replace(file.name, path)


def _rate_cell(result: Result | None) -> str:
    if result is None:
        return "-"
    rate = f"{result.bytes_per_s / 1e6:.0f}"
    return rate if len(result.samples) == 1 else f"{rate} ±{result.spread * 50:.0f}%"


def _mean_rate(found: dict[Pattern, Result]) -> float:
    return sum(result.bytes_per_s for result in found.values()) / len(found)
