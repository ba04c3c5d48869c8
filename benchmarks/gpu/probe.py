"""Asks a device, one by one, what deepoffload takes for granted about it. Each answer stands alone and is written when
it is there: a failure does not stop the rest.

python -m benchmarks.gpu.probe [--simulate] [--folder FOLDER] [QUESTION ...]

The answers go to FOLDER/gpu_probe_<device>.json. With --simulate the tests' simulated GPU answers all questions but
those for rates.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

if "--simulate" in sys.argv:  # before anything that asks torch for its accelerator
    from tests.support.simulated_gpu import install

    install(devices=1)

import deepoffload
from deepoffload import machine
from deepoffload.copies.accelerator import Accelerator
from deepoffload.copies.pinning import CHUNK_BYTES, PinnedArena
from deepoffload.memory.arena import Arena
from deepoffload.params.reference_counts import LONE
from deepoffload.params.slot import make_stand_in
from deepoffload.params.torch_private import outside_user_modes, set_data_elsewhere, storage_at

MIB = 1 << 20
Answer = dict[str, Any]


class Probe:
    """One device. Each public method is a question."""

    def __init__(self, *, simulate: bool) -> None:
        found = torch.accelerator.current_accelerator()
        assert found is not None, "torch sees no accelerator"
        self._simulate = simulate
        self._accelerator = Accelerator(found)
        self._device = self._accelerator.device
        self._module = torch.get_device_module(self._device)

    @property
    def name(self) -> str:
        return "simulated" if self._simulate else str(self._module.get_device_properties(self._device).name)

    # -- how long ------------------------------------------------------------------------------------------------------

    def _microseconds(self, call: Callable[[], object], times: int = 2000) -> float:
        call()
        self._accelerator.synchronize()
        begin_s = time.perf_counter()
        for _ in range(times):
            call()
        end_s = time.perf_counter()
        self._accelerator.synchronize()
        return round(1e6 * (end_s - begin_s) / times, 2)

    def _rate(self, call: Callable[[], object], nbytes: int, rounds: int = 5) -> float:
        """Bytes per second, the median of several rounds after a first one."""
        rates = []
        for _ in range(rounds + 1):
            self._accelerator.synchronize()
            begin_s = time.perf_counter()
            call()
            self._accelerator.synchronize()
            rates.append(nbytes / (time.perf_counter() - begin_s))
        return statistics.median(rates[1:])

    # -- questions -----------------------------------------------------------------------------------------------------

    def versions(self) -> Answer:
        properties = self._module.get_device_properties(self._device)
        return {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "device": properties.name,
            "memory_bytes": properties.total_memory,
            "threads": torch.get_num_threads(),
        }

    def memory_that_grows(self) -> Answer:
        """What the machine says of its memory, before and after much of it is touched."""
        before = machine.measure()
        touched = torch.empty((1 << 28) if self._simulate else (40 << 30), dtype=torch.uint8)
        touched[::4096].fill_(0)
        after = machine.measure()
        del touched
        return {
            when: {"total": found.memory_total_bytes, "available": found.memory_available_bytes, "cores": found.cores}
            | {"most": found.most_bytes(may_grow=False), "container": found.container_bytes}
            for when, found in (("before", before), ("after", after))
        }

    def view_of_raw_memory(self) -> Answer:
        """A storage of an address inside of other memory, and who is counted to refer to it."""
        memory = torch.empty(MIB, dtype=torch.uint8, device=self._device)
        storage = storage_at(memory.data_ptr() + 256, self._device, 4096)
        storage.memory = memory
        view = torch.empty(0, dtype=torch.bfloat16, device=self._device).set_(storage, 0, (2048,), (1,))
        view.fill_(3.0)
        param = nn.Parameter(torch.empty(1, device=self._device, dtype=torch.bfloat16))
        param.data = view
        del view, storage

        class Shown:
            pass

        shown: Any = Shown()
        shown.storage = param.data.untyped_storage()
        alone = LONE.storage_is_shared(shown, shown=True)
        alias = param.detach()
        shared = LONE.storage_is_shared(shown, shown=True)
        del alias
        if not self._simulate:
            param.record_stream(self._module.Stream())
        return {
            "value": float(memory[256:258].view(torch.bfloat16)[0]),
            "shared_without_a_view": alone,
            "shared_with_a_view": shared,
        }

    def data_across_devices(self) -> Answer:
        """A parameter moves, and stays the same object."""
        param = nn.Parameter(torch.ones(4))
        there = torch.full((), float("nan"), device=self._device).expand(4)
        before = id(param)
        set_data_elsewhere(param, there)
        return {
            "device": str(param.device),
            "same_object": id(param) == before,
            "assigned": torch._has_compatible_shallow_copy_type(torch.ones(1), there),
        }

    def stand_in_refuses(self) -> Answer:
        """What shows in place of bytes that are away can be neither read nor written."""
        away = make_stand_in((8, 8), torch.bfloat16, self._device)
        ones = torch.ones(8, 8, device=self._device, dtype=torch.bfloat16)
        uses: dict[str, Callable[[], object]] = {
            "add_": lambda: away.add_(1),
            "data_ptr": away.data_ptr,
            "matmul": lambda: bool((ones @ away).isnan().all()),
            "addmm": lambda: bool(torch.addmm(ones[0], ones, away).isnan().all()),
            "copy": lambda: away.cpu(),
        }
        answers: Answer = {}
        for name, use in uses.items():
            try:
                answers[name] = str(use())
            except RuntimeError as error:
                answers[name] = f"raises {type(error).__name__}"
        return answers

    def capture_is_known(self) -> Answer:
        return {"asked": self._accelerator.is_capturing(), "name": hasattr(self._module, "is_current_stream_capturing")}

    def registration(self) -> Answer:
        arena = Arena((256 if self._simulate else 2048) * MIB)
        pinned = PinnedArena(self._accelerator, arena)
        begin_s = time.perf_counter()
        parts = pinned.lock(0, arena.capacity_bytes)
        took_s = time.perf_counter() - begin_s
        answer = {
            "bytes_per_s": arena.capacity_bytes / took_s,
            "parts": len(parts),
            "locked_bytes": pinned.locked_bytes,
            "refusal": pinned.refusal,
        }
        pinned.release()
        return answer

    def copies(self) -> Answer:
        arena = Arena((256 if self._simulate else 2048) * MIB)
        pinned = PinnedArena(self._accelerator, arena)
        nbytes = arena.capacity_bytes
        parts = pinned.lock(0, nbytes)
        host = torch.frombuffer(arena.buffer, dtype=torch.uint8)
        there = [torch.empty(nbytes, dtype=torch.uint8, device=self._device) for _ in range(2)]
        accelerator = self._accelerator

        def bring(chosen: list[tuple[int, int]]) -> None:
            with accelerator.on(accelerator.copy_in):
                for start, size in chosen:
                    there[0][start : start + size].copy_(host[start : start + size], non_blocking=True)

        def take(chosen: list[tuple[int, int]]) -> None:
            with accelerator.on(accelerator.copy_out):
                for start, size in chosen:
                    host[start : start + size].copy_(there[1][start : start + size], non_blocking=True)

        def both() -> None:
            half = len(parts) // 2
            bring(parts[:half])
            take(parts[half : 2 * half])  # other bytes of the host: what is read is not written meanwhile

        answer: Answer = {
            "in_bytes_per_s": self._rate(lambda: bring(parts), nbytes),
            "out_bytes_per_s": self._rate(lambda: take(parts), nbytes),
            "both_bytes_per_s": self._rate(both, nbytes),
        }
        begin_s = time.perf_counter()
        bring(parts)
        answer["launch_of_all_s"] = time.perf_counter() - begin_s  # it returns at once
        accelerator.synchronize()
        if not self._simulate:
            answer |= self._copies_of_torch(there[0], host)
        return answer

    def _copies_of_torch(self, there: Tensor, host: Tensor) -> Answer:
        plain = torch.empty(there.numel(), dtype=torch.uint8, pin_memory=True)
        pageable = torch.empty(64 * MIB, dtype=torch.uint8)
        answer: Answer = {
            "torch_pinned_in_bytes_per_s": self._rate(lambda: there.copy_(plain, non_blocking=True), there.numel()),
            "pageable_in_bytes_per_s": self._rate(
                lambda: there[: 64 * MIB].copy_(pageable, non_blocking=True), 64 * MIB
            ),
        }
        try:
            across = slice(CHUNK_BYTES - MIB, CHUNK_BYTES + MIB)
            there[: 2 * MIB].copy_(host[across], non_blocking=True)
            self._accelerator.synchronize()
            answer["across_two_registrations"] = "works"
        except RuntimeError as error:
            answer["across_two_registrations"] = str(error)[:200]
        return answer

    def driver_calls_us(self) -> Answer:
        accelerator, stream = self._accelerator, self._accelerator.copy_in
        event = accelerator.event(accelerator.current())
        memory = torch.empty(MIB, dtype=torch.uint8, device=self._device)

        def in_stream() -> None:
            with accelerator.on(stream):
                pass

        def outside() -> None:
            with outside_user_modes():
                pass

        def view() -> None:
            storage = storage_at(memory.data_ptr(), self._device, 4096)
            storage.memory = memory
            flat = torch.empty(0, dtype=torch.bfloat16, device=self._device).set_(storage, 0, (2048,), (1,))
            flat.as_strided((32, 64), (64, 1))

        calls: dict[str, Callable[[], object]] = {
            "event": lambda: accelerator.event(stream),
            "query": event.query,
            "current": accelerator.current,
            "on_stream": in_stream,
            "wait_event": lambda: stream.wait_event(event),
            "is_capturing": accelerator.is_capturing,
            "outside_user_modes": outside,
            "view": view,
        }
        return {name: self._microseconds(call) for name, call in calls.items()}

    def memory_after_a_matmul(self) -> Answer:
        """What the library of matrix products keeps."""
        before = self._module.memory_allocated()
        x = torch.ones(64, 64, device=self._device, requires_grad=True)
        (x @ x).sum().backward()
        del x
        self._accelerator.synchronize()
        return {"kept_bytes": self._module.memory_allocated() - before}

    def alignment_of_weights(self) -> Answer:
        """Whether a product has the same bits with a weight that is aligned to less than torch's 512 bytes."""
        shapes = ((128, 512, 64), (1000, 1001, 77)) + (() if self._simulate else ((2048, 8192, 4096),))
        memory = torch.empty(64 * MIB, dtype=torch.uint8, device=self._device)
        answer: Answer = {}
        for inner, outer, rows in shapes:
            weight, bias, x = (
                torch.randn(*shape, device=self._device).to(torch.bfloat16)
                for shape in ((outer, inner), (outer,), (rows, inner))
            )
            expected = nn.functional.linear(x, weight, bias)
            for offset in (16, 64, 128, 256, 512):
                view = memory[offset : offset + weight.numel() * 2].view(torch.bfloat16).view(outer, inner)
                view.copy_(weight)
                same = torch.equal(nn.functional.linear(x, view, bias), expected)
                took = self._microseconds(lambda x=x, view=view, bias=bias: nn.functional.linear(x, view, bias), 20)
                answer[f"{inner}x{outer} at {offset}"] = {"same_bits": same, "launch_us": took}
        return answer

    def host_update(self) -> Answer:
        numel = (1 << 22) if self._simulate else (1 << 28)
        param = nn.Parameter(torch.zeros(numel))
        optimizer = deepoffload.CPUAdamW([param], lr=1e-3)
        param.grad = torch.ones(numel)
        optimizer.step()
        return {"bytes_per_s": self._rate(optimizer.step, 28 * numel), "threads": torch.get_num_threads()}

    def training_equals_plain(self) -> Answer:
        def build() -> nn.Module:
            torch.manual_seed(0)
            layers = nn.Sequential(*[nn.Linear(256, 256) for _ in range(6)])
            return layers.to(torch.bfloat16).float()  # the same masters on both sides

        seen = {}
        for ours in (False, True):
            if ours:
                budgets = {"host_budget": "16MiB", "device_budget": "1MiB", "device": str(self._device)}
                with deepoffload.offload_context(precision="bf16", **budgets):
                    model = build()
            else:
                model = build().to(self._device, torch.bfloat16)
            optimizer, losses = deepoffload.CPUAdamW(model.parameters(), lr=1e-3), []
            for number in range(4):
                rows = torch.randn(8, 256, generator=torch.Generator().manual_seed(number))
                loss = model(rows.to(self._device, torch.bfloat16)).float().square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(loss.detach()))
            seen["ours" if ours else "plain"] = losses
        return {"equal": seen["ours"] == seen["plain"], **seen}


QUESTIONS = tuple(name for name in vars(Probe) if not name.startswith("_") and name != "name")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", nargs="*", help=f"of these only: {', '.join(QUESTIONS)}")
    parser.add_argument("--simulate", action="store_true", help="on the tests' simulated GPU")
    parser.add_argument("--folder", type=Path, default=Path("benchmarks/results"), help="where the answers go")
    said = parser.parse_args()
    probe = Probe(simulate=said.simulate)
    out = said.folder / f"gpu_probe_{probe.name.lower().replace(' ', '_')}.json"
    answers: dict[str, Any] = {}
    for name in said.questions or QUESTIONS:
        try:
            answers[name] = getattr(probe, name)()
        except Exception as error:  # each question stands alone
            answers[name] = {"failed": f"{type(error).__name__}: {error}"[:500]}
        print(f"{name:24} {json.dumps(answers[name])}", flush=True)
        out.write_text(
            json.dumps({"question": "what deepoffload takes for granted", "answers": answers}, indent=1) + "\n"
        )
    print(f"written to {out}")
    return int(any("failed" in answer for answer in answers.values()))


if __name__ == "__main__":
    sys.exit(main())
