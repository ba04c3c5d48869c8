"""The numbers by which ranks know what they ask of each other.

Weights of the unit with index i have 2 i, its gradients 2 i + 1. Parts of optimizer state have larger ones.
"""

from __future__ import annotations


def weights_number(unit_index: int) -> int:
    """The number of a unit's weights."""
    return 2 * unit_index


def gradients_number(unit_index: int) -> int:
    """The number of a unit's gradients."""
    return 2 * unit_index + 1


FIRST_LATE_INDEX = 1 << 58


def late_index(unit_index: int) -> int:
    """What stands for the index of a unit in the number of gradients of its parameters that were unfrozen later."""
    return FIRST_LATE_INDEX + unit_index


FIRST_STATE_NUMBER = 1 << 62
"""Numbers from here on are of optimizer state."""
BUILT_NUMBER = 1 << 60
"""Of the end of construction."""
LATE_NUMBER = BUILT_NUMBER - 2
"""Of parameters that come to a model after it was placed."""
MEETINGS = {
    BUILT_NUMBER: "the end of offload_context",
    LATE_NUMBER: "parameters that came after the model was placed",
}
"""What errors call those at which ranks only meet."""
FIRST_BUILDING_NUMBER = BUILT_NUMBER + 1
"""Numbers from here on are of parameters of a model that is being built."""
