"""Checkpoints of ours for others: fp32 safetensors, torch's files, distributed checkpoints; and back."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import deepoffload
from deepoffload.checkpoint.convert.commands import run as command
from deepoffload.checkpoint.convert.dcp import _Chunk, _Chunked
from deepoffload.checkpoint.convert.tensors import Held
from deepoffload.checkpoint.convert.universal import read_universal
from tests.checkpoint.training import ALL, adamw, gpt, masters, snapshot, steps
from tests.support.disks import largest_file
from tests.support.loops import assert_same_bits
from tests.support.models import TRANSFORMERS, llama

PRECISIONS = ("bf16", "fp32", "fp16") if ALL else ("bf16", "fp16")


def untied_gpt() -> nn.Module:
    model = gpt()
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    return model


def transposed_gpt() -> nn.Module:
    """Two weights whose memory is not in row-major order."""
    model = gpt()
    for name in ("blocks.0.mlp.0", "blocks.1.attention.qkv"):
        layer = model.get_submodule(name)
        layer.weight = nn.Parameter(layer.weight.detach().t().clone().t())
    return model


def trained(paged: Callable[..., Any], make: Callable[[], nn.Module], precision: str, **settings: Any) -> Any:
    model = paged(make, precision=precision)
    optimizer = adamw(model, **settings)
    if precision == "fp16":
        for group in optimizer.param_groups:
            group["eps"] = 1e-4
    steps(model, optimizer, 0)
    return model, optimizer


@pytest.mark.parametrize("precision", PRECISIONS)
def test_fp32_weights_are_the_masters(precision: str, paged: Callable[..., Any], tmp_path: Path) -> None:
    model, optimizer = trained(paged, gpt, precision)
    deepoffload.TrainingState(model, optimizer).save(tmp_path / "saved")
    arguments = ["to-fp32", str(tmp_path / "saved"), str(tmp_path / "out"), "--max-shard-size", "40KB"]
    assert command(arguments) == 0
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    found: dict[str, Tensor] = {}
    for file in sorted(set(index["weight_map"].values())):
        found.update(load_file(tmp_path / "out" / file))
    assert set(found) == set(index["weight_map"]) == set(model.state_dict()) - {"head.weight"}
    assert_same_bits(masters(model, optimizer), {name: found[name] for name in masters(model, optimizer)})


@pytest.mark.parametrize("family", ["tied llama", "gpt2", "mixtral"])
def test_models_of_transformers(family: str, paged: Callable[..., Any], tmp_path: Path) -> None:
    """Mixtral's experts have another packing in the file than in memory; both layouts come out exact."""
    transformers = pytest.importorskip("transformers")
    build = {"tied llama": lambda: llama(tie_word_embeddings=True), **TRANSFORMERS}[family]
    model = paged(build, precision="bf16")
    optimizer = adamw(model)
    steps(model, optimizer, 0)
    deepoffload.TrainingState(model, optimizer).save(tmp_path / "saved")
    exact, state = masters(model, optimizer), optimizer.state_dict()["state"]
    assert command(["to-fp32", str(tmp_path / "saved"), str(tmp_path / "out")]) == 0
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert read.dtype is torch.float32
    assert_same_bits(exact, dict(read.named_parameters()))
    assert command(["to-torch", str(tmp_path / "saved"), str(tmp_path / "torch")]) == 0
    plain = build()
    plain.load_state_dict(torch.load(tmp_path / "torch" / "model.pt", weights_only=True))
    assert_same_bits(exact, dict(plain.named_parameters()))
    held = torch.load(tmp_path / "torch" / "optimizer.pt", weights_only=True)["state"]
    assert held.keys() == state.keys()
    for number in held:
        for key in ("exp_avg", "exp_avg_sq"):
            assert_same_bits(state[number][key], held[number][key])
    assert command(["to-universal", str(tmp_path / "saved"), str(tmp_path / "universal")]) == 0
    found = read_universal(str(tmp_path / "universal"))
    for name, master in exact.items():
        assert_same_bits(master, found.weights[name].read(0, master.numel()).view(master.shape))


CHOICES = [("bf16", "fp32", gpt), ("fp32", "8bit", untied_gpt), ("bf16", "bf16", transposed_gpt)]
if ALL:
    CHOICES = list(
        itertools.product(("bf16", "fp32", "fp16"), ("fp32", "bf16", "8bit"), (gpt, untied_gpt, transposed_gpt))
    )


