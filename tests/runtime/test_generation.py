"""Generation that lasts, that Ctrl-C ends, and whose files or disks are not as they should be."""

from __future__ import annotations

import errno
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from deepoffload import load_pretrained, save_pretrained, stats
from deepoffload.errors import ConfigError, IoFailure, PlacementError
from deepoffload.io.engine import IoEngine
from deepoffload.runtime import disk as disk_module
from deepoffload.timeline import Lane
from tests.runtime.generation_campaign import GROWTH_BYTES, TOKENS, generate_long, generation_in, interrupt_often
from tests.support.disks import tmpfs
from tests.support.generation import Generation
from tests.support.inspect import io_of, pager_of
from tests.support.programs import Programs
from tests.support.waiting import wait_until

BUDGET_BYTES = 4 << 20


@pytest.fixture
def generation(tmp_path: Path) -> Generation:
    return generation_in(tmp_path)


@torch.no_grad()
def test_nothing_grows_and_nothing_is_written(generation: Generation) -> None:
    """``python -m tests.runtime.generation_campaign`` does the same for 2,000 tokens."""
    model = generation.paged(BUDGET_BYTES)
    assert generate_long(model, 60, warm=20) <= GROWTH_BYTES


def test_ctrl_c_leaves_a_model_that_generates(generation: Generation) -> None:
    expected = generation.plain().generate(TOKENS, max_new_tokens=5, do_sample=False)
    interrupt_often(generation.paged(BUDGET_BYTES), expected, 6, seed=1)


@torch.no_grad()
def test_each_forward_pass_is_counted_and_shown(generation: Generation, tmp_path: Path) -> None:
    model = generation.paged(BUDGET_BYTES, timeline=True)
    for count in range(1, 5):
        model(TOKENS)
        found = stats(model)
        assert found["forwards"] == count
    before = found
    model(TOKENS)
    found = stats(model)
    assert found["forward_bytes_read"] == found["disk_bytes_read"] - before["disk_bytes_read"] > 0
    waits = ("waits", "faults", "partial_reads")
    assert found["forward_waits"] == sum(found[name] - before[name] for name in waits)
    assert found["forward_wait_s"] == pytest.approx(found["wait_s"] - before["wait_s"])
    engine = generation.context.engine
    assert engine is not None and engine.timeline is not None
    passes = [span for span in engine.timeline.spans() if span.lane is Lane.PASS]
    assert [span.name for span in passes] == [f"forward pass {number}" for number in range(1, 6)]
    assert engine.summary().steps == 4 and engine.summary().read_bytes > 0
    engine.export_trace(tmp_path / "trace.json")
    assert "forward pass 5" in (tmp_path / "trace.json").read_text()
    with pytest.raises(IndexError):
        model(torch.full((1, 3), 1 << 40))
    assert stats(model)["forwards"] == 5, "a call that failed is none"


@torch.no_grad()
def test_a_checkpoint_on_a_read_only_disk_without_direct_io(generation: Generation, tmp_path: Path) -> None:
    """Network file systems are such. It is said once for all files, and nothing else differs."""
    expected = generation.plain().generate(TOKENS, max_new_tokens=3, do_sample=False)
    with tmpfs(tmp_path / "small", 64) as where:
        generation.plain().save_pretrained(where / "checkpoint", max_shard_size="1MB")
        assert len(list((where / "checkpoint").glob("*.safetensors"))) > 2
        subprocess.run(["mount", "-o", "remount,ro", where], check=True)
        there = Generation(generation.kind, where / "checkpoint", generation.nvme_path)
        with pytest.warns(RuntimeWarning, match=r"\.safetensors: O_DIRECT does not work") as caught:
            model = there.paged(BUDGET_BYTES)
            found = [model.generate(TOKENS, max_new_tokens=3, do_sample=False) for _ in range(2)]
        assert len([warning for warning in caught if "O_DIRECT" in str(warning.message)]) == 1
        assert torch.equal(found[0], expected) and torch.equal(found[1], expected)
        assert stats(model)["disk_bytes_written"] == 0
        with pytest.raises(ConfigError, match="EROFS|[Rr]ead-only"):
            Generation(generation.kind, generation.checkpoint, where).paged(BUDGET_BYTES)
        there.context.engine.close()  # type: ignore[union-attr]


