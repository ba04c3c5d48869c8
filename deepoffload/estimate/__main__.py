"""``python -m deepoffload.estimate``."""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from deepoffload.config import Config, OptimizerConfig, Precision, StepOverlap
from deepoffload.errors import DeepOffloadError, PlacementError, UsageError
from deepoffload.estimate import inference, measure, plots, report, zero_infinity
from deepoffload.estimate.arguments import parse
from deepoffload.estimate.machine import MachineSpec, read_machine
from deepoffload.estimate.progress import MeasuringProgress
from deepoffload.estimate.questions import Estimate, estimate, largest_model, surely_too_large
from deepoffload.estimate.recording import DryRun
from deepoffload.estimate.states import estimate_model_states_mem_needs_all_live
from deepoffload.estimate.step_time import OpTimes
from deepoffload.estimate.subject import LENGTH, Batch, Subject, from_config, from_counts

EXIT_OK, EXIT_DOES_NOT_FIT, EXIT_USAGE = 0, 1, 2
BUDGET_POINTS = 12


def main(argv: Sequence[str] | None = None, prog: str = "python -m deepoffload.estimate") -> int:
    """Returns 0 when the model fits, 1 when it does not, 2 for a mistake in the command."""
    try:
        with without_collections():
            return _run(parse(argv, prog))
    except DeepOffloadError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return EXIT_USAGE


@contextmanager
def without_collections() -> Iterator[None]:
    """Leave garbage where it is: plans are many small objects, and every collection looks at all of torch."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _run(options: argparse.Namespace) -> int:
    for name in ("plot_efficiency", "plot_budget"):
        if getattr(options, name):
            plots.check_plot(f"--{name.replace('_', '-')}", getattr(options, name))
    if options.json and (options.deepspeed or options.zero_infinity):
        which = "--deepspeed" if options.deepspeed else "--zero-infinity"
        raise UsageError(f"{which} prints tables, which --json has no place for: ask for them in two runs")
    if options.plot_efficiency:
        plots.plot_efficiency(options.plot_efficiency)
    if options.zero_infinity:
        print("\n".join(report.comparison(zero_infinity.compare_largest())), end="\n\n")
        print("\n".join(report.comparison(zero_infinity.compare_bandwidths())))
    if not (options.config or options.parameters or options.largest):
        return EXIT_OK
    batch, config = Batch(options.batch, options.seq or LENGTH), _config(options)
    if options.largest:
        found = largest_model(
            _machine(options), config, batch, checkpointing=options.checkpointing, vocabulary=options.vocabulary
        )
    else:
        subject = _subject(options, batch)
        for note in subject.notes:
            print(note, file=sys.stderr)
        machine = read_machine(options.machine) if options.machine else measure.unmeasured_machine(options.measure)
        if options.deepspeed:
            estimate_model_states_mem_needs_all_live(subject.module, machine.devices_per_node, machine.nodes)
            print()
        if options.inference:
            return _infer(options, subject, config)
        # What no rates can change is said before they are measured.
        if not options.machine and not surely_too_large(subject, machine, config):
            machine = _machine(options)
        found = _estimate(subject, machine, config, options)
    print(json.dumps(report.as_json(found), indent=1) if options.json else report.text(found))
    return EXIT_OK if found.fits else EXIT_DOES_NOT_FIT


def _infer(options: argparse.Namespace, subject: Subject, config: Config) -> int:
    context = options.context or options.seq or LENGTH
    found = inference.estimate_inference(subject, _machine(options), config, options.batch, context)
    print(json.dumps(inference.as_json(found), indent=1) if options.json else inference.text(found))
    return EXIT_OK if found.fits else EXIT_DOES_NOT_FIT


def _machine(options: argparse.Namespace) -> MachineSpec:
    if options.machine:
        return read_machine(options.machine)
    with MeasuringProgress(sys.stderr) as progress:
        return measure.measure_machine(options.measure, fresh=options.measure is not None, progress=progress)


def _config(options: argparse.Namespace) -> Config:
    return Config(
        host_budget=options.host_budget,
        nvme_budget=options.nvme_budget,
        precision=Precision(options.precision),
        step_overlap=StepOverlap(options.step_overlap),
        gradient_accumulation_steps=options.accumulation,
        optimizer=OptimizerConfig(options.optimizer, {"state_dtype": options.state_dtype, "momentum": 0.9}),
    )


def _subject(options: argparse.Namespace, batch: Batch) -> Subject:
    if options.config:
        return from_config(
            options.config,
            batch,
            checkpointing=options.checkpointing,
            arithmetic=options.arithmetic,
            may_shorten=options.seq is None,
        )
    return from_counts(
        options.parameters,
        options.layers,
        options.hidden,
        batch,
        vocabulary=options.vocabulary,
        heads=options.heads,
        checkpointing=options.checkpointing,
    )


def _estimate(subject: Subject, machine: MachineSpec, config: Config, options: argparse.Namespace) -> Estimate:
    timed: dict[int, OpTimes] = {}

    def time_ops(run: DryRun) -> OpTimes:
        """Seconds of the model's own operators on this machine; measured once for all budgets."""
        if not timed:
            with MeasuringProgress(sys.stderr) as progress:
                timed[0] = measure.measure_ops(run, progress=progress)
        return timed[0]

    known: dict[str, Any] = {"time_ops": time_ops} if options.measure else {}
    with MeasuringProgress(sys.stderr) as progress:
        found = estimate(subject, machine, config, progress=progress, **known)
    if options.plot_budget:
        _plot_budgets(found, known, options.plot_budget)
    return found


def _plot_budgets(found: Estimate, known: dict[str, Any], path: str) -> None:
    smallest, blocks = found.smallest_bytes, found.blocks
    if smallest is None or blocks is None:
        raise PlacementError(f"--plot-budget: {found.problem}")
    most = sum(block.nbytes for block in blocks.placement.blocks)
    points = []
    for number in range(BUDGET_POINTS + 1):
        budget = int(smallest + (1.02 * most - smallest) * number / BUDGET_POINTS)
        step = estimate(found.subject, found.machine, replace(found.config, host_budget=budget), **known).step
        if step is not None:
            points.append((budget, step.seconds, step.compute_s))
    plots.plot_budgets(points, path, f"{found.subject.name} on {found.machine.name}")


if __name__ == "__main__":
    sys.exit(main())
