"""However a program ends or is interrupted, nothing is left behind; what goes on, goes on right.

Every scenario of ``lifecycle_program.py`` runs in a separate process.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepoffload
from deepoffload.errors import ClosedError, IoTimeout, UsageError
from tests.runtime.conftest import ROOT, Outcome
from tests.runtime.lifecycle_program import NOTHING, PHASES
from tests.support.inspect import tiers_of
from tests.support.models import TinyGPT, batch, next_token_loss
from tests.support.paging import TIGHT, Paging

Run = Callable[..., Outcome]


def program(run: Run, *arguments: object, **named: Any) -> Outcome:
    return run("lifecycle_program", *arguments, **named)


def left(outcome: Outcome) -> dict[str, Any]:
    return {key: outcome.said[key] for key in NOTHING}


# -- ends --------------------------------------------------------------------------------------------------------------


def test_normal_exit(run_program: Run) -> None:
    done = program(run_program, "normal", fresh=True)
    assert len(done.said["losses"]) == 3 and done.stderr == ""


def test_nothing_is_printed_at_exit_whatever_dies_last(run_program: Run) -> None:
    assert run_program("exit_program", fresh=True).stderr == ""


@pytest.mark.parametrize(
    ("scenario", "code", "said"),
    [
        ("leaves_by_sys_exit", 3, ""),
        ("leaves_while_a_thread_trains", 0, ""),
        ("leaves_by_exception", 1, "LookupError: the program's own error"),
        ("leaves_by_os_exit", 5, ""),
    ],
)
def test_leaving_early(run_program: Run, scenario: str, code: int, said: str) -> None:
    done = program(run_program, scenario, code=code)
    assert done.stderr.strip().endswith(said) and ("Error" in done.stderr) == bool(said)


@pytest.mark.parametrize("phase", PHASES)
def test_ctrl_c_ends_the_program(run_program: Run, phase: str) -> None:
    done = program(run_program, "signalled", phase, int(signal.SIGINT), code=-signal.SIGINT)
    assert done.stderr.strip().endswith("KeyboardInterrupt")


@pytest.mark.parametrize(
    ("phase", "number"),
    [("construct", signal.SIGKILL), ("exit", signal.SIGTERM), ("backward", signal.SIGKILL), ("step", signal.SIGKILL)],
)
def test_killed(run_program: Run, phase: str, number: signal.Signals) -> None:
    program(run_program, "signalled", phase, int(number), code=-number)


def test_ctrl_c_from_outside_ends_a_busy_program_soon(tmp_path: Path) -> None:
    """No hook is involved: the signal comes whenever it comes."""
    command = [sys.executable, str(ROOT / "tests/runtime/lifecycle_program.py"), str(tmp_path), "trains_until_killed"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "training"
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=200)
    assert process.returncode == -signal.SIGINT
    assert stderr.strip().endswith("KeyboardInterrupt") and "Exception ignored" not in stderr
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_caught_and_everything_dropped(run_program: Run) -> None:
    assert program(run_program, "caught_once").said == dict.fromkeys(PHASES, NOTHING)


def test_closing_twice(run_program: Run) -> None:
    assert left(program(run_program, "closed")) == NOTHING


def test_a_deleted_model_gives_everything_back_at_once(run_program: Run) -> None:
    assert left(program(run_program, "deleted")) == NOTHING


def test_models_in_sequence_give_their_budgets_back(run_program: Run) -> None:
    done = program(run_program, "one_after_the_other")
    assert left(done) == NOTHING
    assert len(set(done.said["losses"])) == 1
    first, *_, last = done.said["rss_kb"]
    assert last - first < 40 << 10, "four more models of 64 MiB each were trained"


def test_forked_children(run_program: Run) -> None:
    done = program(run_program, "forks")
    assert done.said == {"codes": [0, 0, 0], "same": True} and done.stderr == ""


# -- interrupts that the program catches -------------------------------------------------------------------------------


@pytest.mark.parametrize(("phase", "samples"), [("forward", 16), ("backward", 16)])
def test_ctrl_c_anywhere_then_on_with_the_same_bits(run_program: Run, phase: str, samples: int) -> None:
    """At samples of all the places at which Python code of ours can be interrupted; then the step is made again."""
    done = program(run_program, "recovers", phase, samples, limit_s=200)
    assert done.said["places"] > 500
    assert (done.said["wrong"], done.said["same"], done.said["leases"]) == ([], True, [])
    assert left(done) == NOTHING


def test_ctrl_c_anywhere_in_a_step_leaves_no_step_or_a_whole_one(run_program: Run) -> None:
    done = program(run_program, "interrupted_updates", 12, limit_s=200)
    assert done.said["torn"] == [] and done.said["leases"] == []
    # The interrupts were spread over the whole step; what one had left undone was made up for when it was looked at.
    assert len(done.said["updated"]) == 2 and done.said["updated"][0] == 0
    assert left(done) == NOTHING


# -- in this process ---------------------------------------------------------------------------------------------------


def small(paging: Paging, **config: Any) -> deepoffload.offload_context:
    return deepoffload.offload_context(
        host_budget="4MiB", nvme_path=str(paging.nvme_path), debug={"poison": True}, **config
    )


def test_parameters_of_a_closed_engine(paging: Paging) -> None:
    with small(paging, timeline=True) as context:  # so that gradients land: where all rests, small ones do not
        model = TinyGPT()
    optimizer = deepoffload.CPUAdamW(model.parameters())
    loss = next_token_loss(model, batch(0))
    loss.backward()
    later = next_token_loss(model, batch(1))
    weight = model.head.weight
    gradient = weight.grad
    assert context.engine is not None
    context.engine.close()
    uses: dict[str, Callable[[], Any]] = {
        "forward": lambda: next_token_loss(model, batch(0)),
        "step": optimizer.step,
        "operation": lambda: weight + 1,
        "change": lambda: weight.data.zero_(),
        "gradient": lambda: gradient.sum(),
        "state_dict": lambda: {name: value.clone() for name, value in model.state_dict().items()},
        "new optimizer": lambda: deepoffload.CPUAdamW(model.parameters()).step(),
    }
    for name, use in uses.items():
        with pytest.raises(ClosedError, match=r"engine\.close\(\) was called"):
            use()
            pytest.fail(f"{name} went through")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):  # autograd's: it has kept the weights
        later.backward()
    assert "closed engine" in repr(weight) and "closed engine" in repr(gradient)
    assert weight.shape == (64, 48) and weight.dtype is torch.float32 and weight.requires_grad
    assert "Embedding(64, 48)" in repr(model)
    with suppress(ClosedError):  # a gradient is still held
        optimizer.zero_grad()
    context.engine.close()


def tensors_with_a_graph() -> int:
    gc.collect()
    return sum(1 for found in gc.get_objects() if type(found) is torch.Tensor and found.grad_fn is not None)


def test_a_loss_that_is_dropped_takes_its_graph_with_it(paging: Paging) -> None:
    with small(paging) as context:
        model = TinyGPT()
    before = tensors_with_a_graph()
    loss = next_token_loss(model, batch(0))
    assert tensors_with_a_graph() > before
    del loss
    assert tensors_with_a_graph() == before
    assert context.engine is not None
    context.engine.close()


def test_two_models_in_one_context(paging: Paging) -> None:
    torch.manual_seed(0)
    with small(paging) as context:
        first, second = TinyGPT(), nn.Linear(16, 4)
    optimizer = deepoffload.CPUAdamW([*first.parameters(), *second.parameters()])
    for seed in range(3):
        (next_token_loss(first, batch(seed)) + second(torch.ones(2, 16)).square().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    del first
    optimizer.param_groups[0]["params"] = list(second.parameters())
    assert torch.isfinite(second(torch.ones(1, 16))).all()
    assert context.engine is not None
    context.engine.close()


def test_two_engines_side_by_side(paging: Paging) -> None:
    contexts = [small(paging), small(paging)]
    models = []
    for context in contexts:
        torch.manual_seed(0)
        with context:
            models.append(TinyGPT(dropout=0.0))
    optimizer = deepoffload.CPUAdamW([p for model in models for p in model.parameters()])
    losses = []
    for model in models:
        loss = next_token_loss(model, batch(0))
        loss.backward()
        losses.append(loss.item())
    optimizer.step()
    assert losses[0] == losses[1]
    contexts[0].engine.close()  # type: ignore[union-attr]
    assert torch.isfinite(next_token_loss(models[1], batch(1)))
    contexts[1].engine.close()  # type: ignore[union-attr]


def test_a_context_inside_a_context_is_refused_and_the_outer_one_goes_on(paging: Paging) -> None:
    with small(paging) as outer:
        with pytest.raises(UsageError, match="inside offload_context"), small(paging):
            pytest.fail("entered")
        model = nn.Linear(8, 8)
    assert model.weight.sum().isfinite() and outer.engine is not None
    outer.engine.close()


def test_a_context_is_used_once(paging: Paging) -> None:
    context = small(paging)
    with context:
        model = nn.Linear(8, 8)
    with pytest.raises(UsageError, match="used already"), context:
        pytest.fail("entered")
    assert model.weight.sum().isfinite() and context.engine is not None
    context.engine.close()


def test_an_exception_in_the_context_leaves_nothing(paging: Paging) -> None:
    before = {thread.name for thread in threading.enumerate()}
    with pytest.raises(LookupError), small(paging) as context:
        model = nn.Linear(8, 8)
        raise LookupError
    assert list(paging.nvme_path.iterdir()) == []
    assert {thread.name for thread in threading.enumerate()} == before
    assert nn.Linear(2, 2).weight.__class__ is nn.Parameter
    with pytest.raises(ClosedError, match="LookupError"):
        model.weight.sum()
    assert context.engine is not None


def test_the_interrupt_handler_is_put_back(paging: Paging) -> None:
    before = signal.getsignal(signal.SIGINT)
    with small(paging) as context:
        model = nn.Linear(8, 8)
    assert model.weight.sum().isfinite() and context.engine is not None
    context.engine.close()
    assert signal.getsignal(signal.SIGINT) is before


def test_close_gives_back_all_the_rest_when_a_transfer_hangs(paging: Paging, monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()  # engines of other tests, kept by cycles
    before = signal.getsignal(signal.SIGINT)
    with paging.context(TIGHT, 1 << 20) as context:
        model = nn.Linear(64, 64)
    engine = context.engine
    assert engine is not None

    def hangs() -> None:
        raise IoTimeout("still in flight")

    monkeypatch.setattr(tiers_of(engine), "close", hangs)
    with pytest.raises(IoTimeout):
        engine.close()
    assert list(paging.nvme_path.iterdir()) == [] and signal.getsignal(signal.SIGINT) == before
    with pytest.raises(ClosedError):
        model(torch.zeros(1, 64))


def test_paths_as_people_write_them(nvme_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative, with a slash at the end, behind a symbolic link: in every spelling the directory is meant."""
    monkeypatch.chdir(nvme_path)
    (nvme_path / "inner").mkdir()
    (nvme_path / "link").symlink_to(nvme_path / "inner")
    try:
        for path in (".", "inner", "./inner/", str(nvme_path / "link"), Path("inner"), ["inner", "."]):
            with deepoffload.offload_context(host_budget="1MiB", nvme_path=path) as context:
                model = nn.Linear(8, 8)
            assert context.engine is not None
            assert context.engine.budgets.nvme_bytes > 0
            context.engine.close()
            del model
    finally:
        (nvme_path / "link").unlink()
        (nvme_path / "inner").rmdir()
