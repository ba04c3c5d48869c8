"""How long is a token of a model that does not fit: ``python -m benchmarks.inference --path DIR``.

A Llama-like model of 1.2 B parameters in bf16 (``--size small``: 0.2 B) with random weights is written to ``DIR``.
Then the sides take turns in every round: deepoffload with a budget of 512 MiB, with int8 and int4 weights, the
model in memory, accelerate's ``disk_offload`` and transformers' ``device_map`` with everything on disk. Files leave
the page cache before every forward pass. Reported are medians over rounds of each round's ratios, and bytes read
per token. The best rate of the disk is measured in each round.

``--size 20gb --budget 4096 --sides ours int4 transformers`` is a model of 21 GB, which memory does not hold.
``--size experts --sides plain ours "every expert"`` has 8 experts, of which a token uses 2. ``--sides ours "4 units"
"6 units" "8 units"`` cuts the model into units of other sizes than 5 in a budget. The side ``airllm`` is there where
that is installed. The script refuses what the disk or the memory cannot hold before it writes, and removes its files at
its end, by Ctrl-C and SIGTERM, too.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.end_to_end.disk import DiskRate
from benchmarks.end_to_end.meter import MemoryWatch, read_counters
from benchmarks.end_to_end.runner import ROOT, environment
from benchmarks.inference.checkpoints import SIZES, checkpoint_bytes, write_checkpoint
from benchmarks.inference.child import QUANTIZED, UNITS
from deepoffload.cli.nvme.types import Pattern

USUAL_SIDES = ("plain", "ours", "int8", "int4", "accelerate", "transformers")
SIDES = (*USUAL_SIDES, "airllm", "int8 head", "every expert", *UNITS)
PEERS = ("accelerate", "transformers", "airllm")
ONE_BATCH = tuple(side for side in SIDES if side not in ("plain", "ours"))
"""Sides that run with the first batch only."""
TOKENS, PEER_TOKENS = 5, 2
"""Of each side in a round, after a prompt. The first of the former is not counted: it still follows the prompt."""
TEST_FILE_BYTES = 512 << 20
COPIES = {"accelerate": 1.0, "airllm": 1.0, "int8": 0.5, "int8 head": 0.5, "int4": 0.3}
"""What a side writes to the disk, as a share of the checkpoint. Mixtral's experts are merged: ours writes them, too."""
IN_MEMORY = ("plain", "accelerate")
"""Sides that have all of the model in memory, for good or while they load."""


class SideProcess:
    """A side that waits for its turn."""

    def __init__(self, spec: dict[str, Any], threads: int, stack: ExitStack) -> None:
        self._errors = stack.enter_context(tempfile.TemporaryFile("w+"))
        self._child = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.inference.child", json.dumps(spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment(threads),
            cwd=ROOT,
        )
        stack.callback(self._end)
        self.memory = stack.enter_context(MemoryWatch(self._child.pid))

    def ask(self, *asked: Any) -> dict[str, Any]:
        assert self._child.stdin is not None and self._child.stdout is not None
        print(json.dumps(asked), file=self._child.stdin, flush=True)
        line = self._child.stdout.readline()
        if not line:
            self._errors.seek(0)
            raise RuntimeError(f"a side has ended:\n{self._errors.read()[-2000:]}")
        found: dict[str, Any] = json.loads(line)
        return found

    def _end(self) -> None:
        assert self._child.stdin is not None and self._child.stdout is not None
        self._child.stdin.close()
        try:
            self._child.wait(30)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._child.stdout.close()


def refusal(options: argparse.Namespace) -> str | None:
    """Why this machine cannot run what is asked for; None if it can."""
    nbytes = checkpoint_bytes(options.size)
    copies = sum(
        COPIES.get(side, float(options.size == "experts")) for side in options.sides if side not in IN_MEMORY[:1]
    )
    need, free = nbytes * (1 + copies) + 2 * TEST_FILE_BYTES, shutil.disk_usage(options.path).free
    if need > free:
        return (
            f"the checkpoint and what the sides write take {need / 1e9:.0f} GB, and {free / 1e9:.0f} GB are free there"
        )
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    whole = [side for side in options.sides if side in IN_MEMORY]
    if len(whole) * nbytes > 0.8 * memory:
        names = " and ".join(whole)
        return f"{names} would have {nbytes / 1e9:.0f} GB in {memory / 1e9:.0f} GB of memory: leave them out"
    return None


def measure(options: argparse.Namespace, folder: Path, stack: ExitStack) -> dict[str, Any]:
    checkpoint = folder / "checkpoint"
    write_checkpoint(checkpoint, options.size)
    weights = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    budget = int(options.budget * (1 << 20))
    sides: dict[str, SideProcess] = {}
    for name in options.sides:
        own = folder / name
        own.mkdir()
        spec = {"side": name, "checkpoint": str(checkpoint), "folder": str(own), "budget": budget}
        sides[name] = SideProcess(spec, options.threads, stack)
    disk = stack.enter_context(DiskRate(str(folder), fio=False, file_bytes=TEST_FILE_BYTES))
    loads = {name: [sides[name].ask("load")] for name in sides}
    rounds = []
    for number in range(options.rounds):
        before = read_counters()
        rate = max(disk.measure(Pattern.READ).values())
        found: dict[str, Any] = {"disk_bytes_per_s": rate}
        for name, side in sides.items():
            if number and name in ("plain", "ours"):
                loads[name].append(side.ask("load"))
            for batch in options.batches if name not in ONE_BATCH else options.batches[:1]:
                count = PEER_TOKENS if name in PEERS else TOKENS
                answer = side.ask("tokens", batch, count)
                used = slice(1, None) if name in PEERS else slice(2, None)
                found[f"{name} {batch}"] = {
                    "s": statistics.median(answer["seconds"][used]),
                    "read_bytes": statistics.median(answer["read_bytes"][used]),
                    "tokens": answer["tokens"],
                    "peak_bytes": side.memory.take_peak(),
                }
        found["load"] = os.getloadavg()[0]
        found["busy_cpu_s"] = (read_counters() - before).busy_cpu_s
        rounds.append(found)
        print(
            f"round {number + 1} of {options.rounds}: disk {rate / 1e9:.2f} GB/s, load {found['load']:.1f}", flush=True
        )
    return {"weights_bytes": weights, "budget_bytes": budget, "rounds": rounds, "loads": loads}


