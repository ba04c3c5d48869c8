"""Train a GPT on real text while its weights, gradients and optimizer state live on disk.

python examples/train_gpt.py                                  # 125 M parameters in a sixth of their memory
python examples/train_gpt.py --compare                        # and the same in plain PyTorch, loss next to loss
python examples/train_gpt.py --size 1.2b --host-budget 1GiB --seq 128 --batch 1
python examples/train_gpt.py --save DIR --save-every 10 --resume   # stop it at any time, and start it again
torchrun --nproc-per-node 2 examples/train_gpt.py             # two processes, which share the budget and the work
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from gpt.data import Batches, load_text, standard_library
from gpt.model import GPT
from gpt.options import Options, parse_options
from gpt.plain import PlainAdamW
from gpt.progress import MemorySampler, ProgressBar
from gpt.ranks import this_rank
from gpt.training import BETAS, Step, schedule, train

import deepoffload
from deepoffload.config.units import format_bytes
from deepoffload.errors import DeepOffloadError

COMPARED_LINES_MAX = 32
CHECKPOINTS_KEPT = 2


@dataclass
class Outcome:
    """What a run gave. ``disk_bytes`` and ``faults`` are per step; ``stats`` the engine's at the end."""

    steps: list[Step] = field(default_factory=list)
    disk_bytes: list[int] = field(default_factory=list)
    faults: list[int] = field(default_factory=list)
    start_bytes: int = 0
    peak_bytes: int = 0
    stats: dict[str, float] = field(default_factory=dict)

    @property
    def losses(self) -> list[float]:
        return [step.loss for step in self.steps]


def main(arguments: list[str] | None = None) -> int:
    options = parse_options(arguments)
    if this_rank().rank != 0:
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):  # rank 0 tells what happens
            return run(options)
    return run(options)


def run(options: Options) -> int:
    try:
        text = load_text(options.data)
        if len(text) <= options.seq:
            raise ValueError(f"--data has {len(text)} bytes of text, too few for --seq {options.seq}")
        outcome = train_plain(options, text) if options.plain else train_offloaded(options, text)
        plain = run_plain(options) if options.compare else None
    except KeyboardInterrupt:
        print("\ninterrupted: memory, threads and disk space are given back; nothing is left behind", file=sys.stderr)
        return 130
    except (DeepOffloadError, OSError, ValueError) as error:
        print(f"train_gpt.py: error: {error}", file=sys.stderr)
        return 1
    if plain is not None:
        show_comparison(outcome, plain)
    if options.json is not None and this_rank().rank == 0:
        options.json.write_text(json.dumps(as_json(options, outcome, plain), indent=1) + "\n")
    return 0


# -- the offloaded run -------------------------------------------------------------------------------------------------


def train_offloaded(options: Options, text: bytes) -> Outcome:
    """The main job."""
    source = options.data or f"*.py of {standard_library()}"
    print(
        f"GPT of {options.num_parameters / 1e6:.1f} M parameters in {options.precision}: weights, gradients and "
        f"optimizer state are {format_bytes(options.model_bytes)},\n"
        f"{options.model_bytes / options.host_budget:.1f} times the budget of {format_bytes(options.host_budget)} of "
        f"memory; the rest lives in {options.nvme_path}.\n"
        f"Text: {len(text) / 1e6:.1f} MB, {source}. {_workers()}.\n"
    )
    with MemorySampler() as memory, ExitStack() as cleanup:
        started = time.perf_counter()
        torch.manual_seed(options.seed)
        context = deepoffload.offload_context(
            host_budget=options.host_budget,
            nvme_path=str(options.nvme_path),
            precision=options.precision,
        )
        with context:
            engine = context.engine
            cleanup.callback(engine.close)
            model = GPT(options.shape, options.seq, checkpointing=options.checkpointing)
        print(f"{engine.placement.table(len(engine.ranks.host_ranks))}\n")
        print(f"built and placed in {time.perf_counter() - started:.1f} s\n", flush=True)
        optimizer = deepoffload.CPUAdamW(model.parameters(), lr=options.lr, betas=BETAS, max_grad_norm=options.clip)
        outcome = Outcome(start_bytes=memory.start_bytes)
        follow(options, text, model, optimizer, outcome)
        finish(options, text, model)
        outcome.stats = deepoffload.stats(model)
    outcome.peak_bytes = memory.peak_bytes
    show_memory(options, outcome)
    return outcome


