"""Plain PyTorch's side of every comparison: training loops, and a bf16 reference with fp32 master weights."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.models import batch, next_token_loss


@torch.no_grad()
def nudge(master: Tensor) -> None:
    """What deepoffload does to the fp32 master of a bf16 weight: from halfway above an even bf16 number one ulp towards
    zero. ``.to(torch.bfloat16)`` makes the same of both."""
    bits = master.contiguous().view(torch.int32)
    master.copy_((bits - ((bits & 0x1FFFF) == 0x8000).int()).view(torch.float32))


class PlainAdamW:
    """``torch.optim.AdamW`` over fp32 master weights; bf16 models compute with these rounded by ``copy_``.

    In fp32 the weights are the masters, and this is torch's optimizer itself.
    """

    def __init__(self, model: nn.Module, **settings: Any) -> None:
        self._weights = [p for p in model.parameters() if p.requires_grad]
        self._split = any(p.dtype is torch.bfloat16 for p in self._weights)
        masters = getattr(model, "fp32_masters", None) if self._split else None
        self.masters = self._weights if masters is None else [masters[id(p)] for p in self._weights]
        self.inner = torch.optim.AdamW(self.masters, **settings)

    def step(self) -> None:
        if self._split:
            for weight, master in zip(self._weights, self.masters, strict=True):
                master.grad = None if weight.grad is None else weight.grad.float()
        self.inner.step()
        if self._split:
            with torch.no_grad():
                for weight, master in zip(self._weights, self.masters, strict=True):
                    if weight.dtype is torch.bfloat16:
                        nudge(master)
                    weight.copy_(master)

    def zero_grad(self) -> None:
        for weight in self._weights:
            weight.grad = None


def in_dtype(model: Any, dtype: torch.dtype) -> Any:
    """The model as a user has it in another type: ``from_pretrained(dtype=...)`` of a checkpoint of it for a model of
    transformers, ``model.to(dtype)`` else."""
    if not hasattr(model, "from_pretrained"):
        return model.to(dtype)
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        made = type(model).from_pretrained(directory, dtype=dtype).train(model.training)
    trained = {name: param.requires_grad for name, param in model.named_parameters()}
    for name, param in made.named_parameters():
        param.requires_grad_(trained[name])  # which a checkpoint does not know
    return made


def to_bf16(model: Any) -> Any:
    """The model in bf16; the fp32 masters of its weights are kept for PlainAdamW."""
    values = weights_of(model)
    made = in_dtype(model, torch.bfloat16)
    masters = {}
    for name, param in made.named_parameters():
        masters[id(param)] = nn.Parameter(values[name])
        if param.dtype is torch.bfloat16:
            nudge(masters[id(param)])
    object.__setattr__(made, "fp32_masters", masters)
    return made


@dataclass
class Run:
    """What one training run showed."""

    losses: list[Tensor] = field(default_factory=list)
    first_gradients: dict[str, Tensor] = field(default_factory=dict)
    initial: dict[str, Tensor] = field(default_factory=dict)
    after_one_step: dict[str, Tensor] = field(default_factory=dict)
    final: dict[str, Tensor] = field(default_factory=dict)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all weights by name; a tied one appears once."""
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def gradients_of(model: nn.Module) -> dict[str, Tensor | None]:
    """Copies of all gradients by name, None where there is none."""
    found = {}
    for name, param in model.named_parameters():
        grad = param.grad
        found[name] = None if grad is None else grad.detach().clone()
    return found


def train(
    model: nn.Module,
    optimizer: Any,
    *,
    steps: int = 3,
    accumulate: int = 1,
    clip: float | None = None,
    loss_of: Callable[[nn.Module, Tensor], Tensor] = next_token_loss,
    seed: int = 7,
) -> Run:
    """An ordinary loop: ``accumulate`` backwards, ``clip_grad_norm_`` if asked for, a step."""
    run = Run(initial=weights_of(model))
    torch.manual_seed(seed)
    model.train()
    for step in range(steps):
        for micro in range(accumulate):
            loss = loss_of(model, batch(1000 * seed + 10 * step + micro)) / accumulate
            loss.backward()
            run.losses.append(loss.detach().clone())
        if step == 0:
            run.first_gradients = {k: v for k, v in gradients_of(model).items() if v is not None}
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            run.after_one_step = weights_of(model)
    run.final = weights_of(model)
    return run


def _bits(tensor: Tensor) -> Tensor:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    plain = tensor.detach().contiguous()
    return plain if plain.dtype is torch.bool else plain.view(kinds[plain.dtype.itemsize])


def assert_same_bits(expected: Any, got: Any, where: str = "", *, nan_is_wrong: bool = True) -> None:
    """Nested lists, tuples and dicts of tensors and plain values are equal, tensors bit for bit and free of NaN
    (without ``nan_is_wrong``: NaN where the expected ones are)."""
    if isinstance(expected, Tensor):
        assert isinstance(got, Tensor), f"{where}: {got!r} instead of a tensor"
        assert got.shape == expected.shape and got.dtype is expected.dtype, f"{where}: {got.shape} {got.dtype}"
        assert not (nan_is_wrong and got.is_floating_point() and bool(got.isnan().any())), f"{where}: NaN"
        same = _bits(expected) == _bits(got)
        if expected.is_floating_point():
            same |= expected.isnan() & got.isnan()  # a NaN has no bits that kernels agree on
        if not bool(same.all()):
            wrong = int((~same).sum())
            largest = (expected.double() - got.double()).abs().max().item()
            raise AssertionError(f"{where}: {wrong} of {expected.numel()} differ, by up to {largest:.3g}")
    elif isinstance(expected, dict):
        assert list(expected) == list(got), f"{where}: {list(got)} instead of {list(expected)}"
        for key, value in expected.items():
            assert_same_bits(value, got[key], f"{where}[{key!r}]", nan_is_wrong=nan_is_wrong)
    elif isinstance(expected, (list, tuple)):
        assert len(expected) == len(got), f"{where}: {len(got)} instead of {len(expected)}"
        for index, (one, other) in enumerate(zip(expected, got, strict=True)):
            assert_same_bits(one, other, f"{where}[{index}]", nan_is_wrong=nan_is_wrong)
    elif expected != expected and not nan_is_wrong:
        assert got != got, f"{where}: {got!r} instead of NaN"
    else:
        assert expected == got, f"{where}: {got!r} instead of {expected!r}"


def relative_difference(initial: Iterable[Tensor], expected: Iterable[Tensor], got: Iterable[Tensor]) -> float:
    """How far two runs ended apart, as a part of how far they went: norm(got - expected) / norm(expected - initial)."""
    apart = went = 0.0
    for start, one, other in zip(initial, expected, got, strict=True):
        apart += float((one.double() - other.double()).square().sum())
        went += float((one.double() - start.double()).square().sum())
    return (apart / went) ** 0.5


def notes_of(error: BaseException, caplog: pytest.LogCaptureFixture) -> str:
    """What an error says below its traceback; Python 3.10 has no notes, and the log says it there."""
    return "".join(getattr(error, "__notes__", [])) + caplog.text
