"""The durable store: what it recovers after a death and a power failure, what it refuses, and failing disks."""

from __future__ import annotations

import dataclasses
import errno
import os
import random
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from deepoffload.errors import ConfigError, IoFailure, UsageError
from deepoffload.io.durable_store import DurableStore
from deepoffload.io.engine import IoEngine, IoFile
from deepoffload.io.extents import Extent
from deepoffload.io.header_pages import HEADER_BYTES, MARK_PAGE, OWNER_PAGE, SLOT_PAGES
from deepoffload.io.named_files import durable_path
from deepoffload.io.step_record import Slot, parse_body
from deepoffload.io.swap_files import reclaim_stale
from deepoffload.io.swap_space import SwapSpace
from deepoffload.native.aio import PAGE_BYTES, HostMapping
from tests.io.power_failure import JournalEngine, images_after

ALL = os.environ.get("CHECKPOINTS") == "all"
PROGRAMS, CUTS = (20, 200) if ALL else (2, 25)


class Blocks:
    """Blocks as a tier manager writes them: in place, or to a fresh extent where theirs is frozen."""

    def __init__(self, space: SwapSpace, memory: HostMapping) -> None:
        self.space, self.memory = space, memory
        self.extents: dict[int, Extent] = {}
        self.content: dict[int, bytes] = {}

    def write(self, number: int, data: bytes) -> None:
        old = self.extents.get(number)
        if old is None or self.space.is_frozen(old) or old.nbytes != len(data):
            if old is not None:
                self.space.free(old)
            self.extents[number] = self.space.allocate(len(data))
        self.memory.buffer[: len(data)] = data
        self.space.write(self.extents[number], self.memory.address).wait()
        self.content[number] = data

    def publish(self, store: DurableStore, step: int) -> None:
        numbers = sorted(self.extents)
        store.publish(step, [self.extents[n] for n in numbers], repr(numbers).encode())


def read(space: SwapSpace, memory: HostMapping, extent: Extent) -> bytes:
    memory.buffer[: extent.nbytes] = bytes(extent.nbytes)
    space.read(extent, memory.address).wait()
    return bytes(memory.buffer[: extent.nbytes])


def found_content(space: SwapSpace, store: DurableStore, memory: HostMapping) -> tuple[int, dict[int, bytes]]:
    """The step that the store has found, and its blocks; step 0 where there is none."""
    if store.found is None:
        return 0, {}
    numbers = eval(store.found.content)  # a list of numbers
    extents = [stored.extent for stored in store.found.extents]
    return store.found.step, {n: read(space, memory, e) for n, e in zip(numbers, extents, strict=True)}


def random_program(engine: JournalEngine, paths: list[Path], memory: HostMapping, dice: random.Random):
    """Runs it; the steps with their blocks, and when each was begun and durable, in events."""
    steps: dict[int, dict[int, bytes]] = {0: {}}
    times: list[tuple[int, int]] = [(0, 0)]
    with SwapSpace(engine, paths, named=True) as space:
        store, blocks = DurableStore(space), Blocks(space, memory)
        for step in range(1, 8):
            for _ in range(dice.randrange(1, 6)):
                blocks.write(dice.randrange(6), dice.randbytes(dice.choice((100, 4096, 9000, 20_000))))
            begun = len(engine.events)
            blocks.publish(store, step)
            steps[step] = dict(blocks.content)
            times.append((begun, len(engine.events)))
        for _ in range(5):
            blocks.write(dice.randrange(6), dice.randbytes(9000))
        sizes = {file.path: os.path.getsize(file.path) for file in space.files}
    return steps, times, sizes


def after_power_failure(engine, events, sizes, memory, dice) -> tuple[int, dict[int, bytes]]:
    """What the store finds when the power fails after ``events``."""
    for path, image in images_after(events, sizes, dice).items():
        Path(path).write_bytes(image)
    with SwapSpace(engine, sorted({os.path.dirname(path) for path in sizes}), named=True) as space:
        return found_content(space, DurableStore(space), memory)