def test_files_that_are_wrong_from_the_start(generation: Generation) -> None:
    """from_pretrained raises its own error; the engine is closed, and the next one works."""
    file = generation.file
    content = file.read_bytes()
    lies = content.replace(b'"shape":[256,256]', b'"shape":[256,999]', 1)
    for wrong in (content[: len(content) // 2], (1 << 40).to_bytes(8, "little") + content[8:], lies):
        file.write_bytes(wrong)
        with pytest.raises((SafetensorError, OSError)):
            generation.paged(BUDGET_BYTES)
        engine = generation.context.engine
        assert engine is not None and pager_of(engine).life.closed_because is not None
    file.unlink()
    file.mkdir()
    with pytest.raises(OSError):
        generation.paged(BUDGET_BYTES)
    file.rmdir()
    file.write_bytes(content)
    model = generation.paged(BUDGET_BYTES)
    assert torch.equal(model(TOKENS).logits, generation.plain()(TOKENS).logits)


def test_a_budget_below_the_largest_call(generation: Generation) -> None:
    with pytest.raises(PlacementError, match="(?s)working set does not fit.*forward pass") as caught:
        generation.paged(64 << 10)
    assert caught.value.enough_bytes is not None
    assert generation.paged(caught.value.enough_bytes) is not None


def with_faults(monkeypatch: pytest.MonkeyPatch, rules: str) -> None:
    """Engines made from now on have a disk that fails (``csrc/aio/backend_fault.c``)."""
    monkeypatch.setattr(disk_module, "IoEngine", partial(IoEngine, fault_script=rules))


@torch.no_grad()
@pytest.mark.parametrize(("rule", "code"), [("errno=5", errno.EIO), ("short=0", errno.ENODATA)])
def test_a_shard_that_cannot_be_read(
    rule: str, code: int, generation: Generation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the file and the tensors. The next call works, or the next model, where the first read ahead
    fails while this one is made."""
    plain = generation.plain()
    names = [name for name, _ in plain.named_parameters()]
    for chunk in (1, 60):
        model = None
        with pytest.raises(IoFailure, match=errno.errorcode[code]) as caught, monkeypatch.context() as patch:
            with_faults(patch, f"op=read nth={chunk} {rule}")
            model = generation.paged(BUDGET_BYTES)
            for _ in range(20):
                model(TOKENS)
        assert caught.value.errno == code
        assert caught.value.filename == str(generation.file)
        assert any(f"{name}: " in str(caught.value) or f"{name}, " in str(caught.value) for name in names)
        model = model or generation.paged(BUDGET_BYTES)
        assert torch.equal(model(TOKENS).logits, plain(TOKENS).logits)
        assert stats(model)["disk_bytes_written"] == 0


@torch.no_grad()
def test_reads_that_stop_short_go_on(generation: Generation, monkeypatch: pytest.MonkeyPatch) -> None:
    with_faults(monkeypatch, "op=read permille=500 seed=3 short=5000")
    model = generation.paged(BUDGET_BYTES)
    assert torch.equal(model(TOKENS).logits, generation.plain()(TOKENS).logits)
    assert io_of(model).stats()["short_transfers"] > 0


@torch.no_grad()
def test_a_checkpoint_that_was_written_to_is_not_saved_again(generation: Generation, tmp_path: Path) -> None:
    """A state dict shows no other numbers."""
    file = generation.file
    model = generation.paged(BUDGET_BYTES)
    with open(file, "r+b") as opened:
        opened.seek(-4096, os.SEEK_END)
        opened.write(bytes(4096))
    with pytest.raises(IoFailure, match=r"(?s)(model\.|lm_head).*written to after the model was loaded") as caught:
        save_pretrained(model, tmp_path / "again")
    assert str(file) in str(caught.value) and not list((tmp_path / "again").glob("*.safetensors"))


@torch.no_grad()
def test_a_new_checkpoint_in_the_place_of_the_old_one_is_loaded(
    generation: Generation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads ahead of the old one are under way: they are of no concern."""
    with_faults(monkeypatch, "op=read delay_ms=50")  # they have ended only where this process stood still meanwhile
    model = generation.paged(BUDGET_BYTES)
    transfers = pager_of(model).tiers.transfers
    for _ in range(20):
        model(TOKENS)
        if transfers.reads_under_way():
            break
    assert transfers.reads_under_way()
    (tmp_path / "new").mkdir()
    new = Generation.of(lambda: generation.plain().apply(scaled), torch.bfloat16, tmp_path / "new")
    generation.file.write_bytes(new.file.read_bytes())
    load_pretrained(model, generation.checkpoint)
    assert torch.equal(model(TOKENS).logits, new.plain()(TOKENS).logits)


def scaled(module: torch.nn.Module) -> None:
    for param in module.parameters(recurse=False):
        param.data.mul_(1.5)


PROGRAM = """
import sys
from pathlib import Path
import torch
from deepoffload import stats
from tests.support.generation import Generation
from tests.support.memory_watch import give_back, resident_bytes
from transformers import LlamaForCausalLM

torch.set_num_threads(1)
generation = Generation(LlamaForCausalLM, Path(sys.argv[1]), Path(sys.argv[2]))
warm = generation.paged(64 << 20)  # what is imported and allocated by a first model is not counted
warm.generate(torch.arange(3, 15).view(2, 6), max_new_tokens=8, do_sample=False)
generation.context.engine.close()
del warm
give_back()
before = resident_bytes()
Path(sys.argv[4]).touch()
model = generation.paged(int(sys.argv[3]))
for _ in range(4):
    found = model.generate(torch.arange(3, 15).view(2, 6), max_new_tokens=8, do_sample=False)
give_back()
print(found.tolist())
print(resident_bytes() - before, stats(model)["disk_bytes_read"], stats(model)["disk_bytes_written"])
"""


@torch.no_grad()
def test_two_processes_generate_from_one_checkpoint(generation: Generation, programs: Programs, tmp_path: Path) -> None:
    begins = tmp_path / "begins"
    words = [str(generation.checkpoint), str(generation.nvme_path), str(BUDGET_BYTES), str(begins)]
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(programs.run, PROGRAM, *words)
        model = generation.paged(BUDGET_BYTES)
        wait_until(lambda: begins.exists() or other.done())
        calls = 0
        while not other.done() or not calls:
            found = model.generate(TOKENS, max_new_tokens=8, do_sample=False)
            calls += 1
    done = other.result()
    assert not done.returncode, done.stderr
    theirs, numbers = done.stdout.strip().splitlines()[-2:]
    assert theirs == str(found.tolist()) and calls > 0
    growth, read, written = map(float, numbers.split())
    assert growth <= BUDGET_BYTES + (2 << 20), "the other one holds more than its budget"
    assert read > 0 and written == 0 and stats(model)["disk_bytes_written"] == 0
