"""What a configuration cannot say where several ranks train one model."""

from __future__ import annotations

from collections.abc import Mapping

from deepoffload.config.collect import shown
from deepoffload.config.schema import Config, Precision
from deepoffload.device import Tier
from deepoffload.errors import ConfigError, UnsupportedError
from deepoffload.schedule.cost_model import StepOverlap

_ONLY = {
    "gradient_allreduce_op": ("mean", "gradients are the mean over the ranks; scale the loss for their sum"),
    "sequence_parallel_size": (1, "all ranks are data-parallel"),
    "tensor_parallel": ("off", "all ranks are data-parallel"),
    "expert_parallel": ("off", "all ranks are data-parallel"),
}
"""Keys that ask for other numbers, with the value that does not, and what is done in their place."""


def check_several_ranks(config: Config, fields: Mapping[str, object], where: str, world_size: int) -> None:
    """Refuse what would change numbers, and what several ranks cannot do yet.

    Args:
        fields: what was said, also of keys that set nothing in ``config``.

    Raises:
        ConfigError: ignoring a key would change numbers. UnsupportedError: not with several ranks.
    """
    for name, (harmless, why) in _ONLY.items():
        said = fields.get(name)
        if said is not None and said != harmless:
            raise ConfigError(
                f"{where}{name} = {shown(said)} with {world_size} ranks: ignoring it would change numbers: {why}"
            )
    _check_wire(config, fields.get("communication_data_type"), where, world_size)
    several = f"with several ranks ({world_size} here)"
    if config.step_overlap is StepOverlap.IN_BACKWARD and config.durability is not None:
        raise UnsupportedError(
            f'{where}durability is not available with step_overlap = "in_backward" {several}: a step begins where they '
            'have not met; use step_overlap = "deferred"'
        )
    if config.debug.copies:
        raise UnsupportedError(f"{where}debug.copies is not available {several}: ranks show copies as they are")
    if config.offload_optimizer is Tier.DEVICE:
        raise UnsupportedError(
            f'{where}offload_optimizer = "device" is not available {several}: each keeps its part of the state on the '
            'host; set "cpu" or "nvme"'
        )


def _check_wire(config: Config, asked: object, where: str, world_size: int) -> None:
    """Gradients travel in the type that autograd makes them in, which is the weights'."""
    if asked is None or asked is Precision.FP32 or asked is config.precision:
        return
    raise ConfigError(
        f"{where}communication_data_type = {shown(asked)} with {world_size} ranks: ignoring it would change numbers: "
        f"gradients travel in the dtype of the weights, and precision is {shown(config.precision)}; set precision to "
        "the same dtype, or leave this out"
    )
