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
    seconds, losses = [], []
    module.reset_peak_memory_stats()
    for number in range(case["steps"]):
        tokens, targets = (part.to(device) for part in tokens_of(number, case["batch"], case["seq"]))
        module.synchronize()
        started = time.perf_counter()
        losses.append(side.step(tokens, targets))
        module.synchronize()
        seconds.append(time.perf_counter() - started)
    print(json.dumps(figures(case, shape, module, seconds, losses) | side.stats()))


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
