"""What a program is told without asking: a line at the start, by default, and one about models that are not paged."""

from __future__ import annotations

import copy
import gc
import logging
from pathlib import Path

import pytest
import torch
from torch import nn

import deepoffload
from deepoffload.errors import ConfigError, UsageError
from deepoffload.runtime.announce import OUTSIDE_BYTES_MIN
from tests.runtime.conftest import STARTED
from tests.support.paging import Paging
from tests.support.programs import Programs

PROGRAM = """
import logging, sys
import torch, deepoffload
from torch import nn

def build(**settings):
    with deepoffload.offload_context(nvme_path=sys.argv[1], **settings):
        return nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))

def part(name):
    print(f"== {name}", file=sys.stderr)

part("paged")
paged = build(host_budget="1MiB")
part("fits")
fits = build(host_budget="64MiB")
part("taken over")
deepoffload.initialize(model=nn.Linear(8, 8), config={"host_budget": "1MiB"})
part("progress")
said = {"host_budget": "1MiB", "optimizer": {"type": "SGD", "params": {"lr": 0.5}}, "steps_per_print": 2}
engine, *_ = deepoffload.initialize(model=nn.Linear(8, 8), config=said)
for _ in range(5):
    engine.backward(engine(torch.ones(8)).sum())
    engine.step()
part("silenced")
logging.getLogger("deepoffload.start").setLevel("WARNING")
build(host_budget="1MiB")
logging.getLogger("deepoffload.start").setLevel(logging.NOTSET)
logging.getLogger("deepoffload").setLevel("ERROR")
build(host_budget="1MiB")
logging.getLogger("deepoffload").setLevel(logging.NOTSET)
logging.disable(logging.INFO)
build(host_budget="1MiB")
logging.disable(logging.NOTSET)
part("records")
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
build(host_budget="1MiB")
part("warnings only")
logging.getLogger().setLevel(logging.WARNING)
build(host_budget="1MiB")
"""


def test_one_line_at_the_start_that_can_be_silenced(programs: Programs, nvme_path: Path) -> None:
    done = programs.run(PROGRAM, str(nvme_path))
    assert done.returncode == 0, done.stderr
    parts = dict(part.split("\n", 1) for part in done.stderr.split("== ")[1:])
    for name in ("paged", "fits", "taken over"):
        assert STARTED.fullmatch(parts[name]), f"{name}: {parts[name]}"
    assert "kept in memory: nothing" in parts["paged"] and f"on NVMe ({nvme_path}): weights 1.5" in parts["paged"]
    assert "memory used: 1.00 MiB of 1.00 MiB" in parts["paged"] and "0.4 M parameters" in parts["paged"]
    assert "kept in memory: weights 1.5" in parts["fits"] and "on NVMe: nothing" in parts["fits"]
    assert "MiB of 64.00 MiB" in parts["fits"]
    started, *steps = parts["progress"].splitlines()
    assert steps == [f"deepoffload: step={step}, skipped=0, lr=[0.5], mom=[0.0]" for step in (2, 4)], parts["progress"]
    assert parts["silenced"] == "" and parts["warnings only"] == ""
    assert parts["records"].count("INFO deepoffload.start ") == 1 and "INFO deepoffload placement" in parts["records"]


def small(paging: Paging) -> deepoffload.offload_context:
    return deepoffload.offload_context(host_budget="1MiB", nvme_path=str(paging.nvme_path))


