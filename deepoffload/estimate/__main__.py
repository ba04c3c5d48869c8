"""``python -m deepoffload.estimate``."""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from deepoffload.config import (
    AccumulationOrder,
    ActivationMode,
    Config,
    OptimizerConfig,
    Precision,
    RanksConfig,
    StepOverlap,
)
from deepoffload.config.units import format_bytes
from deepoffload.device import Tier
from deepoffload.errors import DeepOffloadError, PlacementError, UsageError
from deepoffload.estimate import inference, measure, on_ranks, plots, report, zero_infinity
from deepoffload.estimate.arguments import check_launched, check_link, parse
from deepoffload.estimate.machine import MachineSpec, read_machine
from deepoffload.estimate.progress import MeasuringProgress, Report, silent
from deepoffload.estimate.questions import Estimate, estimate, largest_model, surely_too_large
from deepoffload.estimate.recording import DryRun
from deepoffload.estimate.states import estimate_model_states_mem_needs_all_live
from deepoffload.estimate.step_time import OpTimes
from deepoffload.estimate.subject import LENGTH, Batch, Subject, from_config, from_counts
from deepoffload.estimate.tuning.command import tune

EXIT_OK, EXIT_DOES_NOT_FIT, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130
BUDGET_POINTS = 12


def main(argv: Sequence[str] | None = None, prog: str = "python -m deepoffload.estimate") -> int:
    """Returns 0 when the model fits, 1 when it does not, 2 for a mistake in the command."""
    said = sys.argv[1:] if argv is None else argv
    try:
        with without_collections():
            options = parse(said, prog)
            if options.ranks is None and not options.machine:
                options.ranks = on_ranks.launched_ranks()
                check_launched(options, options.ranks)
            if not options.machine:  # which may say how many
                check_link(options, options.ranks)
            return _run(options, said)
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


def _run(options: argparse.Namespace, argv: Sequence[str]) -> int:
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
    if options.tune:
        return _tune(options)
    if not (options.config or options.parameters or options.largest):
        return EXIT_OK
    batch, config = Batch(options.batch, options.context or options.seq or LENGTH), _config(options)
    together = _measuring_ranks(options)
    try:
        if options.largest:
            if _measured_by_others(options, together):
                return on_ranks.start(options.ranks, argv)
            machine = _machine(options, together)
            sizes = {"checkpointing": options.checkpointing, "vocabulary": options.vocabulary}
            found = largest_model(machine, config, batch, **sizes)
        else:
            subject = _subject(options, batch)
            machine = _unmeasured(options, together)
            # What no rates can change is said before they are measured.
            measured = not options.machine and (options.inference or not surely_too_large(subject, machine, config))
            if measured and _measured_by_others(options, together):
                return on_ranks.start(options.ranks, argv)
            for note in subject.notes if together is None or together.is_first else ():
                print(note, file=sys.stderr)
            if options.deepspeed:
                estimate_model_states_mem_needs_all_live(subject.module, machine.devices_per_node, machine.nodes)
                print()
            if options.inference:
                return _infer(options, subject, config)
            if measured:
                machine = _machine(options, together, subject)
            found = _estimate(subject, machine, config, options, together)
    finally:
        if together is not None:
            together.close()
    if together is None or together.is_first:
        print(json.dumps(report.as_json(found), indent=1) if options.json else report.text(found))
    return EXIT_OK if found.fits else EXIT_DOES_NOT_FIT


def _tune(options: argparse.Namespace) -> int:
    gc.enable()  # this goes on for a minute or two
    batch = Batch(1, options.seq or LENGTH)
    try:
        with MeasuringProgress(sys.stderr) as progress:
            result, text = tune(options, lambda said: _subject(said, batch), _machine, progress)
    except KeyboardInterrupt:
        print("stopped; nothing was chosen, and nothing was written", file=sys.stderr)
        return EXIT_INTERRUPTED
    print(text)
    return EXIT_OK if result.chosen is not None else EXIT_DOES_NOT_FIT


def _infer(options: argparse.Namespace, subject: Subject, config: Config) -> int:
    machine, context = _machine(options, subject=subject), subject.batch.length
    found = inference.estimate_inference(subject, machine, config, options.batch, context)
    print(json.dumps(inference.as_json(found), indent=1) if options.json else inference.text(found))
    return EXIT_OK if found.fits else EXIT_DOES_NOT_FIT


def _measuring_ranks(options: argparse.Namespace) -> on_ranks.MeasuringRanks | None:
    """The ranks that a launcher has started, where they are to measure."""
    launched = on_ranks.launched_ranks()
    if launched == 1 or options.machine or options.link_rate or options.inference or options.deepspeed:
        return None
    if options.ranks != launched:
        raise UsageError(f"--ranks {options.ranks}, but the launcher has started {launched}: leave --ranks out")
    return on_ranks.MeasuringRanks(options.transport)


def _measured_by_others(options: argparse.Namespace, together: on_ranks.MeasuringRanks | None) -> bool:
    """Whether several ranks are asked about, of which nobody has started any."""
    several = options.ranks is not None and options.ranks > 1
    return several and together is None and not (options.machine or options.link_rate)


def _unmeasured(options: argparse.Namespace, together: on_ranks.MeasuringRanks | None = None) -> MachineSpec:
    """The machine, with usual rates where no file says them."""
    if options.machine:
        return _with_ranks(options, read_machine(options.machine))
    spec = _with_ranks(options, measure.unmeasured_machine(options.measure))
    return spec if together is None else together.same(spec)


