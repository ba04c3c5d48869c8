"""Durable steps on disks that fail, are slow, lose their directory, or change bits."""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch

from deepoffload.checkpoint.durable_source import open_durable
from deepoffload.errors import IoFailure, UsageError
from deepoffload.io.durable_store import DurableStore
from deepoffload.io.engine import IoEngine
from deepoffload.io.header_pages import SLOT_PAGES
from deepoffload.io.named_files import durable_path
from deepoffload.io.swap_space import SwapSpace
from deepoffload.runtime import disk
from tests.checkpoint.durable_model import PLACES, Make, Run, image, trained
from tests.checkpoint.training import ALL
from tests.support.loops import assert_same_bits


@contextmanager
def failing(rules: str) -> Iterator[None]:
    """Engines that are made meanwhile have a disk that fails by these rules (``csrc/aio/backend_fault.c``)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk, "IoEngine", partial(IoEngine, fault_script=rules))
        yield


@pytest.mark.parametrize("nth", range(1, 40) if ALL else (1, 4, 9, 20))
@pytest.mark.parametrize("kind", ["errno=5", "errno=28", "errno=122", "short=0"] if ALL else ["errno=28", "short=0"])
def test_a_write_that_fails_while_committing(kind: str, nth: int, make: Make, tmp_path: Path) -> None:
    """One that fails at any moment is told, what was durable stays so, and the run and its commits go on."""
    expected = trained(make, place="host")
    with failing(f"op=write after=1 nth={nth} {kind}"):
        run = make("host")
    assert run.state.resume() == 2
    assert_same_bits(expected, run.everything())
    failures = 0
    for _ in range(3):
        for attempt in (run.step, run.state.commit):
            try:
                attempt()
            except IoFailure as failure:
                failures += 1
                assert failure.errno in (errno.EIO, errno.ENOSPC, errno.EDQUOT) and "swap" in str(failure)
                image(tmp_path / "swap", tmp_path / "left")
                left = Run(**PLACES["host"], durability={"every": 1, "path": str(tmp_path / "left")})
                assert left.state.resume() >= 2
                left.close()
                if attempt == run.step:
                    run.optimizer.step()
                    run.schedule.step()
                    run.optimizer.zero_grad()
    run.state.commit(wait=True)
    now, step = run.everything(), run.state.step
    run.close()
    run = make("host")
    assert run.state.resume() == step
    assert_same_bits(now, run.everything())
    assert failures <= 1


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("rule", "message"), [("errno=5", "EIO"), ("short=0", "ENODATA"), ("flip=77", "damaged")])
def test_a_read_that_fails_while_resuming(rule: str, message: str, make: Make, tmp_path: Path) -> None:
    """One of the record: no run begins. One of the state: the model is half loaded until a resume succeeds."""
    expected = trained(make, place="all")
    refused = half = 0
    for nth in [*range(1, 6), *range(6, 300, 1 if ALL else 12)]:
        run = None
        try:
            with failing(f"op=read nth={nth} {rule}"):
                run = make("all")
            step = run.state.resume()
        except (IoFailure, UsageError) as error:
            assert message in str(error) and str(tmp_path / "swap") in str(error)
            if run is None:
                refused += 1
                continue
            half += 1
            step = run.state.resume() if "of durable step 1" not in str(error) else 1
        else:
            assert step == 2 or "flip" in rule, "a damaged record leaves the one before it"
            if step == 2 and nth > len(SLOT_PAGES):
                run.close()
                break  # it reads no more than that
        if step == 2:
            assert_same_bits(expected, run.everything())
        run.close()
    assert refused and half
    run = make("all")
    assert run.state.resume() == 2
    assert_same_bits(expected, run.everything())


@pytest.mark.parametrize("rules", ["delay_ms=15", "permille=600 seed=3 short=5000", "jitter_us=9000 seed=5"])
def test_disks_that_are_slow_or_stop_short(rules: str, make: Make) -> None:
    """Nothing fails, and no step is lost."""
    expected = []
    for place, rule in (("host", ""), ("all", rules)):
        with failing(rule):
            run = make(place)
        for _ in range(4):
            run.step()
            run.state.commit()
        expected.append(run.everything())
        run.close()
        with failing(rule):
            run = make(place)
        assert run.state.resume() == 4
        expected.append(run.everything())
        run.state.discard()
        run.close()
    for found in expected[1:]:
        assert_same_bits(expected[0], found)


@pytest.mark.parametrize("replaced", [False, True])
def test_a_directory_that_is_removed(replaced: bool, make: Make, tmp_path: Path) -> None:
    """What is written to a file without a name would be gone with the process: commits say so, and training goes on."""
    plain = Run(host_budget="64MiB")
    for _ in range(3):
        plain.step()
    expected = plain.everything()
    plain.close()
    run, swap = make(), tmp_path / "swap"
    run.step()
    run.state.commit(wait=True)
    shutil.rmtree(swap)
    if replaced:
        random_state = torch.get_rng_state()
        swap.mkdir()
        make("host")
        torch.set_rng_state(random_state)
    for _ in range(2):
        run.step()
        with pytest.raises(IoFailure, match="was removed while this run uses it.*state.save") as caught:
            run.state.commit(wait=True)
        assert caught.value.errno == errno.ENOENT and caught.value.filename == durable_path(str(swap))
    swap.mkdir(exist_ok=True)  # where copies of what is looked at lie
    assert_same_bits(expected, run.everything())
    run.state.save(tmp_path / "checkpoints")
    run.close()
    assert os.path.exists(durable_path(str(swap))) == replaced


def test_a_damaged_extent_is_named(make: Make, tmp_path: Path) -> None:
    trained(make)
    path = Path(durable_path(str(tmp_path / "swap")))
    data = path.read_bytes()
    run = make()
    (store,) = [run.engine.durability.store]
    extents = [stored.extent for stored in store.found.extents]
    run.close()
    for extent in extents:
        part = extent.pieces[0]
        with open(path, "r+b") as file:
            file.seek(part.offset + 5)
            file.write(bytes([data[part.offset + 5] ^ 1]))
        run = make()
        with pytest.raises(UsageError, match=rf"{path} is damaged between offset \d+ and \d+, in .* of durable step 2"):
            run.state.resume()
        if extent is not extents[-1]:  # what lies in no block is read before anything is changed
            with pytest.raises(UsageError, match="half loaded"):
                run.step()
        run.close()
        path.write_bytes(data)


@pytest.mark.timeout(1200)
def test_random_bits_of_extents(make: Make, tmp_path: Path) -> None:
    """Each is recognised, in any tensor; bits that belong to no durable step are not."""
    trained(make)
    swap = tmp_path / "swap"
    dice = random.Random(3)
    with IoEngine() as io, SwapSpace(io, [swap], named=True) as space:
        found = DurableStore(space).found
        assert found is not None
        lengths = [stored.extent.nbytes for stored in found.extents]

        def read_all() -> None:
            with open_durable(space, found) as source:
                for tensor in (*source.weights.values(), *source.arrays.values()):
                    tensor.whole()

        read_all()
        with open(durable_path(str(swap)), "r+b", buffering=0) as file:
            for _ in range(1000 if ALL else 80):
                (number,) = dice.choices(range(len(lengths)), lengths)
                extent = found.extents[number].extent
                assert len(extent.pieces) == 1
                at, bit = extent.pieces[0].offset + dice.randrange(extent.nbytes), dice.randrange(8)
                flip(file.fileno(), at, bit)
                with pytest.raises(UsageError, match=r"is damaged between offset \d+ and \d+, in .* of durable step 2"):
                    read_all()
                flip(file.fileno(), at, bit)
        read_all()


def flip(file: int, offset: int, bit: int) -> None:
    os.pwrite(file, bytes([os.pread(file, 1, offset)[0] ^ 1 << bit]), offset)
