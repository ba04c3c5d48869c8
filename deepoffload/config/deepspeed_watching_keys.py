"""DeepSpeed's keys for watching a run, and for schedules of layers and data."""

from __future__ import annotations

from deepoffload.config.keys import (
    Key,
    ValueKind,
    boolean,
    choice_of,
    honoured,
    inapplicable,
    integer,
    list_of,
    mapping,
    number,
    text,
)

_OFF = (boolean(), False)
_TEXT_OR_NOTHING = (text(), None)


def _group(prefix: str, what: dict[str, str], **keys: tuple[ValueKind, object]) -> tuple[Key, ...]:
    return tuple(honoured(f"{prefix}.{name}", kind, what[name], default) for name, (kind, default) in keys.items())


def _files(prefix: str, enabled: str) -> tuple[Key, ...]:
    what = {
        "enabled": enabled,
        "output_path": "The directory in which the folder of the job lies; empty: the working directory.",
        "job_name": "The name of that folder.",
    }
    return _group(prefix, what, enabled=_OFF, output_path=(text(), ""), job_name=(text(), "DeepSpeedJobName"))


MONITOR_KEYS = (
    *_files("tensorboard", "Write the run's numbers for TensorBoard (docs/watching.md); needs the package."),
    *_files("csv_monitor", "Write the run's numbers as CSV, one file for each (docs/watching.md)."),
    *_group(
        "wandb",
        {
            "enabled": "Send the run's numbers to Weights & Biases (docs/watching.md); needs the package.",
            "group": "The run's group.",
            "team": "Whose project it is.",
            "project": "The project.",
        },
        enabled=_OFF,
        group=_TEXT_OR_NOTHING,
        team=_TEXT_OR_NOTHING,
        project=(text(), "deepspeed"),
    ),
    *_group(
        "comet",
        {
            "enabled": "Send the run's numbers to Comet (docs/watching.md); needs the package comet_ml.",
            "samples_log_interval": "Samples from one value of an event to the next.",
            **dict.fromkeys(
                ("project", "workspace", "api_key", "experiment_key", "online", "mode"),
                "As for `comet_ml.start`.",
            ),
            "experiment_name": "What the experiment is called.",
        },
        enabled=_OFF,
        samples_log_interval=(integer(1), 100),
        project=_TEXT_OR_NOTHING,
        workspace=_TEXT_OR_NOTHING,
        api_key=_TEXT_OR_NOTHING,
        experiment_name=_TEXT_OR_NOTHING,
        experiment_key=_TEXT_OR_NOTHING,
        online=(boolean(), None),
        mode=_TEXT_OR_NOTHING,
    ),
)

PROFILER_KEYS = _group(
    "flops_profiler",
    {
        "enabled": "Count the operations of one step by modules, with times, waits and bytes (docs/watching.md).",
        "recompute_fwd_factor": "How often a backward runs the forward again, where the backward was not counted.",
        "profile_step": "Updates made before that step.",
        "module_depth": "Down to which depth modules are summed up by class; -1: to the innermost.",
        "top_modules": "Classes shown for each depth.",
        "detailed": "Show every module.",
        "output_file": "Where the table goes; not said: to standard output.",
    },
    enabled=_OFF,
    recompute_fwd_factor=(number(0), 0.0),
    profile_step=(integer(), 1),
    module_depth=(integer(-1), -1),
    top_modules=(integer(), 1),
    detailed=(boolean(), True),
    output_file=_TEXT_OR_NOTHING,
)

_SCHEDULE = "curriculum_learning.schedule_config"


def _schedule(name: str, kind: ValueKind, what: str) -> Key:
    return honoured(f"{_SCHEDULE}.{name}", kind, what, field=f"curriculum_learning.{name}")


SCHEDULE_KEYS = (
    *_group(
        "progressive_layer_drop",
        {
            "enabled": "The model's forward gets `progressive_layer_drop=True` and `pld_theta` (docs/watching.md).",
            "theta": "Where `pld_theta` ends.",
            "gamma": "How fast it falls.",
        },
        enabled=_OFF,
        theta=(number(0, 1), 1.0),
        gamma=(number(0), 0.001),
    ),
    *_group(
        "curriculum_learning",
        {
            "enabled": "Cut the sequences that the engine is given, to a length that grows (docs/watching.md).",
            "curriculum_type": "Only lengths have a schedule.",
            "min_difficulty": "Tokens at the beginning.",
            "max_difficulty": "Tokens at the end.",
            "schedule_type": "How the length grows.",
        },
        enabled=_OFF,
        curriculum_type=(choice_of("seqlen"), "seqlen"),
        min_difficulty=(integer(1), None),
        max_difficulty=(integer(1), None),
        schedule_type=(choice_of("fixed_linear", "fixed_root", "fixed_discrete"), None),
    ),
    _schedule("total_curriculum_step", integer(1), "`fixed_linear`, `fixed_root`: updates until the end."),
    _schedule("difficulty_step", integer(1), "`fixed_linear`, `fixed_root`: what every length is a multiple of."),
    _schedule("root_degree", number(0), "`fixed_root`: 2 is the square root."),
    _schedule("difficulty", list_of(integer(1)), "`fixed_discrete`: the lengths."),
    _schedule("max_step", list_of(integer(1)), "`fixed_discrete`: the last update of each length but the last one."),
    inapplicable("curriculum_learning.params", mapping(), "schedule_config has what a schedule needs", {}),
)
