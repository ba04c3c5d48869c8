"""What the program can do where a checkpoint does not fit: arguments that the call has."""

from __future__ import annotations

from typing import NamedTuple


class Remedies(NamedTuple):
    """Ends of error messages.

    Attributes:
        not_strict: where weights differ. without_optimizer: where the optimizer does. without_schedule: where only
            one side has a schedule. weights_only: where other objects differ.
    """

    not_strict: str
    without_optimizer: str
    without_schedule: str
    weights_only: str


OF_LOAD = Remedies(
    not_strict="load_module_strict=False loads what both have",
    without_optimizer="load_optimizer_states=False loads the weights alone and leaves the optimizer as it is",
    without_schedule="pass the same names, or load_lr_scheduler_states=False, which leaves the schedule as it is",
    weights_only="pass the same names, or load_module_only=True for weights alone",
)
OF_RESUME = Remedies(
    *["resume takes all of it: make model, optimizer and objects as they were, or begin in another durability.path"] * 4
)
