"""Trains small decoders under budgets and says what they took: ``SWAP_DIRECTORY JSON-LIST``; prints JSON lines.

Each is trained in a separate process, forked before torch has started a thread. Memory is RssAnon + RssShmem of
``/proc/self/status``, looked at every two milliseconds; bytes.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch
import torch._dynamo  # hooks and checkpointing are kept out of torch.compile, for which torch loads this

import deepoffload
from deepoffload.estimate.decoder import Decoder, DecoderShape
from deepoffload.schedule.cost_model import BlockKind
from tests.support.inspect import tiers_of
from tests.support.memory_watch import MemoryWatch, give_back, resident_bytes


def warm_up() -> None:
    """What any program has that has run one operator of each kind: threads, and the libraries' own memory."""
    layer = torch.nn.Linear(64, 64)
    for dtype in (torch.float32, torch.bfloat16):
        layer.to(dtype)(torch.randn(8, 64, dtype=dtype)).sum().backward()


def train(swap: str, settings: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    checkpointing, batch, length = settings["checkpointing"], settings["batch"], settings["length"]
    accumulation = settings["accumulation"]
    config = {"precision": settings["precision"], "gradient_accumulation_steps": accumulation} | settings["config"]
    warm_up()
    give_back()
    process_bytes = resident_bytes()
    watch = MemoryWatch()
    with deepoffload.offload_context(config, nvme_path=swap) as context:
        model = Decoder(DecoderShape(**settings["shape"]), checkpointing=checkpointing)
    built_bytes = watch.take_peak()
    early = settings["config"].get("step_overlap") == "in_backward"  # the norm is not known while gradients still come
    state_dtype = settings["config"].get("optimizer", {}).get("params", {}).get("state_dtype", "fp32")
    optimizer = deepoffload.CPUAdamW(
        model.parameters(), lr=1e-4, max_grad_norm=None if early else 1.0, state_dtype=state_dtype
    )
    tokens = torch.randint(0, settings["shape"]["vocabulary"], (batch, length))
    steps = []
    for _ in range(settings.get("steps", 2)):
        before, started = deepoffload.stats(model), time.perf_counter()
        if settings["config"].get("accumulation_order") == "vertical":
            deepoffload.accumulate(model, [tokens] * accumulation)
        else:
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
    engine = context.engine
    table = engine.placement.table() if engine is not None and engine.placement is not None else ""
    found = {
        "process_bytes": process_bytes,
        "built_bytes": built_bytes,
        "peak_bytes": max(built_bytes, watch.take_peak()),
        "stats": deepoffload.stats(model),
        "placement": table,
        "steps": steps,
    }
    if engine is not None:
        # What was resident from the start on may have an extent, too, from while the model was built.
        found["paged_nvme_bytes"] = {
            kind.value: sum(
                sum(piece.nbytes for piece in block.extent.pieces)
                for block in tiers_of(engine).blocks()
                if block.kind is kind and block.extent is not None and block.id not in tiers_of(engine).static
            )
            for kind in BlockKind
        }
        engine.close()
    return found


def main() -> None:
    for settings in json.loads(sys.argv[2]):
        child = os.fork()
        if child == 0:
            torch.set_num_threads(settings.get("threads", 1))
            print(json.dumps(train(sys.argv[1], settings)), flush=True)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            sys.exit(f"training with {settings} ended with status {status}")


if __name__ == "__main__":
    main()