def _workers() -> str:
    processes = this_rank().world_size
    each = f"{processes} processes, each with " if processes > 1 else ""
    threads = torch.get_num_threads()
    return f"{each}{threads} thread{'' if threads == 1 else 's'}"


def follow(options: Options, text: bytes, model: GPT, optimizer: torch.optim.Optimizer, outcome: Outcome) -> None:
    """Train, and show each step."""
    batches = Batches(text, batch=options.batch, seq=options.seq, seed=options.seed)
    ranks = this_rank()
    bytes_per_step = options.batch * options.seq * options.accumulate * ranks.world_size
    progress = ProgressBar(options.steps)
    before = {} if options.plain else deepoffload.stats(model)
    scheduler = schedule(optimizer, options.steps)
    state = deepoffload.TrainingState(model, optimizer, scheduler=scheduler) if options.save_every else None
    first = resume(options, state)
    for step in train(
        model, optimizer, scheduler, batches, ranks, first=first, steps=options.steps, accumulate=options.accumulate
    ):
        outcome.steps.append(step)
        line = f"loss {step.loss:.4f}  {bytes_per_step / step.seconds:5.0f} tokens/s"
        if not options.plain:
            after = deepoffload.stats(model)
            moved = sum(after[key] - before[key] for key in ("disk_bytes_read", "disk_bytes_written"))
            outcome.disk_bytes.append(int(moved))
            outcome.faults.append(int(after["faults"] - before["faults"]))
            before = after
            line += f"  {moved / 1e9:.2f} GB disk  {outcome.faults[-1]} faults"
        if state is not None and (step.number % options.save_every == 0 or step.number == options.steps):
            state.save(options.save, keep_last=CHECKPOINTS_KEPT)
            line += "  saved"
        progress.show(step.number, line)
    print()


def resume(options: Options, state: deepoffload.TrainingState | None) -> int:
    """Load the newest checkpoint where that was asked for; the number of steps that it stands after."""
    if state is None or not options.resume or not (options.save / "latest").exists():
        return 0
    loaded = state.load(options.save)
    print(f"resumed after step {loaded.step} from {loaded.folder}\n")
    if loaded.step >= options.steps:
        print(f"that was the last of --steps {options.steps}: nothing is left to train\n")
    return loaded.step


def finish(options: Options, text: bytes, model: GPT) -> None:
    """What was asked for after training."""
    if options.generate:
        model.eval()
        prompt = text[: min(options.seq, 64)]
        written = model.generate(prompt, options.generate, seed=options.seed)
        print(f"{prompt.decode(errors='replace')}|{written.decode(errors='replace')}\n")
    if options.save is not None and not options.save_every:
        deepoffload.save_pretrained(model, options.save)
        print(f"weights saved in {options.save}\n")


def show_memory(options: Options, outcome: Outcome) -> None:
    stats, peak, start = outcome.stats, outcome.peak_bytes, outcome.start_bytes
    arena = int(stats["host_peak_bytes"])
    if not outcome.steps:
        return  # resumed a run that was finished
    seconds = sum(step.seconds for step in outcome.steps)
    first, *later = outcome.disk_bytes
    moved = sum(later) / len(later) if later else first
    of_first = f" (the first one {first / 1e9:.2f} GB: its updates run in the next)" if later else ""
    last = outcome.losses[-5:]
    print(
        f"loss {outcome.losses[0]:.2f} -> {sum(last) / len(last):.2f} (mean of the last {len(last)}) in "
        f"{len(outcome.steps)} steps and {seconds:.0f} s, {stats['wait_s']:.0f} s of it waiting for the disk\n"
        f"disk traffic per step: {moved / 1e9:.2f} GB, {moved / stats['parameters']:.1f} bytes per parameter"
        f"{of_first}\n"
        f"memory of this process, at most  {format_bytes(peak):>11}   (RssAnon + RssShmem)\n"
        f"  Python, torch and the text     {format_bytes(start):>11}   before the model was built\n"
        f"  weights, gradients, state      {format_bytes(arena):>11}   of the budget of "
        f"{format_bytes(int(stats['host_budget_bytes']))}\n"
        f"  activations and the rest       {format_bytes(max(0, peak - start - arena)):>11}\n"
        f"on NVMe                          {format_bytes(int(stats['nvme_bytes'])):>11}   in one unnamed file, gone now"
        f"{_of_ranks(stats)}"
    )


