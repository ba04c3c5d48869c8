"""What a forward leaves on the modules of a model, other than in buffers that it changes in place.

One unit may set an attribute, and another one read it: ``self.mean``, ``layer.aux_loss``, a list on the model. In
vertical order all micro-batches pass the first unit before any comes to the second, and would read what the last one
has left there. A unit that runs again in backward would read what came later in its own forward, and sets it once more.

The first forward of all shows which attributes it changes. It is looked at where a module's window opens and closes,
too: a mask that the model gives to its layers and takes back is there only in between. After that only those
attributes are kept and lent.

Weights are no such attributes. A forward that freezes some for a while, or puts others in their places (as
``torch.func.functional_call`` does), is noticed, and nothing is lent. So is one that writes to weights, such as an
embedding with ``max_norm``: backward computes with what they had in the forward of the same micro-batch, and a second
run would write to them again.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from deepoffload.params.torch_private import in_functorch, past_doors, version_of
from deepoffload.params.unit import ParamHandle

_VALUES = (int, float, complex, str, bytes, bool)
"""Types of which equal values are the same."""
_OWN_NAMES = frozenset(nn.Module().__dict__) - {"training"}
"""What every module has and no forward leaves there: parameters, buffers, hooks."""
_SET_ONCE = frozenset({"_output_capturing_hooks_installed"})
"""Flags that a library sets in the first forward and never again. With this one transformers says that its hooks for
router logits and hidden states are on the modules."""
_LOOKS = 50_000
"""So many modules are looked at in places that have nothing to do with the call of a module: less than a second."""
_LENT_LENGTH = 1000
"""Longer containers are lent as they are, and not as they were."""


class _Absent:
    """Stands for the value of an attribute that is not there."""


class AttributeName(NamedTuple):
    """An attribute of a module, by the module's name in its model."""

    module: str
    key: str

    def __str__(self) -> str:
        return f"{self.module}.{self.key}".lstrip(".")


class PastValue(NamedTuple):
    """What an attribute had at some moment. ``content``: of a list, set or dict."""

    value: Any
    length: int = 0
    content: Any = None

    @classmethod
    def of(cls, value: Any) -> PastValue:
        if not isinstance(value, (list, set, Mapping)):
            return cls(value)
        if type(value) not in (list, set, dict) or len(value) > _LENT_LENGTH:
            return cls(value, len(value))
        return cls(value, len(value), copy.copy(value))

    def is_still(self, value: Any) -> bool:
        """Whether the attribute has not been changed since."""
        if self.length != (len(value) if isinstance(value, (list, set, Mapping)) else 0):
            return False
        if self.value is value:
            return True
        return type(self.value) is type(value) and isinstance(value, _VALUES) and bool(self.value == value)


_NOTHING = PastValue(_Absent)


