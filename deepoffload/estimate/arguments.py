"""The command line of ``python -m deepoffload.estimate``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn

from deepoffload.config.units import parse_bytes
from deepoffload.errors import ConfigError
from deepoffload.estimate.decoder import DEFAULT_VOCABULARY

_OF_LINKS = {"link_rate": None, "transport": "auto"}
"""What options of a link between ranks have that are not said."""
_OF_TRAINING = {
    **dict.fromkeys(("largest", "deepspeed", "zero_infinity", "checkpointing"), False),
    **dict.fromkeys(("plot_efficiency", "plot_budget", "order", "step_overlap"), None),
    **dict.fromkeys(("offload_activations", "activation_budget", "device_budget"), None),
    "accumulation": 1,
    "activations": "auto",
    "optimizer": "adamw",
    "state_dtype": "fp32",
}
"""What options have that are not said, of those that ``--inference`` has nothing to do with."""

_SAID_BY_TUNE = {
    **{name: unsaid for name, unsaid in _OF_TRAINING.items() if name != "checkpointing"},
    "batch": 1,
    "inference": False,
    "transport": "auto",
}
"""The same of ``--tune``: its file says them, or they are what it chooses."""
_OF_TUNE = {"train_batch_size": None, "memory": None, "runs": None, "model": None}
"""The same of everything but ``--tune``."""
_OF_ONE_MODEL = {"plot_budget": None, "deepspeed": False}
"""The same of ``--largest``."""
_WITHOUT_MODEL = ("zero_infinity", "plot_efficiency")
"""What is asked without a model."""
RUNS = 2
"""Candidates that ``--tune`` runs, where nobody says how many."""


class Parser(argparse.ArgumentParser):
    """Its mistakes are ConfigErrors, of a line and a hint: all options would hide what is wrong."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}\n({self.prog} --help lists the options)")


