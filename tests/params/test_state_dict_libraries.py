"""Values of ``state_dict()`` in the hands of libraries that ask for addresses, storages, views and copies."""

from __future__ import annotations

import copy
import gc
import io
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_model, save_model
from torch import Tensor, nn
from torch.distributed import checkpoint as distributed_checkpoint
from torch.distributed.checkpoint._state_dict_stager import StateDictStager

from deepoffload import CPUAdamW
from deepoffload.params.state_dict_values import LazyValue
from tests.support.loops import assert_same_bits, weights_of
from tests.support.models import TinyGPT, batch, gpt2, mlp, next_token_loss
from tests.support.paging import EVICTING, TIGHT, Paging, Same, plain


def tied() -> TinyGPT:
    return TinyGPT(dropout=0.0)


def only_once(state: Any) -> dict[str, Tensor]:
    """A state dict of the tied model with each weight once, as ``named_parameters()`` has it."""
    return {name: value for name, value in state.items() if name != "head.weight"}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    next_token_loss(model, batch(seed)).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("setting", [TIGHT, EVICTING], ids=str)
def test_distributed_checkpoints(paging: Paging, setting: Any, tmp_path: Path) -> None:
    """Saved at once, saved in the background, and what the background's stager copies, which it keeps for later."""
    model = paging.build(tied, setting, key="tied")
    optimizer = CPUAdamW(model.parameters(), lr=1e-2)
    other = paging.build(tied, setting, seed=1, key="tied")
    stager = StateDictStager()
    for seed in range(4):
        train(model, optimizer, seed)
        expected = weights_of(model)
        staged = stager.stage({"model": model.state_dict(), "step": seed})
        assert all(type(value) is Tensor and not vars(value) for value in staged["model"].values())
        assert_same_bits(expected, only_once(staged["model"]))
    for name, save in (("now", distributed_checkpoint.save), ("later", distributed_checkpoint.async_save)):
        started = save({"model": model.state_dict()}, checkpoint_id=str(tmp_path / name))
        if name == "later":
            started.result()
        for target in (plain(tied, seed=1), other):
            state = {"model": target.state_dict()}
            distributed_checkpoint.load(state, checkpoint_id=str(tmp_path / name))
            target.load_state_dict(state["model"])
            assert_same_bits(expected, weights_of(target))


@pytest.mark.parametrize("safe", [True, False])
def test_accelerate_saves_and_loads_a_model_with_tied_weights(paging: Paging, safe: bool, tmp_path: Path) -> None:
    found = []
    for model in (plain(tied), paging.build(tied, TIGHT, key="tied")):
        accelerator = Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(model, CPUAdamW(model.parameters(), lr=1e-2))
        train(model, optimizer, 0)
        accelerator.save_state(str(tmp_path / "state"), safe_serialization=safe)
        saved = weights_of(model)
        train(model, optimizer, 1)
        accelerator.load_state(str(tmp_path / "state"))
        loaded = weights_of(model)
        train(model, optimizer, 2)
        found.append([saved, loaded, weights_of(model)])
    assert_same_bits(found[0], found[1])
    assert_same_bits(found[1][0], found[1][1])


def test_safetensors_and_torch_with_tied_weights(paging: Paging, tmp_path: Path) -> None:
    model, other = paging.build(tied, TIGHT, key="tied"), paging.build(tied, TIGHT, seed=1, key="tied")
    save_model(model, tmp_path / "model.safetensors")
    for target in (plain(tied, seed=1), other):
        load_model(target, tmp_path / "model.safetensors")
        assert_same_bits(weights_of(model), weights_of(target))
    sizes = []
    for state in (plain(tied).state_dict(), model.state_dict()):
        file = io.BytesIO()
        torch.save(state, file)
        sizes.append(file.tell())
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        assert loaded["head.weight"].data_ptr() == loaded["embedding.weight"].data_ptr()
        assert_same_bits(weights_of(model), only_once(loaded))
    assert abs(sizes[0] - sizes[1]) < sizes[0] // 20


def test_save_pretrained_of_a_state_dict(paging: Paging, tmp_path: Path) -> None:
    model = paging.build(gpt2, TIGHT)
    model.save_pretrained(tmp_path, state_dict=model.state_dict(), max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_same_bits(weights_of(plain(gpt2)), weights_of(type(model).from_pretrained(tmp_path)))


def test_more_weights_than_open_files(paging: Paging) -> None:
    def build() -> nn.Sequential:
        return nn.Sequential(*[nn.Linear(4, 4) for _ in range(60)], mlp())

    model = paging.build(build, TIGHT)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 20, limits[1]))
    try:
        state = model.state_dict()
        addresses = {value.data_ptr() for value in state.values()}
        torch.save(state, io.BytesIO())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len(addresses) == len(state) > 100


def nameless_file_bytes() -> int:
    """What files without a name that this process has open take on their disks."""
    found = {}
    for number in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{number}").endswith(" (deleted)"):
                status = os.stat(f"/proc/self/fd/{number}")
                found[status.st_dev, status.st_ino] = status.st_blocks * 512
        except OSError:
            pass  # the descriptor that listed the directory
    return sum(found.values())