class KeptAttributes:
    """The attributes of a model's modules, from before its first forward on.

    Attributes:
        changed: those that a forward changes, each with what it had before the first one.
        first: the name of the first one that was found, or "" where there is none; None before that forward has ended.
        weight: the name of the first weight that was found to be frozen, unfrozen or another tensor; "" where none was.
        edited: the name of the first weight that was written to; "" where none was.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._modules = {name: weakref.ref(module) for name, module in model.named_modules()}
        self._names = {id(module): name for name, module in model.named_modules()}
        self._before = {name: _attributes(module) for name, module in model.named_modules()}
        self._weights = {name: _weights(module) for name, module in model.named_modules()}
        # Where a model without a better place leaves things. Other modules are looked at when they are called.
        self._elsewhere = [name for name, module in model.named_modules() if not module._parameters]
        self._looks = _LOOKS
        self.changed: dict[AttributeName, PastValue] = {}
        self.first: str | None = None
        self.weight = ""
        self.edited = ""

    def is_of(self, model: nn.Module) -> bool:
        return self._model() is model

    def look(self, module: nn.Module) -> None:
        """In the first forward: a call of ``module`` begins, or has ended. Its attributes, those of modules in it, of
        those around it, and of those without parameters are compared with what they had before."""
        name = self._names.get(id(module)) if self.first is None else None
        if name is None:
            return
        names = {self._names[id(part)] for part in module.modules() if id(part) in self._names}
        while name:
            name = name.rpartition(".")[0]
            names.add(name)
        if self._looks > 0:
            self._looks -= len(self._elsewhere)
            names.update(self._elsewhere)
        for each in names:
            self._compare(each)

    def forward_has_ended(self) -> str:
        """The first forward of all is over. Returns ``first``."""
        if self.first is None:
            for name in self._modules:
                self._compare(name)
            self.first = str(next(iter(self.changed), ""))
            self._before.clear()
            self._weights.clear()
        return self.first

    def _compare(self, name: str) -> None:
        """Note those attributes of a module that are not as they were before."""
        module = self._modules[name]() if name in self._modules else None
        if module is None:
            return
        before, now = self._before[name], _attributes(module)
        for key in {**before, **now}:
            held, value = before.get(key, _NOTHING), now.get(key, _NOTHING).value
            if not held.is_still(value):
                self.changed.setdefault(AttributeName(name, key), held)
        if not in_functorch():  # inside a transform no forward stops
            self._compare_weights(name, module)

    def _compare_weights(self, name: str, module: nn.Module) -> None:
        for key, before in self._weights[name].items():
            now = module._parameters.get(key)
            if now is not before.tensor or _is_trained(now) is not before.is_trained:
                self.weight = self.weight or str(AttributeName(name, key))
            elif not self.edited and edits_of_weight(before.tensor) != before.edits:
                self.edited = str(AttributeName(name, key))

    # -- for a second run of a call --------------------------------------------------------------------------------

    def now(self) -> dict[AttributeName, PastValue]:
        """What the attributes have that are known to change."""
        return {place: PastValue.of(self._read(place)) for place in self.changed}

    @contextmanager
    def lent(self, then: Mapping[AttributeName, PastValue]) -> Iterator[None]:
        """The attributes have what they had when :meth:`now` gave ``then``; afterwards what they have at present."""
        present = self.now()
        for place, held in self.changed.items():
            self._write(place, then.get(place, held))  # not in it: it had not been changed by then
        try:
            yield
        finally:
            for place, held in present.items():
                self._write(place, held)

    def _read(self, place: AttributeName) -> Any:
        module = self._modules[place.module]()
        return _Absent if module is None else _values(module).get(place.key, _Absent)

    def _write(self, place: AttributeName, held: PastValue) -> None:
        module = self._modules[place.module]()
        if module is None:
            return
        content = held.value
        if isinstance(held.content, list):
            content[:] = held.content
        elif held.content is not None:
            content.clear()
            content.update(held.content)
        values: MutableMapping[str, Any] = module._buffers if place.key in module._buffers else vars(module)
        if held.value is _Absent:
            values.pop(place.key, None)
        else:
            values[place.key] = held.value


def _values(module: nn.Module) -> dict[str, Any]:
    return {**vars(module), **module._buffers}


def _attributes(module: nn.Module) -> dict[str, PastValue]:
    """By name, those that can hold what a forward computes."""
    return {
        key: PastValue.of(value)
        for key, value in _values(module).items()
        if key not in _OWN_NAMES
        and key not in _SET_ONCE
        and (isinstance(value, Tensor) or not callable(value))  # libraries wrap forward
    }


class PastWeight(NamedTuple):
    """A weight as it was at some moment. ``edits``: how often it had been written to."""

    tensor: Tensor
    is_trained: bool
    edits: tuple[int, int]


def _weights(module: nn.Module) -> dict[str, PastWeight]:
    """By name, but for those that get their shapes in a forward."""
    found = {key: weight for key, weight in module._parameters.items() if weight is not None and not is_lazy(weight)}
    return {key: PastWeight(weight, _is_trained(weight), edits_of_weight(weight)) for key, weight in found.items()}


def edits_of_weight(weight: Tensor) -> tuple[int, int]:
    """Where the counters of a weight stand, in-place changes and those that were found by its bytes."""
    handle = weight.__dict__.get("_slot")
    if not isinstance(handle, ParamHandle):
        return version_of(weight), 0
    if handle.escape_crc is not None and handle.storage is not None:  # ``.data`` was asked for, and may be written to
        with handle.pager.lock:
            if handle.changed():
                handle.pager.will_change(handle)
    version = version_of(weight)
    unseen = version != handle.version and not handle.is_to_be_updated()  # it counts when somebody looks
    return version, handle.edits + unseen


def _is_trained(weight: Any) -> bool:
    return bool(past_doors(_requires_grad, (weight,)))


def _requires_grad(weight: Tensor) -> bool:
    return weight.requires_grad
