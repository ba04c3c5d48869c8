"""What the ranks of the tests of ``load_pretrained`` do."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

import deepoffload
from deepoffload import offload_context
from deepoffload.errors import DeepOffloadError
from deepoffload.runtime.context import engine_of
from tests.ranks.saving import rank
from tests.ranks.training_programs import digest
from tests.support.models import TinyGPT


class Turned(TinyGPT):
    """With weights that lie in another order in memory than in files, in long runs and in short ones."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.turned = nn.Parameter(torch.randn(130, 300).t())
        self.moved = nn.Parameter(torch.randn(4, 9, 500).transpose(0, 1))


class _Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def load(path: str, config: dict[str, Any], inside: bool) -> tuple[dict[str, str], str]:
    """The digests of a model that was loaded, and what the log says of it."""
    said, log = _Said(), logging.getLogger("deepoffload")
    log.addHandler(said)
    log.setLevel(logging.INFO)
    torch.manual_seed(3)
    with offload_context({"gradient_dtype": "fp32", **config}):
        model = Turned()
        if inside:
            deepoffload.load_pretrained(model, path)
    if not inside:
        held = model.blocks[0].mlp[0].weight.data[:2]  # a view of what is loaded shows it
        deepoffload.load_pretrained(model, path)
        assert torch.equal(held, model.blocks[0].mlp[0].weight[:2])
    found = {name: digest(value) for name, value in model.state_dict().items()}
    engine_of(model).close()
    return found, next(line for line in said.lines if line.startswith("loaded"))


def load_what_is_wrong(directory: str) -> list[str]:
    """The errors of loads in which the last rank has another file, and what becomes of the model."""
    torch.manual_seed(3)
    with offload_context(host_budget="32MiB"):
        model = TinyGPT(dropout=0.0)
    before = {name: digest(value) for name, value in model.state_dict().items()}
    errors = []
    for kind in ("other values", "damaged"):
        path = Path(directory, kind if rank() == int(os.environ["WORLD_SIZE"]) - 1 else "right", "model.safetensors")
        try:
            deepoffload.load_pretrained(model, path)
        except DeepOffloadError as error:
            errors.append(f"{type(error).__name__}: {error}")
    assert {name: digest(value) for name, value in model.state_dict().items()} == before
    deepoffload.load_pretrained(model, Path(directory, "right"))
    assert {name: digest(value) for name, value in model.state_dict().items()} != before
    engine_of(model).close()
    return errors
