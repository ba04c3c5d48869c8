from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepoffload.config.units import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("value", "count"),
    [
        (0, 0),
        (1 << 40, 1 << 40),
        (1.5e9, 1_500_000_000),
        ("7", 7),
        ("1e9", 10**9),
        ("2GiB", 2 << 30),
        ("2 gib", 2 << 30),
        (" 500MB ", 500 * 10**6),
        ("1.5KiB", 1536),
        (".5kB", 500),
        ("3.B", 3),
        ("0.3GB", 300_000_000),  # 0.3 * 1e9 in doubles is 299999999.99999994
        ("0.1GiB", 107_374_182),
        ("9007199254740993B", 2**53 + 1),
        ("4PiB", 4 << 50),
    ],
)
def test_values(value, count):
    assert parse_bytes(value) == count


@pytest.mark.parametrize(
    "value",
    ["", "GiB", "2G", "2Gb/s", "-1GB", "1.5", "1,5GB", "0x10", "1e99GB", "nan", "9" * 50, 1.5, -1, float("inf")]
    + [float("nan"), True, None, [1], 1e300, -1e300, 10**400, 1 << 63, "1e30GiB", "8192PiB"],
)
def test_refused(value):
    with pytest.raises(ValueError, match="bytes|unit") as caught:
        parse_bytes(value)
    assert len(str(caught.value)) < 150


def test_an_ambiguous_unit_is_explained():
    with pytest.raises(ValueError, match=r'write "1.5GiB" \(1024\) or "1.5GB" \(1000\)'):
        parse_bytes("1.5G")


@given(st.integers(0, 1 << 52))
def test_whole_bytes_survive_text(count):
    assert parse_bytes(str(count)) == parse_bytes(f"{count}B") == count
    assert parse_bytes(f"{count}KiB") == count * 1024


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        ((1 << 20) - 1, "1.00 MiB"),
        (3 << 29, "1.50 GiB"),
        (5000 << 50, "5000.00 PiB"),
    ],
)
def test_shown(count, text):
    assert format_bytes(count) == text
