"""Memory is used again only when nobody refers to it: a torch or Python that counts otherwise is refused at import."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest

from deepoffload.errors import UnsupportedError
from deepoffload.params.reference_counts import LONE, LoneCounts, self_test
from deepoffload.params.torch_private import TESTED_VERSIONS

ROOT = Path(__file__).parents[2]


def test_counts_that_are_off_by_one_are_found() -> None:
    self_test(LONE)
    for field in fields(LoneCounts):
        for off in (-1, 1):
            counts = replace(LONE, **{field.name: getattr(LONE, field.name) + off})
            if field.name == "users_left" and off == 1:
                continue  # the reference count sees all that this one would see
            with pytest.raises(UnsupportedError, match=f"does not tell who refers to memory.*{TESTED_VERSIONS}"):
                self_test(counts)
                pytest.fail(f"{field.name} {off:+}")


def test_one_range_of_versions_is_declared_tested_and_named_in_errors() -> None:
    least, newest = TESTED_VERSIONS.removeprefix("torch ").split(" to ")
    assert f'"torch>={least}"' in (ROOT / "pyproject.toml").read_text()
    default = next(line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith("VERSIONS ?="))
    tested = [pair.split(":") for pair in default.removeprefix("VERSIONS ?=").split()]
    assert [torch.rpartition(".")[0] for _, torch in tested] == [least, newest]
    assert tested[0][0] == "python3.10" and 'requires-python = ">=3.10"' in (ROOT / "pyproject.toml").read_text()
    assert f"{TESTED_VERSIONS}" in (ROOT / "README.md").read_text()
