"""Trains a small decoder under a budget and says what it took: ``SWAP_DIRECTORY JSON``; prints JSON, last.

Memory is RssAnon + RssShmem of ``/proc/self/status``, looked at every two milliseconds; bytes.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import threading
import time
from typing import Any

import torch

import deepoffload
from deepoffload.estimate.decoder import Decoder, DecoderShape


def resident_bytes() -> int:
    with open("/proc/self/status") as status:
        fields = dict(line.split(":", 1) for line in status if ":" in line)
    return (int(fields["RssAnon"].split()[0]) + int(fields["RssShmem"].split()[0])) * 1024


class Watch:
    def __init__(self) -> None:
        self.peak_bytes = 0
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        while True:
            self.look()
            time.sleep(0.002)

    def look(self) -> None:
        self.peak_bytes = max(self.peak_bytes, resident_bytes())


def warm_up() -> None:
    """What any program has that has run one operator of each kind: threads, and the libraries' own memory."""
    layer = torch.nn.Linear(64, 64)
    layer(torch.randn(8, 64)).sum().backward()
    layer.to(torch.bfloat16)(torch.randn(8, 64).bfloat16()).sum().backward()


def train(swap: str, settings: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    checkpointing, batch, length = settings["checkpointing"], settings["batch"], settings["length"]
    accumulation = settings["accumulation"]
    config = {"precision": settings["precision"], "gradient_accumulation_steps": accumulation} | settings["config"]
    warm_up()
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    process_bytes = resident_bytes()
    watch = Watch()
    with deepoffload.offload_context(config, nvme_path=swap) as context:
        model = Decoder(DecoderShape(**settings["shape"]), checkpointing=checkpointing)
    watch.look()
    built_bytes = watch.peak_bytes
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-4, max_grad_norm=1.0)
    tokens = torch.randint(0, settings["shape"]["vocabulary"], (batch, length))
    steps = []
    for _ in range(settings.get("steps", 3)):
        before, started = deepoffload.stats(model), time.perf_counter()
        for _ in range(accumulation):
            model(tokens).backward()
        forward_backward_s = time.perf_counter() - started
        optimizer.step()
        optimizer.zero_grad()
        now = deepoffload.stats(model)
        steps.append(
            {
                "seconds": time.perf_counter() - started,
                "before_update_s": forward_backward_s,
                "read": now["disk_bytes_read"] - before["disk_bytes_read"],
                "written": now["disk_bytes_written"] - before["disk_bytes_written"],
            }
        )
        watch.look()
    engine = context.engine
    return {
        "process_bytes": process_bytes,
        "built_bytes": built_bytes,
        "peak_bytes": watch.peak_bytes,
        "stats": deepoffload.stats(model),
        "placement": engine.placement.table() if engine is not None and engine.placement is not None else "",
        "steps": steps,
    }


if __name__ == "__main__":
    torch.set_num_threads(2)
    print(json.dumps(train(sys.argv[1], json.loads(sys.argv[2]))), flush=True)
