"""Checkpoints that DeepSpeed 0.19.8 has written (``tests/support/deepspeed_peer.py fixtures``)."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

ARCHIVE = Path(__file__).parents[1] / "data" / "deepspeed_0.19.8.tar.xz"


@pytest.fixture(scope="session")
def fixtures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Their folder. Tests that change something copy it first."""
    place = tmp_path_factory.mktemp("deepspeed")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(place)  # our own archive; Python 3.10 and 3.11 know filters from later releases on
    return place
