"""Accelerate over a paged model that several ranks train::

    from deepoffload.integrations.accelerate import RankAccelerator

It is accelerate's own, but for one thing: it does not wrap a paged model in DistributedDataParallel, because the ranks
add the gradients up already. With one rank there is no difference.
"""

from __future__ import annotations

from typing import Any

import accelerate
from torch import nn

from deepoffload.params.unit import ParamHandle


class RankAccelerator(accelerate.Accelerator):
    """Accelerate's, which leaves paged models as they are."""

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """As accelerate's. A paged model stays where it is, and no wrapper is put around it."""
        if is_paged(model):
            device_placement, evaluation_mode = False, True
        return super().prepare_model(model, device_placement, evaluation_mode)


def is_paged(model: nn.Module) -> bool:
    """Whether deepoffload has parameters of the model."""
    return any(isinstance(param.__dict__.get("_slot"), ParamHandle) for param in model.parameters())