@pytest.mark.parametrize("paths", [1, 2])
def test_a_power_failure_at_any_moment(make_engine, memory, tmp_path, paths: int):
    directories = [tmp_path / str(number) for number in range(paths)]
    for directory in directories:
        directory.mkdir()
    seen = set()
    for seed in range(PROGRAMS):
        dice = random.Random(seed)
        engine, recovering = JournalEngine(), make_engine()
        steps, times, sizes = random_program(engine, directories, memory, dice)
        for _ in range(CUTS):
            cut = dice.randrange(len(engine.events) + 1)
            step, content = after_power_failure(recovering, engine.events[:cut], sizes, memory, dice)
            durable = max(n for n, (_, done) in enumerate(times) if done <= cut)
            begun = max(n for n, (begin, _) in enumerate(times) if begin <= cut)
            assert durable <= step <= begun
            assert content == steps[step]
            seen.add(step)
        engine.close()
        for path in sizes:
            os.unlink(path)
    assert len(seen) > 4


def test_without_syncs_a_power_failure_loses_steps(make_engine, memory, tmp_path):
    """The simulated disk is worth something: the same test fails when nothing is synced."""
    dice, engine = random.Random(1), JournalEngine()
    engine.note_syncs, recovering = False, make_engine()
    steps, times, sizes = random_program(engine, [tmp_path], memory, dice)
    wrong = 0
    for _ in range(CUTS):
        cut = dice.randrange(len(engine.events) + 1)
        durable = max(n for n, (_, done) in enumerate(times) if done <= cut)
        try:
            step, content = after_power_failure(recovering, engine.events[:cut], sizes, memory, dice)
        except (UsageError, IoFailure):
            wrong += 1
        else:
            wrong += step < durable or content != steps[step]
    engine.close()
    assert wrong > CUTS // 4


@pytest.fixture
def two_steps(make_engine, memory, tmp_path) -> Path:
    """A directory whose durable state has step 2, and the record of step 1 in the other place."""
    directory = tmp_path / "swap"
    directory.mkdir()
    with SwapSpace(make_engine(), [directory], named=True) as space:
        store, blocks = DurableStore(space), Blocks(space, memory)
        blocks.write(0, b"a" * 300_000)
        blocks.publish(store, 1)
        blocks.write(0, b"b" * 300_000)
        blocks.publish(store, 2)
    return directory


def flip(path: Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 0x10]))


def slots_of(path: Path) -> list[Slot | None]:
    data = path.read_bytes()
    return [Slot.of(data[page * PAGE_BYTES : (page + 1) * PAGE_BYTES]) for page in SLOT_PAGES]


def test_every_byte_of_a_slot_counts(two_steps: Path):
    data = Path(durable_path(str(two_steps))).read_bytes()
    for number in SLOT_PAGES:
        page = data[number * PAGE_BYTES : (number + 1) * PAGE_BYTES]
        assert Slot.of(page) is not None
        for offset in range(PAGE_BYTES):
            flipped = bytearray(page)
            flipped[offset] ^= 0x10
            assert Slot.of(bytes(flipped)) is None


def test_a_torn_record_leaves_the_one_before(make_engine, memory, two_steps: Path):
    path = Path(durable_path(str(two_steps)))
    newest = max((slot for slot in slots_of(path) if slot), key=lambda slot: slot.sequence)
    flip(path, SLOT_PAGES[slots_of(path).index(newest)] * PAGE_BYTES + 40)
    with SwapSpace(make_engine(), [two_steps], named=True) as space:
        assert found_content(space, DurableStore(space), memory) == (1, {0: b"a" * 300_000})


