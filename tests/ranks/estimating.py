"""What ranks do in the tests that compare estimates with their runs."""

from __future__ import annotations

import gc
import logging
import os
import time
from typing import Any

import torch

import deepoffload
from deepoffload import CPUAdamW, offload_context
from deepoffload.estimate.decoder import Decoder, DecoderShape
from deepoffload.io.kept_measurements import cache_directory
from deepoffload.runtime.context import engine_of
from tests.support.inspect import disk_rates_of
from tests.support.memory_watch import MemoryWatch, give_back, resident_bytes

STEPS = 3


def run_all(shape: DecoderShape, batch: int, length: int, configs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All with a device or none: it stays for the whole process, and autograd has to know it from the start."""
    return [run(shape, batch, length, config) for config in configs]


def run(shape: DecoderShape, batch: int, length: int, config: dict[str, Any]) -> dict[str, Any]:
    """Train a few steps. Returns the placement table, the rates that it was made with, and what a step has moved."""
    device = config.get("device", "cpu")
    if device != "cpu":
        from tests.support.simulated_gpu import install

        install()
    tables: list[str] = []
    logger, handler = logging.getLogger("deepoffload"), logging.Handler()
    handler.emit = lambda record: tables.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    layer = torch.nn.Linear(64, 64).bfloat16()  # what any process has that has run an operator
    layer(torch.ones(8, 64, dtype=torch.bfloat16)).sum().backward()
    gc.collect()
    give_back()
    process_bytes = resident_bytes()
    watch = MemoryWatch()
    torch.manual_seed(3)
    with offload_context(config):
        model = Decoder(shape)
    logger.removeHandler(handler)
    engine = engine_of(model)
    optimizer = CPUAdamW(model.parameters(), lr=1e-4, max_grad_norm=1.0)
    tokens = torch.randint(0, shape.vocabulary, (batch, length)).to(device)
    seconds = []
    for _ in range(STEPS):
        before, begun = deepoffload.stats(model), time.perf_counter()
        for _ in range(config.get("gradient_accumulation_steps", 1)):
            model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - begun)
    after = deepoffload.stats(model)
    names = ["gather_bytes", "reduce_bytes", "disk_bytes_read", "disk_bytes_written"]
    names += ["device_bytes_in", "device_bytes_out"] if device != "cpu" else []
    found = {
        "table": next(text for text in tables if text.startswith("placement")).partition("\n")[2],
        "bandwidths": disk_rates_of(engine),
        "rates": (after["link_gather_bytes_per_s"], after["link_reduce_bytes_per_s"]),
        "moved": {name: after[name] - before[name] for name in names},
        "seconds": seconds,
        "process_bytes": process_bytes,
        "peak_bytes": watch.take_peak(),
        "stats": dict(after),
    }
    engine.close()
    return found


def measure_the_link(folder: str) -> list[tuple[float, float]]:
    """The rates of three engines: measured, kept, and measured again because what is kept is damaged."""
    os.environ["XDG_CACHE_HOME"] = folder
    rates = []
    for number in range(3):
        with offload_context({"host_budget": "8MiB", "ranks": {"transport": "group"}}):
            model = torch.nn.Linear(8, 8)
        stats = deepoffload.stats(model)
        rates.append((stats["link_gather_bytes_per_s"], stats["link_reduce_bytes_per_s"]))
        assert stats["gather_bytes"] < 1 << 20  # what a measurement moves is not counted
        engine_of(model).close()
        if number == 1:
            (file,) = cache_directory().glob("link-*.json")
            file.write_text("{")
    return rates