def parse(argv: Sequence[str] | None, prog: str) -> argparse.Namespace:
    """The options, checked for what contradicts.

    Raises:
        ConfigError: unknown, contradicting or missing options.
    """
    parser = Parser(
        prog=prog, description="Will this model fit on this machine, where does what go, and how long is a step?"
    )
    model = parser.add_argument_group("model")
    model.add_argument("--config", metavar="PATH", help="transformers' config.json, or its directory")
    model.add_argument("--arithmetic", action="store_true", help="use the sizes in it only, without transformers")
    model.add_argument("--parameters", type=_count, metavar="N", help="number of parameters, such as 1.3e9 or 7B")
    model.add_argument("--layers", type=_count, metavar="N")
    model.add_argument("--hidden", type=_count, metavar="N", help="hidden size")
    model.add_argument("--heads", type=_count, metavar="N")
    model.add_argument("--vocabulary", type=_count, metavar="N", help=f"not said: {DEFAULT_VOCABULARY}")
    model.add_argument("--largest", action="store_true", help="find the largest decoder that fits instead")
    tuning = parser.add_argument_group("tuning")
    text = "choose settings for the training that this configuration (ours or DeepSpeed's) says, or for this model"
    tuning.add_argument("--tune", metavar="FILE", help=text)
    text = "FILE.py:FUNCTION or package.module:FUNCTION of your program, which makes the model and its loss"
    tuning.add_argument("--model", metavar="FUNCTION", help=text)
    tuning.add_argument("--train-batch-size", type=_count, metavar="N", help="sequences per step, which stay the same")
    text = "of the host, for everything; not said: what is available"
    tuning.add_argument("--memory", type=_bytes, metavar="BYTES", help=text)
    text = f"candidates that are run; 0: predict alone; not said: {RUNS}"
    tuning.add_argument("--runs", type=_number, metavar="N", help=text)
    work = parser.add_argument_group("work")
    work.add_argument("--inference", action="store_true", help="generate with it, in place of training")
    work.add_argument("--context", type=_count, metavar="N", help="tokens in the KV cache; with --inference")
    work.add_argument("--batch", type=_count, default=1, metavar="N", help="sequences in a micro-batch")
    work.add_argument("--seq", type=_count, metavar="N", help="tokens in a sequence; not said: 1024, or what it takes")
    work.add_argument("--accumulation", type=_count, default=1, metavar="N", help="micro-batches in a step")
    orders = ("vertical", "horizontal")
    text = "of these; not said: the estimate is of a program that calls backward itself, with a line on the other order"
    work.add_argument("--order", choices=orders, help=text)
    modes = ("auto", "keep", "recompute")
    work.add_argument("--activations", choices=modes, default="auto", help="in vertical order, as in the configuration")
    work.add_argument("--checkpointing", action="store_true", help="recompute activations")
    tiers, text = ("host", "nvme"), "inputs of checkpointed blocks leave for this tier; with --checkpointing"
    work.add_argument("--offload-activations", choices=tiers, help=text)
    text = "of the host budget, for these; not said: a quarter (host) or an eighth (nvme)"
    work.add_argument("--activation-budget", type=_bytes, metavar="BYTES", help=text)
    work.add_argument("--precision", choices=("bf16", "fp32", "fp16"), help="not said: bf16")
    overlaps = ("deferred", "speculative", "in_backward", "none")
    work.add_argument("--step-overlap", choices=overlaps, help="not said: as the engine chooses")
    work.add_argument("--optimizer", choices=("adam", "adamw", "lion", "adagrad", "sgd"), default="adamw")
    work.add_argument("--state-dtype", choices=("fp32", "bf16", "8bit"), default="fp32", help="of Adam's moments")
    machine = parser.add_argument_group("machine")
    machine.add_argument("--machine", metavar="FILE", help="JSON that describes it; see docs/estimators.md")
    machine.add_argument("--measure", metavar="DIRECTORY", help="measure this one, with a disk at DIRECTORY")
    machine.add_argument(
        "--host-budget",
        type=_bytes,
        metavar="BYTES",
        help="of all ranks of a host, as in the configuration; not said: what there is",
    )
    machine.add_argument("--nvme-budget", type=_bytes, metavar="BYTES", help="of all ranks of a host; 0 for none")
    text = "of a device's memory, as in the configuration; not said: half of it at most"
    machine.add_argument("--device-budget", type=_bytes, metavar="BYTES", help=text)
    text = "processes that train it together: on CPUs, or on the devices of a machine file"
    machine.add_argument("--ranks", type=_count, metavar="N", help=text)
    machine.add_argument(
        "--link-rate", type=_bytes, metavar="BYTES", help="per second, from the other ranks to one; else measured"
    )
    machine.add_argument("--transport", choices=("auto", "group", "memory"), default="auto", help="between ranks")
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print JSON")
    output.add_argument("--deepspeed", action="store_true", help="print DeepSpeed's estimates and ours next to them")
    output.add_argument("--zero-infinity", action="store_true", help="print the published results, reproduced")
    output.add_argument("--plot-efficiency", metavar="FILE", help="draw efficiency against bandwidth")
    output.add_argument("--plot-budget", metavar="FILE", help="draw step time against host budget")
    options = parser.parse_args(argv)
    _check(options)
    _check_models(options, {name for name, value in vars(options).items() if value != parser.get_default(name)})
    options.vocabulary = options.vocabulary or DEFAULT_VOCABULARY
    options.runs = RUNS if options.runs is None else options.runs
    return options


