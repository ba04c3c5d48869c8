"""Reads a pickle that anybody may have made, and runs nothing that it names.

Python's own unpickler calls the functions that a pickle names. This reader has no way to call any of them: it builds
numbers, texts, lists, tuples, dicts, sets and descriptions of tensors, and every other class becomes a :class:`Record`
of what the pickle says about it. Memory and time are bounded: what a pickle makes is counted against
:data:`MADE_BYTES_MAX`, and its opcodes against :data:`OPCODES_MAX`.

The opcodes are those of https://github.com/python/cpython/blob/main/Lib/pickletools.py.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from deepoffload.errors import UsageError

OPCODES_MAX = 2_000_000
MADE_BYTES_MAX = 48 << 20
_INTEGER_BYTES_MAX = 64
_CONTAINER_BYTES = 80
_ITEM_BYTES = 24
_SCALAR_BYTES = 32
_NAME_BYTES = 400


class Name(NamedTuple):
    """A class or function that a pickle names. It stays a name."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"[:120]


class Record:
    """An object of a class that this reader does not make: what the pickle says about it, and nothing more.

    Attributes:
        kind: its class, or the function that would have made it. args: what that would have been called with.
        state: what its ``__setstate__`` would have been called with, or its ``__dict__``.
        items: what it holds as a list or a dict.
    """

    __slots__ = ("kind", "args", "state", "items")

    def __init__(self, kind: Name, args: Any) -> None:
        self.kind = kind
        self.args = args
        self.state: Any = None
        self.items: Any = None

    def __repr__(self) -> str:
        return f"<a {self.kind}>"

    def field(self, key: str, default: Any = None) -> Any:
        """An attribute that the object would have."""
        return self.state.get(key, default) if isinstance(self.state, dict) else default


Builder = Callable[[Any], Any]
"""Makes a value from the arguments that a pickle gives."""


class _Bad(Exception):
    """Why a pickle is refused; :func:`read_pickle` says where."""


class _Mark:
    __slots__ = ()


_MARK = _Mark()


def read_pickle(
    data: bytes,
    where: str,
    builders: dict[tuple[str, str], Builder] | None = None,
    names: dict[tuple[str, str], Any] | None = None,
    persistent: Callable[[Any], Any] | None = None,
) -> Any:
    """The value of a pickle.

    Args:
        where: what the data are called in errors.
        builders: functions of ours that stand for functions and classes a pickle may call.
        names: values of ours that stand for constants a pickle may name.
        persistent: gives the object of a persistent identity; None: there are none.

    Raises:
        UsageError: it is no pickle, damaged, too large, or uses what is never in a checkpoint.
    """
    machine = _Machine(data, {**_BUILDERS, **(builders or {})}, names or {}, persistent)
    try:
        return machine.run()
    except _Bad as bad:
        raise UsageError(f"{where} is not a pickle that a checkpoint holds: {bad}; nothing of it was run") from None
    except UsageError:
        raise
    except (LookupError, struct.error, TypeError, ValueError, OverflowError, AttributeError) as error:
        reason = f"{type(error).__name__} at byte {machine.at} of {len(data)}: {str(error)[:100]}"
        raise UsageError(f"{where} is damaged, or no pickle ({reason}); nothing of it was run") from None


