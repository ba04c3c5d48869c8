"""What DeepSpeed writes on the parameters of ZeRO-3, as properties of ours. Scripts ask for it to tell a parameter
whose bytes may be away from an ordinary one.

Inside the call of a module the parameters are ordinary ones, without these names.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deepoffload.params.unit import ParamHandle, UnitState

if TYPE_CHECKING:
    from deepoffload.params.slot import TensorSlot


class ZeroParamStatus(enum.Enum):
    """Whether the program may count on a parameter's bytes."""

    AVAILABLE = 1
    """A ``GatheredParameters`` that names it is open."""
    NOT_AVAILABLE = 2
    """Its bytes come when they are used, and may leave afterwards."""
    INFLIGHT = 3
    """The same, and they are being read now."""


class PeerNames:
    """DeepSpeed's ``ds_*`` attributes. Read-only."""

    __slots__ = ()

    if TYPE_CHECKING:
        _slot: TensorSlot

    @property
    def ds_id(self) -> int:
        """A number that no other parameter of this process has while this one exists."""
        return id(self._slot)

    @property
    def ds_status(self) -> ZeroParamStatus:
        """Whether the program may count on the bytes."""
        slot: Any = self._slot
        if isinstance(slot, ParamHandle) and slot.gathered:
            return ZeroParamStatus.AVAILABLE
        if slot.unit is not None and slot.unit.state is UnitState.FETCHING:
            return ZeroParamStatus.INFLIGHT
        return ZeroParamStatus.NOT_AVAILABLE

    @property
    def ds_shape(self) -> torch.Size:
        """The shape of the whole parameter."""
        return self._slot.shape

    @property
    def ds_numel(self) -> int:
        """The elements of the whole parameter."""
        return self._slot.numel

    @property
    def ds_tensor(self) -> Tensor:
        """The elements that this rank keeps, flat, as a view: with one rank all of them, with several the local part of
        ``safe_get_local_fp32_param``."""
        data: Tensor = self.data  # type: ignore[attr-defined]
        slot: Any = self._slot
        if not isinstance(slot, ParamHandle) or slot.cut is None:
            return data.reshape(-1)
        return data.as_strided((slot.numel,), (1,))[slot.cut.own_elements()]
