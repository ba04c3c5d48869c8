"""DeepSpeed's keys of its autotuner: what ``python -m deepoffload.estimate --tune`` makes of them."""

from __future__ import annotations

from deepoffload.config.keys import (
    Key,
    Treatment,
    ValueKind,
    boolean,
    choice_of,
    honoured,
    inapplicable,
    integer,
    mapping,
    text,
)

METRICS = ("throughput", "latency", "flops", "forward", "step")
"""What DeepSpeed's autotuner compares. The batch of a step stays the same, so all of them have the same order here."""

_ALL_ARE_COMPARED = "the cost model compares all candidates, and the two best are run"
_NO_FILES = "an experiment is a process, which leaves no files"


def _honoured(name: str, kind: ValueKind, what: str, default: object = None) -> Key:
    return honoured(f"autotuning.{name}", kind, what, default)


def _not_needed(name: str, kind: ValueKind, why: str, default: object = None) -> Key:
    return inapplicable(f"autotuning.{name}", kind, why, default)


TUNING_KEYS = (
    Key(
        "autotuning.enabled",
        boolean(),
        Treatment.MAPPED,
        "`python -m deepoffload.estimate --tune FILE --config MODEL` chooses settings, before a model is built; a "
        "program that is given this file trains with the settings that stand in it",
        False,
        field="autotuning.enabled",
    ),
    _honoured(
        "metric",
        choice_of(*METRICS),
        "Named in the result. The batch of a step is kept, so all have one order.",
        "throughput",
    ),
    _honoured(
        "max_train_batch_size", integer(1), "The batch of a step where `train_batch_size` is not said; else its limit."
    ),
    _honoured("min_train_batch_size", integer(1), "The batch of a step must not be smaller.", 1),
    _honoured("max_train_micro_batch_size_per_gpu", integer(1), "The largest micro-batch that is looked at.", 1024),
    _honoured("min_train_micro_batch_size_per_gpu", integer(1), "The smallest one.", 1),
    _honoured("num_tuning_micro_batch_sizes", integer(1), "How many sizes are looked at; not said: at most six."),
    _honoured("start_profile_step", integer(1), "The first step of a run that is timed.", 3),
    _honoured("end_profile_step", integer(1), "The last one.", 5),
    _honoured(
        "results_dir", text(), "Where `ds_config_optimal.json` and the table are written; not said: only printed."
    ),
    _honoured("overwrite", boolean(), "Whether results that are there may be replaced.", True),
    _not_needed("model_info", mapping(), "`--config`, or `--parameters` with `--layers` and `--hidden`, says it", {}),
    _not_needed("model_info_path", text(), _NO_FILES),
    _not_needed("metric_path", text(), _NO_FILES),
    _not_needed("exps_dir", text(), _NO_FILES, "autotuning_exps"),
    _not_needed("fast", boolean(), _ALL_ARE_COMPARED, True),
    _not_needed("tuner_type", choice_of("gridsearch", "random", "model_based"), _ALL_ARE_COMPARED, "gridsearch"),
    _not_needed("tuner_early_stopping", integer(), _ALL_ARE_COMPARED, 5),
    _not_needed("tuner_num_trials", integer(), _ALL_ARE_COMPARED, 50),
    _not_needed("mp_size", integer(1), "all ranks are data-parallel", 1),
    _not_needed("arg_mappings", mapping(), "no script is started, so none needs the values as arguments", {}),
)
