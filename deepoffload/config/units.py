"""Byte counts as people write them, exactly."""

from __future__ import annotations

import re
from fractions import Fraction

_FACTORS = {
    "B": 1,
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGTP", start=1)},
    **{f"{letter}IB": 1024**power for power, letter in enumerate("KMGTP", start=1)},
}
_TEXT = re.compile(r"\s*(?P<number>\d+(?:\.\d*)?(?:[eE][+]?\d+)?|\.\d+)\s*(?P<unit>[A-Za-z]*)\s*")
_NUMBER_MAX_DIGITS = 40
_MOST_BYTES = (1 << 63) - 1
"""The largest size that a file or a mapping can have."""
_TOO_MANY = "more bytes than any machine has"
_SHOWN_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB")
_SHOWN_MAX = 1023.995
"""From here on two decimals would round to 1024.00."""


def parse_bytes(value: int | float | str) -> int:
    """Bytes of ``1073741824``, ``1.5e9``, ``"2GiB"`` or ``"500 MB"``.

    KB, MB, ... are powers of 1000 and KiB, MiB, ... powers of 1024, in either case of letters. A fraction of a byte in
    a text with a unit is rounded down; a number without a unit has to be whole.

    Raises:
        ValueError: what is wrong and how to write it.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError('expected bytes, such as 2147483648 or "2GiB"')
    if isinstance(value, str):
        return _parse_text(value)
    if value != value or value in (float("inf"), float("-inf")) or value != int(value):
        raise ValueError(f'expected a whole number of bytes, or text such as "2GiB", not {value}')
    if value < 0:
        raise ValueError("expected bytes, which are not negative")
    if value > _MOST_BYTES:
        raise ValueError(f'{_TOO_MANY}; write for example "2GiB"')
    return int(value)


def _parse_text(text: str) -> int:
    match = _TEXT.fullmatch(text)
    if match is None or len(text) > _NUMBER_MAX_DIGITS:
        raise ValueError(f'expected bytes, such as 2147483648, "2GiB" or "500MB", not "{text}"')
    unit = match["unit"].upper()
    if unit and unit not in _FACTORS:
        hint = "known are B, KB to PB, KiB to PiB"
        if len(unit) == 1 and unit in "KMGTP":
            hint = f'write "{match["number"]}{unit}iB" (1024) or "{match["number"]}{unit}B" (1000)'
        raise ValueError(f'unknown unit "{match["unit"]}"; {hint}')
    mantissa, _, exponent = match["number"].lower().partition("e")
    if exponent and int(exponent) > _NUMBER_MAX_DIGITS:
        raise ValueError(f'"{text}" is {_TOO_MANY}')
    amount = Fraction(mantissa if not mantissa.endswith(".") else mantissa + "0") * 10 ** int(exponent or 0)
    amount *= _FACTORS[unit or "B"]
    if not unit and amount.denominator != 1:
        raise ValueError(f'expected a whole number of bytes, or a unit as in "{text}GiB", not "{text}"')
    if amount > _MOST_BYTES:
        raise ValueError(f'"{text}" is {_TOO_MANY}')
    return int(amount)


def format_bytes(count: int) -> str:
    """``count`` bytes for people, in powers of 1024: ``"1.50 GiB"``, ``"512 B"``."""
    if count < 1024:
        return f"{count} B"
    power = 1
    while power < len(_SHOWN_UNITS) and count / 1024**power >= _SHOWN_MAX:
        power += 1
    return f"{count / 1024**power:.2f} {_SHOWN_UNITS[power - 1]}"


def at_least(nbytes: int) -> str:
    """:func:`format_bytes`, rounded up: where so much is enough."""
    text = format_bytes(nbytes)
    if parse_bytes(text) < nbytes:
        number, unit = text.split()
        text = f"{float(number) + 0.01:.2f} {unit}"
    return text


def at_most(nbytes: int) -> str:
    """:func:`format_bytes`, rounded down: where so much is not too much."""
    text = format_bytes(nbytes)
    if parse_bytes(text) > nbytes:
        number, unit = text.split()
        text = f"{float(number) - 0.01:.2f} {unit}"
    return text
