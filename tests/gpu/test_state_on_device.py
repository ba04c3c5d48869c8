"""Optimizer state lives on the device and is updated there, as far as it has room: with ``offload_optimizer="device"``,
and in what the weights leave of a ``device_budget`` that the configuration says."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import deepoffload
from deepoffload import offload_context
from deepoffload.native import cpu_adam
from deepoffload.native.cpu_adam import SUM_BLOCK, AdamHyper, Segment
from deepoffload.optim.device_arithmetic import SCRATCH_BYTES_PER_ELEMENT, AdamCoefficients, Arithmetic
from deepoffload.optim.device_kernels import (
    CONSTANT_BYTES,
    DeviceKernels,
    DeviceSegment,
    FusedKernels,
    OperatorKernels,
)
from deepoffload.optim.device_sums import BLOCK_SCRATCH_BYTES, blocks_of, exact_total
from deepoffload.optim.dtypes import NATIVE_DTYPES
from deepoffload.optim.state import LAYOUTS
from tests.native.every_split import BORDERS, UPPER_HALVES, numbers
from tests.native.every_split import split as host_split
from tests.support.inspect import shown_memory_of, units_of
from tests.support.simulated_gpu.device_module import NAME

STEPS = 6
KERNELS = "deepoffload.optim.fused_kernels"


@contextmanager
def interpreted_kernels() -> Iterator[Any]:
    """Triton's kernels in its interpreter."""
    pytest.importorskip("triton", reason="Triton is not installed here (pip install triton), so its kernels do not run")
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    sys.modules.pop(KERNELS, None)
    try:
        yield importlib.import_module(KERNELS)
    finally:
        sys.modules.pop(KERNELS, None)
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before


def build() -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.LayerNorm(64))]
    return nn.Sequential(nn.Embedding(50, 64), *layers, nn.Linear(64, 50))


def loss_of(model: nn.Module, number: int, device: str) -> Tensor:
    tokens = torch.randint(50, (2, 16), generator=torch.Generator().manual_seed(number)).to(device)
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())


def paged(device: str, path: Path, **said: Any) -> tuple[nn.Module, Any]:
    config = {"device": device, "host_budget": "8MiB", "nvme_path": str(path), "debug": {"poison": True}}
    with offload_context({**config, **said}) as context:
        model = build()
    return model, context.engine


def train(
    model: nn.Module, optimizer: Any, device: str, meanwhile: Callable[[int], None] = lambda step: None
) -> list[float]:
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, step, device)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        meanwhile(step)
    return losses


def values(model: nn.Module) -> list[Tensor]:
    return [param.detach().float().cpu() for param in model.parameters()]


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("budget", [1 << 21, 250_000], ids=["all", "part"])
def test_as_on_the_host(device: str, tmp_path: Path, precision: str, budget: int) -> None:
    results = []
    for tier in ("nvme", "device"):
        said = {"precision": precision, "device_budget": budget, "offload_optimizer": tier}
        model, engine = paged(device, tmp_path, **said)
        optimizer: Any = deepoffload.CPUAdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0)

        def meddle(step: int, model: nn.Module = model, optimizer: Any = optimizer) -> None:
            if step == 1:
                optimizer.load_state_dict(optimizer.state_dict())
            if step == 2:
                with torch.no_grad():
                    model[-1].bias.add_(0.5)  # an edit is the master from now on, on each tier
            if step == 3:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

        losses = train(model, optimizer, device, meddle)
        stats = engine.stats()
        moments = [value["exp_avg"].clone() for value in optimizer.state_dict()["state"].values()]
        results.append((losses, values(model), moments, stats["host_state_bytes"], stats["device_peak_bytes"]))
        assert stats["device_peak_bytes"] <= budget
        engine.close()
    (losses, weights, moments, on_host, _), (losses_there, weights_there, moments_there, left, _) = results
    assert left == 0 if budget == 1 << 21 else 0 < left < on_host
    assert losses_there == losses
    for ours, theirs in zip((*weights_there, *moments_there), (*weights, *moments), strict=True):
        assert torch.equal(ours, theirs), "the bits of the host's kernels"