def _of_ranks(stats: dict[str, float]) -> str:
    if stats["world_size"] == 1:
        return ""
    moved = format_bytes(int(stats["gather_bytes"] + stats["reduce_bytes"]))
    return (
        f"\nfrom other ranks                 {moved:>11}   in {int(stats['rounds'])} rounds, "
        f"{stats['rank_wait_s']:.0f} s of waiting for them\n"
        f"(all of this is said of the first of {int(stats['world_size'])} ranks)"
    )


# -- the comparison ----------------------------------------------------------------------------------------------------


def train_plain(options: Options, text: bytes) -> Outcome:
    """The same model, data and order of operations, with everything in memory."""
    print(f"plain PyTorch, {options.num_parameters / 1e6:.1f} M parameters in {options.precision}", flush=True)
    with MemorySampler() as memory:
        torch.manual_seed(options.seed)
        model = GPT(options.shape, options.seq, checkpointing=options.checkpointing)
        if torch.accelerator.is_available():
            model.to(torch.accelerator.current_accelerator())
        bf16 = options.precision == "bf16"
        optimizer = PlainAdamW(model.parameters(), options.lr, bf16=bf16, max_grad_norm=options.clip)
        outcome = Outcome(start_bytes=memory.start_bytes)
        follow(options, text, model, optimizer, outcome)
        finish(options, text, model)
    outcome.peak_bytes = memory.peak_bytes
    return outcome


def run_plain(options: Options) -> dict[str, Any]:
    """:func:`train_plain` in a separate process, which starts without our memory and ends with this one."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "plain.json"
        command = [sys.executable, __file__, "--plain", "--json", str(result)]
        for name in ("size", "precision", "steps", "batch", "seq", "lr", "accumulate", "seed"):
            command += [f"--{name}", str(getattr(options, name))]
        command += ["--clip", str(options.clip or 0)]
        command += ["--data", str(options.data)] if options.data is not None else []
        command += ["--checkpointing"] if options.checkpointing else []
        print()
        child = subprocess.Popen(command)
        try:
            if child.wait() != 0:
                raise ValueError(f"the run in plain PyTorch ended with status {child.returncode}")
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
        return json.loads(result.read_text())


def show_comparison(outcome: Outcome, plain: dict[str, Any]) -> None:
    pairs = list(zip(outcome.losses, plain["losses"], strict=True))
    stride = -(-len(pairs) // COMPARED_LINES_MAX)
    print("step   deepoffload   plain PyTorch   difference")
    for number, (ours, theirs) in enumerate(pairs, start=1):
        if number == 1 or number == len(pairs) or number % stride == 0:
            print(f"{number:4}   {ours:11.7f}   {theirs:13.7f}   {ours - theirs:+10.1e}")
    largest = max(abs(ours - theirs) for ours, theirs in pairs)
    same = sum(ours == theirs for ours, theirs in pairs)
    print(f"largest difference {largest:.1e}; {same} of {len(pairs)} losses are equal bit for bit")
    print(f"peak memory: deepoffload {format_bytes(outcome.peak_bytes)}, plain {format_bytes(plain['peak_bytes'])}")


def as_json(options: Options, outcome: Outcome, plain: dict[str, Any] | None) -> dict[str, Any]:
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()}
    return {
        "settings": settings,
        "parameters": options.num_parameters,
        "model_bytes": options.model_bytes,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "losses": outcome.losses,
        "step_s": [step.seconds for step in outcome.steps],
        "disk_bytes": outcome.disk_bytes,
        "faults": outcome.faults,
        "start_bytes": outcome.start_bytes,
        "peak_bytes": outcome.peak_bytes,
        "stats": outcome.stats,
        "plain": plain,
    }


if __name__ == "__main__":
    sys.exit(main())