class _Machine:
    def __init__(
        self,
        data: bytes,
        builders: dict[tuple[str, str], Builder],
        names: dict[tuple[str, str], Any],
        persistent: Callable[[Any], Any] | None,
    ) -> None:
        self.data = data
        self.at = 0
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.made_bytes = 0
        self._builders = builders
        self._names = names
        self._persistent = persistent

    def run(self) -> Any:
        data, stack = self.data, self.stack
        for _ in range(OPCODES_MAX):
            code = data[self.at]
            self.at += 1
            if code == 0x2E:  # STOP
                if len(stack) != 1 or stack[0] is _MARK:
                    raise _Bad("it ends with something left to do")
                return stack[0]
            operation = _OPERATIONS.get(code)
            if operation is None:
                raise _Bad(f"it has the opcode {bytes([code])!r} at byte {self.at - 1}")
            operation(self)
        raise _Bad(f"it has more than {OPCODES_MAX} opcodes")

    # -- bytes of the pickle ---------------------------------------------------------------------------------------

    def take(self, nbytes: int) -> bytes:
        end = self.at + nbytes
        if nbytes < 0 or end > len(self.data):
            raise _Bad(f"{nbytes} bytes are announced at byte {self.at}, and it ends before")
        taken = self.data[self.at : end]
        self.at = end
        return taken

    def unsigned(self, nbytes: int) -> int:
        return int.from_bytes(self.take(nbytes), "little")

    def line(self) -> str:
        end = self.data.index(b"\n", self.at)
        text = self.data[self.at : end]
        self.at = end + 1
        return text.decode()

    # -- what is made ----------------------------------------------------------------------------------------------

    def charge(self, nbytes: int) -> None:
        self.made_bytes += nbytes
        if self.made_bytes > MADE_BYTES_MAX:
            raise _Bad(f"what it makes takes more than {MADE_BYTES_MAX >> 20} MiB")

    def push(self, value: Any, nbytes: int = _SCALAR_BYTES) -> None:
        self.charge(nbytes + 8)
        self.stack.append(value)

    def since_mark(self) -> list[Any]:
        stack = self.stack
        at = len(stack) - 1
        while stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise _Bad(f"a mark is missing at byte {self.at}")
        taken = stack[at + 1 :]
        del stack[at:]
        return taken

    def remember(self, number: int) -> None:
        self.charge(_CONTAINER_BYTES)
        self.memo[number] = self.stack[-1]

    # -- objects ---------------------------------------------------------------------------------------------------

    def name(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise _Bad("it names a class with what is no text")
        key = (module, name)
        value = self._names[key] if key in self._names else Name(module, name)
        self.push(value, _NAME_BYTES)

    def call(self, function: Any, args: Any) -> Any:
        if type(function) is not Name or type(args) is not tuple:
            raise _Bad(f"it calls what is no name at byte {self.at}")
        builder = self._builders.get((function.module, function.name))
        self.charge(_CONTAINER_BYTES)
        return Record(function, args) if builder is None else builder(args)

    def build(self, target: Any, state: Any) -> None:
        if type(target) is Record:
            if type(state) is tuple and len(state) == 2 and type(state[1]) is dict and state[0] in (None, {}):
                state = state[1]  # attributes in slots
            target.state = state
        elif type(target) in (list, tuple, dict, set, str, int, float, bytes, Name):
            raise _Bad(f"it sets the state of a {type(target).__name__}")
        # The state of an ordered dict (a module's versions) or of a tensor is of no use here.

    def fill(self, target: Any, pairs: list[Any]) -> None:
        if len(pairs) % 2:
            raise _Bad("it has a key without a value")
        if type(target) is Record:
            target.items = target.items if type(target.items) is dict else {}
            target = target.items
        if type(target) not in (dict, OrderedDict):
            raise _Bad(f"it puts keys into a {type(target).__name__}")
        self.charge(len(pairs) * _ITEM_BYTES)
        for index in range(0, len(pairs), 2):
            target[checked_key(pairs[index])] = pairs[index + 1]

    def extend(self, target: Any, items: list[Any]) -> None:
        if type(target) is Record:
            target.items = target.items if type(target.items) is list else []
            target = target.items
        if type(target) is not list:
            raise _Bad(f"it appends to a {type(target).__name__}")
        self.charge(len(items) * _ITEM_BYTES)
        target.extend(items)

    def persist(self, identity: Any) -> None:
        if self._persistent is None:
            raise _Bad("it refers to storages, and there are none")
        self.push(self._persistent(identity), _CONTAINER_BYTES)


_KEYS = (str, int, float, bool, bytes, type(None))


def checked_key(key: Any) -> Any:
    """A key as it is: numbers and texts, flat tuples of them, and records (which are equal to themselves only). A deep
    tuple would overrun the interpreter's stack when it is hashed.

    Raises:
        UsageError is made of what this raises.
    """
    if type(key) in _KEYS or type(key) is Record:
        return key
    if type(key) is tuple and len(key) <= 64 and all(type(item) in _KEYS for item in key):
        return key
    raise _Bad(f"it has a {type(key).__name__} as a key")


def _ordered_dict(args: Any) -> Any:
    made: OrderedDict[Any, Any] = OrderedDict()
    for key, value in args[0] if args else ():
        made[checked_key(key)] = value
    return made


def _set(args: Any) -> Any:
    return {checked_key(item) for item in _items(args)}


def _items(args: Any) -> Iterable[Any]:
    items = args[0] if args else ()
    if type(items) not in (list, tuple, set):
        raise _Bad("a container is made of what is none")
    return items


def _encoded(args: Any) -> bytes:
    """Bytes, as protocol 2 has them."""
    text, encoding = args
    if type(text) is not str or encoding != "latin1":
        raise _Bad("bytes are made of what is no text")
    return text.encode("latin1")


_BUILDERS: dict[tuple[str, str], Builder] = {
    ("_codecs", "encode"): _encoded,
    ("__builtin__", "bytes"): lambda args: b"",
    ("collections", "OrderedDict"): _ordered_dict,
    ("builtins", "set"): _set,
    ("__builtin__", "set"): _set,
    ("builtins", "list"): lambda args: list(_items(args)),
    ("builtins", "tuple"): lambda args: tuple(_items(args)),
    ("builtins", "dict"): _ordered_dict,
}


# -- opcodes ---------------------------------------------------------------------------------------------------------


def _integer(machine: _Machine, nbytes: int) -> None:
    if nbytes > _INTEGER_BYTES_MAX:
        raise _Bad(f"it has an integer of {nbytes} bytes")
    machine.push(int.from_bytes(machine.take(nbytes), "little", signed=True))


def _text(machine: _Machine, length_bytes: int) -> None:
    taken = machine.take(machine.unsigned(length_bytes))
    machine.push(taken.decode("utf-8", "surrogatepass"), _SCALAR_BYTES + 2 * len(taken))


def _bytes(machine: _Machine, length_bytes: int) -> None:
    taken = machine.take(machine.unsigned(length_bytes))
    machine.push(taken, _SCALAR_BYTES + len(taken))


def _tuple(machine: _Machine, count: int) -> None:
    items = machine.stack[len(machine.stack) - count :]
    if len(items) != count or any(item is _MARK for item in items):
        raise _Bad("a tuple lacks items")
    del machine.stack[len(machine.stack) - count :]
    machine.push(tuple(items), _CONTAINER_BYTES)


def _marked(machine: _Machine, make: Callable[[list[Any]], Any]) -> None:
    items = machine.since_mark()
    machine.push(make(items), _CONTAINER_BYTES + len(items) * _ITEM_BYTES)


def _dict(machine: _Machine) -> None:
    pairs, made = machine.since_mark(), {}  # type: ignore[var-annotated]
    machine.fill(made, pairs)
    machine.push(made, _CONTAINER_BYTES)


def _reduce(machine: _Machine) -> None:
    args, function = machine.stack.pop(), machine.stack.pop()
    machine.push(machine.call(function, args))


def _reduce_with_keywords(machine: _Machine) -> None:
    keywords, args, function = machine.stack.pop(), machine.stack.pop(), machine.stack.pop()
    if type(function) is not Name:
        raise _Bad("it calls what is no name")
    made = Record(function, args)
    made.state = keywords if type(keywords) is dict else None
    machine.push(made, _CONTAINER_BYTES)


def _build(machine: _Machine) -> None:
    state = machine.stack.pop()
    machine.build(machine.stack[-1], state)


def _set_item(machine: _Machine) -> None:
    value, key = machine.stack.pop(), machine.stack.pop()
    machine.fill(machine.stack[-1], [key, value])


def _set_items(machine: _Machine) -> None:
    pairs = machine.since_mark()
    machine.fill(machine.stack[-1], pairs)


def _append(machine: _Machine) -> None:
    item = machine.stack.pop()
    machine.extend(machine.stack[-1], [item])


def _appends(machine: _Machine) -> None:
    items = machine.since_mark()
    machine.extend(machine.stack[-1], items)


def _add_items(machine: _Machine) -> None:
    items = machine.since_mark()
    if type(machine.stack[-1]) is not set:
        raise _Bad("it adds to what is no set")
    machine.charge(len(items) * _ITEM_BYTES)
    machine.stack[-1].update(checked_key(item) for item in items)


def _named(machine: _Machine) -> None:
    name, module = machine.stack.pop(), machine.stack.pop()
    machine.name(module, name)


def _recall(machine: _Machine, number: int) -> None:
    machine.push(machine.memo[number], 0)


_OPERATIONS: dict[int, Callable[[_Machine], Any]] = {
    0x80: lambda m: m.take(1),  # PROTO
    0x95: lambda m: m.take(8),  # FRAME
    ord("("): lambda m: m.push(_MARK, 0),
    ord("0"): lambda m: m.stack.pop(),
    ord("1"): lambda m: m.since_mark(),
    ord("2"): lambda m: m.push(m.stack[-1], 0),
    ord("N"): lambda m: m.push(None, 0),
    0x88: lambda m: m.push(True, 0),
    0x89: lambda m: m.push(False, 0),
    ord("K"): lambda m: m.push(m.unsigned(1)),
    ord("M"): lambda m: m.push(m.unsigned(2)),
    ord("J"): lambda m: _integer(m, 4),
    0x8A: lambda m: _integer(m, m.unsigned(1)),  # LONG1
    0x8B: lambda m: _integer(m, m.unsigned(4)),  # LONG4
    ord("G"): lambda m: m.push(struct.unpack(">d", m.take(8))[0]),
    0x8C: lambda m: _text(m, 1),
    ord("X"): lambda m: _text(m, 4),
    0x8D: lambda m: _text(m, 8),
    ord("C"): lambda m: _bytes(m, 1),
    ord("B"): lambda m: _bytes(m, 4),
    0x8E: lambda m: _bytes(m, 8),
    ord("U"): lambda m: _bytes(m, 1),  # a text of Python 2
    ord("T"): lambda m: _bytes(m, 4),
    ord("]"): lambda m: m.push([], _CONTAINER_BYTES),
    ord("}"): lambda m: m.push({}, _CONTAINER_BYTES),
    ord(")"): lambda m: m.push((), 0),
    0x8F: lambda m: m.push(set(), _CONTAINER_BYTES),
    0x85: lambda m: _tuple(m, 1),
    0x86: lambda m: _tuple(m, 2),
    0x87: lambda m: _tuple(m, 3),
    ord("t"): lambda m: _marked(m, tuple),
    ord("l"): lambda m: _marked(m, list),
    0x91: lambda m: _marked(m, lambda items: {checked_key(item) for item in items}),  # FROZENSET
    ord("d"): _dict,
    ord("a"): _append,
    ord("e"): _appends,
    ord("s"): _set_item,
    ord("u"): _set_items,
    0x90: _add_items,
    ord("c"): lambda m: m.name(m.line(), m.line()),
    0x93: _named,  # STACK_GLOBAL
    ord("R"): _reduce,
    0x81: _reduce,  # NEWOBJ
    0x92: _reduce_with_keywords,  # NEWOBJ_EX
    ord("b"): _build,
    ord("Q"): lambda m: m.persist(m.stack.pop()),
    ord("q"): lambda m: m.remember(m.unsigned(1)),
    ord("r"): lambda m: m.remember(m.unsigned(4)),
    0x94: lambda m: m.remember(len(m.memo)),  # MEMOIZE
    ord("h"): lambda m: _recall(m, m.unsigned(1)),
    ord("j"): lambda m: _recall(m, m.unsigned(4)),
}
