"""In which order some of many equal blocks are chosen to stay in memory."""

from __future__ import annotations


def spread(count: int) -> list[float]:
    """Numbers for ``count`` blocks. In their order blocks are spread evenly, however many of them are taken: then what
    stays on NVMe is needed in an even stream. (The radical inverse in base 2: J. G. van der Corput,
    "Verteilungsfunktionen", 1935.)
    """
    values, digit = [0.0], 0.5
    while len(values) < count:
        values += [value + digit for value in values]
        digit /= 2
    return values[:count]