def _check(options: argparse.Namespace) -> None:
    by_counts = [name for name in ("parameters", "layers", "hidden") if getattr(options, name) is not None]
    ways = [name for name, said in (("--config", options.config), ("--largest", options.largest)) if said]
    ways += ["--parameters, --layers and --hidden"] if by_counts else []
    ways += ["--model"] if options.model else []
    if len(ways) > 1:
        raise ConfigError(f"{' and '.join(ways)} are different ways to say the model; give one")
    if not ways and not (options.zero_infinity or options.plot_efficiency or options.tune):
        raise ConfigError("say the model: --config PATH, or --parameters N --layers N --hidden N, or --largest")
    if by_counts and len(by_counts) < 3:
        missing = [f"--{name}" for name in ("parameters", "layers", "hidden") if name not in by_counts]
        raise ConfigError(f"{' and '.join(missing)} missing: a model by numbers needs parameters, layers and hidden")
    moments = {"adam": ("fp32", "bf16", "8bit"), "adamw": ("fp32", "bf16", "8bit"), "lion": ("fp32", "bf16")}
    if options.state_dtype not in moments.get(options.optimizer, ("fp32",)):
        raise ConfigError(f"--state-dtype {options.state_dtype}: {options.optimizer} has no such state")
    if options.precision == "fp16" and options.step_overlap == "in_backward":
        raise ConfigError("--step-overlap in_backward: fp16 needs all gradients before an update; use deferred")
    if options.offload_activations and not (options.checkpointing or options.inference):
        raise ConfigError("--offload-activations moves inputs of checkpointed blocks: say --checkpointing, too")
    if options.activation_budget is not None and not options.offload_activations:
        raise ConfigError("--activation-budget is for --offload-activations: say host or nvme")
    if options.context and not options.inference:
        raise ConfigError("--context is the length of a KV cache: it goes with --inference")
    if options.context and options.seq:
        raise ConfigError("--context is what --seq says of training: give one of them")
    for name, unsaid in (_SAID_BY_TUNE if options.tune else _OF_TUNE).items():
        if getattr(options, name) != unsaid:
            why = "what --tune chooses, or what its file says: leave it out" if options.tune else "for --tune: say both"
            raise ConfigError(f"{_option(name)} is {why}")
    for name, unsaid in {**_OF_TRAINING, **_OF_LINKS}.items() if options.inference else ():
        if getattr(options, name) != unsaid:
            raise ConfigError(f"{_option(name)} is about training: leave it or --inference out")
    if options.accumulation == 1 and (options.order or options.activations != "auto"):
        name = "--order" if options.order else "--activations"
        raise ConfigError(f"{name} is that of several micro-batches: say --accumulation N, or leave it out")
    if options.ranks and (options.inference or options.deepspeed):
        raise ConfigError(
            f"--ranks is about training: leave it or --{'inference' if options.inference else 'deepspeed'} out"
        )
    if options.link_rate == 0:
        raise ConfigError("--link-rate 0: nothing would ever arrive; give bytes per second, such as 4GB")
    if options.device_budget is not None and not options.machine:
        raise ConfigError("--device-budget is that of a device: describe it with --machine, or leave this out")
    if options.machine and options.measure:
        raise ConfigError("--machine describes a machine and --measure measures this one; give one of them")
    if options.machine and options.runs:
        raise ConfigError("--runs is about this machine: with --machine nothing is run, so leave one of them out")


def _check_models(options: argparse.Namespace, said: set[str]) -> None:
    """Refuse what is about other models than those that are asked about. ``said``: options that are not as they are
    without being said.

    Raises:
        ConfigError: an option would be ignored.
    """
    by_counts = options.parameters is not None
    if not (options.config or by_counts or options.largest or options.tune):  # then a table or a picture alone is
        for name in sorted(said.difference(_WITHOUT_MODEL)):
            raise ConfigError(f"{_option(name)} is about a model: say one, too, or leave it out")
    for name, unsaid in _OF_ONE_MODEL.items() if options.largest else ():
        if getattr(options, name) != unsaid:
            raise ConfigError(f"{_option(name)} is about one model: leave it or --largest out")
    if options.arithmetic and (by_counts or options.largest or options.model):
        raise ConfigError("--arithmetic is about the sizes in a configuration file: say --config, or leave it out")
    if options.heads and not by_counts:
        raise ConfigError("--heads is that of a model by numbers: say --parameters, --layers and --hidden, too")
    if options.vocabulary and not (by_counts or options.largest):
        raise ConfigError("--vocabulary is that of a model by numbers, or of --largest: leave it out")


def check_launched(options: argparse.Namespace, ranks: int) -> None:
    """The same as of ``--ranks``, where a launcher has started so many.

    Raises:
        ConfigError: what is asked about has no ranks.
    """
    for name in ("inference", "deepspeed") if ranks > 1 else ():
        if getattr(options, name):
            raise ConfigError(f"{_option(name)}, but a launcher has started {ranks} processes: start one alone")


def check_link(options: argparse.Namespace, ranks: int) -> None:
    """Refuse what is said of a link that is not there.

    Raises:
        ConfigError: such an option would be ignored.
    """
    for name, unsaid in _OF_LINKS.items() if ranks == 1 else ():
        if getattr(options, name) != unsaid:
            raise ConfigError(f"{_option(name)} is that of several ranks: say --ranks N, or leave it out")


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _count(text: str, least: int = 1) -> int:
    """A whole number from 1, or from ``least``; 7B, 350M and 1e9 are understood."""
    factor = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}.get(text[-1:].upper(), 1)
    try:
        value = float(text[:-1] if factor > 1 else text) * factor
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not least <= value < 1e18 or value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
    return int(value)


def _number(text: str) -> int:
    return _count(text, least=0)


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
