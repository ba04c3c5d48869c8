"""What ranks do in the tests of steps and of what contributions refuse."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from deepoffload.errors import DeepOffloadError, UnsupportedError
from deepoffload.native.cpu_adam import AdamHyper
from deepoffload.optim.rule import UpdateJob
from deepoffload.ranks.sums import SquareSum
from tests.ranks.contributing import Side, check, expected_sums, same, side
from tests.ranks.setting_up import warnings_of
from tests.support.inspect import owned_gradient
from tests.support.rank_processes import SOON_S

WIDTH = 64
SETTINGS = {"max_grad_norm": None, "skip_non_finite": False, "unscale": 1.0}


def _jobs(here: Side, lr: float, step: int = 1):  # type: ignore[no-untyped-def]
    hyper = AdamHyper(lr, 0.9, 0.999, 1e-8, 0.0, True, step)
    job = UpdateJob(step, hyper, {}, {}, True)
    return {handle: (handle.tensor, job) for handle in here.handles.values() if here.gradients.present(handle)}


def decide(*lrs: float) -> tuple[bool, int]:
    """Each rank has its own learning rate, and the last one an overflow."""
    with side("memory", WIDTH, torch.float32) as here:
        same(here.model, here.ranks.rank, 0)
        last = here.ranks.rank == here.ranks.world_size - 1
        with here.step().met():
            jobs = _jobs(here, lrs[here.ranks.rank])
            overflow = here.step().agree(jobs, SETTINGS, last)
            total = here.step().sum_over_ranks(SquareSum(1 << here.ranks.rank, False)).total
        return overflow, total


def clip_otherwise() -> None:
    """Rank 1 clips."""
    with side("memory", WIDTH, torch.float32) as here:
        same(here.model, here.ranks.rank, 0)
        with here.step().met():
            settings = SETTINGS | {"max_grad_norm": 1.0} if here.ranks.rank == 1 else SETTINGS
            here.step().agree(_jobs(here, 0.1), settings, False)


def lack_a_gradient() -> None:
    """Rank 1 drops a gradient that the others keep."""
    with side("group", WIDTH, torch.float32) as here:
        same(here.model, here.ranks.rank, 0)
        with here.step().met():
            if here.ranks.rank == 1:
                here.gradients.assign(here.handles["blocks.1.scale"], None)
            here.step().agree(_jobs(here, 0.1), SETTINGS, False)


def fail_inside(rank: int) -> None:
    """One rank finds a setting out of range, inside the step; the others are told soon."""
    with side("memory", WIDTH, torch.float32) as here:
        same(here.model, here.ranks.rank, 0)
        begin = time.monotonic()
        try:
            with here.step().met():
                if here.ranks.rank == rank:
                    raise ValueError("lr must not be negative, got -1")
                here.step().sum_over_ranks(SquareSum(1, False))
        finally:
            assert time.monotonic() - begin < SOON_S


def _refused(here: Side, do: Callable[[], object]) -> str:
    try:
        do()
    except UnsupportedError as error:
        return str(error)
    raise AssertionError("it was not refused")


def refuse() -> list[str]:
    """Every rank does what cannot be done with several ranks; then all train."""
    found = []
    with side("memory", WIDTH, torch.bfloat16) as here:
        model, gradients, handles = here.model, here.gradients, here.handles
        param = handles["blocks.0.scale"].tensor
        assert param is not None
        gradients.assign(handles["blocks.0.scale"], torch.ones(WIDTH))
        found.append(_refused(here, lambda: (param * 2).sum().backward()))
        gradients.assign(handles["blocks.0.scale"], None)
        found.append(_refused(here, lambda: (param**3).sum().backward(create_graph=True)))
        param.__class__.grad.__set__(param, None)
        same(model, here.ranks.rank, 0)
        with here.step().met():
            pass
    return found


def drop_while_under_way() -> None:
    """zero_grad() after a backward that no step follows; then a micro-batch whose sum must know nothing of it."""
    with side("memory", WIDTH, torch.float32) as here:
        torch.manual_seed(0)
        plain = type(here.model)(WIDTH, torch.float32)
        same(here.model, here.ranks.rank, 0)
        for handle in here.handles.values():
            here.gradients.assign(handle, None)
        same(here.model, here.ranks.rank, 1)
        expected = expected_sums(plain, same, here.ranks.world_size, range(1, 2))
        with here.step().met():
            for name, handle in here.handles.items():
                if name in expected:
                    owned = owned_gradient(here.gradients, handle)
                    if owned is not None:
                        start, found = owned
                        assert torch.equal(found, expected[name][start : start + found.numel()]), name


def leave_a_backward_out(transport: str) -> tuple[list[int], list[str]]:
    """Rank 1 has nothing to train on, and its program waits for the others before its step. Returns how many rounds
    passed, and what was said of that rank."""
    rounds: list[int] = []
    return rounds, warnings_of(lambda: rounds.append(_leave_a_backward_out(transport)))


def _leave_a_backward_out(transport: str) -> int:
    with side(transport, WIDTH, torch.float32, 9) as here:
        torch.manual_seed(0)
        plain = type(here.model)(WIDTH, torch.float32, 9)
        here.gradients.contributions.wait_s = 0.2

        def program(model: torch.nn.Module, rank: int, micro_batch: int) -> None:
            if rank != 1:
                same(model, rank, micro_batch)  # type: ignore[arg-type]

        for micro_batch in range(2):
            program(here.model, here.ranks.rank, micro_batch)
            dist.barrier()
            expected = expected_sums(plain, program, here.ranks.world_size, range(micro_batch, micro_batch + 1))
            with here.step().met():
                check(here, expected)
            for handle in here.handles.values():
                here.gradients.assign(handle, None)
        return int(here.link.stats()["rounds"])


def error_of(program: Callable[..., object], *arguments: object) -> str:
    """The class and the text of what ``program`` raises."""
    try:
        program(*arguments)
    except (DeepOffloadError, RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
