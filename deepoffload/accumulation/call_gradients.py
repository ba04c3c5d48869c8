"""Which gradients a call of ``accumulate`` has made, so that they can be dropped where it fails."""

from __future__ import annotations

from torch import Tensor, nn

from deepoffload.memory.lock import SHIELD
from deepoffload.params.unit import ParamHandle
from deepoffload.runtime.engine import Engine


class CallGradients:
    """Made before the call. ``engine``: None where the model is not paged."""

    def __init__(self, model: nn.Module, engine: Engine | None) -> None:
        self._engine = engine
        self._changes = 0 if engine is None else engine.gradients.changes
        self._ordinary: list[tuple[Tensor, Tensor | None, int]] = []
        self._had: set[ParamHandle] = set()
        for param in model.parameters():
            slot = param.__dict__.get("_slot")
            if isinstance(slot, ParamHandle):
                if engine is not None and slot.pager is engine.pager and engine.gradients.present(slot):
                    self._had.add(slot)
            else:
                grad = param.grad
                self._ordinary.append((param, grad, 0 if grad is None else grad._version))

    def drop(self) -> bool:
        """Drop the gradients that have changed since. Returns whether some of them were there before."""
        with SHIELD:  # people press Ctrl-C twice
            return self._drop()

    def _drop(self) -> bool:
        lost = False
        if self._engine is not None:
            gradients = self._engine.gradients
            for unit in self._engine.pager.units:
                for handle in unit.handles:
                    if gradients.changed_since(self._changes, [handle]):
                        lost |= handle in self._had
                        gradients.assign(handle, None)
        for param, before, version in self._ordinary:
            grad = param.grad
            if grad is not None and (grad is not before or grad._version != version):
                lost |= before is not None
                param.grad = None
        return lost