@pytest.mark.parametrize("precision, state_dtype, make", CHOICES)
def test_torch_and_distributed_files_continue(
    precision: str, state_dtype: str, make: Callable[[], nn.Module], paged: Callable[..., Any], tmp_path: Path
) -> None:
    """torch's AdamW goes on from both with the same bits, and ours from what torch has saved."""
    model, optimizer = trained(paged, make, precision, state_dtype=state_dtype)
    deepoffload.TrainingState(model, optimizer).save(tmp_path / "saved")
    exact, state = masters(model, optimizer), optimizer.state_dict()["state"]
    assert command(["to-torch", str(tmp_path / "saved"), str(tmp_path / "torch")]) == 0
    assert command(["to-dcp", str(tmp_path / "saved"), str(tmp_path / "dcp")]) == 0
    runs = []
    for way in ("torch", "dcp"):
        plain = make()
        plain_optimizer = torch.optim.AdamW(plain.parameters())
        if way == "torch":
            plain.load_state_dict(torch.load(tmp_path / "torch" / "model.pt", weights_only=True, mmap=True))
            plain_optimizer.load_state_dict(torch.load(tmp_path / "torch" / "optimizer.pt", weights_only=True))
        else:
            load_distributed(plain, plain_optimizer, tmp_path / "dcp")
        assert_same_bits(exact, dict(plain.named_parameters()))
        for number, held in plain_optimizer.state_dict()["state"].items():
            assert_same_bits(
                {key: state[number][key] for key in ("exp_avg", "exp_avg_sq")},
                {key: held[key] for key in ("exp_avg", "exp_avg_sq")},
            )
        assert plain_optimizer.param_groups[0]["lr"] == 3e-3
        torch.manual_seed(5)
        losses = steps(plain, plain_optimizer, 3)
        runs.append({"losses": losses, **snapshot(plain, plain_optimizer)})
        if way == "dcp":
            save_distributed(plain, plain_optimizer, tmp_path / "theirs")
    assert_same_bits(runs[0]["losses"], runs[1]["losses"])
    assert command(["from-dcp", str(tmp_path / "theirs"), str(tmp_path / "back")]) == 0
    again = paged(make)
    again_optimizer = adamw(again)
    assert deepoffload.TrainingState(again, again_optimizer).load(tmp_path / "back").step == 6
    found = snapshot(again, again_optimizer)
    assert_same_bits(runs[1]["weights"], found["weights"])
    for number, held in runs[1]["state"].items():
        assert_same_bits(
            {key: held[key] for key in ("exp_avg", "exp_avg_sq")},
            {key: found["state"][number][key] for key in ("exp_avg", "exp_avg_sq")},
        )


def load_distributed(model: nn.Module, optimizer: Any, place: Path) -> None:
    weights, state = get_state_dict(model, optimizer)
    held = {"model": weights, "optimizer": state}
    dcp.load(held, checkpoint_id=place)
    set_state_dict(model, optimizer, model_state_dict=held["model"], optim_state_dict=held["optimizer"])


def named(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    weights, state = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": state}


def save_distributed(model: nn.Module, optimizer: Any, place: Path) -> None:
    dcp.save(named(model, optimizer), checkpoint_id=place)


def test_a_paged_run_that_torch_has_saved(paged: Callable[..., Any], tmp_path: Path) -> None:
    """``dcp.save`` of a paged bf16 model and its optimizer has the masters' remainders, and they come back."""
    model, optimizer = trained(paged, untied_gpt, "bf16")
    save_distributed(model, optimizer, tmp_path / "dcp")
    exact, state = masters(model, optimizer), snapshot(model, optimizer)["state"]
    assert command(["from-dcp", str(tmp_path / "dcp"), str(tmp_path / "back")]) == 0
    again = paged(untied_gpt, precision="fp32")
    again_optimizer = adamw(again)
    deepoffload.TrainingState(again, again_optimizer).load(tmp_path / "back")
    assert_same_bits(exact, dict(again.named_parameters()))
    for number, held in snapshot(again, again_optimizer)["state"].items():
        assert_same_bits(
            {key: state[number][key] for key in ("exp_avg", "exp_avg_sq")},
            {key: held[key] for key in ("exp_avg", "exp_avg_sq")},
        )


def test_what_is_read_may_be_cut_in_any_way() -> None:
    """A tensor in blocks, as several ranks store it, is read in any windows."""
    whole = torch.arange(6 * 10 * 4).view(6, 10, 4)
    for rows, columns in itertools.product(([6], [2, 4], [1, 3, 2]), ([10], [4, 6], [3, 3, 4])):
        chunks, row = [], 0
        for height in rows:
            column = 0
            for width in columns:
                part = whole[row : row + height, column : column + width].contiguous()
                chunks.append(_Chunk((row, column, 0), tuple(part.shape), lambda part=part: Held(part)))
                column += width
            row += height
        tensor = _Chunked(whole.dtype, tuple(whole.shape), chunks)
        for start, numel in ((0, 240), (1, 200), (37, 1), (100, 140)):
            assert torch.equal(tensor.read(start, numel), whole.view(-1)[start : start + numel])


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("saved")
    model = gpt().to(torch.bfloat16)
    optimizer = adamw(model)
    steps(model, optimizer, 0)
    deepoffload.TrainingState(model, optimizer).save(place)
    return place


@pytest.fixture
def saved(saved_once: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved_once, tmp_path / "saved"))


