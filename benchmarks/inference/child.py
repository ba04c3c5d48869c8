"""One side of the comparison in a separate process: it is told by lines on stdin, and answers with JSON.

``python -m benchmarks.inference.child '{"side": ..., "checkpoint": ..., "folder": ..., "budget": ...}'``. Sides:
``plain`` (in memory), ``ours``, ``int8``, ``int8 head`` (the output head, too), ``int4``, ``every expert`` (ours, where
a call of stacked experts takes all of them), ``4 units`` and the like (ours, where so many units of weights fit into
the budget), ``accelerate`` (``disk_offload``), ``transformers`` (``device_map`` on disk), ``airllm`` (where that is
installed; it first writes the checkpoint again, layer by layer).
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.end_to_end.meter import read_counters

PROMPT_TOKENS = 16
UNITS = {f"{count} units": count for count in (4, 6, 8)}
QUANTIZED = {"int8": ("int8", False), "int8 head": ("int8", True), "int4": ("int4", False)}
"""Kind, and whether the output head is one of the quantised layers."""
OURS = ("ours", "every expert", *QUANTIZED, *UNITS)


def drop_caches(folders: list[str]) -> None:
    """Every file below these folders leaves the page cache, as far as nobody maps it."""
    for folder in folders:
        for path in Path(folder).rglob("*"):
            if path.is_file():
                fd = os.open(path, os.O_RDONLY)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)


class Side:
    """A loaded model and its way to be loaded."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.side: str = spec["side"]
        self.checkpoint: str = spec["checkpoint"]
        self.folder: str = spec["folder"]
        self.budget: int = spec["budget"]
        self.model: Any = None
        self.context: Any = None

    def _from_pretrained(self, **more: Any) -> Any:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self.checkpoint, dtype=torch.bfloat16, **more).eval()

    def load(self) -> None:
        self.model = None
        gc.collect()
        if self.side in OURS:
            import deepoffload
            from deepoffload.runtime import cuts

            if self.side in UNITS:
                cuts.UNITS_PER_BUDGET_IN_INFERENCE = UNITS[self.side]  # of this process
            more = {"experts_implementation": "eager"} if self.side == "every expert" else {}
            self.context = deepoffload.offload_context(inference=True, host_budget=self.budget, nvme_path=self.folder)
            with self.context:
                self.model = self._from_pretrained(**more)
                if self.side in QUANTIZED:
                    kind, head = QUANTIZED[self.side]
                    deepoffload.quantize_weights(self.model, kind, head=head)
        elif self.side == "airllm":
            from airllm import AutoModel

            self.model = AutoModel.from_pretrained(
                self.checkpoint, device="cpu", dtype=torch.bfloat16, layer_shards_saving_path=self.folder
            )
        elif self.side == "transformers":
            self.model = self._from_pretrained(device_map={"": "disk"}, offload_folder=self.folder)
        else:
            self.model = self._from_pretrained()
            if self.side == "accelerate":
                from accelerate import disk_offload

                self.leave_files()
                disk_offload(self.model, self.folder, execution_device=torch.device("cpu"))

    def leave_files(self) -> None:
        """Copy what the model maps: else the file's pages stay in memory, and other sides find them there."""
        for param in self.model.parameters():
            param.data = param.data.clone()

    def about_ours(self) -> dict[str, float]:
        """What deepoffload has written to its swap file, and which bytes of weights it keeps in memory."""
        if self.side not in OURS:
            return {"written_bytes": 0, "resident_bytes": 0}
        import deepoffload

        written = deepoffload.stats(self.model)["disk_bytes_written"]
        return {"written_bytes": written, "resident_bytes": self.context.engine.placement.resident_bytes}

    @torch.no_grad()
    def tokens(self, batch: int, count: int, *, dropping: bool) -> dict[str, Any]:
        """Seconds and bytes read of each forward pass: of a prompt, then of ``count`` greedy tokens."""
        torch.manual_seed(0)
        ids = torch.randint(3, 30_000, (batch, PROMPT_TOKENS))
        if self.side == "airllm":
            return self._generated(ids, count, dropping=dropping)
        cache, seconds, read, chosen = None, [], [], []
        for _ in range(count + 1):
            if dropping:
                drop_caches([self.checkpoint, self.folder])
            before, begin = read_counters(), time.perf_counter()
            output = self.model(input_ids=ids, past_key_values=cache, use_cache=True)
            seconds.append(time.perf_counter() - begin)
            read.append((read_counters() - before).read_bytes)
            cache, ids = output.past_key_values, output.logits[:, -1:].argmax(-1)
            chosen.append(ids[:, 0].tolist())
        return {"seconds": seconds, "read_bytes": read, "tokens": chosen}

    def _generated(self, ids: torch.Tensor, count: int, *, dropping: bool) -> dict[str, Any]:
        """The same of a model that has nothing but ``generate``."""
        seconds: list[float] = []
        read: list[int] = []

        def begin() -> None:
            nonlocal before, begin_s
            if dropping:
                drop_caches([self.checkpoint, self.folder])
            before, begin_s = read_counters(), time.perf_counter()

        def after_token(tokens: torch.Tensor, scores: Any, **more: Any) -> torch.Tensor:
            seconds.append(time.perf_counter() - begin_s)
            read.append((read_counters() - before).read_bytes)
            begin()
            return torch.zeros(len(tokens), dtype=torch.bool)

        before, begin_s = read_counters(), 0.0
        begin()
        found = self.model.generate(
            ids, max_new_tokens=count + 1, min_new_tokens=count + 1, use_cache=True, stopping_criteria=[after_token]
        )
        tokens = getattr(found, "sequences", found)[:, PROMPT_TOKENS:]
        return {"seconds": seconds, "read_bytes": read, "tokens": tokens.t().tolist()}

    def answer(self, asked: list[Any]) -> dict[str, Any]:
        if asked[0] == "load":
            drop_caches([self.checkpoint])
            begin = time.perf_counter()
            self.load()
            found = self.tokens(1, 0, dropping=False)
            seconds = time.perf_counter() - begin
            if self.side == "plain":
                self.leave_files()
            return {"first_token_s": seconds, "tokens": found["tokens"], **self.about_ours()}
        _, batch, count = asked
        return self.tokens(batch, count, dropping=self.side != "plain")


def main() -> None:
    side = Side(json.loads(sys.argv[1]))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    for line in sys.stdin:
        print(json.dumps(side.answer(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
