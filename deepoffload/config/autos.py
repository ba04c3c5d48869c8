"""``"auto"``: what a trainer should have filled in, and what it became because none did."""

from __future__ import annotations

from collections.abc import Iterable

from deepoffload.config.collect import KEYS, SCHEDULE, shown
from deepoffload.config.deepspeed_keys import TRAINER_KEYS
from deepoffload.config.keys import AUTO, Key, Treatment
from deepoffload.config.schema import Config

_NO_PATH = "no path: nothing goes to NVMe"
_MACHINE = "worked out from what the machine has"
_UNSAID = {
    "device": "the accelerator that torch finds, else the CPU",
    "device_budget": _MACHINE,
    "host_budget": _MACHINE,
    "nvme_budget": _MACHINE,
    "nvme_path": _NO_PATH,
    "zero_optimization.offload_param.nvme_path": _NO_PATH,
    "zero_optimization.offload_optimizer.nvme_path": _NO_PATH,
    "keep_fp32": "nothing",
    "gradient_clipping": "1.0 in initialize(), off in a plain loop",
    "train_batch_size": "unknown",
    "train_micro_batch_size_per_gpu": "unknown",
    "scheduler.params.warmup_max_lr": "the optimizer's own rate",
}
"""What no value means, where that is not simply "not said"."""


def auto_warning(paths: Iterable[str], config: Config, where: str) -> str:
    """One text that lists ``paths``, each with what it became in ``config``; those of a trainer's arguments first."""
    listed = sorted(dict.fromkeys(paths), key=lambda path: not _of_a_trainer(path))
    lines = [f'{where}"auto" is a value for a trainer to fill in, and nothing has:']
    for path in listed:
        hint = " (only the trainer or you can know it: give a value)" if _of_a_trainer(path) else ""
        lines.append(f"  {path} became {_became(path, config)}{hint}")
    return "\n".join(lines)


def _of_a_trainer(path: str) -> bool:
    return path in TRAINER_KEYS or path.rpartition(".")[0] in TRAINER_KEYS


def _became(path: str, config: Config) -> str:
    key = KEYS.get(path)
    if path.startswith(SCHEDULE + "."):
        value = None if config.scheduler is None else config.scheduler.params.get(path.removeprefix(SCHEDULE + "."))
    elif key is None:
        return "what its keys are by default"
    elif key.treatment is Treatment.INAPPLICABLE:
        return f"nothing: {key.text}"
    elif key.field is None:
        return shown(key.default)
    else:
        value = _field(key.field, config)
        if value is None:
            value = _default(key)
        if key.field != path and value not in (None, ()):
            return f"{key.field.split('.offload')[0]} = {shown(value)}"
    if value in (None, ()):
        return _UNSAID.get(path, "not said")
    if value == AUTO and path.startswith(SCHEDULE + "."):
        return "unknown: no schedule can be built of it"
    return shown(list(value) if isinstance(value, tuple) else value)


def _default(key: Key) -> object:
    return key.default if key.convert is None and key.field == key.path else None


def _field(field: str, config: Config) -> object:
    section, _, name = field.partition(".")
    if field.startswith("optimizer.params."):
        return None if config.optimizer is None else config.optimizer.params.get(field.rpartition(".")[2])
    if field == "optimizer.type":
        return None if config.optimizer is None else config.optimizer.type
    if field in ("scheduler.type", SCHEDULE):
        return None if config.scheduler is None else getattr(config.scheduler, name)
    value = getattr(config, section, None)
    return getattr(value, name, value) if name else value