def _with_ranks(options: argparse.Namespace, spec: MachineSpec) -> MachineSpec:
    ranks = options.ranks or spec.ranks
    check_link(options, ranks)
    if options.device_budget is not None and not spec.has_device:
        raise UsageError(f"--device-budget: {options.machine} has no device (device_memory_bytes); leave it out")
    if ranks % spec.nodes:
        raise UsageError(f"--ranks {ranks}: the machine has {spec.nodes} nodes, which get equal numbers of ranks")
    each, most = ranks // spec.nodes, spec.host_memory_bytes // max(1, spec.process_bytes)
    if each > max(1, most):
        raise UsageError(
            f"--ranks {ranks}: {each} processes of {format_bytes(spec.process_bytes)} do not fit in a host's memory of "
            f"{format_bytes(spec.host_memory_bytes)}, even without a model; use at most {max(1, most) * spec.nodes}"
        )
    spec = _on_devices(spec, each) if spec.has_device else replace(spec, devices_per_node=each)
    rate = options.link_rate
    return spec if rate is None else replace(spec, rank_gather_bytes_per_s=rate, rank_reduce_bytes_per_s=rate)


def _on_devices(spec: MachineSpec, each: int) -> MachineSpec:
    """A machine with devices, of which a node has ``each`` ranks: one on a device, or as many as its file allows."""
    devices, most = spec.devices_per_node, spec.ranks_per_device
    if each <= devices:
        return replace(spec, devices_per_node=each, ranks_per_device=1)
    sharing = -(-each // devices)
    if sharing > most or each % devices:
        shared = "one rank computes" if most == 1 else f"{most} ranks at most compute"
        raise UsageError(
            f"--ranks: {each} on a node, which has devices_per_node = {devices}; {shared} on each device, and all have "
            "equally many. Correct devices_per_node, or say ranks_per_device where ranks are to share devices"
        )
    return replace(spec, ranks_per_device=sharing)


def _machine(
    options: argparse.Namespace, together: on_ranks.MeasuringRanks | None = None, subject: Subject | None = None
) -> MachineSpec:
    if options.machine:
        return _unmeasured(options)
    libraries = [] if subject is None else [*subject.libraries]
    if options.checkpointing or options.tune:  # which tries checkpointing
        libraries.append(measure.COMPILER)
    fresh = options.measure is not None
    with _progress(together) as progress:
        if together is not None:
            spec = replace(measure.unmeasured_machine(options.measure), process_bytes=measure.process_bytes(libraries))
            return together.machine(spec, options.measure, progress)
        found = measure.measure_machine(options.measure, libraries=libraries, progress=progress, fresh=fresh)
    found = _with_ranks(options, found)
    if found.devices_per_node > 1:  # this process has measured with all cores, of which a rank has its part
        each = found.devices_per_node
        torch.set_num_threads(max(1, torch.get_num_threads() // each))
        found = replace(found, flops_per_s=found.flops_per_s / each, device_bytes_per_s=found.device_bytes_per_s / each)
    return found


def _progress(together: on_ranks.MeasuringRanks | None) -> AbstractContextManager[Report]:
    """One rank says what is being measured."""
    return MeasuringProgress(sys.stderr) if together is None or together.is_first else nullcontext(silent)


def _config(options: argparse.Namespace) -> Config:
    return Config(
        host_budget=options.host_budget,
        nvme_budget=options.nvme_budget,
        device_budget=options.device_budget,
        precision=Precision(options.precision or "bf16"),
        step_overlap=None if options.step_overlap is None else StepOverlap(options.step_overlap),
        gradient_accumulation_steps=options.accumulation,
        accumulation_order=AccumulationOrder(options.order or "auto"),
        activations=ActivationMode(options.activations),
        offload_activations=None if options.offload_activations is None else Tier(options.offload_activations),
        activation_budget=options.activation_budget,
        optimizer=OptimizerConfig(options.optimizer, {"state_dtype": options.state_dtype, "momentum": 0.9}),
        ranks=RanksConfig(transport=options.transport),
    )


def _subject(options: argparse.Namespace, batch: Batch) -> Subject:
    length = options.context or options.seq
    if options.config:
        subject = from_config(
            options.config,
            batch,
            checkpointing=options.checkpointing,
            arithmetic=options.arithmetic,
            may_shorten=length is None,
        )
        if length is not None and subject.batch.length != length:
            option = "--context" if options.context else "--seq"
            raise UsageError(f"{option} {length}: {subject.notes[-1]}; leave it out")
        return subject
    return from_counts(
        options.parameters,
        options.layers,
        options.hidden,
        batch,
        vocabulary=options.vocabulary,
        heads=options.heads,
        checkpointing=options.checkpointing,
    )


def _estimate(
    subject: Subject,
    machine: MachineSpec,
    config: Config,
    options: argparse.Namespace,
    together: on_ranks.MeasuringRanks | None,
) -> Estimate:
    timed: dict[int, OpTimes] = {}

    def time_ops(run: DryRun) -> OpTimes:
        """Seconds of the model's own operators on this machine; measured once for all budgets."""
        if not timed:
            with _progress(together) as progress:
                by = measure.measure_ops if together is None else together.ops
                timed[0] = by(run, progress=progress)
        return timed[0]

    known: dict[str, Any] = {"time_ops": time_ops} if options.measure else {}
    with _progress(together) as progress:
        found = estimate(subject, machine, config, progress=progress, **known)
    if options.plot_budget and (together is None or together.is_first):
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