def large() -> nn.Module:
    return nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(OUTSIDE_BYTES_MIN // (16 << 20) + 1)))


class Policy(nn.Sequential):
    """What asks for its length before it has any contents, while it is copied."""


def test_a_large_model_outside_of_the_budget_is_mentioned_once(
    no_other_engine: None, paging: Paging, caplog: pytest.LogCaptureFixture
) -> None:
    def mentioned() -> int:
        return sum("outside of offload_context" in record.message for record in caplog.records)

    before = large()
    with small(paging) as one:
        first = nn.Linear(64, 64)
    with small(paging) as other:
        second = nn.Linear(64, 64)
    for _ in range(8):  # each of them gone before the next one
        nn.Linear(2048, 2048, bias=False)
    with deepoffload.offload_context(host_budget="2GiB") as paged:
        third = large()
    with torch.device("meta"):
        large()
    assert mentioned() == 0
    reference = large()
    assert mentioned() == 1 and caplog.records[-1].levelno == logging.WARNING
    again = large()
    assert mentioned() == 1
    for context in (one, other, paged):
        assert context.engine is not None
        context.engine.close()
    assert len(torch.nn.modules.module._global_parameter_registration_hooks) == 0
    del before, first, second, third, reference, again


def test_a_large_copy_of_a_paged_model_is_mentioned_once(
    no_other_engine: None, paging: Paging, caplog: pytest.LogCaptureFixture
) -> None:
    """A reference model as ``create_reference_model`` of trl makes it."""

    def mentioned() -> list[str]:
        return [record.getMessage() for record in caplog.records if "copy.deepcopy" in record.getMessage()]

    with small(paging) as one:
        first = nn.Linear(64, 64)
    with deepoffload.offload_context(host_budget="512MiB") as other:
        model = Policy(large(), nn.Linear(64, 64))
    copy.deepcopy(first)
    for _ in range(8):  # each of them gone before the next one
        copy.deepcopy(model[0][0])
    with deepoffload.offload_context(host_budget="512MiB") as third:
        teacher = copy.deepcopy(model)
    assert mentioned() == []
    reference = copy.deepcopy(model)
    (line,) = mentioned()
    assert "Policy" in line and "80.00 MiB" in line and "inside an offload_context" in line
    again = copy.deepcopy(model)
    assert len(mentioned()) == 1
    for context in (one, other, third):
        assert context.engine is not None
        context.engine.close()
    del teacher, reference, again


def test_a_large_parameter_of_a_second_context_is_not_outside(
    no_other_engine: None, paging: Paging, caplog: pytest.LogCaptureFixture
) -> None:
    with small(paging) as one:
        first = nn.Linear(64, 64)
    with deepoffload.offload_context(host_budget="512MiB") as other:
        second = nn.Embedding(OUTSIDE_BYTES_MIN // 4096 + 1, 1024)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    for context in (one, other):
        assert context.engine is not None
        context.engine.close()
    del first, second


class Packed(nn.Parameter):
    """As libraries for quantised weights have them."""


def test_large_parameters_that_cannot_be_paged_are_mentioned(
    no_other_engine: None, paging: Paging, caplog: pytest.LogCaptureFixture
) -> None:
    for numel in (OUTSIDE_BYTES_MIN, OUTSIDE_BYTES_MIN + 1):
        caplog.clear()
        with small(paging) as context:
            model = nn.Linear(64, 64)
            model.packed = Packed(torch.empty(numel, dtype=torch.int8), requires_grad=False)
        found = [record.getMessage() for record in caplog.records if "are not paged" in record.getMessage()]
        assert len(found) == (numel > OUTSIDE_BYTES_MIN)
        assert context.engine is not None
        context.engine.close()
    assert "64.00 MiB" in found[0] and "of type Packed" in found[0]


@pytest.mark.parametrize("how", ["offload_context", "initialize"])
def test_a_process_that_a_launcher_started_as_one_of_several(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    def start(**said: str) -> None:
        if how == "offload_context":
            with deepoffload.offload_context(host_budget="1MiB", **said) as context:
                model = nn.Linear(8, 8)
            assert model.weight.sum().isfinite() and context.engine is not None
            context.engine.close()
        else:
            model = nn.Linear(8, 8)
            engine, *_ = deepoffload.initialize(model=model, config={"host_budget": "1MiB"}, **said)
            assert (engine.world_size, engine.global_rank, engine.local_rank, engine.dp_world_size) == (1, 0, 0, 1)
            engine.destroy()

    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="WORLD_SIZE=2 in the environment, but no RANK: which of the 2 processes"):
        start()
    start(ranks="local")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ConfigError, match="WORLD_SIZE=2 in the environment, but no MASTER_ADDR.*with torchrun"):
        start()
    start(ranks="local")
    for name, value in {"WORLD_SIZE": "1", "SLURM_NTASKS": "8", "OMPI_COMM_WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    start()
    monkeypatch.setenv("WORLD_SIZE", "unknown")
    start()
    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(ConfigError, match="OMPI_COMM_WORLD_SIZE=2.*mpirun of Open MPI.*as one of 2.*with torchrun"):
        start()
    monkeypatch.delenv("OMPI_COMM_WORLD_SIZE")
    for name, value in {"PMI_SIZE": "4", "PMI_RANK": "3"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="as rank 3 of 4"):
        start()
    start(ranks="local")


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ({"ranks": "alone"}, "ranks = 'alone': expected \"local\" for a model that this process has for itself"),
        ({"ranks": {"timeout": 3}}, "ranks.timeout: unknown key; did you mean ranks.timeout_s"),
        ({"ranks": "local", "group": object()}, 'ranks="local" and group= contradict each other'),
        ({"group": object()}, "group= .*has not been started"),
    ],
)
def test_what_is_said_about_ranks_and_cannot_be(said, text):
    with pytest.raises((ConfigError, UsageError), match=text):
        deepoffload.offload_context(host_budget="1MiB", **said)
    with pytest.raises((ConfigError, UsageError), match=text):
        deepoffload.initialize(model=nn.Linear(8, 8), config={"host_budget": "1MiB"}, **said)


def test_the_context_says_the_ranks_of_its_model():
    with deepoffload.offload_context(host_budget="1MiB", ranks={"timeout_s": 20}) as context:
        model = nn.Linear(8, 8)
    assert context.config.ranks.timeout_s == 20.0 and context.engine is not None
    with pytest.raises(UsageError, match="was built in an offload_context, which says its ranks"):
        deepoffload.initialize(model=model, ranks="local")
    context.engine.close()


def test_an_engine_that_nobody_closes_leaves_no_hooks_to_the_next_one(no_other_engine: None, paging: Paging) -> None:
    before = len(torch.nn.modules.module._global_parameter_registration_hooks)
    with small(paging) as context:
        model = nn.Linear(64, 64)
    assert len(torch.nn.modules.module._global_parameter_registration_hooks) == before + 1
    del context, model
    gc.collect()  # torch may be going through its hooks then: they stay
    assert len(torch.nn.modules.module._global_parameter_registration_hooks) == before + 1
    with small(paging) as context:
        model = nn.Linear(64, 64)
    assert len(torch.nn.modules.module._global_parameter_registration_hooks) == before + 1
    assert context.engine is not None
    context.engine.close()
    del model
    assert len(torch.nn.modules.module._global_parameter_registration_hooks) == before


def test_a_model_is_built_while_engines_that_nobody_closed_are_collected(no_other_engine: None, paging: Paging) -> None:
    lost: list[nn.Module] = []
    going: list[bool] = []

    def collect(module: nn.Module, name: str, param: object) -> None:
        if going:
            lost.clear()
            gc.collect()

    handle = torch.nn.modules.module.register_module_parameter_registration_hook(collect)
    try:
        for _ in range(3):
            with small(paging):
                lost.append(nn.Linear(64, 64))
        going.append(True)
        nn.Linear(64, 64)  # torch would say "OrderedDict mutated during iteration"
    finally:
        handle.remove()
