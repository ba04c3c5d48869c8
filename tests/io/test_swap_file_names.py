"""Swap files in directories that others may write to: they have no name if possible, and no name is looked up twice."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import warnings

import pytest

from deepoffload.errors import IoFailure
from deepoffload.io.swap_files import warn_of_shared
from deepoffload.io.swap_space import SwapSpace

VICTIM = b"do not write here" * 1000

RACER = """
import os, stat, sys
name, victim = sys.argv[1:]
while True:
    try:
        if stat.S_ISREG(os.lstat(name).st_mode):
            os.rename(name, name + ".old")
            os.symlink(victim, name)
    except FileNotFoundError:
        pass
"""


def test_a_new_file_that_is_swapped_for_a_link_does_not_lead_elsewhere(make_engine, tmp_path):
    victim, name = tmp_path / "victim", tmp_path / "open" / "new"
    name.parent.mkdir()
    victim.write_bytes(VICTIM)
    engine = make_engine(backend="pool")
    racer = subprocess.Popen([sys.executable, "-c", RACER, str(name), str(victim)])
    swapped, until = 0, time.monotonic() + 1
    try:
        while swapped <= 20 or swapped < 1000 and time.monotonic() < until:
            engine.open_file(name, create=True, lock=True).close()
            while not name.is_symlink() and racer.poll() is None:
                pass
            swapped += 1
            assert victim.read_bytes() == VICTIM
            name.unlink()
    finally:
        racer.kill()
        racer.wait()


def test_a_link_is_never_followed(make_engine, tmp_path):
    victim, link = tmp_path / "victim", tmp_path / "link"
    victim.write_bytes(VICTIM)
    link.symlink_to(victim)
    for options in ({}, {"readonly": True}, {"create": True}):
        with pytest.raises(IoFailure, match="ELOOP|EEXIST"):
            make_engine().open_file(link, **options)
    assert victim.read_bytes() == VICTIM


def test_a_pipe_in_place_of_a_file_is_not_waited_for(make_engine, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for readonly in (True, False):
        with pytest.raises(IoFailure, match="EINVAL"):
            make_engine().open_file(tmp_path / "pipe", readonly=readonly)


def test_a_file_that_somebody_else_may_change_is_not_taken_for_ones_own(make_engine, tmp_path):
    engine, file = make_engine(), tmp_path / "file"
    file.write_bytes(bytes(8192))
    file.chmod(0o600)
    engine.open_file(file, own=True).close()
    file.chmod(0o602)
    with pytest.raises(IoFailure, match="EPERM"):
        engine.open_file(file, own=True)
    file.chmod(0o664)
    engine.open_file(file, own=True).close()
    os.link(file, tmp_path / "second name")
    with pytest.raises(IoFailure, match="EPERM"):
        engine.open_file(file, own=True)
    (tmp_path / "second name").unlink()
    if os.geteuid() == 0:
        os.chown(file, 12345, -1)
        with pytest.raises(IoFailure, match="EPERM"):
            engine.open_file(file, own=True)


def test_a_swap_file_never_has_a_name(make_engine, memory, tmp_path):
    """The directory's time of change tells: a name that came and went changes it."""
    os.close(os.open(tmp_path, os.O_TMPFILE | os.O_RDWR))
    os.utime(tmp_path, ns=(10**18, 10**18))
    with SwapSpace(make_engine(), [tmp_path]) as swap:
        extent = swap.allocate(1 << 20)
        data = memory.buffer[: 1 << 20] = os.urandom(1 << 20)
        swap.write(extent, memory.address).wait()
        memory.buffer[: 1 << 20] = bytes(1 << 20)
        swap.read(extent, memory.address).wait()
        assert memory.buffer[: 1 << 20] == data
        (file,) = swap.files
        assert file.direct or file.direct_errno != 0
    assert tmp_path.stat().st_mtime_ns == 10**18


@pytest.mark.parametrize(
    ("mode", "others_group", "who"),
    [
        (0o777, False, "everybody"),
        (0o1777, False, None),
        (0o775, True, "group"),
        (0o1775, True, None),
        (0o755, True, None),
        (0o775, False, None),
        (0o700, False, None),
    ],
)
def test_a_directory_that_others_may_write_to_is_warned_of(tmp_path, mode, others_group, who):
    shared = tmp_path / "shared"
    shared.mkdir()
    if others_group:
        if os.geteuid():
            pytest.skip("only root can give a directory to another group")
        os.chown(shared, -1, 12345)
    shared.chmod(mode)
    if who is None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warn_of_shared([str(shared)])
        return
    with pytest.warns(RuntimeWarning, match=f"{shared} can be written to by .*{who}.*sticky bit.*chmod"):
        warn_of_shared([str(shared)])