def test_gradients_stay_where_their_state_is(device: str, tmp_path: Path) -> None:
    """Nothing passes the bus, clipping included, and no memory is taken over the budget. (Before, each gradient went
    to the host and back, 2 x 2 bytes per parameter, and an update took 60 bytes for each of its elements.)"""
    model, engine = paged(device, tmp_path, precision="bf16", device_budget=1 << 21, offload_optimizer="device")
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2, max_grad_norm=1e-3)
    module = torch.get_device_module(device)
    train(model, optimizer, device)
    before = engine.stats()
    loss_of(model, 0, device).backward()
    assert engine.stats()["host_gradient_bytes"] == 0
    allocated = module.memory_allocated()
    module.reset_peak_memory_stats()
    optimizer.step()
    with torch.no_grad():  # makes what is deferred
        for param in model.parameters():
            param.sum()
    numel = sum(param.numel() for param in model.parameters())
    assert module.max_memory_allocated() - allocated < 2 * numel, "sums of squares, and no temporaries"
    optimizer.zero_grad()
    after = engine.stats()
    assert after["device_bytes_out"] == before["device_bytes_out"]
    assert after["device_bytes_in"] == before["device_bytes_in"]
    engine.close()


def test_what_the_program_does_to_gradients_on_the_device(device: str, tmp_path: Path) -> None:
    """Accumulated, looked at, edited, kept, dropped."""
    found = []
    for tier in ("nvme", "device"):
        model, engine = paged(device, tmp_path, precision="bf16", offload_optimizer=tier)
        optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2, max_grad_norm=0.5)
        kept, norms = [], []
        for step in range(4):
            for micro in range(2):
                (loss_of(model, 2 * step + micro, device) / 2).backward()
                if step == 1:
                    kept.append(model[1].weight.grad.clone())
            if step == 2:
                model[1].weight.grad.mul_(3.0)
                model[2].weight.grad.view(-1)[5] = 100.0
                kept.append(model[3].weight.grad)
            if step == 3:
                optimizer.zero_grad()
                loss_of(model, 50, device).backward()
                model[1].bias.grad = torch.ones_like(model[1].bias)
            optimizer.step()
            norms.append(float(optimizer.grad_norm))
            optimizer.zero_grad()
        found.append((norms, values(model), [value.cpu() for value in kept]))
        engine.close()
    (norms, weights, kept), (norms_there, weights_there, kept_there) = found
    assert norms_there == norms
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(weights_there, weights, strict=True))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(kept_there, kept, strict=True))