def test_room_on_the_disk_comes_back_and_addresses_stay(paging: Paging) -> None:
    with paging.context(TIGHT, 2 << 20):
        model = mlp(256)
    weights_bytes = sum(param.numel() * 4 for param in model.parameters())
    before = nameless_file_bytes()
    state = model.state_dict()
    addresses = {name: value.data_ptr() for name, value in state.items()}
    kept = state["2.weight"].untyped_storage()
    assert nameless_file_bytes() >= before + weights_bytes
    del state
    gc.collect()
    assert nameless_file_bytes() <= before + kept.nbytes() + 4096
    assert_same_bits(model[2].weight.detach().clone(), torch.tensor([]).set_(kept, 0, (256, 256)))
    again = model.state_dict()
    assert {name: value.data_ptr() for name, value in again.items()} == addresses
    assert_same_bits(weights_of(model), {name: torch.from_numpy(mapped_values(v)) for name, v in again.items()})


def mapped_values(value: Tensor) -> Any:
    return (
        torch.empty(0, dtype=value.dtype)
        .set_(value.untyped_storage(), value.storage_offset(), value.size(), value.stride())
        .numpy()
    )


def test_copies_and_other_data(same: Same) -> None:
    """Copies of tied values are tied, a shallow copy is an alias, and ``.data =`` is about the value alone."""

    def program(model: TinyGPT) -> Any:
        state = model.state_dict()
        deep = copy.deepcopy({"state": state, "view": state["head.weight"].t()})
        addresses = [deep["state"][name].data_ptr() for name in ("head.weight", "embedding.weight")]
        shallow = copy.copy(state["position"])
        shallow.mul_(2)
        state["norm.weight"].data = torch.full((3,), 5.0)
        found = [dict(deep["state"]), deep["view"].clone(), weights_of(model), state["norm.weight"] * 2]
        assert state["norm.weight"].shape == (3,) and type(state["norm.weight"]) is Tensor
        assert addresses[0] == addresses[1] == deep["view"].data_ptr() and deep["view"].stride() == (1, 48)
        return [[value.clone() for value in one.values()] if isinstance(one, dict) else one for one in found]

    same(tied, program, key="tied")


VIEWS: dict[str, Any] = {
    "view": lambda x: x.view(-1),
    "reshape": lambda x: x.reshape(2, -1),
    "t": lambda x: x.t() if x.dim() < 3 else x.transpose(0, 2),
    "T": lambda x: x.mT if x.dim() > 1 else x,
    "first": lambda x: x[0],
    "last": lambda x: x[-1],
    "rows": lambda x: x[1:],
    "every other": lambda x: x[..., ::2],
    "new axis": lambda x: x[None],
    "narrow": lambda x: x.narrow(0, 0, 1),
    "chunk": lambda x: x.chunk(2)[-1],
    "unbind": lambda x: x.unbind(-1)[0],
    "list": lambda x: list(x)[0],
    "expand": lambda x: x.unsqueeze(0).expand(3, *x.shape),
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "contiguous": lambda x: x.contiguous(),
    "flatten": torch.flatten,
    "transpose": lambda x: torch.transpose(x, 0, -1),
    "bytes": lambda x: x.view(torch.int16),
    "strided": lambda x: x.as_strided((2, 2), (3, 1), 1),
    "picked": lambda x: x[[0]],
    "masked": lambda x: x[x > 0],
}


def test_random_views(paging: Paging) -> None:
    """Where a view lies in its weight, what it holds, and where writes to it go."""
    model, reference = paging.build(mlp, EVICTING), plain(mlp)
    lazy, ordinary = model.state_dict()["2.weight"], reference.state_dict()["2.weight"]
    lazily = 0

    @settings(max_examples=80, suppress_health_check=list(HealthCheck))
    @given(st.lists(st.sampled_from(sorted(VIEWS)), min_size=1, max_size=4), st.booleans())
    def agree(names: list[str], write: bool) -> None:
        nonlocal lazily
        value, expected = lazy, ordinary
        for name in names:
            try:
                following = VIEWS[name](expected)
            except (RuntimeError, IndexError, TypeError) as error:
                with pytest.raises(type(error)):
                    VIEWS[name](value)
                return
            value, expected = VIEWS[name](value), following
        shown = [(x.shape, x.dtype, x.stride(), x.storage_offset(), x.is_contiguous()) for x in (value, expected)]
        assert shown[0] == shown[1]
        assert_same_bits(expected.clone(), value.clone())
        shared = expected.untyped_storage().data_ptr() == ordinary.untyped_storage().data_ptr()
        if shared and expected.numel():
            assert type(value) is LazyValue
            assert value.data_ptr() - lazy.data_ptr() == expected.data_ptr() - ordinary.data_ptr()
            assert value.untyped_storage() is lazy.untyped_storage() is value.untyped_storage()
            assert torch.equal(torch.from_numpy(mapped_values(value).copy()), expected)
            lazily += 1
        if write and expected.is_contiguous():
            for each in (value, expected):
                if each.is_floating_point():
                    each.mul_(-1.5)
                else:
                    each.zero_()
            assert_same_bits(reference[2].weight.detach().clone(), model[2].weight.detach().clone())

    agree()
    assert lazily > 20
