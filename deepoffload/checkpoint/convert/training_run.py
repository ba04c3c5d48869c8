"""A training run as every format has it: what the readers of formats give and the writers take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deepoffload.checkpoint.convert.tensors import Values, nbytes_of

ADAM = "adam"
"""The kind of optimizer that is Adam or AdamW: they keep the same arrays."""


@dataclass(frozen=True)
class GroupOfParams:
    """A parameter group: its settings, and the names of its parameters."""

    settings: Mapping[str, Any]
    names: Sequence[str]


@dataclass(frozen=True)
class TrainingRun:
    """What was trained, tensor by tensor.

    Attributes:
        source: what it was read from, for people.
        step: optimizer steps.
        weights: tensors of the ``state_dict``, in the type in which they were stored.
        masters: the exact fp32 values of the weights that have any finer than those of ``weights``.
        aliases: further names of tied weights, with the name in ``weights``.
        kind: of optimizers; None: there is none.
        groups: the optimizer's, in order.
        arrays: arrays of optimizer state in fp32, by parameter and key (``exp_avg``, ...).
        small: the rest of its state by parameter: ``step`` and the like.
        others: states of a schedule and of other objects, by name.
        client_state: what the program has added.
        as_on_hub: the weights in their best precision as they are named and packed on the hub, where the model has them
            in another way; None: as in ``weights``.
        config_files: text of ``config.json`` and the like, by name.
    """

    source: str
    step: int
    weights: Mapping[str, Values]
    masters: Mapping[str, Values] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    kind: str | None = None
    groups: Sequence[GroupOfParams] = ()
    arrays: Mapping[str, Mapping[str, Values]] = field(default_factory=dict)
    small: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    others: Mapping[str, Any] = field(default_factory=dict)
    client_state: Any = None
    as_on_hub: Mapping[str, Values] | None = None
    config_files: Mapping[str, bytes] = field(default_factory=dict)

    def exact(self, name: str) -> Values:
        """A weight in its best precision."""
        return self.masters.get(name, self.weights[name])

    def trained(self) -> list[str]:
        """Parameters of the optimizer, group by group."""
        return [name for group in self.groups for name in group.names]

    @property
    def nbytes(self) -> int:
        """Of weights in their best precision, and of the optimizer's arrays."""
        arrays = [values for held in self.arrays.values() for values in held.values()]
        return sum(nbytes_of(values) for values in [*map(self.exact, self.weights), *arrays])
