"""Generation that lasts, and that Ctrl-C ends again and again: ``python -m tests.runtime.generation_campaign DIR
[--tokens N] [--interrupts N] [--seed N]``. The test suite has a short form of both.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from deepoffload import stats
from tests.runtime.lifecycle_program import has_saved_tensor_hooks
from tests.support.ctrl_c import CtrlC
from tests.support.generation import Generation, weight_bytes
from tests.support.inspect import tiers_of
from tests.support.memory_watch import give_back, resident_bytes
from tests.support.models import llama

TOKENS = torch.arange(3, 15).view(2, 6)
GROWTH_BYTES = 2 << 20
"""That a run may take more at its end than when it had begun: Python's own pools."""


def generation_in(directory: Path) -> Generation:
    """A Llama in bf16 of 11 MB, for some thousand tokens."""
    sizes = {"vocab_size": 2048, "hidden_size": 256, "intermediate_size": 512, "max_position_embeddings": 4096}
    return Generation.of(partial(llama, num_hidden_layers=8, **sizes), torch.bfloat16, directory)


class Looks:
    """Asked by ``generate`` after each token whether it is to stop; looks at the engine, and never stops it. The memory
    is looked at after some tokens."""

    def __init__(self, model: Any, at: tuple[int, ...]) -> None:
        self._model, self._at = model, at
        self.count = 0
        self.resident_bytes: list[int] = []
        self.begin: dict[str, float] = {}

    def __call__(self, tokens: torch.Tensor, scores: Any, **more: Any) -> torch.Tensor:
        self.count += 1
        found = stats(self._model)
        assert found["forwards"] == self.count
        if self.count == 1:
            self.begin = found
        if self.count in self._at:
            give_back()
            self.resident_bytes.append(resident_bytes())
        return torch.zeros(len(tokens), dtype=torch.bool)


def generate_long(model: Any, count: int, warm: int) -> int:
    """Generate ``count`` tokens. Returns by how many bytes the process has grown from the token number ``warm`` to the
    last one. Nothing is written, and what is used after the first pass was foreseen."""
    looks = Looks(model, (warm, count))
    model.generate(
        TOKENS, max_new_tokens=count, min_new_tokens=count, do_sample=False, cache_implementation="static",
        stopping_criteria=[looks],
    )  # fmt: skip
    found = stats(model)
    assert looks.count == count
    assert found["disk_bytes_written"] == 0 and found["faults"] == looks.begin["faults"]
    per_token = (found["disk_bytes_read"] - looks.begin["disk_bytes_read"]) / (count - 1)
    assert 0 < per_token <= weight_bytes(model), "something is read twice"
    begin_bytes, end_bytes = looks.resident_bytes
    return end_bytes - begin_bytes


def interrupt(model: Any, delay_s: float) -> bool:
    """Send Ctrl-C some time after ``generate`` has begun; whether that ended it. The model is as before."""
    ctrl_c, ended = CtrlC(delay_s), False
    try:
        ctrl_c.go.set()
        model.generate(TOKENS, max_new_tokens=5, do_sample=False)
    except KeyboardInterrupt:
        ended = True
    ctrl_c.call_off()
    assert torch._C._is_torch_function_enabled() and torch.is_grad_enabled(), "a switch is off"
    leases = [block.name for block in tiers_of(model).blocks() if block.leases]
    assert not leases and not has_saved_tensor_hooks(), f"{leases} are held"
    return ended


def interrupt_often(model: Any, expected: torch.Tensor, count: int, seed: int) -> int:
    """Until ``count`` were in time. One that was not is followed by one that comes after half as long, for a call may
    be quicker than those before. Returns how many were sent."""
    dice, ended, share = random.Random(seed), 0, 1.0
    for number in itertools.count():
        begin_s = time.monotonic()
        assert torch.equal(model.generate(TOKENS, max_new_tokens=5, do_sample=False), expected), f"after {number}"
        if ended == count:
            break
        assert number < 20 * count, "no Ctrl-C is in time"
        in_time = interrupt(model, share * dice.random() * (time.monotonic() - begin_s))
        ended, share = ended + in_time, 1.0 if in_time else share / 2
    assert stats(model)["disk_bytes_written"] == 0
    return number


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--interrupts", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    said = parser.parse_args()
    torch.set_num_threads(1)
    generation = generation_in(said.directory)
    plain, model = generation.plain(), generation.paged(4 << 20)
    growth = generate_long(model, said.tokens, warm=said.tokens // 10)
    print(f"{said.tokens} tokens: grown by {growth} bytes, no fault, nothing written", flush=True)
    assert growth <= GROWTH_BYTES
    expected = plain.generate(TOKENS, max_new_tokens=5, do_sample=False)
    sent = interrupt_often(model, expected, said.interrupts, said.seed)
    print(f"Ctrl-C ended {said.interrupts} of {sent} calls, each next one has plain's tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
