"""``ds_nvme_bench``: what does this disk give, and which settings reach it?"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from deepoffload.cli.nvme.arguments import Options, parse_options
from deepoffload.cli.nvme.choice import (
    Choice,
    bandwidth_of,
    best_per_backend,
    choose,
    duplex_text,
    make_bandwidth,
)
from deepoffload.cli.nvme.compare import Comparison, compare_with_fio
from deepoffload.cli.nvme.files import room_by_path
from deepoffload.cli.nvme.fio import find_fio
from deepoffload.cli.nvme.job import Effort
from deepoffload.cli.nvme.machine import describe_machine
from deepoffload.cli.nvme.plan import Plan, make_plan
from deepoffload.cli.nvme.plot import check_plot, plot
from deepoffload.cli.nvme.progress import JobProgress
from deepoffload.cli.nvme.report import check_output, print_table, result_json, table_rows, write_json
from deepoffload.cli.nvme.sweep import Bench, Findings
from deepoffload.cli.nvme.types import DataMismatch, Pattern, Setting
from deepoffload.config.units import format_bytes
from deepoffload.errors import DeepOffloadError, IoFailure, IoTimeout, UnsupportedError
from deepoffload.io.engine import BACKENDS, BackendReport, IoEngine, choose_backend, probe_backend
from deepoffload.io.probe import Bandwidth, probe_path, store_bandwidth
from deepoffload.io.swap_files import check_paths, reclaim_stale
from deepoffload.machine import in_memory

EXIT_OK, EXIT_FAULT, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130
COMPARE_SHARE, ALONE_SHARE = 0.4, 0.1
TABLE_ROWS = 20


@dataclass
class Outcome:
    """Everything that was found out, as far as it came."""

    findings: Findings
    choice: Choice | None = None
    bandwidths: list[Bandwidth] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    stored: bool = False
    interrupted: bool = False


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line ``argv`` (default: the process's).

    Returns:
        0; 1 when the disk or the machine fails or data is wrong; 2 for a mistake in the command; 130 on Ctrl-C.
    """
    try:
        return _run(parse_options(argv))
    except SystemExit as end:  # --help
        return int(end.code or 0)
    except KeyboardInterrupt:
        print("ds_nvme_bench: interrupted; the test files are gone", file=sys.stderr)
        return EXIT_INTERRUPTED
    except (DataMismatch, IoFailure, IoTimeout, UnsupportedError) as error:
        print(f"ds_nvme_bench: {error}", file=sys.stderr)
        return EXIT_FAULT
    except DeepOffloadError as error:
        print(f"ds_nvme_bench: {error}", file=sys.stderr)
        return EXIT_USAGE
    except BrokenPipeError:
        # The reader of our output has gone (`| head`); the interpreter would complain again when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAULT


def _run(options: Options) -> int:
    directories = check_paths(options.paths, key="--path")
    if options.json_file not in (None, "-"):
        check_output(str(options.json_file), "--json")
    if options.plot_file is not None:
        check_plot(options.plot_file)
        check_output(options.plot_file, "--plot")
    if "fio" in options.compare:
        find_fio()
    end_s = time.monotonic() + options.time_limit_s
    machine = describe_machine(directories)
    backends, reports = _backends(options)
    plan = _plan(options, directories, backends)
    # The results go to stdout, everything else to stderr when stdout is to hold JSON only.
    quiet = options.json_file == "-"
    if not quiet:
        _print_start(machine, plan, options, reports)
    with (
        JobProgress(options.time_limit_s) as progress,
        Bench(plan, directories, progress.update, guests=bool(options.compare)) as bench,
    ):
        outcome = _measure(bench, options, end_s)
    report = _report(outcome, machine, plan, options, reports)
    if not quiet:
        _print_outcome(outcome, options, directories)
    if options.json_file is not None:
        write_json(options.json_file, report)
    if options.plot_file is not None and outcome.findings.samples:
        plot(outcome.findings.results(), f"{machine['processor']}, {', '.join(directories)}", options.plot_file)
    if outcome.interrupted:
        print("ds_nvme_bench: interrupted; the test files are gone", file=sys.stderr)
    return EXIT_INTERRUPTED if outcome.interrupted else EXIT_OK


def _backends(options: Options) -> tuple[list[str], list[BackendReport]]:
    """Those to measure, and what the machine says of each.

    Raises:
        UnsupportedError: one that was asked for by name cannot be started.
    """
    reports = [probe_backend(name) for name in options.backends or BACKENDS]
    if options.backends is not None:
        for name in options.backends:
            choose_backend(name)
    return [report.name for report in reports if report.available], reports


def _plan(options: Options, directories: list[str], backends: Sequence[str]) -> Plan:
    direct = []
    with_engine = IoEngine(backend="pool", queue_depth=1)
    try:
        for directory in directories:
            reclaim_stale(directory)
            direct.append(probe_path(directory, with_engine).direct)
    finally:
        with_engine.close()
    room = min(room_by_path(directories).values()) // (2 if options.compare else 1)
    return make_plan(options, backends, can_direct=all(direct), room_bytes=room)