def test_damaged_records_are_refused(make_engine, two_steps: Path):
    path = Path(durable_path(str(two_steps)))
    newest = max((slot for slot in slots_of(path) if slot), key=lambda slot: slot.sequence)
    begin = newest.body.pieces[0].offset
    engine = make_engine()
    for offset in range(0, newest.body.nbytes, 1 if ALL else 31):
        flip(path, begin + offset)
        with SwapSpace(engine, [two_steps], named=True) as space:
            with pytest.raises(UsageError, match="the record of step 2 is damaged"):
                DurableStore(space)
        flip(path, begin + offset)
    for page in SLOT_PAGES:
        flip(path, page * PAGE_BYTES + 40)
    with SwapSpace(engine, [two_steps], named=True) as space:
        with pytest.raises(UsageError, match="both records of the durable state are damaged"):
            DurableStore(space)


def test_every_byte_of_the_other_pages(make_engine, two_steps: Path):
    """The page that says which files belong together is checked; the one that says who uses them is for people."""
    path, engine = Path(durable_path(str(two_steps))), make_engine()
    for offset in range(0, PAGE_BYTES, 1 if ALL else 61):
        flip(path, MARK_PAGE * PAGE_BYTES + offset)
        with SwapSpace(engine, [two_steps], named=True) as space:
            with pytest.raises(UsageError, match=f"{path} is damaged at offset {MARK_PAGE * PAGE_BYTES}"):
                DurableStore(space)
        flip(path, MARK_PAGE * PAGE_BYTES + offset)
        flip(path, OWNER_PAGE * PAGE_BYTES + offset)
        with SwapSpace(engine, [two_steps], named=True) as space:
            assert DurableStore(space).step == 2


def test_bodies_that_somebody_made(two_steps: Path):
    data = Path(durable_path(str(two_steps))).read_bytes()
    slot = next(slot for slot in slots_of(Path(durable_path(str(two_steps)))) if slot)
    part = slot.body.pieces[0]
    body = data[part.offset : part.offset + slot.body.nbytes]
    dice = random.Random(5)
    parse_body(body)
    for _ in range(10_000 if ALL else 1000):
        made = bytearray(body[: dice.randrange(len(body) + 1)] if dice.random() < 0.2 else body)
        for _ in range(dice.randrange(1, 4)):
            if made:
                at = dice.randrange(len(made))
                made[at : at + 4] = dice.randbytes(dice.choice((1, 4)))
        try:
            extents, _, _ = parse_body(bytes(made))
        except UsageError:
            continue
        assert len(extents) <= len(made)


def test_extents_that_overlap_are_refused(make_engine, memory, tmp_path):
    with SwapSpace(make_engine(), [tmp_path], named=True) as space:
        store, blocks = DurableStore(space), Blocks(space, memory)
        blocks.write(0, b"a" * 9000)
        extent = blocks.extents[0]
        store.publish(1, [extent, extent], b"")
    with SwapSpace(make_engine(), [tmp_path], named=True) as space:
        with pytest.raises(UsageError, match="extents overlap"):
            DurableStore(space)


def test_paths_in_another_order_or_missing(make_engine, memory, tmp_path):
    directories = [tmp_path / name for name in ("one", "two")]
    for directory in directories:
        directory.mkdir()
    with SwapSpace(make_engine(), directories, named=True) as space:
        blocks, store = Blocks(space, memory), DurableStore(space)
        blocks.write(0, b"c" * 5_000_000)
        blocks.publish(store, 1)
    for wrong in ([directories[1]], [directories[0]], directories[::-1]):
        with SwapSpace(make_engine(), wrong, named=True) as space:
            with pytest.raises(UsageError, match="name the same paths in the same order") as caught:
                DurableStore(space)
        assert str(directories[0]) in str(caught.value)
    with SwapSpace(make_engine(), directories, named=True) as space:
        assert found_content(space, DurableStore(space), memory)[0] == 1


