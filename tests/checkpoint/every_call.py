"""Saves, loads, commits and resumes, in each of which one system call after the other fails.

    python -m tests.checkpoint.every_call DIRECTORY OPERATION,... STRIDE ERRNO...

Of the calls that an operation makes, each ``STRIDE``-th fails, once with each errno (0: a write that is short). Run by
``tests.support.failing_calls``. Where one fails: a clear error or none, and all that was there before is as it was.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import deepoffload
from deepoffload.checkpoint.source import open_checkpoint
from deepoffload.checkpoint.tags import known_tags, latest_tag
from deepoffload.errors import DeepOffloadError, UsageError
from tests.checkpoint.durable_runs import digest
from tests.checkpoint.training import adamw
from tests.support.disks import folder_on_disk
from tests.support.failing_calls import FailingCalls
from tests.support.models import TinyGPT, batch, next_token_loss


class Run:
    """A small model that trains; each step depends on its number alone."""

    def __init__(self, **said: Any) -> None:
        torch.manual_seed(0)
        with deepoffload.offload_context(host_budget="400KiB", **said) as context:
            self.model = TinyGPT(width=32, depth=2)
        self.engine = context.engine
        self.optimizer = adamw(self.model)
        self.state = deepoffload.TrainingState(self.model, self.optimizer)

    def step(self, number: int) -> None:
        torch.manual_seed(number)
        next_token_loss(self.model, batch(number)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def digest(self) -> int:
        return digest(self.model, self.optimizer)


class Operation:
    """What is done again and again. ``prepare`` comes before, ``examine`` after it, with the error that it raised."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.swap = directory.with_name("elsewhere")
        directory.parent.mkdir()
        for path in (directory, self.swap):
            folder_on_disk(path)

    def prepare(self) -> None: ...

    def act(self) -> None: ...

    def examine(self, error: DeepOffloadError | None) -> None: ...

    def end(self) -> None: ...


class Saving(Operation):
    """To tags that are new and to one that is there, with older ones removed."""

    waits = True

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.run = Run(nvme_path=str(self.swap))
        self.run.step(1)
        self.run.state.save(self.directory, "same")
        self.expected = self.run.digest()
        self.saves = 0

    def prepare(self) -> None:
        self.saves += 1
        self.tag = "same" if self.saves % 2 else f"save{self.saves}"
        self.before = self.saved()

    def saved(self) -> dict[str, bytes]:
        """Every checkpoint by its manifest; under "" what ``latest`` names."""
        found = {tag: (self.directory / tag / "manifest.json").read_bytes() for tag in known_tags(str(self.directory))}
        return {**found, "": str(latest_tag(str(self.directory))).encode()}

    def act(self) -> None:
        handle = self.run.state.save(self.directory, self.tag, keep_last=2, wait=self.waits)
        if not isinstance(handle, str):
            handle.wait()

    def examine(self, error: DeepOffloadError | None) -> None:
        after = self.saved()
        if error is None:
            assert after[""] == self.tag.encode()
        elif "The checkpoint is complete in" in str(error):  # ``latest`` could not be written
            assert all(after[tag] == data for tag, data in self.before.items() if tag not in ("", self.tag))
        else:
            assert after == self.before
        for tag in known_tags(str(self.directory)):
            with open_checkpoint(str(self.directory / tag), lambda nbytes: None) as source:
                for file in source.manifest.files:
                    source.reader.verify(file)
        assert self.run.digest() == self.expected

    def end(self) -> None:
        self.run.state.save(self.directory, "last", keep_last=1)
        assert sorted(os.listdir(self.directory)) == ["last", "latest"]


class SavingInBackground(Saving):
    waits = False


class Loading(Operation):
    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.run = Run(nvme_path=str(self.swap))
        self.run.step(1)
        self.run.state.save(self.directory, "one")
        self.saved = self.run.digest()

    def prepare(self) -> None:
        self.run.step(2)
        self.before = self.run.digest()

    def act(self) -> None:
        self.run.state.load(self.directory)

    def examine(self, error: DeepOffloadError | None) -> None:
        if error is None:
            assert self.run.digest() == self.saved
            return
        unchanged = self.run.digest() == self.before
        try:
            self.run.step(3)
            assert unchanged
        except UsageError as refused:
            assert "half loaded" in str(refused)
        self.run.state.load(self.directory)
        assert self.run.digest() == self.saved


