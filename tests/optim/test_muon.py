"""``deepoffload.Muon``: torch's Muon and AdamW in one object, over the zoo's models and whenever the update runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepoffload
from deepoffload.errors import ConfigError, UsageError
from deepoffload.optim.foreign.muon import hidden_matrices
from deepoffload.optim.foreign.muon_step import gram_newton_schulz
from tests.optim.deferred import train_on_text
from tests.optim.foreign_kinds import PlainLoop
from tests.support.inspect import units_of
from tests.support.loops import assert_same_bits, weights_of
from tests.support.models import TinyGPT, batch, gpt2, llama, mixtral, mlp, next_token_loss, rows
from tests.support.paging import EVICTING, RESIDENT, SERIAL, TIGHT, Paging, plain

ADAM = {"betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.1}
NO_DECAY = {"weight_decay": 0.0}
OURS = {"muon_lr": 0.02, "adam_lr": 3e-3, "weight_decay": 0.1}


class TwoOptimizers:
    """What a program writes in plain PyTorch."""

    def __init__(self, names: list[str], params: list[Tensor], is_hidden: Callable[[str, Tensor], bool]) -> None:
        hidden = [p for name, p in zip(names, params, strict=True) if is_hidden(name, p)]
        others = [p for name, p in zip(names, params, strict=True) if not is_hidden(name, p)]
        self.stacks = [p for p in hidden if p.dim() == 3]
        self.slices = [[nn.Parameter(p.detach()[i]) for i in range(len(p))] for p in self.stacks]
        matrices = [p for p in hidden if p.dim() == 2] + [p for each in self.slices for p in each]
        self.muon = torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1)
        self.adam = torch.optim.AdamW(others, lr=3e-3, **ADAM)

    def step(self) -> None:
        for stack, slices in zip(self.stacks, self.slices, strict=True):
            for number, param in enumerate(slices):
                assert stack.grad is not None
                param.grad = stack.grad[number]
        self.muon.step()
        self.adam.step()


def gpt(**changes: Any) -> nn.Module:
    return TinyGPT(width=32, depth=2, **changes)


def is_hidden(name: str, param: Tensor) -> bool:
    words = ("embed", "lm_head", "wte", "wpe")
    return (param.dim() == 2 or "expert" in name) and not any(word in name for word in words)


def is_hidden_in_gpt(name: str, param: Tensor) -> bool:
    return param.dim() == 2 and "embedding" not in name


def train(model: nn.Module, optimizer: Any, steps: int = 5, accumulate: int = 1) -> list[Tensor]:
    torch.manual_seed(5)
    model.train()
    return train_on_text(model, optimizer, steps, accumulate)


CELLS = (
    (partial(gpt, checkpointing=False), TIGHT, 2),
    (gpt, replace(EVICTING, precision="bf16"), 1),
    (gpt, replace(EVICTING, step_overlap="in_backward"), 1),
    (llama, replace(EVICTING, precision="bf16"), 2),
    (mixtral, EVICTING, 1),
    (gpt, RESIDENT, 1),
    (partial(gpt, checkpointing=True), replace(TIGHT, precision="bf16", step_overlap="none"), 2),
    (llama, TIGHT, 1),
    (gpt2, TIGHT, 1),
)
"""Four are run only with FOREIGN=all."""


@pytest.mark.parametrize(
    ("family", "setting", "accumulate"),
    CELLS if os.environ.get("FOREIGN") == "all" else CELLS[:5],
    ids=lambda value: getattr(value, "__name__", None) or str(value)[:24],
)
def test_same_bits_as_torchs_two_optimizers(paging: Paging, family: Any, setting: Any, accumulate: int) -> None:
    twin = plain(family, precision=setting.precision)
    names = [name for name, _ in twin.named_parameters()]
    chosen = is_hidden if family in (llama, gpt2, mixtral) else is_hidden_in_gpt
    reference = PlainLoop(twin, lambda params: TwoOptimizers(names, params, chosen))
    expected = train(twin, reference, accumulate=accumulate)
    model = paging.build(family, setting, key=getattr(family, "__name__", "checkpointed"))
    got = train(model, deepoffload.Muon(model, **OURS), accumulate=accumulate)
    assert_same_bits(expected, got)
    assert_same_bits(weights_of(twin), weights_of(model))


def test_which_parameters_are_for_muon(paging: Paging) -> None:
    class Untied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(40, 16)
            self.hidden = nn.ModuleList([nn.Linear(16, 16), nn.Conv1d(16, 16, 3)])
            self.out = nn.Linear(16, 40)

    for make, expected in ((Untied, {"hidden.0.weight"}), (partial(paging.build, Untied, TIGHT), {"hidden.0.weight"})):
        model = make()
        found = hidden_matrices(model)
        assert {name for name, param in model.named_parameters() if id(param) in found} == expected
        model.out.weight.use_muon = True
        model.hidden[0].weight.use_muon = False
        found = hidden_matrices(model)
        assert {name for name, param in model.named_parameters() if id(param) in found} == {"out.weight"}


def test_momentum_in_bf16(paging: Paging) -> None:
    """Half the bytes; the momentum is rounded after each step."""

    def build() -> nn.Module:
        return mlp(depth=4)

    model, twin = paging.build(build, TIGHT), plain(build)
    optimizer = deepoffload.Muon(model, lr=0.02, momentum_dtype="bf16")
    matrices = [p for p in twin.parameters() if p.dim() == 2]
    muon = torch.optim.Muon(matrices, lr=0.02, weight_decay=0.0)
    adam = torch.optim.AdamW([p for p in twin.parameters() if p.dim() == 1], lr=0.02, betas=(0.9, 0.95), eps=1e-10)
    for group in adam.param_groups:
        group["weight_decay"] = 0.0
    for step in range(4):
        for net, ours in ((model, [optimizer]), (twin, [muon, adam])):
            net(rows(seed=step)).square().mean().backward()
            for each in ours:
                each.step()
            net.zero_grad()
        for param in matrices:
            buffer = muon.state[param]["momentum_buffer"]
            buffer.copy_(buffer.bfloat16())
    assert_same_bits(weights_of(twin), weights_of(model))
    weights_of(model)
    stored = {piece.block.nbytes for unit in units_of(model) for piece in unit.pieces if piece.format.fields}
    assert 2 * 64 * 64 in stored, stored


@pytest.mark.parametrize("shape", [(48, 16), (16, 48), (32, 32)], ids=str)
def test_the_iteration_on_the_gram_matrix(shape: tuple[int, int]) -> None:
    """It computes the polynomial of the standard iteration, which here runs in fp64."""
    update = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    a, b, c = 3.4445, -4.7750, 2.0315
    wide = update.double()
    wide = wide.T if shape[0] > shape[1] else wide
    wide = wide / wide.norm()
    for _ in range(5):
        gram = wide @ wide.T
        wide = a * wide + (b * gram + c * gram @ gram) @ wide
    expected = wide.T if shape[0] > shape[1] else wide
    got = gram_newton_schulz(update, (a, b, c), 5, 1e-7)
    torch.testing.assert_close(got.double(), expected, rtol=0, atol=2e-4)


def config_of(nvme_path: Path, optimizer: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "host_budget": "192KiB",
        "nvme_path": str(nvme_path),
        "gradient_clipping": 0,
        "optimizer": optimizer,
        "debug": {"poison": True, "evict_always": True},
        **changes,
    }


def test_deepspeeds_configuration(nvme_path: Path, tmp_path: Path) -> None:
    """Its JSON, the schedule of its engine, and a checkpoint in the middle."""
    section = {"type": "Muon", "params": {"lr": 1e-3, "muon_lr": 0.02, "adam_lr": 3e-3, "weight_decay": 0.1}}
    section["params"]["ns_method"] = "standard"
    torch.manual_seed(0)
    model = gpt()
    twin = gpt()
    twin.load_state_dict(model.state_dict())
    names = [name for name, _ in twin.named_parameters()]
    reference = PlainLoop(twin, lambda params: TwoOptimizers(names, params, is_hidden_in_gpt))
    engine, optimizer, _, _ = deepoffload.initialize(model=model, config=config_of(nvme_path, section))
    try:
        assert isinstance(optimizer, deepoffload.Muon)
        for step in range(5):
            torch.manual_seed(step)
            engine.backward(next_token_loss(engine, batch(step)))
            engine.step()
            torch.manual_seed(step)
            next_token_loss(twin, batch(step)).backward()
            reference.step()
            reference.zero_grad()
            if step == 1:
                engine.save_checkpoint(str(tmp_path), tag="one")
        assert_same_bits(weights_of(twin), weights_of(model))
        engine.load_checkpoint(str(tmp_path), tag="one")
        for step in range(2, 5):
            torch.manual_seed(step)
            engine.backward(next_token_loss(engine, batch(step)))
            engine.step()
        assert_same_bits(weights_of(twin), weights_of(model))
    finally:
        engine.close()


class ScaledLoop:
    """Torch's two optimizers over fp32 masters of an fp16 model, whose losses are scaled."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        model = mlp(depth=4)
        masters = {name: nn.Parameter(param.detach().clone()) for name, param in model.named_parameters()}
        self.model = model.half()
        found = {id(param): masters[name] for name, param in self.model.named_parameters()}
        object.__setattr__(self.model, "fp32_masters", found)
        self.loops = [
            PlainLoop(self.model, lambda params: torch.optim.Muon(params, lr=0.02, weight_decay=0.0), self._of(2)),
            PlainLoop(self.model, lambda params: torch.optim.AdamW(params, lr=0.02, **ADAM | NO_DECAY), self._of(1)),
        ]
        self.skipped = 0

    def _of(self, dim: int) -> list[Tensor]:
        return [param for param in self.model.parameters() if param.dim() == dim]

    def step(self, step: int, scale: float) -> None:
        loss = self.model(rows(seed=step).half()).float().square().mean() * 100
        (loss * scale).backward()
        if all(bool(param.grad.isfinite().all()) for param in self.model.parameters()):  # type: ignore[union-attr]
            for loop in self.loops:
                loop.step(1 / scale)
        else:
            self.skipped += 1
        self.model.zero_grad()