def test_a_second_run_is_refused_and_told_who_has_it(make_engine, two_steps: Path):
    program = (
        "import sys\nfrom deepoffload.io.engine import IoEngine\nfrom deepoffload.io.swap_space import SwapSpace\n"
        "space = SwapSpace(IoEngine(), [sys.argv[1]], named=True)\nprint('open', flush=True)\nsys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(two_steps)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "open\n"
        with pytest.raises(UsageError, match=rf"is used by process {other.pid} on .*; end that run"):
            SwapSpace(make_engine(), [two_steps], named=True)
        other.communicate("", timeout=200)
    SwapSpace(make_engine(), [two_steps], named=True).close()


def test_a_lock_that_a_dead_runs_child_still_holds_is_waited_for(make_engine, two_steps: Path):
    program = (
        "import os, sys, time\nfrom deepoffload.io.engine import IoEngine\n"
        "from deepoffload.io.swap_space import SwapSpace\n"
        "space = SwapSpace(IoEngine(), [sys.argv[1]], named=True)\n"
        "if not os.fork():\n    sys.stdin.read()\n    os._exit(0)\n"
        "print('forked', flush=True)\nos.kill(os.getpid(), 9)"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", program, str(two_steps)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdin is not None and other.stdout is not None and other.stdout.readline() == "forked\n"
    other.wait(200)
    closer = threading.Timer(0.5, other.stdin.close)
    closer.start()
    SwapSpace(make_engine(), [two_steps], named=True).close()
    closer.join()
    other.stdout.close()


def test_a_file_that_was_cut_off_is_not_taken_for_a_new_one(make_engine, two_steps: Path):
    path = Path(durable_path(str(two_steps)))
    whole = path.read_bytes()
    for content in (whole[:10_000], whole[:100], b"somebody's text"):
        path.write_bytes(content)
        with pytest.raises(UsageError, match=rf"{path} has {len(content)} bytes: it was cut off, or is no file of"):
            SwapSpace(make_engine(), [two_steps], named=True)
        assert path.read_bytes() == content
    for content in (b"", bytes(PAGE_BYTES)):  # one whose making was interrupted
        path.write_bytes(content)
        SwapSpace(make_engine(), [two_steps], named=True).close()


def test_what_is_no_file_of_ours_is_not_written_to(make_engine, tmp_path):
    """Also not its first page, which says who uses the file; nor by a second name of it."""
    path = Path(durable_path(str(tmp_path)))
    for content in (b"somebody's text" * 5000, bytes(PAGE_BYTES) + b"x" * HEADER_BYTES):
        path.write_bytes(content)
        with pytest.raises(UsageError, match=f"{path} is no file of deepoffload's; move it away"):
            SwapSpace(make_engine(), [tmp_path], named=True)
        assert path.read_bytes() == content
    path.unlink()
    SwapSpace(make_engine(), [tmp_path], named=True).close()
    content = path.read_bytes()
    os.link(path, tmp_path / "victim")
    with pytest.raises(UsageError, match=f"{path} belongs to another user, .* or has a second name"):
        SwapSpace(make_engine(), [tmp_path], named=True)
    assert path.read_bytes() == content


def test_memory_is_no_place_for_it(make_engine):
    with pytest.raises(ConfigError, match="/dev/shm is in memory"):
        SwapSpace(make_engine(), ["/dev/shm"], named=True)
    assert not os.path.exists(durable_path("/dev/shm"))


def test_what_clears_away_stale_files_leaves_it_alone(two_steps: Path):
    assert reclaim_stale(str(two_steps)) == []
    assert os.path.exists(durable_path(str(two_steps)))


def test_giving_it_up(make_engine, memory, two_steps: Path):
    with SwapSpace(make_engine(), [two_steps], named=True) as space:
        store = DurableStore(space)
        assert store.found is not None and space.used_bytes > 0
        store.discard()
        assert store.step is None and space.used_bytes == HEADER_BYTES
        store.discard()
    with SwapSpace(make_engine(), [two_steps], named=True) as space:
        store, blocks = DurableStore(space), Blocks(space, memory)
        assert store.found is None
        blocks.write(0, b"d" * 5000)
        blocks.publish(store, 7)
        store.remove_if_empty()
        assert os.path.exists(durable_path(str(two_steps)))
        store.discard()
        store.remove_if_empty()
    assert os.listdir(two_steps) == []


def test_files_that_are_removed(make_engine, memory, two_steps: Path):
    """Nothing can be durable in a file without a name; one that another run has made in its place stays."""
    with SwapSpace(make_engine(), [two_steps], named=True) as space:
        store, blocks = DurableStore(space), Blocks(space, memory)
        store.discard()
        shutil.rmtree(two_steps)
        blocks.write(0, b"e" * 5000)
        for _ in range(2):
            with pytest.raises(IoFailure, match="ENOENT.*was removed while this run uses it") as caught:
                blocks.publish(store, 3)
            assert caught.value.filename == durable_path(str(two_steps))
        two_steps.mkdir()
        with SwapSpace(make_engine(), [two_steps], named=True) as other:
            newer, others = DurableStore(other), Blocks(other, memory)
            others.write(0, b"f" * 5000)
            others.publish(newer, 1)
        with pytest.raises(IoFailure, match="was removed while this run uses it"):
            blocks.publish(store, 3)
        store.remove_if_empty()
    with SwapSpace(make_engine(), [two_steps], named=True) as space:
        assert found_content(space, DurableStore(space), memory) == (1, {0: b"f" * 5000})


class FailingFile(IoFile):
    """Its syncs fail while the class says so."""

    failing = False

    def sync(self) -> None:
        if type(self).failing:
            raise IoFailure("sync", errno.EIO, self.path, 0, 0)
        super().sync()


class FailingSyncs(JournalEngine):
    def open_file(self, path, **options):
        file = IoEngine.open_file(self, path, **options)
        return FailingFile(**{field.name: getattr(file, field.name) for field in dataclasses.fields(file)})


def test_after_a_sync_that_failed_nothing_counts_as_durable(memory, tmp_path):
    engine = FailingSyncs()
    try:
        with SwapSpace(engine, [tmp_path], named=True) as space:
            store, blocks = DurableStore(space), Blocks(space, memory)
            blocks.write(0, b"a" * 9000)
            blocks.publish(store, 1)
            blocks.write(0, b"b" * 9000)
            FailingFile.failing = True
            with pytest.raises(IoFailure, match="sync failed with EIO"):
                blocks.publish(store, 2)
            FailingFile.failing = False
            with pytest.raises(IoFailure, match="no step has been made durable since an earlier failure"):
                blocks.publish(store, 3)
            assert store.step == 1
    finally:
        FailingFile.failing = False
        engine.close()


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("nth", [1, 2])
def test_writes_of_a_record_that_fail(make_engine, memory, tmp_path, code: int, nth: int):
    """The body's, and the slot's. The step before is there, and the same call makes the step later."""
    with SwapSpace(make_engine(), [tmp_path], named=True) as space:
        blocks = Blocks(space, memory)
        blocks.write(0, b"a" * 9000)
        blocks.publish(DurableStore(space), 1)
    before = 2  # the page of the owner, and the block
    engine = make_engine(fault_script=f"op=write nth={before + nth} errno={code}")
    with SwapSpace(engine, [tmp_path], named=True) as space:
        store, blocks = DurableStore(space), Blocks(space, memory)
        blocks.write(0, b"b" * 9000)
        with pytest.raises(IoFailure, match=errno.errorcode[code]):
            blocks.publish(store, 2)
        assert store.step == 1
        copy = tmp_path / "copy"
        copy.mkdir()
        shutil.copyfile(durable_path(str(tmp_path)), durable_path(str(copy)))
        with SwapSpace(make_engine(), [copy], named=True) as other:
            assert found_content(other, DurableStore(other), memory) == (1, {0: b"a" * 9000})
        blocks.publish(store, 2)
        assert store.step == 2
    with SwapSpace(make_engine(), [tmp_path], named=True) as space:
        assert found_content(space, DurableStore(space), memory) == (2, {0: b"b" * 9000})
        assert space.used_bytes < 40_000 + HEADER_BYTES
