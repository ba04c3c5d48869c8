"""Checkpoints that are quantised already, as the libraries of GPTQ, AWQ and compressed-tensors store them.

Those libraries put modules with such tensors in the place of ``nn.Linear`` before transformers loads the checkpoint.
Here the modules are written down by hand: the same names, types and shapes, and the plain way to compute with them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from deepoffload import stats
from deepoffload.memory.block import is_backed
from tests.support.disks import folder_on_disk
from tests.support.generation import Generation
from tests.support.inspect import units_of

TOKENS = torch.arange(3, 15).view(2, 6)
GROUP = 32
IN_A_WORD = 8
"""int4 values in one int32."""
SHIFTS = torch.arange(0, 32, 4, dtype=torch.int32)


def _random_words(*shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32)


class GptqLinear(nn.Module):
    """``qweight [in / 8, out]``, ``qzeros [groups, out / 8]``, ``scales [groups, out]``, ``g_idx [in]``: buffers."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        groups = in_features // GROUP
        self.register_buffer("qweight", _random_words(in_features // IN_A_WORD, out_features))
        self.register_buffer("qzeros", _random_words(groups, out_features // IN_A_WORD))
        self.register_buffer("scales", torch.rand(groups, out_features) * 0.01)
        self.register_buffer("g_idx", (torch.arange(in_features) // GROUP).to(torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        zeros = ((self.qzeros[:, :, None] >> SHIFTS) & 15).flatten(1) + 1
        weight = ((self.qweight[:, None, :] >> SHIFTS[:, None]) & 15).flatten(0, 1)
        group = self.g_idx.long()
        return x @ (self.scales[group] * (weight - zeros[group])).to(x.dtype)


class AwqLinear(nn.Module):
    """``qweight [in, out / 8]``, ``qzeros [groups, out / 8]``, ``scales [groups, out]``: buffers. The values of a word
    are those of eight columns, in their own order."""

    ORDER = (0, 4, 1, 5, 2, 6, 3, 7)

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        groups = in_features // GROUP
        self.register_buffer("qweight", _random_words(in_features, out_features // IN_A_WORD))
        self.register_buffer("qzeros", _random_words(groups, out_features // IN_A_WORD))
        self.register_buffer("scales", torch.rand(groups, out_features) * 0.01)

    def _unpacked(self, words: Tensor) -> Tensor:
        shifts = 4 * torch.tensor(self.ORDER, dtype=torch.int32)
        return ((words[:, :, None] >> shifts) & 15).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        weight, zeros = self._unpacked(self.qweight), self._unpacked(self.qzeros)
        scaled = (weight - zeros.repeat_interleave(GROUP, 0)) * self.scales.repeat_interleave(GROUP, 0)
        return x @ scaled.to(x.dtype)


class CompressedLinear(nn.Module):
    """``weight_packed [out, in / 8]``, ``weight_scale [out, groups]``, ``weight_shape [2]``: frozen parameters."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        values = {
            "weight_packed": _random_words(out_features, in_features // IN_A_WORD),
            "weight_scale": torch.rand(out_features, in_features // GROUP) * 0.01,
            "weight_shape": torch.tensor([out_features, in_features]),
        }
        for name, value in values.items():
            self.register_parameter(name, nn.Parameter(value, requires_grad=False))

    def forward(self, x: Tensor) -> Tensor:
        weight = ((self.weight_packed[:, :, None] >> SHIFTS) & 15).flatten(1) - 8
        weight = weight.view(self.weight_shape.tolist())
        return nn.functional.linear(x, (weight * self.weight_scale.repeat_interleave(GROUP, 1)).to(x.dtype))


class Packed(LlamaForCausalLM):
    """A Llama whose layers compute with packed weights."""

    kind: type[nn.Module]

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        for name, module in list(self.model.layers.named_modules()):
            if type(module) is nn.Linear:
                parent, _, key = name.rpartition(".")
                packed = self.kind(module.in_features, module.out_features)
                setattr(self.model.layers.get_submodule(parent), key, packed)

    def _init_weights(self, module: nn.Module) -> None:
        """Nothing: a checkpoint has all values."""


class PackedByGptq(Packed):
    kind = GptqLinear


class PackedByAwq(Packed):
    kind = AwqLinear


class PackedCompressed(Packed):
    kind = CompressedLinear


def checkpoint_of(model: type[Any], path: Path) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=256, intermediate_size=1024, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    made = model(config)
    for param in made.parameters():
        if param.is_floating_point() and param.dim() == 2 and param.shape[0] == config.vocab_size:
            nn.init.normal_(param, std=0.2)
    made.to(torch.bfloat16).save_pretrained(path)
    return path


@torch.no_grad()
@pytest.mark.parametrize("model", [PackedByGptq, PackedByAwq, PackedCompressed])
def test_packed_weights_are_read_where_they_lie(model: type[Any], tmp_path: Path) -> None:
    generation = Generation(model, checkpoint_of(model, tmp_path / "checkpoint"), folder_on_disk(tmp_path / "swap"))
    plain = generation.plain()
    expected = plain(TOKENS).logits
    assert expected.isfinite().all() and expected.std() > 0
    for budget in (generation.least_bytes(), 2 << 20):
        paged = generation.paged(budget)
        assert paged.state_dict().keys() == plain.state_dict().keys()
        assert all(is_backed(unit.weights) for unit in units_of(paged))
        for _ in range(2):
            assert torch.equal(paged(TOKENS).logits, expected)
        way: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
        assert torch.equal(paged.generate(TOKENS, **way), plain.generate(TOKENS, **way))
        found = stats(paged)
        assert found["disk_bytes_written"] == 0 and found["disk_bytes_read"] > 0
        words = [name for name, value in paged.named_buffers() if value.dtype is torch.int32 and value.numel() > 4096]
        assert not words, "these stay in memory"
        left = sum(value.nbytes for value in paged.buffers())
        assert left < 0.05 * sum(value.nbytes for value in plain.state_dict().values()), "too much stays in memory"
