"""What all tests share: a directory on a real disk for swap files, and paged models that leave nothing behind."""

from __future__ import annotations

import gc
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from deepoffload.io.probe import Bandwidth
from tests.support import cuda, session
from tests.support.disks import disk_of, lies_on
from tests.support.paging import STRICT, Paging, Same
from tests.support.programs import Programs
from tests.support.simulated_gpu.isolation import CHILD

FROZEN = pytest.StashKey[tuple[Path, int]]()
"""The file of the last test for which :func:`freeze_what_was_imported` has looked, and how many modules there were."""

if CHILD not in os.environ:
    cuda.hide()


def pytest_configure() -> None:
    """Small models are fastest on one thread, and several of these sessions may run side by side. On two, each waits
    for threads that the other keeps from running, and takes five times as long."""
    session.pytest_configure()
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"  # of the programs that tests start


def freeze_what_was_imported(item: pytest.Item) -> None:
    """Engines collect garbage before they open, and tests when they end. What has been imported, at first or by a test
    of the same file, is none and need not be looked at again: a tenth of a second of each test behind it."""
    now = item.path, len(sys.modules)
    if item.session.stash.get(FROZEN, None) != now:
        gc.collect()
        gc.freeze()
        item.session.stash[FROZEN] = now


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Every test draws the same numbers, after every other test and in every worker."""
    freeze_what_was_imported(item)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def measured_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bandwidth]:
    """The disk that all temporary directories lie on. It is measured once for this user. What is known of directories
    that only these tests have is kept apart from the user's cache."""
    directory, base = Path(tempfile.gettempdir()), tmp_path_factory.getbasetemp()
    measured = disk_of(directory if directory.stat().st_dev == base.stat().st_dev else base)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        lies_on(measured, Path(measured.path))
        yield measured


@pytest.fixture(scope="session")
def nvme_path(tmp_path_factory: pytest.TempPathFactory, measured_disk: Bandwidth) -> Path:
    """One directory for the whole session."""
    path = tmp_path_factory.mktemp("nvme")
    lies_on(measured_disk, path)
    return path


@pytest.fixture
def tmp_path(tmp_path: Path, measured_disk: Bandwidth) -> Iterator[Path]:
    """As ever. Engines that swap there need not measure it first."""
    kept = lies_on(measured_disk, tmp_path)
    yield tmp_path
    for path in kept:
        path.unlink(missing_ok=True)


@pytest.fixture(scope="session")
def shared_paging(nvme_path: Path) -> Paging:
    return Paging(nvme_path)


@pytest.fixture(scope="session")
def programs() -> Iterator[Programs]:
    """Runs programs in separate processes."""
    made = Programs()
    yield made
    made.close()


@pytest.fixture
def two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.fixture
def paging(shared_paging: Paging) -> Iterator[Paging]:
    """Makes paged models; when the test is over, their swap files are gone."""
    yield shared_paging
    gc.collect()
    assert list(shared_paging.nvme_path.iterdir()) == []


@pytest.fixture(params=STRICT, ids=str)
def same(request: pytest.FixtureRequest, paging: Paging) -> Same:
    """Compares a program on a plain and on a paged model, once with everything evicted, once with the least budget."""
    return Same(paging, request.param)