EXPORTS = ("to-fp32", "to-torch", "to-dcp", "to-universal")


@pytest.mark.parametrize("name", EXPORTS)
def test_nothing_is_replaced(name: str, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "mine.txt").write_text("mine")
    assert command([name, str(saved), str(taken)]) == 1
    assert "replaces nothing" in capsys.readouterr().err
    assert [path.name for path in taken.iterdir()] == ["mine.txt"]
    empty = tmp_path / "empty"
    empty.mkdir()
    assert command([name, str(saved), str(empty)]) == 0
    assert list(empty.iterdir())


@pytest.mark.parametrize("name", EXPORTS)
def test_a_write_that_fails_leaves_nothing(
    name: str, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(tmp_path.iterdir())
    with largest_file(9_000):
        assert command([name, str(saved), str(tmp_path / "out")]) == 1
    assert "EFBIG" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before


def test_an_import_replaces_only_our_own(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["to-universal", str(saved), str(tmp_path / "universal")]) == 0
    arguments = ["from-universal", str(tmp_path / "universal"), str(tmp_path / "out"), "--output-tag", "one"]
    assert command(arguments) == 0
    assert command(arguments) == 0
    (tmp_path / "out" / "one" / "notes.txt").write_text("mine")
    assert command(arguments) == 1
    assert "notes.txt" in capsys.readouterr().err


def test_show_and_verify(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["show", str(saved)]) == 0
    assert "global_step3 (latest): step 3" in capsys.readouterr().out
    assert command(["show", str(saved), "--tag", "global_step3"]) == 0
    assert "embedding.weight.exp_avg  F32" in capsys.readouterr().out
    assert command(["verify", str(saved)]) == 0
    assert "every checksum is right" in capsys.readouterr().out
    data = next((saved / "global_step3").glob("optimizer-*.safetensors"))
    content = bytearray(data.read_bytes())
    content[-5] ^= 4
    data.write_bytes(content)
    for arguments in (["verify", str(saved)], *([name, str(saved), str(tmp_path / name)] for name in EXPORTS)):
        assert command(arguments) == 1
        assert "is damaged" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved"]
    for name in ("show", "verify"):
        assert command([name, str(saved / "global_step3")]) == 1
        assert f"is itself a checkpoint: give {saved} as the directory" in capsys.readouterr().err
        assert command([name, ""]) == 1
        assert "is no directory: give a path" in capsys.readouterr().err
    assert command(["verify", str(tmp_path / "nothing")]) == 1
    assert "that is no directory" in capsys.readouterr().err
    assert command(["from-dcp", str(saved), str(tmp_path / "out")]) == 1
    assert "it is no checkpoint of torch.distributed.checkpoint" in capsys.readouterr().err
    assert command(["show", str(tmp_path / "nothing")]) == 1
    assert command(["show", str(tmp_path)]) == 1
    assert "no checkpoints" in capsys.readouterr().err


def test_show_says_what_cannot_be_used(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(saved / "global_step3", saved / "old")
    (saved / "old" / "training.json").unlink()
    for arguments, count in (([], "1 of 2"), (["--tag", "old"], "1 of 1")):
        assert command(["show", str(saved), *arguments]) == 1
        said = capsys.readouterr()
        assert "old: cannot be used: " in said.out and "training.json is missing" in said.out
        assert f"{count} cannot be used: old" in said.err
    assert command(["show", str(saved), "--tag", "global_step3"]) == 0


def numbered(model: nn.Module, optimizer: Any) -> Any:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def numbered_alone(model: nn.Module, optimizer: Any) -> Any:
    """Without the settings of the groups."""
    return {"model": model.state_dict(), "optimizer": {"state": optimizer.state_dict()["state"]}}


@pytest.mark.parametrize("make", [numbered, numbered_alone])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_distributed_checkpoints_with_numbers_of_parameters(
    kind: Any, make: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = gpt()
    optimizer = kind(model.parameters(), lr=0.1)
    steps(model, optimizer, 0)
    state = make(model, optimizer)
    dcp.save(state, checkpoint_id=tmp_path / "theirs")
    arguments = ["from-dcp", str(tmp_path / "theirs"), str(tmp_path / "out")]
    if make is numbered_alone and kind is torch.optim.SGD:
        assert command(arguments) == 0  # without a momentum it has no state
        return
    assert command(arguments) == 1
    said = capsys.readouterr().err
    assert "by numbers of parameters" in said and "get_state_dict(model, optimizer)" in said
    assert "get_optimizer_state_dict" in said and not (tmp_path / "out").exists()
    dcp.save(named(model, optimizer), checkpoint_id=tmp_path / "named")
    assert command(["from-dcp", str(tmp_path / "named"), str(tmp_path / "out")]) == 0


def without(*path: str) -> Callable[[dict[str, Any]], None]:
    """Takes one key out of a nested state; "*": of all."""

    def change(state: dict[str, Any]) -> None:
        found = [state]
        for key in path[:-1]:
            found = [inner for each in found for inner in (each.values() if key == "*" else [each[key]])]
        for each in found:
            each.pop(path[-1])

    return change


STATE = ("optimizer", "state")
INCOMPLETE: dict[str, tuple[Any, Callable[[dict[str, Any]], None], str]] = {
    "one step": (torch.optim.AdamW, without(*STATE, "embedding.weight", "step"), "and not the number of its steps"),
    "all steps": (torch.optim.AdamW, without(*STATE, "*", "step"), "and not the number of its steps"),
    "steps of Adagrad": (torch.optim.Adagrad, without(*STATE, "*", "step"), "and not the number of its steps"),
    "one moment": (torch.optim.AdamW, without(*STATE, "head.weight", "exp_avg"), "has no exp_avg of head.weight, and"),
    "the model": (torch.optim.AdamW, without("model"), "has no weights"),
    "a weight": (torch.optim.AdamW, without("model", "head.weight"), "which is no parameter of a group"),
    "the groups": (torch.optim.AdamW, without("optimizer", "param_groups"), "which is no parameter of a group"),
}
ASSUMED: dict[str, tuple[Any, Callable[[dict[str, Any]], None], str]] = {
    "the optimizer": (torch.optim.AdamW, without("optimizer"), "has no optimizer state: weights alone are taken over"),
    "the state": (torch.optim.AdamW, without(*STATE), "has no optimizer state: weights alone are taken over"),
    "one state": (
        torch.optim.AdamW,
        without(*STATE, "head.weight"),
        "no optimizer state of head.weight: taken as",
    ),
    "steps of SGD": (
        partial(torch.optim.SGD, momentum=0.9),
        lambda state: None,
        "does not say how many steps were made: taken as 0",
    ),
    "names": (
        torch.optim.AdamW,
        lambda state: state.update(net=state.pop("model"), opt=state.pop("optimizer")),
        "no name begins with 'model.', so all its tensors are taken for weights",
    ),
}


@pytest.mark.parametrize("what", [*INCOMPLETE, *ASSUMED])
def test_what_a_distributed_checkpoint_lacks_is_said(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, change, said = (INCOMPLETE | ASSUMED)[what]
    model = untied_gpt()
    optimizer = kind(model.parameters(), lr=0.1)
    steps(model, optimizer, 0)
    state = named(model, optimizer)
    change(state)
    dcp.save(state, checkpoint_id=tmp_path / "theirs")
    status = command(["from-dcp", str(tmp_path / "theirs"), str(tmp_path / "out")])
    assert said in capsys.readouterr().err
    assert (tmp_path / "out").exists() is (what in ASSUMED) is (status == 0)


def test_an_optimizer_that_the_format_does_not_have(
    paged: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = paged(gpt)
    optimizer = deepoffload.CPULion(model.parameters(), lr=1e-4)
    steps(model, optimizer, 0)
    deepoffload.TrainingState(model, optimizer).save(tmp_path / "saved")
    for name, said in (("to-universal", "Adam"), ("to-torch", "torch has no optimizer"), ("to-dcp", "torch has no")):
        assert command([name, str(tmp_path / "saved"), str(tmp_path / "out")]) == 1
        assert said in capsys.readouterr().err
        assert not (tmp_path / "out").exists()
    assert command(["to-fp32", str(tmp_path / "saved"), str(tmp_path / "out")]) == 0
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(model.state_dict()) - {"head.weight"}