@pytest.fixture(params=["operators", "fused"])
def kernels(request: pytest.FixtureRequest, device: str) -> Iterator[DeviceKernels]:
    """Torch's operators, and Triton's kernels: on the simulated GPU in its interpreter, which calculates on the CPU."""
    if request.param == "operators":
        yield OperatorKernels()
        return
    with interpreted_kernels() if device == NAME else nullcontext():
        yield FusedKernels(torch.device(device, 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_sums_of_squares_are_those_of_the_host(kernels: DeviceKernels, device: str, dtype: torch.dtype) -> None:
    """Over the whole range of exponents, where the order of additions shows; of several gradients at once, in batches
    that end within them."""
    gradients, expected = [], []
    for numel in (1, 31, SUM_BLOCK, 3 * SUM_BLOCK + 77, 1000):
        generator = torch.Generator().manual_seed(numel)
        exponents = torch.randint(-60, 50, (numel,), generator=generator).float()
        values = (torch.randn(numel, generator=generator) * exponents.exp2()).to(dtype)
        for special in (None, float("inf"), float("nan")):
            values = values.clone()
            if special is not None:
                values[numel // 2] = special
            gradients.append(values)
            found = cpu_adam.sum_of_squares(values.data_ptr(), numel, dtype=NATIVE_DTYPES[dtype], num_threads=1)
            expected.append(found)
    there = [values.to(device) for values in gradients]
    counts = [blocks_of(values.numel()) for values in gradients]
    scratch = torch.empty(3 * BLOCK_SCRATCH_BYTES + 64, dtype=torch.uint8, device=device)
    sums = torch.empty(sum(counts), dtype=torch.float64, device=device)
    kernels.block_sums(there, sums, scratch)
    assert [exact_total(part) for part in sums.cpu().split(counts)] == expected


def numbers_of(numel: int, seed: int) -> Tensor:
    """Of all magnitudes that gradients and moments have, subnormal ones and zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-40, 4, (numel,), generator=generator).float()
    found = torch.randn(numel, generator=generator) * exponents.exp2()
    found[::97] = 0.0
    found[1::97] = 1e-41
    return found


HYPERS = (
    AdamHyper(1e-3, 0.9, 0.999, 1e-8, 0.01, True, 1),
    AdamHyper(3e-4, 0.9, 0.95, 1e-8, 0.1, False, 7),
    AdamHyper(1e-2, 0.3, 0.99, 1e-6, 0.0, True, 1000, maximize=True),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_an_update_has_the_bits_of_the_host(kernels: DeviceKernels, device: str, dtype: torch.dtype) -> None:
    """The first step, one after the program has changed the weight, and others; in chunks."""
    numel, grad_factor = 20_011, 0.37
    for number, hyper in enumerate(HYPERS):
        first, stale = number == 0, number == 1
        master, grad, exp_avg = (numbers_of(numel, seed) for seed in range(3))
        exp_avg_sq = numbers_of(numel, 3).square()
        weight, grad = master.to(dtype), grad.to(dtype)
        grad[7], grad[11] = float("nan"), float("inf")
        lead = torch.zeros(numel, dtype=torch.int16) if dtype is torch.bfloat16 else master.clone()
        if stale:
            lead = lead if dtype is torch.bfloat16 else weight.float()
        elif dtype is torch.bfloat16:
            cpu_adam.split_fp32(master.data_ptr(), weight.data_ptr(), lead.data_ptr(), numel, num_threads=1)
        there = [value.to(device) for value in (weight, grad, exp_avg, exp_avg_sq, lead)]
        if stale:
            there[4].fill_(77)  # what completes a weight that the program has changed does not count
        if first:
            exp_avg.zero_()
            exp_avg_sq.zero_()
        segment = Segment(
            numel,
            0,
            grad.data_ptr(),
            NATIVE_DTYPES[dtype],
            weight.data_ptr(),
            NATIVE_DTYPES[dtype],
            remainder=lead.data_ptr() if dtype is torch.bfloat16 else 0,
            master=lead.data_ptr() if dtype is torch.float16 else 0,
            exp_avg=exp_avg.data_ptr(),
            exp_avg_sq=exp_avg_sq.data_ptr(),
        )
        cpu_adam.adam_step([segment], [hyper], LAYOUTS[dtype], grad_factor=grad_factor, num_threads=1)

        kept = None if dtype is torch.float32 else there[4]
        scratch = torch.empty(CONSTANT_BYTES + 9_000 * SCRATCH_BYTES_PER_ELEMENT, dtype=torch.uint8, device=device)
        one = DeviceSegment(*there[:4], kept, first=first, stale=stale)
        kernels.update(one, AdamCoefficients.of(hyper, grad_factor), scratch)
        expected = [weight, exp_avg, exp_avg_sq, *([] if kept is None else [lead])]
        got = [there[0], there[2], there[3], *([] if kept is None else [kept])]
        number_there = ~weight.isnan()
        for ours, theirs in zip(got, expected, strict=True):
            assert torch.equal(ours.cpu()[number_there], theirs[number_there])
            if theirs.is_floating_point():
                assert torch.equal(ours.cpu().isnan(), theirs.isnan())
        assert int(number_there.logical_not().sum()) == 2


def test_which_kernels_are_chosen(
    device: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's where it is there, and where its kernels have the bits of the operators; the log says which and why."""
    monkeypatch.setattr(sys.modules[__name__], "STEPS", 2)

    def trained() -> list[Tensor]:
        caplog.clear()
        with caplog.at_level("INFO", "deepoffload"):
            model, engine = paged(device, tmp_path, precision="bf16", offload_optimizer="device")
        train(model, deepoffload.CPUAdamW(model.parameters(), lr=1e-2, max_grad_norm=0.5), device)
        found = values(model)
        engine.close()
        return found

    by_kernels = trained()
    if device != NAME:  # on CUDA, where Triton is a part of torch
        assert "is updated by one kernel of Triton" in caplog.text
        return
    by_operators = by_kernels
    assert "is updated by torch's operators: Triton" in caplog.text
    with interpreted_kernels() as fused:
        by_kernels = trained()
        assert "is updated by one kernel of Triton" in caplog.text
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(by_kernels, by_operators, strict=True))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fused, "block_sums", lambda values, sums: sums.fill_(1.0))
            trained()
    assert "torch's operators: Triton's kernels have other bits with weights of torch.bfloat16" in caplog.text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_what_the_compiler_makes_of_an_update(dtype: torch.dtype) -> None:
    """For an H100, without one: of each element exactly these operations, each rounded once, and none that flushes
    subnormal numbers."""
    triton = pytest.importorskip("triton", reason="Triton is not installed here (pip install triton)")
    from triton.backends.compiler import GPUTarget

    sys.modules.pop(KERNELS, None)
    kernels = importlib.import_module(KERNELS)
    kernels.PTX = triton.language.constexpr(True)
    pointer, lead = {0: ("*fp32", "*fp32"), 1: ("*i16", "*i16"), 2: ("*fp16", "*fp32")}[kernels._CODES[dtype]]
    names = kernels._adam.arg_names
    constants = {"WEIGHT": kernels._CODES[dtype], "GRAD": kernels._CODES[dtype], "FIRST": False, "STALE": False}
    constants |= {"COUPLED": True, "FROM_NEW": False, "BLOCK": 128}
    types = {
        "weight": pointer,
        "lead": lead,
        "grad": pointer,
        "exp_avg": "*fp32",
        "exp_avg_sq": "*fp32",
        "numel": "i32",
    }
    signature = {name: "constexpr" if name in constants else types.get(name, "fp32") for name in names}
    source = triton.compiler.ASTSource(
        kernels._adam, signature, {(names.index(name),): value for name, value in constants.items()}
    )
    made = triton.compile(
        source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "enable_fp_fusion": False}
    )  # one element for each thread
    found = re.findall(r"(?:add|sub|mul|fma|div|sqrt)(?:\.[a-z]+)*\.f(?:32|64)\b", made.asm["ptx"])
    expected = {"mul.rn.f32": 5, "fma.rn.f32": 3, "div.rn.f32": 2, "sqrt.rn.f32": 1, "sub.rn.f32": 1}
    counts = {name: found.count(name) for name in set(found)}
    assert counts.pop("add.rn.f32") >= 2, "a number that is the same for all elements may have 0 added to it"
    assert counts == expected
    assert "ftz" not in made.asm["ptx"]
    sys.modules.pop(KERNELS, None)


