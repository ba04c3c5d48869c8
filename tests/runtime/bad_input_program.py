"""Trouble that needs a separate process: ``SWAP_DIRECTORY SCENARIO``. Prints JSON about it, last."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from typing import Any

import psutil  # noqa: F401 - before the user changes
import torch
from torch import Tensor

import deepoffload
from deepoffload import offload_context
from deepoffload.errors import DeepOffloadError, IoFailure
from tests.support.models import TinyGPT, batch, next_token_loss

SWAP = sys.argv[1]


def tight(**changes: Any) -> offload_context:
    settings: dict[str, Any] = {"host_budget": 900 << 10, "nvme_path": SWAP, "debug": {"poison": True}}
    return offload_context(**(settings | changes))


def report(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def report_error(**changes: Any) -> None:
    """What entering a context and building a model in it raises."""
    try:
        with tight(**changes):
            model = TinyGPT()
    except DeepOffloadError as error:
        report(kind=type(error).__name__, value_error=isinstance(error, ValueError), message=str(error))
    else:
        report(kind="none", model=repr(model))


def not_writable() -> None:
    """As an ordinary user, because root may write everywhere."""
    directory = tempfile.mkdtemp(prefix="closed")
    os.chmod(directory, 0o555)
    pid = os.fork()
    if pid == 0:
        if os.geteuid() == 0:
            os.setgid(65534)
            os.setuid(65534)
        report_error(nvme_path=directory)
        os._exit(0)
    os.waitpid(pid, 0)
    os.rmdir(directory)


def full_disk() -> None:
    """A file system with less room than the model needs, next to the margin that is always left free."""
    directory = os.path.join(SWAP, "small")
    os.mkdir(directory)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=65m", "none", directory], capture_output=True)
    try:
        if mounted.returncode:
            report(kind="no mount")
        else:
            report_error(nvme_path=directory)
            assert os.listdir(directory) == [] and os.statvfs(directory).f_bavail == os.statvfs(directory).f_blocks
    finally:
        subprocess.run(["umount", directory], capture_output=True)
        os.rmdir(directory)


def file_size_limit() -> None:
    limit_file_size(64 << 10)
    report_error()


def limit_file_size(nbytes: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))


class Training:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.context = tight()
        with self.context:
            self.model = TinyGPT()
        self.optimizer = deepoffload.CPUAdamW(self.model.parameters(), lr=1e-3)
        self.done = 0

    def loss(self) -> Tensor:
        torch.manual_seed(100 + self.done)
        loss = next_token_loss(self.model, batch(self.done))
        loss.backward()
        return loss

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.done += 1


def writes_fail_for_a_while() -> None:
    """Writes beyond a file size limit fail in the middle of training; once it is lifted, training goes on, right."""
    expected = Training()
    for _ in range(4):
        expected.loss()
        expected.step()
    training = Training()
    messages = []
    for step in range(4):
        if step in (1, 3):
            limit_file_size(4096)
            try:
                training.loss()
            except IoFailure as failure:
                messages.append(str(failure))
            limit_file_size(resource.RLIM_INFINITY)
            try_again(training)
        else:
            training.loss()
        training.step()
    pairs = zip(expected.model.parameters(), training.model.parameters(), strict=True)
    same = all(torch.equal(one.detach(), other.detach()) for one, other in pairs)
    report(messages=messages, same=same)


def try_again(training: Training) -> None:
    """Forward and backward; transfers that were on their way when the trouble ended may still report it."""
    for _ in range(10):
        training.optimizer.zero_grad()
        try:
            training.loss()
        except IoFailure:
            continue
        return
    raise AssertionError("it never went on")


if __name__ == "__main__":
    globals()[sys.argv[2]](*sys.argv[3:])
