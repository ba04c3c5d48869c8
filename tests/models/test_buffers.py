"""Buffers have the types, and give the numbers, that the same program has in plain PyTorch."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepoffload
from tests.models.more_families import MORE, decoder
from tests.models.zoo import TRANSFORMERS, Family, tokens
from tests.support.loops import assert_same_bits, in_dtype
from tests.support.models import llama, mlp, rows
from tests.support.paging import EVICTING, RESIDENT, TIGHT, Paging, plain

pytest.importorskip("transformers")

FAR = 32768
BF16 = {"precision": "bf16"}
LONG = {"max_position_embeddings": FAR}
ROTARY: dict[str, Callable[[], Any]] = {
    "Llama": lambda: llama(hidden_size=32, intermediate_size=48, num_hidden_layers=2, attention_dropout=0.0, **LONG),
    "Qwen2": decoder("Qwen2ForCausalLM", "Qwen2Config", **LONG, num_key_value_heads=2),
    "GPT-NeoX": decoder("GPTNeoXForCausalLM", "GPTNeoXConfig", **LONG),
    "Mistral": decoder("MistralForCausalLM", "MistralConfig", **LONG, num_key_value_heads=2, head_dim=8),
}


LAYER = {"layers": 1, "attention_heads": 4, "ffn_dim": 48, "layerdrop": 0.0}


@contextlib.contextmanager
def quiet() -> Any:
    """Without the progress bars of transformers."""
    with contextlib.redirect_stderr(io.StringIO()):
        yield


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def converted(build: Callable[[], Any], dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    with quiet():
        return in_dtype(build(), dtype)


def far(model: nn.Module, start: int) -> Any:
    """Logits and a gradient of tokens at positions from ``start`` on."""
    model.eval()
    ids = tokens(start)
    positions = torch.arange(start, start + ids.shape[1]).expand(2, -1)
    logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    logits.float().square().mean().backward()
    grad = next(p for p in model.parameters() if p.dim() == 2).grad
    assert grad is not None
    seen = logits.detach().clone(), grad.detach().clone()
    for param in model.parameters():
        param.grad = None
    return seen


@pytest.mark.parametrize("name", ROTARY)
def test_rotary_positions_up_to_32k(paging: Paging, name: str, tmp_path: Path) -> None:
    """Built in fp32 and converted, loaded in bf16, and loaded in bf16 with nothing to convert: plain's bits."""
    build = ROTARY[name]
    with quiet():
        reference = plain(build, precision="bf16")
        reference.save_pretrained(tmp_path)
        kind, bf16 = type(reference), torch.bfloat16
        models = [
            paging.build(build, replace(TIGHT, **BF16), key=f"far {name}"),
            paging.build(lambda: kind.from_pretrained(tmp_path, dtype=bf16), replace(RESIDENT, **BF16)),
            paging.build(lambda: kind.from_pretrained(tmp_path, dtype=bf16), RESIDENT),
        ]
    assert next(reference.parameters()).dtype is bf16
    starts = (0, 2047, FAR - 16)
    expected = [far(reference, start) for start in starts]
    greedy = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    prompt = {"input_ids": tokens(5, 40), "attention_mask": torch.ones(2, 40, dtype=torch.int64)}
    generated = reference.generate(**prompt, **greedy)
    for model in models:
        assert_same_bits(buffers_of(reference), buffers_of(model), name)
        for start, wanted in zip(starts, expected, strict=True):
            assert_same_bits(wanted, far(model, start), f"{name} at {start}")
        assert torch.equal(generated, model.generate(**prompt, **greedy))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_every_family_has_the_buffers_of_plain(paging: Paging, precision: str) -> None:
    """And weights of the same types: some are kept in fp32."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    kept = set()
    for family in (*TRANSFORMERS, *MORE):
        reference = converted(family.build, dtype)
        model = paging.build(family.build, replace(RESIDENT, precision=precision))
        assert_same_bits(buffers_of(reference), buffers_of(model), family.name)
        wanted = {name: param.dtype for name, param in reference.named_parameters()}
        assert wanted == {name: param.dtype for name, param in model.named_parameters()}, family.name
        kept |= {family.name for found in wanted.values() if found is torch.float32}
    assert kept == ({"T5", "GPT-OSS"} if precision == "fp16" else set())


def test_position_tables_that_transformers_makes_narrower(paging: Paging) -> None:
    """M2M100's and XGLM's sinusoids follow ``dtype=`` in ``from_pretrained``, where rotary frequencies do not."""
    small = {"vocab_size": 64, "d_model": 32, "max_position_embeddings": 64, "dropout": 0.0, "attention_dropout": 0.0}
    layers = {f"{side}_{what}": size for side in ("encoder", "decoder") for what, size in LAYER.items()}

    def build(name: str, **settings: Any) -> Any:
        import transformers

        kind = getattr(transformers, f"{name.partition('For')[0]}Config")
        return getattr(transformers, name)(kind(**small, **settings))

    for make in (
        lambda: build("M2M100ForConditionalGeneration", **layers),
        lambda: build("XGLMForCausalLM", ffn_dim=48, num_layers=2, attention_heads=4),
    ):
        reference = converted(make)
        model = paging.build(make, replace(RESIDENT, **BF16))
        assert_same_bits(buffers_of(reference), buffers_of(model))
        assert any(buffer.dtype is torch.bfloat16 for buffer in model.buffers())
        ids = tokens(3)
        assert_same_bits(*(found(input_ids=ids, labels=ids).loss.detach() for found in (reference, model)))


def test_a_model_that_cannot_be_built_twice_says_that_its_tables_are_a_guess(
    paging: Paging, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers import LlamaForCausalLM

    class Once(LlamaForCausalLM):
        def __init__(self, config: Any) -> None:
            if torch.get_default_dtype() is torch.bfloat16:
                raise OSError("its files are gone")
            super().__init__(config)

    model = paging.build(lambda: Once(llama(num_hidden_layers=1).config), replace(RESIDENT, **BF16))
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}
    assert "its files are gone" in caplog.text and "buffers=" in caplog.text


def test_first_gradients_of_other_families(paging: Paging) -> None:
    def gradients(family: Family, model: Any) -> Any:
        torch.manual_seed(5)
        loss = family.loss(model.train(), 501)
        loss.backward()
        return loss.detach(), [None if p.grad is None else p.grad.clone() for p in model.parameters()]

    for family in MORE:
        with quiet():
            expected = gradients(family, plain(family.build, precision="bf16"))
        model = paging.build(family.build, replace(TIGHT, **BF16), key=family.name)
        assert_same_bits(expected, gradients(family, model), family.name)


class Table(nn.Module):
    """Without weights: a table that is computed, one that is saved, and others that no conversion changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.arange(64) / 64.0, persistent=False)
        self.register_buffer("mean", torch.linspace(0.1, 1.0, 64))
        self.register_buffer("wide", torch.linspace(0.1, 1.0, 64, dtype=torch.float64))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("phase", torch.ones(4, dtype=torch.complex64))
        self.register_buffer("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        return (x.float() * self.frequencies + self.mean.float()).to(x.dtype)


def mixed() -> nn.Sequential:
    norm = nn.BatchNorm1d(64)
    free = nn.BatchNorm1d(64, affine=False)
    layers = [layer for pair in zip(mlp(depth=3), (norm, Table(), free), strict=False) for layer in pair]
    return nn.Sequential(*layers, nn.Linear(64, 64))


def loaded_in_bf16() -> nn.Sequential:
    """Weights in bf16, the buffers of the table as they were made."""
    model = mixed()
    for param in model.parameters():
        param.data = param.data.bfloat16()
    return model


FLOATING = ("1.running_mean", "3.frequencies", "3.mean", "3.wide", "5.running_var")


@pytest.mark.parametrize(
    ("build", "config", "wanted"),
    [
        (mixed, {}, "fp32 fp32 fp32 fp64 fp32"),
        (mixed, BF16, "bf16 fp32 bf16 fp64 bf16"),
        (mixed, {"precision": "fp16"}, "fp16 fp32 fp16 fp64 fp16"),
        (mixed, BF16 | {"buffers": "compute"}, "bf16 bf16 bf16 bf16 bf16"),
        (mixed, BF16 | {"data_types": {"buffer_dtype": "bf16"}}, "bf16 bf16 bf16 bf16 bf16"),
        (mixed, BF16 | {"buffers": "fp32"}, "fp32 fp32 fp32 fp32 fp32"),
        (mixed, BF16 | {"keep_fp32": "mean"}, "bf16 fp32 fp32 fp64 bf16"),
        (mixed, BF16 | {"keep_fp32": nn.BatchNorm1d}, "fp32 fp32 bf16 fp64 fp32"),
        (loaded_in_bf16, {}, "fp32 fp32 fp32 fp64 fp32"),
        (loaded_in_bf16, BF16, "fp32 fp32 fp32 fp64 fp32"),
        (loaded_in_bf16, {"buffers": "compute"}, "bf16 bf16 bf16 bf16 bf16"),
        (lambda: mixed().bfloat16(), {}, "bf16 bf16 bf16 bf16 bf16"),
        (lambda: mixed().bfloat16(), BF16, "bf16 bf16 bf16 bf16 bf16"),
        (lambda: mixed().bfloat16(), {"precision": "fp32"}, "fp32 fp32 fp32 fp32 fp32"),
    ],
)
def test_which_buffers_take_which_type(
    nvme_path: Path, build: Callable[[], nn.Module], config: dict[str, Any], wanted: str
) -> None:
    config = {"host_budget": "8MiB", "nvme_path": str(nvme_path), **config}
    before = buffers_of(build())
    with deepoffload.offload_context(config):
        in_context = build()
    existing = build()
    deepoffload.initialize(model=existing, config=config)
    names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}
    for model in (in_context, existing):
        found = buffers_of(model)
        assert [names[found[name].dtype] for name in FLOATING] == wanted.split()
        for name, buffer in before.items():
            assert_same_bits(buffer.to(found[name].dtype), found[name], name)
        assert found["3.count"].dtype is torch.int64 and found["1.num_batches_tracked"].dtype is torch.int64
        assert found["3.mask"].dtype is torch.bool and found["3.phase"].dtype is torch.complex64


