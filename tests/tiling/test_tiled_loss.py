"""Losses whose logits are made in tiles: the bits of ``F.cross_entropy``; a paged head is read once per pass."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import deepoffload
from deepoffload.errors import UnsupportedError, UsageError
from deepoffload.tiling.head_output import HeadOutput
from tests.models.zoo import opt
from tests.support.inspect import reads_of
from tests.support.loops import assert_same_bits
from tests.support.models import FAMILIES, VOCABULARY, batch, gpt2, llama, mixtral
from tests.support.paging import EVICTING, RESIDENT, TIGHT, Paging, Same, Setting, plain

TOKENS, FEATURES, CLASSES = 70, 24, 50
SMALL = 16 * VOCABULARY * 4
"""Bytes of logits of 16 tokens."""


def sample(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Hidden states and targets, of which some count for nothing."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, TOKENS // 2, FEATURES, generator=generator).to(dtype)
    targets = torch.randint(0, CLASSES, (2, TOKENS // 2), generator=generator)
    targets[0, :5] = -100
    return hidden.requires_grad_(), targets


def whole(hidden: Tensor, head: nn.Module, targets: Tensor, **settings: Any) -> Tensor:
    logits = head(hidden).float().flatten(0, -2)
    loss = F.cross_entropy(logits, targets.flatten(), **settings)
    return loss.view(targets.shape) if settings.get("reduction") == "none" else loss


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 16, 1000])
def test_against_the_logits_of_all_tokens(dtype: torch.dtype, reduction: str, tokens: int) -> None:
    """The loss has the same bits in fp32; gradients are sums over tiles."""
    found = []
    for tiled in (False, True):
        torch.manual_seed(1)
        head = nn.Linear(FEATURES, CLASSES).to(dtype)
        hidden, targets = sample(dtype)
        settings: dict[str, Any] = {"reduction": reduction}
        if tiled:
            loss = deepoffload.tiled_loss(hidden, head, targets, max_bytes=tokens * CLASSES * 4, **settings)
        else:
            loss = whole(hidden, head, targets, **settings)
        (loss * torch.ones(()).expand_as(loss)).sum().backward()
        assert head.bias is not None
        found.append((loss.detach(), hidden.grad, head.weight.grad, head.bias.grad))
    if dtype is torch.float32 and tokens > 1:
        assert_same_bits(found[0][0], found[1][0])
    for one, other in zip(*found, strict=True):
        close = {} if dtype is torch.float32 else {"rtol": 0.02, "atol": 1e-2}
        torch.testing.assert_close(one, other, **close)


def test_ignored_smoothed_and_frozen() -> None:
    head, (hidden, targets) = nn.Linear(FEATURES, CLASSES, bias=False), sample()
    few = {"max_bytes": 8 * CLASSES * 4}
    for settings in ({"label_smoothing": 0.1}, {"ignore_index": 3}):
        torch.testing.assert_close(
            deepoffload.tiled_loss(hidden, head, targets.clamp(min=0), **few, **settings),
            whole(hidden, head, targets.clamp(min=0), **settings),
        )
    nothing = torch.full_like(targets, -100)
    assert deepoffload.tiled_loss(hidden, head, nothing, **few).isnan()  # as torch has it
    assert deepoffload.tiled_loss(hidden, head, nothing, reduction="sum", **few) == 0
    head.weight.requires_grad_(False)
    deepoffload.tiled_loss(hidden, head.weight, targets, **few).backward()
    assert hidden.grad is not None and head.weight.grad is None
    with torch.no_grad():
        assert_same_bits(deepoffload.tiled_loss(hidden, head, targets, **few), whole(hidden, head, targets))


def test_under_autocast() -> None:
    found = []
    for tiled in (False, True):
        torch.manual_seed(1)
        head, (hidden, targets) = nn.Linear(FEATURES, CLASSES), sample()
        with torch.autocast("cpu", torch.bfloat16):
            if tiled:
                loss = deepoffload.tiled_loss(hidden, head, targets, max_bytes=16 * CLASSES * 4)
            else:
                loss = whole(hidden, head, targets)
        loss.backward()
        found.append((loss.detach(), hidden.grad, head.weight.grad))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=1e-3)
        assert one.dtype is other.dtype is torch.float32


def test_a_head_in_tiles() -> None:
    found = []
    for limit in (None, 20 * FEATURES * 4):
        torch.manual_seed(1)
        holder = nn.ModuleDict({"head": nn.Linear(FEATURES, CLASSES)})
        if limit is not None:
            deepoffload.tile_linear(holder, limit)
        hidden, targets = sample()
        loss = deepoffload.tiled_loss(hidden, holder["head"], targets, max_bytes=16 * CLASSES * 4)
        loss.backward()
        grads = [param.grad for name, param in holder.named_parameters() if name.endswith("weight")]
        found.append((loss.detach(), hidden.grad, torch.cat(grads)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
    hidden, targets = sample()
    targets[1, 1] = CLASSES
    with pytest.raises(UsageError, match="a target is none of the 50 classes"):
        deepoffload.tiled_loss(hidden, holder["head"], targets)
    with pytest.raises(UsageError, match="label_smoothing"):
        deepoffload.tiled_loss(hidden, holder["head"], targets, label_smoothing=0.1)


BAD = {
    "hidden is": {"hidden": torch.zeros(2, 3, FEATURES + 1)},
    "hidden is torch.int64": {"hidden": torch.zeros(2, 3, FEATURES, dtype=torch.int64)},
    "targets are torch.int64": {"targets": torch.zeros(3, 2, dtype=torch.int64)},
    "targets are torch.float32": {"targets": torch.zeros(2, 3)},
    "reduction='middle'": {"reduction": "middle"},
    "label_smoothing=2": {"label_smoothing": 2},
    "max_bytes=0": {"max_bytes": 0},
    "max_bytes: ": {"max_bytes": "many"},
    "head is a GELU": {"head": nn.GELU()},
}


@pytest.mark.parametrize("said", BAD)
def test_what_does_not_fit(said: str) -> None:
    given: dict[str, Any] = {
        "hidden": torch.zeros(2, 3, FEATURES),
        "head": nn.Linear(FEATURES, CLASSES),
        "targets": torch.zeros(2, 3, dtype=torch.int64),
    }
    with pytest.raises(UsageError, match=said):
        deepoffload.tiled_loss(**{**given, **BAD[said]})


class Scaled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 0.1 * super().forward(input)


def test_a_head_that_does_more_than_its_weight_says_is_refused() -> None:
    hooked, replaced = nn.Linear(FEATURES, CLASSES), nn.Linear(FEATURES, CLASSES)
    hooked.register_forward_hook(lambda module, args, out: 0.1 * out)
    replaced.forward = lambda input: 0.1 * F.linear(input, replaced.weight)  # type: ignore[method-assign]
    in_tiles = nn.ModuleDict({"head": nn.Linear(FEATURES, CLASSES)})
    deepoffload.tile_linear(in_tiles, FEATURES * 4 * 16)
    in_tiles["head"].tiles[1].register_forward_pre_hook(lambda module, args: (0.1 * args[0],))  # type: ignore[union-attr, index]
    hidden, targets = sample()
    for head, said in (
        (hooked, "Linear, has hooks"),
        (replaced, "Linear, has another forward"),
        (Scaled(FEATURES, CLASSES), "Scaled, has another forward"),
        (in_tiles["head"], "Linear, has hooks"),
    ):
        with pytest.raises(UsageError, match=f"the head, a {said}, and only its weight"):
            deepoffload.tiled_loss(hidden, head, targets)
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(FEATURES, CLASSES))
    expected = F.cross_entropy(normed(hidden).flatten(0, 1), targets.flatten())
    assert_same_bits(expected, deepoffload.tiled_loss(hidden, normed, targets))


class Language(nn.Module):
    """A body, and a head that is a separate unit, larger than all else."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 48)
        self.body = nn.Sequential(*[nn.Sequential(nn.Linear(48, 48), nn.GELU()) for _ in range(4)])
        self.head = nn.Linear(48, 8 * VOCABULARY, bias=bias)


