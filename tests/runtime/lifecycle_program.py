"""A training program that ends, or is interrupted, as it is told: ``SWAP_DIRECTORY SCENARIO [ARGUMENT ...]``.

Prints what is left of the engine as JSON, last, where it comes that far.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

import deepoffload
from deepoffload import offload_context
from tests.support.inspect import tiers_of
from tests.support.memory_watch import resident_bytes
from tests.support.models import TinyGPT, batch, next_token_loss
from tests.support.paging import PACKAGE
from tests.support.threads import native_threads_left

SWAP = sys.argv[1] if __name__ == "__main__" else ""  # the tests import constants from here
HOST_BUDGET_BYTES = 900 << 10  # about half of what the model takes
PHASES = ("construct", "exit", "forward", "backward", "step")


def has_saved_tensor_hooks() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def left_behind() -> dict[str, Any]:
    """What this process still holds of an engine: threads, open swap files, locked memory, hooks."""
    files = []
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            files.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    hooks = torch.nn.modules.module._global_parameter_registration_hooks.values()
    status = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
    return {
        "threads": native_threads_left(),
        "files": [name for name in files if SWAP in name],
        "locked_kb": int(status["VmLck"].split()[0]),
        "saved_tensor_hooks": has_saved_tensor_hooks(),
        "registration_hooks": sum(hook.watch() is not None for hook in hooks),  # else it waits to be taken away
    }


NOTHING = {"threads": [], "files": [], "locked_kb": 0, "saved_tensor_hooks": False, "registration_hooks": 0}


def context(**changes: Any) -> offload_context:
    settings: dict[str, Any] = {"host_budget": HOST_BUDGET_BYTES, "nvme_path": SWAP, "debug": {"poison": True}}
    return offload_context(**(settings | changes))


class Training:
    """A paged model with its optimizer, one step at a time."""

    def __init__(self, **changes: Any) -> None:
        torch.manual_seed(0)
        self.context = context(**changes)
        with self.context:
            self.model = TinyGPT()
        self.optimizer = deepoffload.CPUAdamW(self.model.parameters(), lr=1e-3)
        self.done = 0

    @property
    def engine(self) -> Any:
        return self.context.engine

    def loss(self) -> Tensor:
        torch.manual_seed(100 + self.done)
        return next_token_loss(self.model, batch(self.done))

    def step(self) -> float:
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.done += 1
        return float(loss.detach())

    def run(self, steps: int) -> list[float]:
        return [self.step() for _ in range(steps)]


@contextmanager
def interrupted_at(nth: int, within: str = "") -> Iterator[list[str]]:
    """Deliver Ctrl-C at the ``nth`` call or return that deepoffload's code makes within the block (from 0), or within
    the function of ours that is called so.

    Yields a list that gets the place when it was reached. With a negative ``nth`` it gets every place instead.
    """
    count = depth = 0
    places: list[str] = []

    def profile(frame: Any, event: str, _: Any) -> None:
        nonlocal count, depth
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return
        if within:
            if frame.f_code.co_name == within and event in ("call", "return"):
                depth += 1 if event == "call" else -1
            if depth == 0:
                return
        here = f"{event} {os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} {frame.f_code.co_name}"
        if nth < 0:
            places.append(here)
        elif count == nth:
            places.append(here)
            sys.setprofile(None)
            signal.raise_signal(signal.SIGINT)
        count += 1

    sys.setprofile(profile)
    try:
        yield places
    finally:
        sys.setprofile(None)


class Bomb(nn.Module):
    """Sends this process a signal when it is called, or when its backward runs."""

    def __init__(self, send: Callable[[], None], *, backward: bool = False) -> None:
        super().__init__()
        self.send = send
        self.backward = backward

    def forward(self, x: Tensor) -> Tensor:
        if self.backward:
            x.register_hook(lambda grad: self.send())
        else:
            self.send()
        return x


class Fragile(TinyGPT):
    """A GPT that sends a signal in the middle of its construction."""

    def __init__(self, send: Callable[[], None]) -> None:
        super().__init__()
        self.blocks.append(nn.Linear(8, 8))
        send()
        self.blocks.append(nn.Linear(8, 8))


def at_phase(phase: str, send: Callable[[], None]) -> None:
    """Train, and call ``send`` once in the middle of a phase."""
    if phase == "construct":
        with context():
            Fragile(send)
        return
    if phase == "exit":
        with context():
            model = TinyGPT()
            exits = [0]

            def profile(frame: Any, event: str, _: Any) -> None:
                if frame.f_code.co_name == "fill" and event == "call":
                    exits[0] += 1
                    if exits[0] == 3:
                        sys.setprofile(None)
                        send()

            sys.setprofile(profile)
        sys.setprofile(None)
        del model
        return
    training = Training(step_overlap="none")
    training.run(2)
    if phase == "step":
        training.loss().backward()

        def profile(frame: Any, event: str, _: Any) -> None:
            if frame.f_code.co_name == "_run_piece" and event == "return":
                sys.setprofile(None)
                send()

        sys.setprofile(profile)
        training.optimizer.step()
    else:
        training.model.blocks[2].mlp.append(Bomb(send, backward=phase == "backward"))
        training.step()


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


# -- scenarios ---------------------------------------------------------------------------------------------------------


def normal() -> None:
    say(losses=Training().run(3))


def closed() -> None:
    training = Training()
    training.run(2)
    training.engine.close()
    training.engine.close()
    say(**left_behind())


def leaves_by_sys_exit() -> None:
    Training().run(2)
    training = Training()
    training.loss()
    sys.exit(3)


def leaves_while_a_thread_trains() -> None:
    training = Training()
    training.run(1)

    def run_on() -> None:
        while True:
            training.run(1)

    threading.Thread(target=run_on, daemon=True).start()
    time.sleep(0.5)


def leaves_by_exception() -> None:
    training = Training()
    training.run(2)
    training.loss().backward()
    raise LookupError("the program's own error")


def leaves_by_os_exit() -> None:
    training = Training()
    training.run(2)
    os._exit(5)


def signalled(phase: str, number: str) -> None:
    """The signal is not caught: the process dies of it."""
    at_phase(phase, lambda: os.kill(os.getpid(), int(number)))
    raise AssertionError("the signal did not arrive")


def caught_once() -> None:
    """Ctrl-C is caught and everything dropped, once per phase: nothing may be left."""
    left = {}
    for phase in PHASES:
        try:
            at_phase(phase, lambda: signal.raise_signal(signal.SIGINT))
        except KeyboardInterrupt:
            pass
        else:
            raise AssertionError("the signal did not arrive")
        gc.collect()
        left[phase] = left_behind()
    say(**left)


def forks() -> None:
    """A child that ends normally, one that ends at once, one that tries to train: the parent goes on undisturbed."""
    expected = Training()
    losses = expected.run(4)
    expected.engine.close()
    training = Training()
    training.run(2)
    codes = []
    for kind in ("normal", "os_exit", "uses"):
        pid = os.fork()
        if pid == 0:
            child(kind, training)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    say(codes=codes, same=[losses[2], losses[3]] == training.run(2))


def child(kind: str, training: Training) -> None:
    if kind == "normal":
        sys.exit(0)
    if kind == "os_exit":
        os._exit(0)
    try:
        training.step()
    except deepoffload.errors.ClosedError as error:
        assert "parent" in str(error), error
        sys.exit(0)
    sys.exit(1)


def deleted() -> None:
    """The model and what refers to it go out of scope; nobody calls the garbage collector."""
    # The first optimizer imports Dynamo, and exceptions handled there keep this frame until collected.
    torch.optim.SGD([nn.Parameter(torch.ones(1))])
    gc.collect()
    gc.disable()
    training = Training()
    training.run(2)
    del training
    say(**left_behind())


def trains_until_killed() -> None:
    training = Training()
    training.run(2)
    print("training", flush=True)
    while True:
        training.step()


def one_after_the_other() -> None:
    """Budgets come back: five models of 64 MiB each need the room of one."""
    losses, rss = [], []
    for _ in range(5):
        torch.manual_seed(0)
        with context(host_budget=64 << 20) as entered:
            model: Any = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(4)))
        optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-3)
        loss = model(torch.ones(2, 1024)).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        del model, optimizer, loss, entered
        rss.append(resident_bytes() >> 10)
    say(losses=losses, rss_kb=rss, **left_behind())


def recovers(phase: str, samples: str) -> None:
    """Ctrl-C at many places of a phase, each caught; the interrupted attempt is dropped and the step repeated."""
    reference = Training()
    for _ in range(2):
        reference.step()
    with interrupted_at(-1) as places:
        attempt(reference, phase)
    reference.optimizer.zero_grad()
    reference.engine.close()
    total = len(places)
    wrong = []
    training = Training()
    training.run(1)
    state = Training()
    state.run(1)
    for index in range(int(samples)):
        nth = index * total // int(samples)
        losses = interrupted_step(training, phase, nth)
        expected = state.step()
        if losses != expected:
            wrong.append([nth, losses, expected])
    hooks = has_saved_tensor_hooks()
    leases = [block.name for block in tiers_of(training.engine).blocks() if block.leases]
    same = all(
        torch.equal(one.detach(), other.detach())
        for one, other in zip(training.model.parameters(), state.model.parameters(), strict=True)
    )
    training.engine.close()
    state.engine.close()
    say(places=total, wrong=wrong, same=same, leases=leases, **(left_behind() | {"saved_tensor_hooks": hooks}))


def attempt(training: Training, phase: str) -> None:
    """The part of a step that is interrupted: forward, or backward too."""
    if phase == "forward":
        training.loss()
    else:
        training.loss().backward()


def interrupted_step(training: Training, phase: str, nth: int) -> float:
    try:
        if phase == "backward":
            loss = training.loss()
            with interrupted_at(nth):
                loss.backward()
        else:
            with interrupted_at(nth):
                training.loss()
    except KeyboardInterrupt:
        pass
    training.optimizer.zero_grad()
    return training.step()


def interrupted_updates(samples: str) -> None:
    """Ctrl-C at many places of ``step()``: afterwards all values are as they were, or as a whole step leaves them."""
    torn, updated, leases = [], [], []
    total = 0
    for index in range(-1, int(samples)):
        training = Training(step_overlap="none")
        training.run(1)
        before = weights(training)
        training.loss().backward()
        with (
            interrupted_at(index if index < 0 else index * total // int(samples)) as places,
            suppress(KeyboardInterrupt),
        ):
            training.optimizer.step()
        after = weights(training)
        if index < 0:
            total, complete = len(places), after
        for name, value in after.items():
            if not bool(((value == before[name]) | (value == complete[name])).all()):
                torn.append([index, name])
        updated.append(sum(int((value != before[name]).sum()) for name, value in after.items()))
        training.optimizer.zero_grad()
        training.run(1)
        leases += [block.name for block in tiers_of(training.engine).blocks() if block.leases]
        training.engine.close()
    say(torn=torn, updated=sorted(set(updated)), leases=leases, **left_behind())


def weights(training: Training) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in training.model.named_parameters()}


if __name__ == "__main__":
    started = time.perf_counter()
    globals()[sys.argv[2]](*sys.argv[3:])