def report(found: dict[str, Any], batches: list[int], sides: list[str]) -> None:
    rounds, weights = found["rounds"], found["weights_bytes"]

    def median(ratio: Any) -> float:
        return statistics.median(ratio(each) for each in rounds)

    def bound(each: dict[str, Any], batch: int, name: str) -> float:
        read_s = each[f"{name} {batch}"]["read_bytes"] / each["disk_bytes_per_s"]
        return max(read_s, each[f"plain {batch}"]["s"]) if f"plain {batch}" in each else read_s

    print(
        f"\nweights {weights / 1e9:.2f} GB, budget {found['budget_bytes'] / 2**20:.0f} MiB; medians of {len(rounds)} "
        "rounds"
    )
    print(
        f"{'side, batch':<18}{'s per token':>12}{'GB read':>9}{'of weights':>11}{'of bound':>9}{'tokens/s':>9}"
        f"{'peak MB':>9}"
    )
    for name in sides:
        for batch in batches if name not in ONE_BATCH else batches[:1]:
            key = f"{name} {batch}"
            seconds, read = median(lambda each, k=key: each[k]["s"]), median(lambda each, k=key: each[k]["read_bytes"])
            of_bound = median(lambda each, k=key, b=batch, n=name: each[k]["s"] / bound(each, b, n))
            peak = max(each[key]["peak_bytes"] for each in rounds)
            print(
                f"{key:<18}{seconds:>12.3f}{read / 1e9:>9.2f}{read / weights:>11.2f}{of_bound:>9.2f}"
                f"{batch / seconds:>9.2f}{peak / 1e6:>9.0f}"
            )
    first = f" {batches[0]}"

    def against(name: str, other: str, key: str) -> float:
        return median(lambda each: each[name + first][key] / each[other + first][key])

    for name in ("plain", *PEERS):
        if name in sides and "ours" in sides:
            print(f"ours / {name}: {against('ours', name, 's'):.2f}")
    for name in (*QUANTIZED, *UNITS, "every expert"):
        if name in sides and "ours" in sides:
            one, other = ("ours", name) if name == "every expert" else (name, "ours")
            time, read = against(one, other, "s"), against(one, other, "read_bytes")
            print(f"{one} / {other}: {time:.2f} of the time, {read:.2f} of the bytes")
    if "ours" in sides:
        report_ours(found, batches, first, median)
    if "plain" in sides and "ours" in sides:
        report_next_to_plain(found, batches)


def report_ours(found: dict[str, Any], batches: list[int], first: str, median: Any) -> None:
    loaded = found["loads"]["ours"]
    left = found["weights_bytes"] - loaded[0]["resident_bytes"]
    read = median(lambda each: each["ours" + first]["read_bytes"])
    print(f"read per token / (weights - {loaded[0]['resident_bytes'] / 1e6:.0f} MB that stay): {read / left:.3f}")
    print(f"written: {max(load['written_bytes'] for load in loaded) / 1e6:.0f} MB")
    most = f"ours {max(batches)}"
    rates = median(lambda each: max(batches) / each[most]["s"] / (batches[0] / each["ours" + first]["s"]))
    print(f"tokens/s of a batch of {max(batches)} / of {batches[0]}: {rates:.1f}")


def report_next_to_plain(found: dict[str, Any], batches: list[int]) -> None:
    rounds, loads = found["rounds"], found["loads"]
    pairs = zip(loads["ours"], loads["plain"], strict=True)
    ratio = statistics.median(ours["first_token_s"] / plain["first_token_s"] for ours, plain in pairs)
    print(f"from_pretrained to the first token, ours / plain: {ratio:.2f}")
    for batch in batches:
        peaks = {side: max(each[f"{side} {batch}"]["peak_bytes"] for each in rounds) for side in ("ours", "plain")}
        above = peaks["ours"] - (peaks["plain"] - found["weights_bytes"]) - found["budget_bytes"]
        print(f"batch {batch}: peak above plain's activations and cache, less the budget: {above / 1e6:.0f} MB")
    same = all(each[f"ours {b}"]["tokens"] == each[f"plain {b}"]["tokens"] for each in rounds for b in batches)
    print(f"greedy tokens {'equal' if same else 'DIFFER FROM'} plain's")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.inference", description=__doc__)
    parser.add_argument("--path", required=True, help="a directory on a real disk, with three times the model's bytes")
    parser.add_argument("--size", choices=SIZES, default="1.2b")
    parser.add_argument("--budget", type=float, default=512, help="MiB of deepoffload's memory")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(USUAL_SIDES))
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--json", help="write everything that was measured to this file")
    options = parser.parse_args()
    problem = refusal(options)
    if problem is not None:
        parser.error(problem)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that files are removed
    folder = Path(tempfile.mkdtemp(prefix="inference-", dir=options.path))
    try:
        with ExitStack() as stack:
            found = measure(options, folder, stack)
    finally:
        shutil.rmtree(folder)
    report(found, options.batches, options.sides)
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