def trained(model: nn.Module, dtype: torch.dtype) -> Any:
    model.train()
    seen = []
    for seed in range(3):
        loss = model(rows(seed=seed).to(dtype)).float().square().mean()
        loss.backward()
        seen.append(loss.detach())
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    return seen, gradients, buffers_of(model)


def without_table() -> nn.Sequential:
    return nn.Sequential(*[layer for layer in mixed() if not isinstance(layer, Table)])


def test_batch_norm_as_after_model_to(paging: Paging) -> None:
    """Running statistics that a bf16 forward updates; a frozen one without weights; one that comes later."""
    reference = plain(without_table, precision="bf16")
    model = paging.build(without_table, replace(EVICTING, **BF16))
    assert_same_bits(trained(reference, torch.bfloat16), trained(model, torch.bfloat16))
    for late in (reference, model):
        late.append(nn.BatchNorm1d(64).bfloat16())
        late.append(nn.BatchNorm1d(64, affine=False))  # stays as the program made it
        late.zero_grad()
    assert_same_bits(trained(reference, torch.bfloat16), trained(model, torch.bfloat16))
    assert model[-1].running_mean.dtype is torch.float32


def test_what_is_not_converted_is_said(paging: Paging, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "deepoffload"):
        paging.build(mixed, replace(RESIDENT, **BF16))
    said = [r.getMessage() for r in caplog.records if "not converted" in r.getMessage()]
    staying = "3.frequencies (float32), 3.wide (float64)"
    remedy = 'buffers="compute" converts them, as model.to() does'
    assert said == [f"buffers that are not converted to bfloat16: {staying}; {remedy}"]
    caplog.clear()
    with caplog.at_level(logging.INFO, "deepoffload"):
        paging.build(mixed, RESIDENT)
    assert not [r for r in caplog.records if "not converted" in r.getMessage()]
