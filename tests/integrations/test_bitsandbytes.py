"""Models in bitsandbytes' 8 and 4 bits, with ``inference=True``: numbers and scales are paged, and the bits are those
of the same model in memory."""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deepoffload import stats
from deepoffload.errors import UnsupportedError
from deepoffload.memory.block import is_backed
from tests.support.generation import Generation
from tests.support.inspect import units_of
from tests.support.models import llama

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)

TOKENS = torch.arange(3, 15).view(2, 6)
BUILD = partial(
    llama, vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=8, max_position_embeddings=256
)
FOUR: dict[str, Any] = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16}
KINDS: dict[str, dict[str, Any]] = {
    "nf4": FOUR,
    "fp4": FOUR | {"bnb_4bit_quant_type": "fp4"},
    "nf4 in bf16 storage": FOUR | {"bnb_4bit_quant_storage": torch.bfloat16},
    "nf4, scales in 8 bits": FOUR | {"bnb_4bit_use_double_quant": True},
    "int8": {"load_in_8bit": True},
    "int8 without outliers": {"load_in_8bit": True, "llm_int8_threshold": 0.0},
}
STORED = ("nf4", "nf4 in bf16 storage", "nf4, scales in 8 bits", "int8")


class Quantized(Generation):
    """Loads with a configuration of bitsandbytes', or a checkpoint that is quantised already."""

    said: Any = None

    def plain(self) -> Any:
        more = {} if self.said is None else {"quantization_config": self.said}
        return self.kind.from_pretrained(self.checkpoint, dtype=torch.bfloat16, **more).eval()


@pytest.fixture
def generation(tmp_path: Path) -> Quantized:
    found = Generation.of(BUILD, torch.bfloat16, tmp_path)
    return Quantized(found.kind, found.checkpoint, found.nvme_path)


def outcome(model: Any) -> list[torch.Tensor]:
    found = [model(TOKENS).logits]
    found += [model.generate(TOKENS, max_new_tokens=6, do_sample=False, num_beams=beams) for beams in (1, 2)]
    return [*found, model(TOKENS[:, :1]).logits]


def equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_the_bits_are_those_of_memory(generation: Quantized, tmp_path: Path, kind: str) -> None:
    """Half of them quantise while they load, the others are stored so."""
    from transformers import BitsAndBytesConfig

    generation.said = BitsAndBytesConfig(**KINDS[kind])
    stored = kind in STORED
    if stored:
        generation.plain().save_pretrained(tmp_path / "stored")
        generation = Quantized(generation.kind, tmp_path / "stored", generation.nvme_path)
    expected = outcome(generation.plain())
    model = generation.paged(generation.least_bytes())
    assert equal(outcome(model), expected) and equal(outcome(model), expected)
    assert stats(model)["evictions"] > 8
    paged = [handle.name for unit in units_of(model) for handle in unit.handles]
    assert sum(name.endswith("original0") for name in paged) == 7 * 8
    if stored and "load_in_8bit" in KINDS[kind]:
        assert stats(model)["disk_bytes_written"] == 0, "numbers in 8 bits are read where they lie"


@torch.no_grad()
def test_layers_that_do_not_lay_their_weights_out_again_are_read_where_they_lie(
    generation: Quantized, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on processors without bf16 instructions."""
    from bitsandbytes.nn import modules
    from transformers import BitsAndBytesConfig

    monkeypatch.setattr(modules, "has_avx512bf16", lambda: False)
    generation.said = BitsAndBytesConfig(**FOUR)
    generation.plain().save_pretrained(tmp_path / "stored")
    generation = Quantized(generation.kind, tmp_path / "stored", generation.nvme_path)
    plain, model = generation.plain(), generation.paged(generation.least_bytes())
    assert equal(outcome(model), outcome(plain)) and stats(model)["disk_bytes_written"] == 0
    assert all(is_backed(unit.weights) for unit in units_of(model))


@torch.no_grad()
def test_calls_in_train_have_the_bits_of_memory_or_are_refused(generation: Quantized) -> None:
    """A layer in 4 bits computes otherwise in ``train()`` until it has evaluated; then it does not."""
    from bitsandbytes.nn import modules
    from transformers import BitsAndBytesConfig

    def logits(model: Any) -> torch.Tensor:
        torch.manual_seed(3)  # dropout
        found: torch.Tensor = model(TOKENS).logits
        return found

    for said in ({"load_in_8bit": True}, FOUR):
        generation.said = BitsAndBytesConfig(**said)
        plain, model = generation.plain().train(), generation.paged(64 << 20).train()
        if said is FOUR and modules.has_avx512bf16():
            with pytest.raises(UnsupportedError, match=r"Linear4bit in train\(\) before its first one in eval\(\)"):
                model(TOKENS)
            plain.eval(), model.eval()
        assert torch.equal(logits(model), logits(plain))
        assert torch.equal(logits(model.train()), logits(plain.train()))


def test_what_cannot_be_done_says_so(generation: Quantized) -> None:
    from transformers import BitsAndBytesConfig

    for said in ({"load_in_8bit": True}, FOUR):
        generation.said = BitsAndBytesConfig(**said)
        model = generation.paged(64 << 20)
        with pytest.raises(UnsupportedError, match=r"state_dict of model\.layers\.0\.self_attn\.q_proj\.weight"):
            model.state_dict()
        inputs = torch.ones(1, 4, 128, dtype=torch.bfloat16, requires_grad=True)
        layer = model.model.layers[0].mlp.up_proj
        with pytest.raises(UnsupportedError, match="gradients of the inputs"):
            model(inputs_embeds=inputs)
        with pytest.raises(UnsupportedError, match="another weight"):
            layer.weight = torch.ones(2, 2)


@torch.no_grad()
def test_what_is_not_quantised_yet_stays_as_it_is(generation: Quantized) -> None:
    """A layer that is made by hand, and trains: it computes in another way until it evaluates."""
    from bitsandbytes.nn import Linear4bit, Linear8bitLt

    import deepoffload

    def build() -> Any:
        torch.manual_seed(0)
        layers = [Linear4bit(64, 64, bias=False), Linear8bitLt(64, 64, has_fp16_weights=False), nn.Linear(64, 64)]
        return nn.Sequential(*layers)

    with deepoffload.offload_context(host_budget="1MiB", nvme_path=str(generation.nvme_path), inference=True):
        model = build()
    plain = build()
    for each in (plain, model):
        each[0].to("cpu"), each[1].to("cpu")
        each.eval()
    assert torch.equal(model(torch.ones(3, 64)), plain(torch.ones(3, 64)))