def tiled(model: Any, tokens: Tensor) -> Tensor:
    hidden = model.body(model.embedding(tokens))
    return deepoffload.tiled_loss(hidden[:, :-1], model.head, tokens[:, 1:], max_bytes=8 * SMALL // 4)


def chunked(model: Any, tokens: Tensor) -> Tensor:
    """The recipe for torch 2.13."""
    hidden = model.body(model.embedding(tokens))
    return F.linear_cross_entropy(
        hidden[:, :-1].flatten(0, 1),
        model.head.weight,
        tokens[:, 1:].flatten(),
        linear_bias=model.head.bias,
        options=nn.LinearCrossEntropyOptions(),
    )


LOSSES: dict[str, Callable[[Any, Tensor], Tensor]] = {"tiled_loss": tiled}
if hasattr(F, "linear_cross_entropy"):
    LOSSES["linear_cross_entropy"] = chunked


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_a_paged_head_is_read_once_in_each_pass(paging: Paging, loss: Callable[[Any, Tensor], Tensor]) -> None:
    """With everything evicted as soon as it may be: what is used twice without a lease is read twice."""

    def step(model: Any, seed: int) -> Any:
        value = loss(model, batch(seed))
        middle = time.perf_counter()
        value.backward()
        found = [value.detach(), *(param.grad.clone() for param in model.parameters())]
        model.zero_grad()
        return middle, found

    reference, model = plain(Language), paging.build(Language, EVICTING, key="language", timeline=True)
    for seed in range(3):
        begin, (_, expected), (middle, got) = time.perf_counter(), step(reference, seed), step(model, seed)
        assert_same_bits(expected, got)
    reads = reads_of(model.head.weight)
    forward, backward = sum(begin < at < middle for at in reads), sum(middle < at for at in reads)
    assert forward == 1
    assert backward == (1 if loss is tiled else 0)  # torch makes its gradients in the forward


def of_a_batch(model: nn.Module, seed: int) -> Tensor:
    tokens = batch(seed)
    found: Any = model(input_ids=tokens, labels=tokens)
    loss: Tensor = found.loss
    return loss


def with_tile_loss(build: Callable[..., nn.Module], limit: int | None = None) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        model = build()
        if limit is not None:
            deepoffload.tile_linear(model, limit)
        deepoffload.tile_loss(model, max_bytes=SMALL)
        return model

    return made


def training(model: nn.Module) -> Any:
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2, max_grad_norm=0.5)
    model.train()
    found = []
    for step in range(5):
        for micro in range(2):
            loss = of_a_batch(model, 10 * step + micro) / 2
            loss.backward()
            found.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return found, [param.detach().clone() for param in model.parameters()]


