"""What the ranks of the tests of saving do."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import deepoffload
from deepoffload import CPUSGD, CPUAdamW, CPULion, offload_context
from deepoffload.errors import DeepOffloadError
from deepoffload.runtime.context import engine_of
from tests.models.zoo import language, small_llama
from tests.ranks.training_programs import digest
from tests.support.models import TinyGPT, batch, next_token_loss
from tests.support.waiting import wait_until

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adamw": lambda params: CPUAdamW(params, lr=1e-2, max_grad_norm=1.0),
    "amsgrad": lambda params: CPUAdamW(params, lr=1e-2, amsgrad=True),
    "8-bit": lambda params: CPUAdamW(params, lr=1e-2, state_dtype="8bit"),
    "lion": lambda params: CPULion(params, lr=1e-3),
    "sgd": lambda params: CPUSGD(params, lr=1e-2, momentum=0.9),
}


def small_gpt() -> nn.Module:
    """State is read parameter by parameter, so that what ranks take is in proportion to their number."""
    return TinyGPT(depth=1, dropout=0.0)


def rank() -> int:
    return int(os.environ["RANK"])


@contextmanager
def built(config: dict[str, Any], make: Callable[[], nn.Module] = small_gpt) -> Iterator[nn.Module]:
    torch.manual_seed(11)
    with offload_context({"gradient_dtype": "fp32", **config}):
        model = make()
    try:
        yield model.train()
    finally:
        engine_of(model).close()


def train(model: nn.Module, optimizer: Any, steps: range) -> list[float | None]:
    """All ranks have the same data, so that a sum over any number of them that is a power of two has the same bits."""
    norms = []
    for step in steps:
        next_token_loss(model, batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        norms.append(getattr(optimizer, "grad_norm", None))
    return norms


def digests(values: dict[Any, Any]) -> dict[str, str]:
    """Of everything in a state dict, with the paths of its keys."""
    found = {}
    for key, value in values.items():
        if isinstance(value, dict):
            found.update({f"{key}.{name}": text for name, text in digests(value).items()})
        else:
            found[str(key)] = digest(value) if isinstance(value, Tensor) else repr(value)
    return found


def save_state(name: str, config: dict[str, Any], path: str, steps: int) -> tuple[dict[str, str], dict[str, str]]:
    """Train, save everything with torch.save on rank 0 alone, and the optimizer's state also as shards of every rank,
    and train on. Returns digests of the state on this rank, and of the weights at the end."""
    with built(config) as model:
        optimizer = OPTIMIZERS[name](model.parameters())
        train(model, optimizer, range(steps))
        if rank() == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
        torch.save(optimizer.state_dict(shards=True), f"{path}.{rank()}")
        shown = digests(optimizer.state_dict())
        train(model, optimizer, range(steps, steps + 2))
        check_disk(model, config)
        return shown, digests(model.state_dict())


def check_disk(model: nn.Module, config: dict[str, Any]) -> None:
    """With a disk there was no room for all in memory."""
    assert "nvme_path" not in config or deepoffload.stats(model)["evictions"] > 0, "this tested nothing"


def load_state(
    name: str, config: dict[str, Any], path: str, steps: int, shards: bool = False
) -> tuple[dict[str, str], dict[str, str]]:
    """The same from what was saved; with ``shards`` each rank loads its own ones."""
    with built(config) as model:
        optimizer = OPTIMIZERS[name](model.parameters())
        saved = torch.load(path, weights_only=True)
        model.load_state_dict(saved["model"])
        if shards:
            saved["optimizer"] = torch.load(f"{path}.{rank()}", weights_only=True)
            assert saved["optimizer"]["shards"]["rank"] == rank()
        optimizer.load_state_dict(saved["optimizer"])
        shown = digests(optimizer.state_dict())
        train(model, optimizer, range(steps, steps + 2))
        return shown, digests(model.state_dict())


def load_wrong_shards(config: dict[str, Any], path: str) -> list[str]:
    """All ranks load what rank 0 has saved, and shards of a model that was cut otherwise. Then they train on."""
    with built(config) as model:
        optimizer = CPUAdamW(model.parameters(), lr=1e-2)
        first = torch.load(f"{path}.0", weights_only=True)
        cut_otherwise = torch.load(f"{path}.{rank()}", weights_only=True)
        cut_otherwise["shards"]["elements"][0] = (5, 9)
        said = []
        for state in (first, cut_otherwise):
            try:
                optimizer.load_state_dict(state)
                said.append("nothing was raised")
            except DeepOffloadError as error:
                said.append(f"{type(error).__name__}: {error}")
        train(model, optimizer, range(1))
        return said


def read_while_others_train_on(config: dict[str, Any]) -> list[float]:
    """Rank 0 reads state while the others are in their next forward, which waits for it only at the step."""
    with built(config) as model:
        optimizer = CPUAdamW(model.parameters(), lr=1e-2)
        train(model, optimizer, range(2))
        before = []
        if rank() == 0:
            time.sleep(0.2)
            before = [float(entry["exp_avg"].norm()) for entry in optimizer.state_dict()["state"].values()]
        train(model, optimizer, range(2, 3))
        return before


def load_on_one_rank_only(config: dict[str, Any], given_up: Path) -> str:
    """Rank 0 waits for the others, which go on when it has given up."""
    with built({**config, "ranks": {"timeout_s": 6}}) as model:
        optimizer = CPUAdamW(model.parameters(), lr=1e-2)
        train(model, optimizer, range(1))
        saved = optimizer.state_dict()
        try:
            if rank() == 0:
                optimizer.load_state_dict(torch.load(_saved(saved), weights_only=True))
            else:
                wait_until(given_up.exists)
                train(model, optimizer, range(1, 2))
        except DeepOffloadError as error:
            given_up.touch()
            return f"{type(error).__name__}: {error}"
        return "nothing was raised"


def _saved(values: Any) -> Any:
    file = io.BytesIO()
    torch.save(values, file)
    file.seek(0)
    return file


def save_files(config: dict[str, Any], root: str) -> dict[str, str]:
    """All ranks save, rank 0 saves alone, and rank 0 saves by transformers' own method, with a step after each."""
    with built(config, small_llama) as model:
        optimizer = CPUAdamW(model.parameters(), lr=1e-2)
        _train_llama(model, optimizer, 0)
        deepoffload.save_pretrained(model, Path(root) / "all", max_shard_size="60KB")
        assert (Path(root) / "all" / "config.json").exists()
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(0.5)  # nobody comes here before all is written
        _train_llama(model, optimizer, 1)
        if rank() == 0:
            deepoffload.save_pretrained(model, Path(root) / "first", max_shard_size="60KB", rank0_only=True)
        _train_llama(model, optimizer, 2)
        if rank() == 0:
            model.save_pretrained(Path(root) / "transformers", max_shard_size="60KB")  # type: ignore[operator]
        _train_llama(model, optimizer, 3)
        return digests(model.state_dict())


def _train_llama(model: nn.Module, optimizer: Any, step: int) -> None:
    model(**language(step)).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def save_where_it_fails(directory: str) -> str:
    with built({"host_budget": "32MiB"}) as model:
        try:
            deepoffload.save_pretrained(model, directory)
        except DeepOffloadError as error:
            return f"{type(error).__name__}: {error}"
        return "nothing was raised"


def save_again_after_rank_0_alone(directory: str) -> list[str]:
    """Rank 0 saves alone before a step, all ranks after it: these wait for the second save."""
    with built({"host_budget": "32MiB"}) as model:
        optimizer = CPUAdamW(model.parameters(), lr=1e-2)
        if rank() == 0:
            deepoffload.save_pretrained(model, directory, rank0_only=True)
        train(model, optimizer, range(1))
        if rank() == 0:
            time.sleep(0.5)
        deepoffload.save_pretrained(model, directory)
        saved = load_file(Path(directory) / "model.safetensors")
        return [
            name for name, value in model.state_dict().items() if name in saved and digest(saved[name]) != digest(value)
        ]
