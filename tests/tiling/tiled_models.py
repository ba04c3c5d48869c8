"""Models of the zoo in tiles, for plain PyTorch and for paging: tiles are as small as these models need."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

import deepoffload
from tests.support.models import TinyGPT, llama, mixtral

LIMIT_BYTES = {"gpt": 12288, "llama": 8192, "mixtral": 3000}
"""Of a tile. Above the head of the GPT, which is tied."""

SMALLER: dict[str, dict[str, int]] = {
    "gpt": {"depth": 2},
    "llama": {"num_hidden_layers": 1},
    "mixtral": {"num_hidden_layers": 1},
}
BUILDS: dict[str, Callable[..., nn.Module]] = {"gpt": TinyGPT, "llama": llama, "mixtral": mixtral}


def in_tiles(name: str, **changes: Any) -> nn.Module:
    """A model whose linear layers are in tiles."""
    model = BUILDS[name](**{**SMALLER[name], **changes})
    assert deepoffload.tile_linear(model, LIMIT_BYTES[name])
    return model


def builder(name: str, **changes: Any) -> Callable[[], nn.Module]:
    """What makes one."""
    return partial(in_tiles, name, **changes)


def small_gpt() -> nn.Module:
    """The GPT as it is, of the same size."""
    return BUILDS["gpt"](**SMALLER["gpt"])


def small_llama() -> nn.Module:
    """The same of the Llama."""
    return BUILDS["llama"](**SMALLER["llama"])