def _measure(bench: Bench, options: Options, end_s: float) -> Outcome:
    """The sweep and what follows from it. Ctrl-C ends it early, with what is known by then."""
    outcome = Outcome(bench.findings)
    several = len(bench.directories) > 1
    left_s = end_s - time.monotonic()
    share = 1 - COMPARE_SHARE * bool(options.compare) - ALONE_SHARE * several
    try:
        bench.sweep(options.patterns, options.repeats, options.warmup, time.monotonic() + share * left_s)
        outcome.choice = choose(bench.findings, options.patterns)
        if outcome.choice is not None and set(options.patterns) == set(Pattern):
            outcome.bandwidths = _bandwidths(bench, outcome.choice.setting, several, ALONE_SHARE * left_s)
            kept = [store_bandwidth(measured) for measured in outcome.bandwidths] if options.store else []
            outcome.stored = bool(kept) and None not in kept
        if options.compare and outcome.choice is not None:
            outcome.comparisons = compare_with_fio(
                bench, outcome.choice.setting, options.patterns, end_s, options.warmup
            )
    except KeyboardInterrupt:
        bench.stop.set()
        outcome.interrupted = True
        outcome.choice = outcome.choice or choose(bench.findings, options.patterns)
    return outcome


def _bandwidths(bench: Bench, best: Setting, several: bool, time_s: float) -> list[Bandwidth]:
    """What deepoffload is to count on, the chosen setting first: per backend on a single path, per path on several."""
    if not several:
        settings = [best, *(setting for setting in best_per_backend(bench.findings) if setting.backend != best.backend)]
        return [bandwidth_of(bench.findings, setting, bench.directories[0]) for setting in settings]
    each_s = max(0.1, time_s / (len(bench.directories) * len(Pattern)))
    found = []
    for index, directory in enumerate(bench.directories):
        rates = {}
        for pattern in Pattern:
            bench.progress(f"{directory} alone: {pattern.value}")
            rates[pattern] = bench.measure(best, pattern, Effort(0.2 * each_s, 0.8 * each_s), [index]).bytes_per_s
        found.append(make_bandwidth(directory, best, rates))
    return found


def _print_start(machine: dict[str, Any], plan: Plan, options: Options, reports: Sequence[BackendReport]) -> None:
    print(f"{machine['processor']}, {machine['cores']} cores, {machine['kernel']}")
    for path in machine["paths"]:
        model = " ".join(str(part) for part in (path.get("device"), path.get("model")) if part)
        print(f"{path['path']}: {path['file_system']}{f' on {model}' if model else ''}", end="")
        print(f", {format_bytes(path['free_bytes'])} free")
        if in_memory(path["path"]):
            print(f"{path['path']} is memory ({path['file_system']}): no disk is measured here", file=sys.stderr)
    for report in reports:
        print(f"{report.name}: {report.reason if report.available else f'not here: {report.reason}'}")
    print(
        f"{len(plan.settings)} settings, {plan.files_max} file(s) of {format_bytes(plan.file_bytes)} per path, "
        f"about {options.time_limit_s:.0f} s at most"
    )
    for note in options.notes:
        print(f"note: {note}", file=sys.stderr)


def _print_outcome(outcome: Outcome, options: Options, directories: Sequence[str]) -> None:
    findings = outcome.findings
    for note in findings.notes:
        print(f"note: {note}", file=sys.stderr)
    if not findings.samples:
        return
    print()
    head, rows = table_rows(findings.results(), options.patterns)
    shown = len(rows) if options.verbose else TABLE_ROWS
    print_table(head, rows[:shown])
    if len(rows) > shown:
        print(f"... and {len(rows) - shown} slower ones (--verbose shows them, --json has them)")
    print("MB/s: median, ± half the spread; CPU: seconds per GB moved, without checking; n: measurements")
    print(f"\nevery page was checked, {format_bytes(findings.compared_bytes)} compared byte for byte: all right")
    if outcome.choice is None:
        return
    for measured in outcome.bandwidths:
        if len(directories) > 1 or measured is outcome.bandwidths[0]:
            print(f"{measured.path}: {duplex_text(measured)}")
    if outcome.stored:
        print("the bandwidths are kept: deepoffload uses them for 30 days")
    elif outcome.bandwidths and options.store:
        print("note: the bandwidths could not be kept: the cache directory cannot be written", file=sys.stderr)
    for comparison in outcome.comparisons:
        print(comparison)
    print(f"best: {outcome.choice.setting}: {outcome.choice.why}; in the configuration:")
    print(json.dumps(outcome.choice.aio, indent=2))


def _report(
    outcome: Outcome, machine: dict[str, Any], plan: Plan, options: Options, reports: Sequence[BackendReport]
) -> dict[str, Any]:
    choice = outcome.choice
    findings = outcome.findings
    return {
        "tool": "ds_nvme_bench",
        "machine": machine,
        "backends": [asdict(report) for report in reports],
        "size_bytes": plan.size_bytes,
        "files": plan.files_max,
        "time_limit_s": options.time_limit_s,
        "interrupted": outcome.interrupted,
        "results": [result_json(result) for result in findings.results()],
        "first_write_bytes_per_s": findings.fill_bytes_per_s,
        "compared_bytes": findings.compared_bytes,
        "huge_page_share": findings.huge_page_share,
        "best": None if choice is None else {**asdict(choice.setting), "why": choice.why},
        "bandwidths": [{**asdict(measured), "overlap": measured.overlap} for measured in outcome.bandwidths],
        "duplex": [duplex_text(measured) for measured in outcome.bandwidths],
        "stored": outcome.stored,
        "comparisons": [comparison.as_json() for comparison in outcome.comparisons],
        "notes": [*options.notes, *findings.notes],
        **({} if choice is None else choice.aio),
    }
