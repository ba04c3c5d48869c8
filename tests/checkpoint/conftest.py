"""Small real models, plain and paged, with the same initial values."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepoffload
from deepoffload import offload_context
from tests.checkpoint.damaged import Opener, trained
from tests.checkpoint.durable_model import PLACES, Make, Run
from tests.support.disks import folder_on_disk
from tests.support.paging import QUICK_BACKEND

transformers = pytest.importorskip("transformers")


def _llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return transformers.LlamaForCausalLM(config)


def _gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=256, n_embd=64, n_layer=3, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def _mixtral() -> nn.Module:
    config = transformers.MixtralConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    return transformers.MixtralForCausalLM(config)


@pytest.fixture
def make_model() -> Callable[[str], nn.Module]:
    """The model of a name, with the same values every time."""
    makers: dict[str, Callable[[], nn.Module]] = {"llama": _llama, "gpt2": _gpt2, "mixtral": _mixtral}

    def make(name: str) -> nn.Module:
        torch.manual_seed(0)
        return makers[name]()

    return make


@pytest.fixture
def paged(nvme_path: Path) -> Iterator[Callable[..., Any]]:
    """Runs a function inside an ``offload_context`` that swaps to disk and evicts and poisons all it can."""
    engines = []

    def build(make: Callable[[], Any], **overrides: Any) -> Any:
        settings: dict[str, Any] = {
            "host_budget": "1MiB",
            "nvme_path": str(nvme_path),
            "step_overlap": "none",
            "debug": {"poison": True, "evict_always": True},
            "aio": {"backend": QUICK_BACKEND},
        }
        with offload_context(**{**settings, **overrides}) as context:
            model = make()
        engines.append(context.engine)
        return model

    yield build
    for engine in engines:
        engine.close()
    gc.collect()
    assert list(nvme_path.iterdir()) == []


@pytest.fixture(autouse=True)
def no_staging_is_left(tmp_path: Path) -> Iterator[None]:
    """No test leaves a half-written file."""
    yield
    assert not list(tmp_path.rglob(".deepoffload-save-*"))


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint with the tag ``one``."""
    model, optimizer = trained()
    return Path(deepoffload.TrainingState(model, optimizer).save(tmp_path_factory.mktemp("saved"), "one"))


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(saved, tmp_path / "copy" / "one"))


@pytest.fixture
def opener() -> Iterator[Opener]:
    made = Opener()
    yield made
    made.io.close()
    made.pool.close()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes runs whose durable state lies in ``tmp_path / "swap"``, and closes them."""
    folder_on_disk(tmp_path / "swap")
    runs: list[Run] = []

    def build(place: str = "half", **said: Any) -> Run:
        durability = {"every": 1, "path": str(tmp_path / "swap")}
        runs.append(Run(**{**PLACES[place], "step_overlap": "deferred", "durability": durability, **said}))
        return runs[-1]

    yield build
    for run in runs:
        run.close()
