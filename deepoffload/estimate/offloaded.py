"""Activations that leave where they are made (``offload_activations``): what of them is in memory, and what on NVMe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from deepoffload.config import Config
from deepoffload.config.resolve import activation_part
from deepoffload.device import Tier
from deepoffload.errors import BudgetError, ConfigError


class ActivationPlaces(NamedTuple):
    """Bytes of saved activations: where they are made, in their part of the host budget, and on NVMe."""

    stay: int
    part: int
    nvme: int


@dataclass(frozen=True)
class Leaving:
    """What the configuration says. ``part_bytes``: of one rank's host budget, 0 where nothing leaves. ``to_nvme``:
    what the part does not hold goes there. ``every``: not inputs of checkpointed blocks alone."""

    part_bytes: int = 0
    to_nvme: bool = False
    every: bool = False

    def places(self, saved_bytes: int, *, recomputes: bool) -> ActivationPlaces:
        """Of ``saved_bytes``, which are inputs of checkpointed blocks where a run ``recomputes``."""
        if not self.part_bytes or not (recomputes or self.every):
            return ActivationPlaces(saved_bytes, 0, 0)
        far = max(0, saved_bytes - self.part_bytes)
        return ActivationPlaces(0, saved_bytes - far, far) if self.to_nvme else ActivationPlaces(0, saved_bytes, 0)

    def problem(self, part_bytes: int) -> str:
        """Why a step cannot keep so much, if so."""
        if part_bytes <= self.part_bytes:
            return ""
        return (
            f"activations take {part_bytes} bytes of host memory, and their part of the budget is {self.part_bytes}: "
            f'raise activation_budget to at least {part_bytes} bytes, or say offload_activations = "nvme"'
        )


def leaving(config: Config, host_bytes: int, *, has_device: bool, ranks: int) -> Leaving:
    """What leaves with a host budget of ``host_bytes``, of one of the host's ``ranks``.

    Raises:
        ConfigError: their part is the whole budget.
    """
    try:
        part_bytes, _ = activation_part(config, host_bytes, on_cpu=not has_device, host_ranks=ranks)
    except BudgetError as error:
        raise ConfigError(str(error)) from None
    to_nvme = config.offload_activations is Tier.NVME
    return Leaving(part_bytes, to_nvme, config.offload_activations_above is not None)
