"""Saving that cannot succeed: nothing half-written appears, and an earlier save stays as it was."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import deepoffload
from deepoffload.checkpoint.directory import publish, staging
from deepoffload.errors import IoFailure, UsageError
from tests.support.disks import largest_file, tmpfs
from tests.support.waiting import wait_until


def layer(value: float, width: int = 512) -> nn.Module:
    model = nn.Linear(width, width)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(value)
    return model


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("shard", ["5GB", "100KB"])
def test_a_write_that_fails_half_way_leaves_the_earlier_save(shard: str, tmp_path: Path) -> None:
    deepoffload.save_pretrained(layer(1.0), tmp_path, max_shard_size=shard)
    before = contents(tmp_path)
    with largest_file(300_001), pytest.raises(IoFailure, match="EFBIG") as caught:
        deepoffload.save_pretrained(layer(2.0), tmp_path, max_shard_size=shard)
    assert contents(tmp_path) == before
    assert caught.value.errno == errno.EFBIG
    assert caught.value.offset == 300_001
    assert "safetensors" in caught.value.filename


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    with tmpfs(tmp_path / "small", 2) as where:
        yield where


def test_too_little_space_is_seen_before_anything_is_written(small_disk: Path) -> None:
    with pytest.raises(IoFailure, match="ENOSPC.*Nothing has been written"):
        deepoffload.save_pretrained(layer(1.0, width=1024), small_disk / "out")
    assert not (small_disk / "out").exists()


def test_a_disk_that_fills_up_meanwhile(small_disk: Path, tmp_path: Path) -> None:
    from deepoffload.checkpoint.safetensors_file import Entry, write_file

    def pieces() -> Iterator[torch.Tensor]:
        yield from torch.zeros(1024, 1024)

    with pytest.raises(IoFailure, match="ENOSPC.*free some space"):
        entry = Entry("weight", torch.float32, (1024, 1024), 4 << 20, pieces)
        write_file(str(small_disk / "model.safetensors"), [entry], {}, lambda nbytes: None)


def test_directories_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here first")
    with pytest.raises(UsageError, match="is a file"):
        deepoffload.save_pretrained(layer(1.0), tmp_path / "file")
    with pytest.raises(UsageError, match="cannot be made"):
        deepoffload.save_pretrained(layer(1.0), tmp_path / "file" / "below")
    assert (tmp_path / "file").read_text() == "here first"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_without_permission(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(UsageError, match="not writable"):
            deepoffload.save_pretrained(layer(1.0), tmp_path)
    finally:
        tmp_path.chmod(0o700)


@pytest.mark.parametrize("earlier", ["5GB", "100KB", "300KB"])
@pytest.mark.parametrize("later", ["5GB", "100KB", "300KB"])
def test_a_later_save_replaces_an_earlier_one_whatever_its_shards(earlier: str, later: str, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("kept")
    (tmp_path / "fresh").mkdir()
    deepoffload.save_pretrained(nn.Sequential(*[layer(1.0, 200) for _ in range(3)]), tmp_path, max_shard_size=earlier)
    model = nn.Sequential(*[layer(2.0, 200) for _ in range(3)])
    deepoffload.save_pretrained(model, tmp_path, max_shard_size=later)
    deepoffload.save_pretrained(model, tmp_path / "fresh", max_shard_size=later)
    expected = contents(tmp_path / "fresh")
    found = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    assert found == {**expected, "notes.txt": b"kept"}


def test_at_no_moment_do_old_and_new_shards_mix(tmp_path: Path) -> None:
    """Whenever publishing is interrupted, what an index names is of one save."""
    for interrupted_after in range(6):
        directory = tmp_path / str(interrupted_after)
        deepoffload.save_pretrained(layer(1.0, 200), directory, max_shard_size="1KB")
        with staging(str(directory)) as staged:
            deepoffload.save_pretrained(layer(2.0, 200), os.path.join(staged, "new"), max_shard_size="1KB")
            for path in Path(staged, "new").iterdir():
                path.rename(Path(staged, path.name))
            os.rmdir(os.path.join(staged, "new"))
            _interrupted(publish, interrupted_after, staged, str(directory))
        index = directory / "model.safetensors.index.json"
        values = {float(t.flatten()[0]) for path in directory.glob("*.safetensors") for t in load_file(path).values()}
        assert not index.exists() or len(values) == 1


class Interrupted(BaseException):
    pass


def _interrupted(function: object, moves: int, *args: object) -> None:
    """Run ``function`` until it has moved or removed that many files."""
    seen = 0

    def trace(frame: object, event: str, called: object) -> None:
        nonlocal seen
        if event == "c_call" and called in (os.replace, os.unlink):
            if seen == moves:
                raise Interrupted
            seen += 1

    sys.setprofile(trace)
    try:
        function(*args)  # type: ignore[operator]
    except Interrupted:
        pass
    finally:
        sys.setprofile(None)


KILLED = """
import sys, torch, deepoffload
from torch import nn
model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(8)])
print("ready", flush=True)
while True:
    deepoffload.save_pretrained(model, sys.argv[1], max_shard_size="5MB")
"""


def test_kill_leaves_whole_files_only_and_the_next_save_tidies_up(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", KILLED, tmp_path / "out"], stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline()

    def is_stopped_in_a_save() -> bool:
        child.send_signal(signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        saving = bool(list((tmp_path / "out").glob(".deepoffload-save-*/*")))
        if not saving:
            child.send_signal(signal.SIGCONT)
        return saving

    wait_until(is_stopped_in_a_save)
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    for path in (tmp_path / "out").glob("*.safetensors"):
        load_file(path)
    (leftover,) = (tmp_path / "out").glob(".deepoffload-save-*")
    deepoffload.save_pretrained(layer(3.0), tmp_path / "out")
    assert not leftover.exists()
    assert float(load_file(tmp_path / "out" / "model.safetensors")["bias"][0]) == 3.0
    assert sorted(contents(tmp_path / "out")) == ["model.safetensors"]


def test_a_save_that_is_under_way_is_not_tidied_up(tmp_path: Path) -> None:
    with staging(str(tmp_path)) as other:
        Path(other, "model.safetensors").write_bytes(b"half")
        deepoffload.save_pretrained(layer(1.0), tmp_path)
        assert Path(other, "model.safetensors").read_bytes() == b"half"