def test_skipped_steps_of_fp16(nvme_path: Path) -> None:
    """A step with an overflow changes neither momentum nor master; deferred as without paging, and as in plain
    PyTorch."""

    def trained(budget: str, overlap: str, clipping: float = 0.5) -> Any:
        torch.manual_seed(0)
        model = mlp(depth=4)
        config = config_of(
            nvme_path,
            {"type": "Muon", "params": {"lr": 0.02, "ns_method": "standard"}},
            host_budget=budget,
            step_overlap=overlap,
            gradient_clipping=clipping,
            fp16={"enabled": True, "initial_scale_power": 20, "hysteresis": 1},
        )
        engine, optimizer, _, _ = deepoffload.initialize(model=model, config=config)
        try:
            scales, before = [], None
            for step in range(8):
                engine.backward(engine(rows(seed=step).half()).float().square().mean() * 100)
                engine.step()
                scales.append((engine.loss_scale, engine.skipped_steps))
                if engine.skipped_steps == step + 1:
                    now = weights_of(model)
                    if before is not None:
                        assert_same_bits(before, now)
                    before = now
            assert 0 < engine.skipped_steps < 8
            state = optimizer.state_dict()["state"]
            masters = [{key: value.clone() for key, value in state[n].items()} for n in sorted(state)]
            return scales, weights_of(model), [dict(sorted(each.items())) for each in masters]
        finally:
            engine.close()

    assert_same_bits(trained("64MiB", "none"), trained("192KiB", "deferred"))
    seen, got, _ = trained("192KiB", "deferred", clipping=0.0)
    plain_loop, scale = ScaledLoop(), 2.0**20
    for step, (next_scale, skipped) in enumerate(seen):
        plain_loop.step(step, scale)
        assert plain_loop.skipped == skipped
        scale = next_scale
    assert_same_bits(weights_of(plain_loop.model), got)


