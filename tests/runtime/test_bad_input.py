"""What users get wrong, or the machine, is said clearly, and before anything is touched where that is possible."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import deepoffload
from deepoffload import offload_context
from deepoffload.errors import (
    BudgetError,
    ClosedError,
    ConfigError,
    PlacementError,
    UnsupportedError,
    UsageError,
)
from tests.runtime.conftest import Outcome
from tests.support.inspect import tiers_of
from tests.support.models import TinyGPT, batch, next_token_loss
from tests.support.paging import Paging

Run = Callable[..., Outcome]


def context(paging: Paging, **changes: Any) -> offload_context:
    settings: dict[str, Any] = {"host_budget": "4MiB", "nvme_path": str(paging.nvme_path), "debug": {"poison": True}}
    return offload_context(**(settings | changes))


@pytest.fixture
def model(paging: Paging) -> Iterator[nn.Module]:
    with context(paging) as entered:
        built = TinyGPT()
    yield built
    assert entered.engine is not None
    entered.engine.close()


def built(entered: offload_context, build: Callable[[], Any] = TinyGPT) -> Any:
    """A model built in a context, alive when the context ends."""
    with entered:
        model = build()
    return model


def train_a_step(model: nn.Module, **settings: Any) -> float:
    optimizer = deepoffload.CPUAdamW(model.parameters(), **settings)
    loss = next_token_loss(model, batch(0))
    loss.backward()
    optimizer.step()
    return loss.item()


# -- paths -------------------------------------------------------------------------------------------------------------


def test_a_path_that_does_not_exist(paging: Paging, tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"nvme_path.*nowhere.*does not exist"),
        context(paging, nvme_path=[str(tmp_path), str(tmp_path / "nowhere")]),
    ):
        pytest.fail("entered")
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_is_a_file(paging: Paging, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with (
        pytest.raises(ConfigError, match=r"nvme_path.*file.*is not a directory"),
        context(paging, nvme_path=str(tmp_path / "file")),
    ):
        pytest.fail("entered")
    assert (tmp_path / "file").read_text() == "x"


def test_a_path_that_keeps_no_files_is_refused_also_when_nothing_would_go_there() -> None:
    for path in ("/proc", "/sys"):
        with pytest.raises(ConfigError, match=f"nvme_path: {path} is on a file system that keeps no files"):
            with offload_context(host_budget="64MiB", nvme_path=path):
                pytest.fail("entered")


def test_a_path_that_is_not_writable(run_program: Run) -> None:
    said = run_program("bad_input_program", "not_writable").said
    assert said["kind"] == "ConfigError" and re.search(r"nvme_path.*closed.*not writable", said["message"])


def test_a_full_disk_is_found_before_training(run_program: Run) -> None:
    said = run_program("bad_input_program", "full_disk").said
    if said["kind"] == "no mount":
        pytest.skip("mounting a small file system is not permitted here")
    assert said["value_error"] and re.search(r"nvme", said["message"]) and "free" in said["message"], said


def test_a_file_size_limit_is_found_before_training(run_program: Run) -> None:
    said = run_program("bad_input_program", "file_size_limit").said
    assert said["kind"] == "BudgetError" and "EFBIG" in said["message"] and "nvme_path" in said["message"]


def test_writes_that_fail_for_a_while_lose_nothing(run_program: Run) -> None:
    said = run_program("bad_input_program", "writes_fail_for_a_while").said
    assert len(said["messages"]) == 2 and said["same"]
    for message in said["messages"]:
        assert re.search(r"write failed with EFBIG .*at offset \d+.*ulimit -f", message), message


# -- budgets -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["keep", "bf16"])
@pytest.mark.parametrize(
    ("build", "too_little"),
    [(TinyGPT, "64KiB"), (lambda: TinyGPT(width=64, depth=8), "72KiB")],
    ids=["tiny", "deep"],
)
def test_a_budget_below_the_working_set_names_one_that_works(
    paging: Paging, build: Callable[[], nn.Module], too_little: str, precision: str
) -> None:
    with pytest.raises(PlacementError, match="working set does not fit") as refused:
        built(context(paging, host_budget=too_little, precision=precision), build)
    text = str(refused.value)
    assert "windows + ring" in text and "optimizer state" in text and "host_budget" in text
    least = int(re.search(r"to at least (\d+) bytes", text)[1])  # type: ignore[index]
    with context(paging, host_budget=least, precision=precision) as entered:
        model = build()
    assert entered.engine is not None and tiers_of(entered.engine).arena.capacity_bytes <= least
    for _ in range(3):
        assert 0 < train_a_step(model) < 1000
    assert deepoffload.stats(model)["host_peak_bytes"] <= least
    entered.engine.close()


def test_no_nvme_names_a_budget_that_works(paging: Paging) -> None:
    with pytest.raises(PlacementError, match="no NVMe.*Set nvme_path") as refused:
        built(context(paging, host_budget="900KiB", nvme_path=[]))
    least = int(re.search(r"to at least (\d+) bytes", str(refused.value))[1])  # type: ignore[index]
    with context(paging, host_budget=least, nvme_path=[]):
        model = TinyGPT()
    assert 0 < train_a_step(model) < 1000


def test_an_nvme_budget_that_is_too_small(paging: Paging) -> None:
    with pytest.raises(PlacementError, match=r"Raise nvme_budget") as refused:
        built(context(paging, host_budget="900KiB", nvme_budget="100KiB"))
    assert "optimizer state" in str(refused.value)


@pytest.mark.parametrize("nvme_budget", ["100KiB", "900KiB"])
@pytest.mark.parametrize("precision", ["keep", "bf16"])
def test_the_nvme_budget_that_is_named_is_enough(paging: Paging, nvme_budget: str, precision: str) -> None:
    """Also where NVMe is full before the model is built, and while its parameters move into their units."""

    def build() -> nn.Module:
        return TinyGPT(width=64, depth=8)

    with pytest.raises(PlacementError, match=r"NVMe must hold .*Raise nvme_budget") as refused:
        built(context(paging, host_budget="1MiB", nvme_budget=nvme_budget, precision=precision), build)
    named = int(re.search(r"NVMe must hold .*?\((\d+) bytes\)", str(refused.value))[1])  # type: ignore[index]
    with context(paging, host_budget="1MiB", nvme_budget=named, precision=precision) as entered:
        model = build()
    for _ in range(3):
        assert 0 < train_a_step(model) < 1000
    assert deepoffload.stats(model)["nvme_capacity_bytes"] <= named
    assert entered.engine is not None
    entered.engine.close()


def test_a_budget_larger_than_the_machine(paging: Paging) -> None:
    with pytest.raises(BudgetError, match="host_budget is .* lower host_budget"), context(paging, host_budget=1 << 60):
        pytest.fail("entered")


def test_a_parameter_larger_than_the_budget_while_building(paging: Paging) -> None:
    with pytest.raises(BudgetError, match=r"Embedding\.weight"), context(paging, host_budget="128KiB"):
        nn.Embedding(512, 512)


# -- configuration -----------------------------------------------------------------------------------------------------

WRONG = [
    ({"host_bugdet": 1}, "host_bugdet: unknown key; did you mean host_budget"),
    ({"debug": {"poisn": True}}, "debug.poisn: unknown key; did you mean debug.poison"),
    ({"host_budget": "4 parsecs"}, "host_budget"),
    ({"host_budget": float("nan")}, "host_budget = nan"),
    ({"host_budget": float("inf")}, "host_budget = inf"),
    ({"host_budget": "1e400GB"}, "host_budget"),
    ({"host_budget": -1}, "host_budget"),
    ({"host_budget": 0}, "host_budget"),
    ({"host_budget": True}, "host_budget"),
    ({"nvme_budget": [1]}, "nvme_budget"),
    ({"device_budget": {}}, "device_budget"),
    ({"nvme_path": 3}, "nvme_path"),
    ({"nvme_path": ""}, "nvme_path"),
    ({"prefetch": "yes"}, "prefetch"),
    ({"precision": "int4"}, "precision"),
    ({"step_overlap": "sometimes"}, "step_overlap"),
    ({"gradient_clipping": float("nan")}, "gradient_clipping"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG, ids=[str(wrong) for wrong, _ in WRONG])
def test_wrong_keys_and_values(paging: Paging, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        context(paging, **wrong)


@pytest.mark.parametrize("name", ["gpu", "none", "cuda:99999999999999999999"])
def test_a_device_that_torch_does_not_know(paging: Paging, name: str) -> None:
    with pytest.raises(ConfigError, match=f'device = "{name}" is not known to torch'):
        with context(paging, device=name):
            raise AssertionError("the context was entered")


# -- models and optimizers ---------------------------------------------------------------------------------------------


def test_parameters_still_on_meta(paging: Paging) -> None:
    with (
        pytest.raises(UsageError, match=r"52 parameters of TinyGPT are still on the meta device.*position"),
        context(paging),
    ):
        with torch.device("meta"):
            model = TinyGPT()
    assert model.position.is_meta
    assert type(nn.Linear(2, 2).weight) is nn.Parameter


def test_a_model_that_is_built_in_inference_mode(paging: Paging) -> None:
    with pytest.raises(UsageError, match=r"made under torch.inference_mode\(\).*build or load the model outside"):
        with torch.inference_mode(), context(paging, inference=True):
            TinyGPT()
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(UsageError, match=r"0.weight was made under torch.inference_mode\(\)"):
        deepoffload.initialize(model=model, config={"host_budget": "4MiB"})
    with context(paging, inference=True):
        model = nn.Sequential(nn.Linear(2, 2))
    with torch.inference_mode():
        assert model(torch.ones(1, 2)).shape == (1, 2)


def test_a_step_inside_the_context(paging: Paging) -> None:
    with pytest.raises(UsageError, match="after the context has ended"), context(paging):
        train_a_step(TinyGPT())


def test_an_optimizer_over_a_closed_engine(paging: Paging) -> None:
    with context(paging) as entered:
        model = TinyGPT()
    optimizer = deepoffload.CPUAdamW(model.parameters())
    next_token_loss(model, batch(0)).backward()
    assert entered.engine is not None
    entered.engine.close()
    with pytest.raises(ClosedError, match="closed engine"):
        optimizer.step()


def test_an_optimizer_without_parameters_of_its_kind() -> None:
    with pytest.raises(UsageError, match="on the meta device"):
        deepoffload.CPUAdamW([nn.Parameter(torch.ones(2, device="meta"))])


def test_stats_of_an_ordinary_model() -> None:
    with pytest.raises(UsageError, match="Linear has no offloaded parameters"):
        deepoffload.stats(nn.Linear(2, 2))


CONVERSIONS: dict[str, Callable[[nn.Module], Any]] = {
    "half": lambda model: model.half(),
    "bfloat16": lambda model: model.bfloat16(),
    "float64": lambda model: model.to(torch.float64),
    "meta": lambda model: model.to("meta"),
    "share_memory": lambda model: model.share_memory(),
    "share_memory_": lambda model: next(model.parameters()).share_memory_(),
    "data of another shape": lambda model: setattr(next(model.parameters()), "data", torch.ones(3)),
    "data of another type": lambda model: setattr(model.position, "data", model.position.detach().double()),
    "jit.trace": lambda model: torch.jit.trace(model, batch(0)),
}


@pytest.mark.parametrize("conversion", CONVERSIONS)
def test_conversions_that_cannot_work_change_nothing(model: nn.Module, conversion: str) -> None:
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    with pytest.raises(UnsupportedError):
        CONVERSIONS[conversion](model)
    gc.collect()
    after = dict(model.named_parameters())
    assert all(torch.equal(after[name].detach(), value) for name, value in before.items())
    assert 0 < train_a_step(model) < 1000


def test_conversions_without_effect_are_fine(model: nn.Module) -> None:
    assert model.to("cpu").float().to(torch.float32) is model
    assert 0 < train_a_step(model) < 1000


def test_ddp_around_a_paged_model(model: nn.Module) -> None:
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    try:
        with pytest.raises(UnsupportedError, match="DistributedDataParallel"):
            nn.parallel.DistributedDataParallel(model)(batch(0))
        assert 0 < train_a_step(model) < 1000
    finally:
        torch.distributed.destroy_process_group()


def test_numbers_of_numpy_are_numbers(paging: Paging) -> None:
    with context(paging, host_budget=numpy.int64(4 << 20), gradient_clipping=numpy.float32(0.5)) as entered:
        model = TinyGPT()
    assert entered.engine is not None and entered.engine.config.gradient_clipping == 0.5
    assert deepoffload.stats(model)["host_budget_bytes"] == 4 << 20
    with pytest.raises(UsageError, match="not int"):
        deepoffload.stats(3)  # type: ignore[arg-type]