TRANSFORMERS = {
    "llama": (llama, None),
    "gpt2": (gpt2, None),
    "mixtral": (mixtral, None),
    "llama in tiles": (llama, 8192),
}


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_models_of_transformers_train_as_in_memory(same: Same, name: str) -> None:
    same(with_tile_loss(*TRANSFORMERS[name]), training, key=f"loss of {name}")


@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral", "opt"])
def test_the_losses_of_the_model_as_it_was(name: str) -> None:
    build = {**FAMILIES, "opt": opt}[name]  # OPT wants its logits contiguous, which they are
    one, other = plain(build).eval(), plain(with_tile_loss(build)).eval()
    assert list(one.state_dict()) == list(other.state_dict())
    tokens = batch(0)
    expected, got = (model(input_ids=tokens, labels=tokens) for model in (one, other))
    assert_same_bits(expected.loss.detach(), got.loss.detach())
    assert type(got.logits) is HeadOutput and got.logits.shape == expected.logits.shape
    assert_same_bits(expected.logits[:, -1].detach(), got.logits[:, -1].detach())
    assert_same_bits(expected.logits.float().argmax(-1), got.logits.float().argmax(-1))
    counted = {"num_items_in_batch": torch.tensor(7)}
    expected, got = (model(input_ids=tokens, labels=tokens, **counted).loss for model in (one, other))
    assert_same_bits(expected.detach(), got.detach())
    prompt = tokens[:1, :4]
    generated = [model.generate(prompt, max_new_tokens=4, do_sample=False) for model in (one, other)]
    assert torch.equal(*generated)


def test_in_evaluation_and_vertical_order(paging: Paging) -> None:
    build = with_tile_loss(llama)
    reference, model = plain(build), paging.build(build, TIGHT, key="loss of llama")
    for each in (reference, model):
        each.eval()
    expected = [of_a_batch(reference, seed) for seed in range(3)]
    for loss in expected:
        loss.backward()
    batches = [{"input_ids": batch(seed), "labels": batch(seed)} for seed in range(3)]
    got = deepoffload.accumulate(model, batches, order="vertical", scale=False)
    assert_same_bits([loss.detach() for loss in expected], [loss.detach() for loss in got])
    assert_same_bits([p.grad for p in reference.parameters()], [p.grad.clone() for p in model.parameters()])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_in_16_bits(paging: Paging, precision: str) -> None:
    setting = Setting(precision, 1.6, precision=precision)
    found = []
    for model in (plain(llama, precision=precision), paging.build(llama, setting, key="llama")):
        deepoffload.tile_loss(model, max_bytes=SMALL)
        model.eval()
        loss = of_a_batch(model, 0)
        loss.backward()
        found.append([loss.detach(), *(param.grad.clone() for param in model.parameters())])
    assert_same_bits(*found)


