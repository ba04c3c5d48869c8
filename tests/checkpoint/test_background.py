"""A save without waiting writes the bytes of its call. The program may do anything meanwhile."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn

import deepoffload
from tests.checkpoint.background import Throttle, assert_same_checkpoints, mlp, saving_threads, train
from tests.checkpoint.training import ALL, adamw
from tests.support.inspect import engine_of_param, is_paged, save_of, tiers_of
from tests.support.models import mixtral
from tests.support.paging import EVERY, TIGHT, Paging, Setting

KINDS: dict[str, Any] = {
    "adamw": adamw,
    "8bit": partial(adamw, state_dtype="8bit"),
    "lion": lambda model: deepoffload.CPULion(model.parameters(), lr=1e-3),
    "sgd": lambda model: deepoffload.CPUSGD(model.parameters(), lr=0.1, momentum=0.9),
    "torch": lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3),
}
IN_BACKWARD = Setting("in_backward", 1.6, step_overlap="in_backward")
COPIES = Setting("copies", None)


def build(paging: Paging, setting: Setting, precision: str) -> nn.Module:
    setting = replace(setting, precision=precision)
    if setting.name != "copies":
        made: nn.Module = paging.build(mlp, setting, key="mlp")
        return made
    debug = {"poison": True, "copies": True}
    path = str(paging.nvme_path)
    with deepoffload.offload_context(
        device="cpu", device_budget="120KiB", host_budget="1MiB", nvme_path=path, precision=precision, debug=debug
    ):
        torch.manual_seed(0)
        return mlp()


class Run:
    """One run of a program of operations, each named in ``OPERATIONS``."""

    def __init__(self, model: nn.Module, make: Any, directory: Path, throttle: Throttle, *, wait: bool) -> None:
        torch.manual_seed(5)
        self.model = model
        self.optimizer = make(model)
        self.state = deepoffload.TrainingState(model, self.optimizer)
        self.directory = directory
        self.throttle = throttle
        self.wait = wait
        self.number = self.saves = 0
        self.held: list[torch.Tensor] = []
        self.earlier: Any = None
        self.earlier_weights: Any = None

    def step(self, _: int) -> None:
        self.number += 1
        train(self.model, self.optimizer, self.number)

    def save(self, _: int) -> None:
        self.saves += 1
        self.state.save(self.directory, f"{self.saves}", wait=self.wait)

    def copy(self, amount: int) -> None:
        self.throttle.grant(amount)

    def param(self, which: int) -> nn.Parameter:
        params = list(self.model.parameters())
        return params[which % len(params)]

    @torch.no_grad()
    def edit(self, which: int) -> None:
        self.param(which).mul_(1.25)

    def edit_data(self, which: int) -> None:
        self.param(which).data.add_(0.125)

    def give_data(self, which: int) -> None:
        param = self.param(which)
        param.data = param.data * 0.5

    def hold(self, which: int) -> None:
        self.held = [self.param(which).detach(), self.param(which + 7).data]

    def edit_held(self, _: int) -> None:
        for view in self.held:
            view.add_(0.25)

    def let_go(self, _: int) -> None:
        self.held = []

    def look(self, _: int) -> None:
        with torch.no_grad():
            self.model(torch.zeros(1, 2, dtype=torch.long))

    def take_state(self, _: int) -> None:
        self.earlier = self.optimizer.state_dict()
        self.earlier_weights = {name: value.clone() for name, value in self.model.state_dict().items()}

    def load_state_dict(self, _: int) -> None:
        if self.earlier is not None:
            self.model.load_state_dict(self.earlier_weights)
            self.optimizer.load_state_dict(self.earlier)

    def lay_out_again(self, which: int) -> None:
        for group in self.optimizer.param_groups:
            if "state_dtype" in group:
                group["state_dtype"] = ("fp32", "8bit", "bf16")[which % 3]

    def freeze(self, which: int) -> None:
        param = self.param(which)
        param.requires_grad_(not param.requires_grad)

    def replace_head(self, _: int) -> None:
        if isinstance(self.optimizer, deepoffload.CPUAdamW):
            torch.manual_seed(self.number)
            for param in self.model[-1].parameters():
                self.optimizer.state.pop(param, None)  # state_dict() has no name for it
            dtype = self.model[-1].weight.dtype
            old = list(self.model[-1].parameters())
            self.model[-1] = nn.Linear(32, 40, dtype=dtype)
            for group in self.optimizer.param_groups:
                group["params"] = [p for p in group["params"] if all(p is not other for other in old)]
            self.optimizer.add_param_group({"params": list(self.model[-1].parameters())})

    def evict(self, _: int) -> None:
        if is_paged(self.model):
            tiers_of(self.model).evict_all()

    def end(self) -> None:
        self.held = []
        if is_paged(self.model):
            engine_of_param(next(self.model.parameters())).close()
        running = save_of(self.state)
        if running is not None:
            running.wait()


OPERATIONS = {
    "step": 6,
    "save": 4,
    "copy": 5,
    "edit": 1,
    "edit_data": 1,
    "give_data": 1,
    "hold": 1,
    "edit_held": 1,
    "let_go": 1,
    "look": 1,
    "take_state": 1,
    "load_state_dict": 1,
    "lay_out_again": 1,
    "freeze": 1,
    "replace_head": 1,
    "evict": 2,
}


def run_twice(
    paging: Paging, setting: Setting, precision: str, kind: str, program: list[tuple[str, int]], directory: Path
) -> None:
    for wait in (True, False):
        throttle = Throttle()
        target = directory / str(wait)
        target.mkdir()
        with throttle.in_force():
            model = build(paging, setting, precision)
            run = Run(model, KINDS[kind], target, throttle, wait=wait)
            for name, amount in program:
                getattr(run, name)(amount)
            run.end()
            del model, run
        assert not saving_threads()
    assert_same_checkpoints(directory / "True", directory / "False")


CASES = st.tuples(
    st.sampled_from([*EVERY, IN_BACKWARD, COPIES]),
    st.sampled_from(["keep", "bf16", "fp16"]),
    st.sampled_from(list(KINDS)),
    st.lists(
        st.tuples(
            st.sampled_from([name for name, weight in OPERATIONS.items() for _ in range(weight)]), st.integers(0, 40)
        ),
        min_size=8,
        max_size=25,
    ),
)


@pytest.mark.timeout(1500)
@settings(
    max_examples=300 if ALL else 8,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.generate) if not ALL else tuple(Phase),
)
@given(case=CASES)
def test_random_programs(case: Any, paging: Paging, tmp_path_factory: pytest.TempPathFactory) -> None:
    setting, precision, kind, program = case
    if kind == "torch" and precision == "fp16":
        kind = "adamw"  # it overflows
    program = [("step", 0), *program, ("save", 0), ("step", 0)]
    if setting is IN_BACKWARD:
        precision = "bf16" if precision == "fp16" else precision  # which overflows only after the update
        program = [op for op in program if op[0] not in ("replace_head", "freeze")]
    run_twice(paging, setting, precision, kind, program, tmp_path_factory.mktemp("saves"))


def test_weights_that_are_stored_in_another_packing(paging: Paging, tmp_path: Path) -> None:
    """Packed experts, and a weight whose memory is not in the order of the file, which is gathered from memory."""

    def made() -> nn.Module:
        model: nn.Module = mixtral()
        head = model.get_submodule("lm_head")
        head.weight = nn.Parameter(head.weight.detach().t().clone().t())
        return model

    for wait in (True, False):
        throttle = Throttle()
        with throttle.in_force():
            model = paging.build(made, replace(TIGHT, precision="bf16"), key="packed")
            optimizer = adamw(model)
            state = deepoffload.TrainingState(model, optimizer)
            torch.manual_seed(1)
            for number in range(5):
                tokens = torch.randint(40, (1, 6), generator=torch.Generator().manual_seed(number))
                model(input_ids=tokens, labels=tokens).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if number in (1, 2):
                    state.save(tmp_path / str(wait), wait=wait)
                throttle.grant(30)
            engine_of_param(model.get_parameter("lm_head.weight")).close()
    assert_same_checkpoints(tmp_path / "True", tmp_path / "False")
