"""One case: trains, and prints its figures as JSON on the last line."""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time
from typing import Any

import torch

if "--simulate" in sys.argv:  # before anything that asks torch for its accelerator
    from tests.support.simulated_gpu import install

    install(devices=1)

from benchmarks.common.gpt import GPT, VOCABULARY, Shape, num_parameters, tokens_of
from benchmarks.gpu.sides import SIDES


def main() -> None:
    case, path = json.loads(sys.argv[1]), sys.argv[2]
    device = torch.accelerator.current_accelerator()
    assert device is not None
    module = torch.get_device_module(device)
    if case["device_bytes"] is not None:
        total = module.mem_get_info()[1]
        module.set_per_process_memory_fraction(min(1.0, case["device_bytes"] / total))
    shape = Shape(case["hidden"], case["layers"])
    side = SIDES[case["side"]](lambda: GPT(shape, case["seq"]), device, case["settings"], path)
    seconds, losses, moved = [], [], [side.disk_bytes()]
    module.reset_peak_memory_stats()
    for number in range(case["steps"]):
        tokens, targets = (part.to(device) for part in tokens_of(number, case["batch"], case["seq"]))
        module.synchronize()
        started = time.perf_counter()
        losses.append(side.step(tokens, targets))
        module.synchronize()
        seconds.append(time.perf_counter() - started)
        moved.append(side.disk_bytes())
    found = figures(case, shape, module, seconds, losses) | side.stats()
    if case["device_bytes"] is not None:
        found["device_estimate_bytes"] = device_estimate_bytes(case, case["settings"], total_bytes(case, module))
    if case["settings"].get("disk"):
        found |= disk_figures(moved, path)
    print(json.dumps(found))


def total_bytes(case: dict[str, Any], module: Any) -> int:
    return min(case["device_bytes"], int(module.mem_get_info()[1]))


def device_estimate_bytes(case: dict[str, Any], settings: dict[str, Any], device_bytes: int) -> int:
    """The peak that ``deepoffload.estimate`` predicts for the case, from the model's shapes."""
    from deepoffload import machine
    from deepoffload.config import Config, Precision
    from deepoffload.config.units import parse_bytes
    from deepoffload.estimate import Batch, MachineSpec, estimate, from_module

    with torch.device("meta"):
        model = GPT(Shape(case["hidden"], case["layers"]), case["seq"])
    tokens = torch.zeros(case["batch"], case["seq"], dtype=torch.int64)
    subject = from_module(model, Batch(case["batch"], case["seq"]), loss_of=lambda call: call(tokens, tokens))
    host_bytes = machine.measure().memory_total_bytes
    spec = MachineSpec(nvme_bytes=1 << 44, host_memory_bytes=host_bytes, device_memory_bytes=device_bytes)
    budget_bytes = parse_bytes(settings["device_budget"])
    found = estimate(subject, spec, Config(precision=Precision.BF16, device_budget=budget_bytes))
    if found.memory is None:
        raise RuntimeError(f"the estimate says that it cannot train: {found.problem}")
    return found.memory.device_bytes


def disk_figures(moved: list[Any], path: str) -> dict[str, Any]:
    """What a step moves on the disk, and what the disk does when nothing else runs, measured now."""
    from deepoffload.io.engine import IoEngine
    from deepoffload.io.probe import measure_bandwidth

    with IoEngine() as engine:
        rate = measure_bandwidth(path, engine, use_cache=False)
    steps = list(zip(moved[1:], moved[2:], strict=False))  # the first step is left out
    read, written = (statistics.median(after[way] - before[way] for before, after in steps) for way in (0, 1))
    return {
        "disk_read_bytes": int(read),
        "disk_written_bytes": int(written),
        "disk_rates": {
            "read_bytes_per_s": rate.read_bytes_per_s,
            "write_bytes_per_s": rate.write_bytes_per_s,
            "mixed_bytes_per_s": rate.mixed_bytes_per_s,
        },
    }


def figures(
    case: dict[str, Any], shape: Shape, module: Any, seconds: list[float], losses: list[float]
) -> dict[str, Any]:
    """The first step builds and learns the order; it is told apart."""
    step_s = statistics.median(seconds[1:])
    tokens = case["batch"] * case["seq"]
    weights = num_parameters(shape, case["seq"]) - (VOCABULARY + case["seq"]) * shape.hidden  # no products with those
    # PaLM (arXiv 2204.02311), appendix B: 6 per weight and token, and attention's products.
    flops = tokens * (6 * weights + 12 * shape.layers * shape.hidden * case["seq"])
    return {
        "parameters": num_parameters(shape, case["seq"]),
        "first_step_s": seconds[0],
        "step_s": step_s,
        "steps_s": seconds,
        "tokens_per_s": tokens / step_s,
        "flops_per_step": flops,
        "device_peak_bytes": module.max_memory_allocated(),
        "host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "losses": losses,
    }


if __name__ == "__main__":
    main()