def test_what_is_refused(nvme_path: Path) -> None:
    model = mlp(depth=2)
    with pytest.raises(UsageError, match="takes the model, or parameter groups that say use_muon"):
        deepoffload.Muon(list(model.parameters()))
    with pytest.raises(ValueError, match=r"only supports 2D parameters.*\(64,\)"):
        deepoffload.Muon([{"params": list(model.parameters()), "use_muon": True}])
    with pytest.raises(ValueError, match="ns_method must be one of standard, gram"):
        deepoffload.Muon(model, ns_method="newton")
    with pytest.raises(ValueError, match="state_dtype must be"):
        deepoffload.Muon(model, momentum_dtype="8bit")
    with pytest.raises(ValueError, match="momentum must be from 0 to 1, got 2"):
        deepoffload.Muon(model, momentum=2)
    for wrong in ({"muon_lr": -1.0}, {"adam_lr": -1.0}, {"weight_decay": -0.1}, {"betas": (0.9, 1.0)}, {"eps": -1.0}):
        with pytest.raises(ValueError, match=r"Invalid|should be >= 0"):
            deepoffload.Muon(model, **wrong)  # as torch's two classes
    with pytest.raises(ValueError, match="Adjust learning rate function mine is not supported"):
        deepoffload.Muon(model, adjust_lr_fn="mine")
    for params in ({"lr": -1}, {"ns_method": "newton"}, {"beta": 1}, {"momentum": 2}):
        with pytest.raises(ConfigError):
            deepoffload.initialize(model=model, config=config_of(nvme_path, {"type": "Muon", "params": params}))


def test_embeddings_are_not_for_muon(paging: Paging) -> None:
    """Known by their names, or by their modules; an attribute of a matrix goes first."""
    model = paging.build(gpt, TIGHT)
    table, matrix = model.embedding.weight, model.blocks[0].mlp[0].weight
    for params in ([table], iter([matrix, table]), [("token_embedding", matrix)], [("lm_head.weight", matrix)]):
        with pytest.raises(UsageError, match=r"use_muon=True has \S*(embedding|lm_head).*use_muon=False"):
            deepoffload.Muon([{"params": params, "use_muon": True}])
    table.use_muon = True
    with pytest.raises(UsageError, match=r"embedding\.weight\.use_muon is True, but it is an embedding"):
        deepoffload.Muon(model)
    del table.use_muon
    matrix.use_muon = True
    groups = [{"params": [("embedded", matrix)], "use_muon": True}, {"params": [("table", table)], "use_muon": False}]
    assert deepoffload.Muon(groups).param_groups[0]["params"][0] is matrix


def test_the_serial_step_has_the_same_bits(paging: Paging) -> None:
    """And clipping, which only the whole step knows."""
    outcomes = []
    for setting in (SERIAL, EVICTING):
        model = paging.build(gpt, setting)
        optimizer = deepoffload.Muon(model, **OURS, ns_method="gram", max_grad_norm=0.05)
        outcomes.append((train(model, optimizer), weights_of(model)))
    for outcome in outcomes[1:]:
        assert_same_bits(outcomes[0], outcome)