def test_a_split_is_that_of_the_host(device: str) -> None:
    """For every bf16 number at every border of rounding."""
    for bits in numbers(BORDERS, UPPER_HALVES // 4):
        hi, lo, _ = host_split(bits)
        numel = len(bits)
        scratch = torch.empty(numel * SCRATCH_BYTES_PER_ELEMENT, dtype=torch.uint8, device=device)
        work = Arithmetic(scratch, numel)
        work.master.copy_(torch.from_numpy(bits.view(np.float32)))
        weight = torch.zeros(numel, dtype=torch.bfloat16, device=device)
        remainder = torch.zeros(numel, dtype=torch.int16, device=device)
        work.split(weight, remainder)
        number = ~np.isnan(bits.view(np.float32))
        assert torch.equal(weight.isnan().cpu(), torch.from_numpy(~number))
        assert np.array_equal(weight.view(torch.int16).cpu().numpy()[number], hi.view(np.int16)[number])
        assert np.array_equal(remainder.cpu().numpy()[number], lo[number])


@pytest.mark.parametrize("overlap", ["none", "deferred", "in_backward"])
def test_the_same_bits_whenever_it_runs(device: str, tmp_path: Path, overlap: str) -> None:
    found = []
    for step_overlap in ("none", overlap):
        said = {"precision": "bf16", "offload_optimizer": "device", "step_overlap": step_overlap}
        model, engine = paged(device, tmp_path, **said)
        train(model, deepoffload.CPUAdamW(model.parameters(), lr=1e-2), device)
        found.append(values(model))
        engine.close()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


def test_the_rest_of_a_budget_is_for_state(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody says otherwise. The host has room for all the same, and an optimizer of which the device has no
    kernel gets its state there. (Before, what weights left of a budget was given back.)"""
    monkeypatch.setattr(sys.modules[__name__], "STEPS", 2)

    def state_there(make: Any = None, **said: Any) -> tuple[int, list[Tensor]]:
        model, engine = paged(device, tmp_path, precision="bf16", **{"device_budget": 1 << 21} | said)
        optimizer = (make or partial(deepoffload.CPUAdamW, lr=1e-2))(model.parameters())
        train(model, optimizer, device)
        memory = shown_memory_of(model)
        found = sum(memory.keeps(piece.block) for unit in units_of(model) for piece in unit.pieces)
        weights = values(model)
        engine.close()
        return found, weights

    there, weights = state_there()
    assert there > 2
    for elsewhere in ({"offload_optimizer": "nvme"}, {"offload_optimizer": "host"}, {"device_budget": None}):
        count, others = state_there(**elsewhere)
        assert count == 0
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(weights, others, strict=True))
    adam: Any = {"type": "AdamW", "params": {"lr": 1e-2}}
    assert state_there(optimizer=adam)[0] == there
    lion: Any = {"type": "Lion", "params": {"lr": 1e-3}}
    make_lion, make_adam = partial(deepoffload.CPULion, lr=1e-3), partial(torch.optim.AdamW, lr=1e-3)
    count, by_lion = state_there(make_lion, optimizer=lion)
    assert count == 0, "it is known that the device has no kernel for it"
    count, others = state_there(make_lion, host_budget="820KiB", nvme_path=None)
    assert count == 0
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(by_lion, others, strict=True))
    ours, theirs = (state_there(make_adam, **said)[1] for said in ({}, {"offload_optimizer": "nvme"}))
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("kind", ["CPULion", "CPUSGD", "8bit", "amsgrad", "paged"])
def test_what_the_device_has_no_kernel_for_goes_to_the_host(device: str, tmp_path: Path, kind: str) -> None:
    def make(params: Any) -> Any:
        if kind in ("8bit", "amsgrad"):
            return deepoffload.CPUAdamW(params, lr=1e-2, **({"state_dtype": kind} if kind == "8bit" else {kind: True}))
        if kind == "paged":
            return deepoffload.paged(torch.optim.RMSprop, params, lr=1e-3)
        return getattr(deepoffload, kind)(params, lr=1e-3)

    found = []
    for tier in ("nvme", "device"):
        model, engine = paged(device, tmp_path, precision="bf16", offload_optimizer=tier)
        train(model, make(model.parameters()), device)
        found.append(values(model))
        engine.close()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))