def changed(build: Callable[..., nn.Module], **attributes: Any) -> Any:
    model = build()
    for name, value in attributes.items():
        setattr(model, name, value)
    return model


def test_models_with_other_losses_are_refused() -> None:
    from transformers import (
        BertConfig,
        BertForMaskedLM,
        Gemma2Config,
        Gemma2ForCausalLM,
        GraniteConfig,
        GraniteForCausalLM,
        T5Config,
    )
    from transformers import T5ForConditionalGeneration as T5

    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    bert = BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, **small))
    t5 = T5(T5Config(vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2))
    gemma = Gemma2ForCausalLM(Gemma2Config(vocab_size=VOCABULARY, head_dim=8, num_key_value_heads=2, **small))
    cases = {
        "has another loss": changed(llama, loss_function=F.mse_loss),
        "another loss|own code": bert,
        "own code|another loss": t5,
        "final_logit_softcapping": gemma,
        "logits_scaling=1.0": GraniteForCausalLM(GraniteConfig(vocab_size=VOCABULARY, **small)),  # it divides by 1, too
        "no nn.Linear as its head, but NonDynamically": changed(
            llama, lm_head=nn.modules.linear.NonDynamicallyQuantizableLinear(48, VOCABULARY)
        ),
    }
    for said, model in cases.items():
        head, loss = type(model.get_output_embeddings()), model.loss_function
        with pytest.raises(UnsupportedError, match=f"({said}).*tiled_loss"):
            deepoffload.tile_loss(model)
        assert type(model.get_output_embeddings()) is head and model.loss_function == loss
    with pytest.raises(UsageError, match="takes a model of transformers, not Linear"):
        deepoffload.tile_loss(nn.Linear(1, 1))
    model = with_tile_loss(llama)()
    with pytest.raises(UsageError, match="in tiles already"):
        deepoffload.tile_loss(model)
    gemma.config.final_logit_softcapping = None
    deepoffload.tile_loss(gemma)
    gemma.config.final_logit_softcapping = 30.0  # which is asked in the forward
    with pytest.raises(UnsupportedError, match="changes its logits between the head and the loss"):
        of_a_batch(gemma, 0)
    masked = with_tile_loss(llama)()

    def forbid(module: Any, args: Any, logits: Any) -> None:
        logits[..., :8] = -1e9  # as Chameleon does

    masked.lm_head.register_forward_hook(forbid)
    with pytest.raises(UnsupportedError, match="changes its logits between the head and the loss"):
        of_a_batch(masked, 0)


def test_everything_in_memory_has_the_same_bits(paging: Paging) -> None:
    build = with_tile_loss(llama)
    assert_same_bits(training(plain(build)), training(paging.build(build, RESIDENT)))


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch 2.13 has it")
def test_the_bias_of_a_head(paging: Paging) -> None:
    """The recipe of torch's loss gives it by name; the loss is that of all logits."""
    build = partial(Language, bias=True)
    found = []
    for model in (plain(build), paging.build(build, EVICTING, key="language with a bias")):
        loss = chunked(model, batch(0))
        loss.backward()
        found.append((loss.detach(), [param.grad.clone() for param in model.parameters()]))
    assert_same_bits(*found)
    logits = model.head(model.body(model.embedding(batch(0))))[:, :-1].flatten(0, 1)
    torch.testing.assert_close(found[0][0], F.cross_entropy(logits, batch(0)[:, 1:].flatten()))


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch 2.13 has it")
def test_torch_says_where_it_falls_back_to_all_logits(paging: Paging) -> None:
    model: Any = paging.build(Language, TIGHT, key="language")
    hidden = model.body(model.embedding(batch(0))).flatten(0, 1)
    with pytest.warns(UserWarning, match="``options`` ignored"):
        F.linear_cross_entropy(
            hidden,
            model.head.weight,
            batch(0).flatten(),
            label_smoothing=0.1,
            options=nn.LinearCrossEntropyOptions(),
        )
