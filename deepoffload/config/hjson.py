"""Hjson, which DeepSpeed reads configurations as: JSON with comments, and with fewer commas and quotes.

Comments are ``# ...``, ``// ...`` and ``/* ... */``. Commas may be missing at the end of a line or be one too many.
Keys need no quotes, and text needs none if it is alone on the rest of its line. The braces of the outermost object may
be left out. Source: https://hjson.github.io/syntax.html, and the package ``hjson``, which DeepSpeed uses.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

_IGNORED = re.compile(r"(?:\s|#[^\n]*|//[^\n]*|/\*.*?\*/)*", re.DOTALL)
_KEY = re.compile(r"[^\s,:\[\]{}\"'#/][^\s,:\[\]{}]*")
_LITERAL = re.compile(
    r"(true|false|null|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?)(?=[^\S\n]*(?:$|[,\]}\n#]|//|/\*))", re.MULTILINE
)
_REST_OF_LINE = re.compile(r"[^\n]*")
_LINES = re.compile(r"'''(.*?)'''", re.DOTALL)

Pairs = list[tuple[str, Any]]


class NoHjson(ValueError):
    """Text that is no Hjson, either."""


def read_hjson(text: str, object_of: Callable[[Pairs], Any] = dict) -> Any:
    """The value that ``text`` says.

    Args:
        object_of: what becomes of the pairs of an object.

    Raises:
        NoHjson: what stands where.
        RecursionError: nested too deeply.
    """
    reader = _HjsonText(text, object_of)
    at = reader.skip(0)
    if text[at : at + 1] in ("{", "["):
        value, end = reader.value(at)
    else:
        value, end = reader.members(at, closed_by="")
    end = reader.skip(end)
    if end < len(text):
        raise reader.error(end, "nothing more was expected")
    return value


class _HjsonText:
    """Each method gives what begins at a position, and the position behind it."""

    def __init__(self, text: str, object_of: Callable[[Pairs], Any]) -> None:
        self._text = text
        self._object_of = object_of

    def skip(self, at: int) -> int:
        """The position behind white space and comments."""
        match = _IGNORED.match(self._text, at)
        return at if match is None else match.end()

    def error(self, at: int, expected: str) -> NoHjson:
        line = self._text.count("\n", 0, at) + 1
        return NoHjson(f"line {line}: {expected}")

    def value(self, at: int) -> tuple[Any, int]:
        first = self._text[at : at + 1]
        if first == "{":
            return self.members(self.skip(at + 1), closed_by="}")
        if first == "[":
            return self._list(self.skip(at + 1))
        if first in ('"', "'"):
            return self._quoted(at)
        literal = _LITERAL.match(self._text, at)
        if literal is not None:
            return json.loads(literal[1]), literal.end()
        if first in ("", "}", "]", ",", ":"):
            raise self.error(at, "a value was expected")
        rest = _REST_OF_LINE.match(self._text, at)
        assert rest is not None  # it matches everything
        return rest[0].strip(), rest.end()

    def members(self, at: int, closed_by: str) -> tuple[Any, int]:
        """The members of an object, up to ``closed_by``, or to the end of the text."""
        pairs: Pairs = []
        while self._text[at : at + 1] != closed_by:
            if at >= len(self._text):
                raise self.error(at, f'"{closed_by}" was expected')
            key, at = self._key(at)
            at = self.skip(at)
            if self._text[at : at + 1] != ":":
                raise self.error(at, f'":" was expected after the key {key!r:.80}')
            value, at = self.value(self.skip(at + 1))
            pairs.append((key, value))
            at = self._after(at)
        return self._object_of(pairs), at + len(closed_by)

    def _list(self, at: int) -> tuple[list[Any], int]:
        values = []
        while self._text[at : at + 1] != "]":
            if at >= len(self._text):
                raise self.error(at, '"]" was expected')
            value, at = self.value(at)
            values.append(value)
            at = self._after(at)
        return values, at + 1

    def _after(self, at: int) -> int:
        at = self.skip(at)
        return self.skip(at + 1) if self._text[at : at + 1] == "," else at

    def _key(self, at: int) -> tuple[str, int]:
        if self._text[at : at + 1] in ('"', "'"):
            return self._quoted(at)
        match = _KEY.match(self._text, at)
        if match is None:
            raise self.error(at, "a key was expected")
        return match[0], match.end()

    def _quoted(self, at: int) -> tuple[str, int]:
        lines = _LINES.match(self._text, at)
        if lines is not None:
            return lines[1].strip(), lines.end()
        mark = self._text[at]
        end = at + 1
        while end < len(self._text) and self._text[end] not in (mark, "\n"):
            end += 2 if self._text[end] == "\\" else 1
        if self._text[end : end + 1] != mark:
            raise self.error(at, "text without its second quotation mark")
        inside = self._text[at + 1 : end]
        if mark == "'":
            inside = inside.replace("\\'", "'").replace('"', '\\"')
        try:
            return json.loads(f'"{inside}"'), end + 1
        except json.JSONDecodeError as error:
            raise self.error(at, f"text that is not valid: {error.msg}") from error