class SavingPretrained(Operation):
    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.run = Run(nvme_path=str(self.swap))
        self.expected = self.run.digest()

    def act(self) -> None:
        deepoffload.save_pretrained(self.run.model, self.directory / "out", max_shard_size="60KB")

    def examine(self, error: DeepOffloadError | None) -> None:
        assert self.run.digest() == self.expected
        self.act()
        assert len(list((self.directory / "out").glob("model-*.safetensors"))) > 1
        shutil.rmtree(self.directory / "out")


class Committing(Operation):
    """Steps that are made durable. After a failed sync nothing can be, so the run starts again from what is there."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.plain = Run(nvme_path=str(self.swap))
        self.digests = [self.plain.digest()]
        self.durable = 0
        self.begin()

    def begin(self) -> None:
        self.run = Run(durability={"every": 1, "path": str(self.directory)})
        self.made = self.run.state.resume()
        assert self.made >= self.durable, (self.made, self.durable)
        assert self.run.digest() == self.digest_after(self.made)

    def digest_after(self, step: int) -> int:
        while len(self.digests) <= step:
            self.plain.step(len(self.digests))
            self.digests.append(self.plain.digest())
        return self.digests[step]

    def act(self) -> None:
        while self.run.state.step <= self.made:
            self.run.step(self.made + 1)
        self.run.state.commit(wait=True)

    def examine(self, error: DeepOffloadError | None) -> None:
        if error is None:
            self.made += 1
            self.durable = self.made
            assert self.run.digest() == self.digest_after(self.made)
            return
        try:
            self.act()
        except DeepOffloadError as again:
            assert "no step has been made durable since an earlier failure" in str(again), again
            self.run.engine.close()
            self.begin()
        else:
            self.examine(None)

    def end(self) -> None:
        self.run.engine.close()
        self.begin()
        assert self.made == self.durable


class Resuming(Operation):
    """What a process does that begins and takes over what is there."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.said = {"every": 1, "path": str(directory)}
        self.run: Run | None = Run(durability=self.said)
        self.run.step(1)
        self.run.state.commit(wait=True)
        self.expected = self.run.digest()
        self.close()

    def act(self) -> None:
        self.run = Run(durability=self.said)
        assert self.run.state.resume() == 1

    def examine(self, error: DeepOffloadError | None) -> None:
        if error is not None:
            self.close()
            self.act()
        assert self.run is not None and self.run.digest() == self.expected
        self.close()

    def close(self) -> None:
        if self.run is not None:
            self.run.engine.close()
        self.run = None


class Beginning(Resuming):
    """What a process does that begins where nothing is, up to its first commit."""

    def prepare(self) -> None:
        for path in self.directory.iterdir():
            path.unlink()

    def act(self) -> None:
        self.run = Run(durability=self.said)
        if not self.run.state.resume():
            self.run.step(1)
            self.run.state.commit(wait=True)


OPERATIONS: dict[str, Callable[[Path], Operation]] = {
    "save": Saving,
    "save_in_background": SavingInBackground,
    "load": Loading,
    "save_pretrained": SavingPretrained,
    "begin": Beginning,
    "commit": Committing,
    "resume": Resuming,
}


def attempt(operation: Operation, calls: FailingCalls, number: int, code: int) -> str:
    """Do it once; the name of the call that failed, "" where there are fewer."""
    operation.prepare()
    error = None
    try:
        with calls.one(number, code):
            try:
                operation.act()
            except DeepOffloadError as raised:
                error = raised
        if error is not None:
            said = str(error)
            assert calls.failed, f"without a failing call: {said}"
            assert not code or errno.errorcode[code] in said or os.strerror(code) in said, f"not clear: {said}"
        operation.examine(error)
    except BaseException as failure:
        where = f"{type(operation).__name__}: errno {code} of call {number}, {calls.failed}: {error!r}"
        raise AssertionError(where) from failure
    return calls.failed


def main(directory: Path, names: list[str], stride: int, codes: list[int]) -> None:
    torch.set_num_threads(1)
    for name in names:
        calls = FailingCalls(directory / name / "watched")
        operation = OPERATIONS[name](directory / name / "watched")
        attempt(operation, calls, 0, errno.EIO)
        failed: Counter[str] = Counter()
        for index, code in enumerate(codes):
            number = 1 + index % stride
            while found := attempt(operation, calls, number, code):
                failed[found] += 1
                number += stride
        operation.end()
        print(f"{name}: {sum(failed.values())} failing calls: {dict(failed)}", flush=True)
        shutil.rmtree(directory / name)


if __name__ == "__main__":
    directory, names, stride, *codes = sys.argv[1:]
    main(Path(directory), names.split(","), int(stride), [int(code) for code in codes])
