"""How much is done for a device, counted on the tests' simulated GPU: copies, places, waits, operators. Counts are the
same on every machine.

python -m benchmarks.gpu.counts                         # a table
python -m benchmarks.gpu.counts --before COUNTS.json    # with a second column: of the table that another commit printed
python -m benchmarks.gpu.counts --json                  # for that; --write FILE: both columns as JSON
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.simulated_gpu import install, settings

if __name__ == "__main__":  # before anything that asks torch for its accelerator
    install(devices=1)

import deepoffload
from deepoffload.copies.accelerator import Accelerator
from deepoffload.copies.fenced_arena import DeviceArena
from deepoffload.copies.in_flight import DeviceTransfers
from deepoffload.copies.pinning import PinnedArena
from deepoffload.memory.arena import Arena
from deepoffload.native import cpu_adam
from deepoffload.runtime.context import engine_of
from deepoffload.timeline import Lane
from tests.support.inspect import units_of

MIB = 1 << 20
WIDTH, LAYERS = 256, 6
Counts = dict[str, float]


class Net(nn.Module):
    """Layers of one normalisation and two products: six gradients each, of which four are small."""

    def __init__(self, width: int = WIDTH, layers: int = LAYERS) -> None:
        super().__init__()
        parts = (
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)) for _ in range(layers)
        )
        self.layers = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def paged(build: Callable[[], nn.Module] = Net, device_bytes: int = 32 * MIB, **said: Any) -> nn.Module:
    budgets = {"device_budget": device_bytes, "host_budget": 64 * MIB} | said
    with deepoffload.offload_context(device="simgpu", **budgets):
        torch.manual_seed(0)
        return build()


class Loop:
    """Steps of one model."""

    def __init__(self, model: nn.Module, width: int = WIDTH, **options: Any) -> None:
        self.model = model
        self.optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-3, **options)
        self.inputs = torch.ones(4, width, dtype=next(model.parameters()).dtype).to("simgpu")

    def backward(self) -> None:
        self.model(self.inputs).float().square().mean().backward()

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        _ = [param.detach() for param in self.model.parameters()]  # what a step has put off

    def moved(self) -> tuple[int, int]:
        """Bytes to the device and from it in one step."""
        before = deepoffload.stats(self.model)
        self.step()
        after = deepoffload.stats(self.model)
        taken, given = (int(after[key] - before[key]) for key in ("device_bytes_in", "device_bytes_out"))
        return taken, given


@contextmanager
def counting(owner: Any, name: str) -> Iterator[list[tuple[Any, ...]]]:
    """The arguments of each call of a function of ours."""
    real, calls = getattr(owner, name), []

    def called(*rest: Any, **more: Any) -> Any:
        calls.append((*rest, more))
        return real(*rest, **more)

    setattr(owner, name, called)
    try:
        yield calls
    finally:
        setattr(owner, name, real)


def state_on_the_device() -> Counts:
    """State kept on the device, with a norm that clips."""
    loop = Loop(paged(offload_optimizer="device"), max_grad_norm=0.1)
    loop.step(2)
    with counting(cpu_adam, "land") as landed:
        taken, given = loop.moved()
    return {
        "state on the device: bytes of gradients from it, a step": given,
        "state on the device: bytes to it, a step": taken,
        "state on the device: elements whose squares the host sums": sum(int(call[2]) for call in landed),
    }


def memory_of(model: nn.Module) -> Any:
    """The device's, with what only a device's has."""
    return engine_of(model).pager.memory


def an_update_on_the_device() -> Counts:
    """Of one parameter of 20 M elements, by torch's operators."""
    width = 4500
    model = paged(
        lambda: nn.Linear(width, width, bias=False), 512 * MIB, host_budget=1 << 30, offload_optimizer="device"
    )
    loop, module = Loop(model, width), torch.get_device_module("simgpu")
    loop.step()
    loop.backward()
    memory_of(model).end_copies()  # gradients that leave have left
    module.reset_peak_memory_stats()
    before = module.memory_allocated()
    loop.optimizer.step()
    _ = model.weight.detach()
    outside_bytes = module.max_memory_allocated() - before
    return {"update on the device, 20 M elements: bytes of memory outside the budget": outside_bytes}


def places() -> Counts:
    """Three steps, the state on the host, all weights fit."""
    loop = Loop(paged(offload_optimizer="host"))
    loop.step(2)
    with counting(DeviceArena, "allocate") as allocated:
        loop.step(3)
    return {"ranges of the device's memory taken for updated weights, a step": len(allocated) / 3}


def driver_calls() -> Counts:
    """One step, the state on the host, six layers of six tensors."""
    loop = Loop(paged(offload_optimizer="host"))
    loop.step(2)
    with counting(Accelerator, "on") as contexts:
        loop.backward()
    from_device = sum(call[1] is call[0].copy_out for call in contexts)
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    with counting(Accelerator, "event") as events, counting(Accelerator, "on") as on:
        with counting(Accelerator, "current") as current:
            loop.step()
    return {
        "copies from the device, a backward with 36 gradients": from_device,
        "events recorded, a step": len(events),
        "contexts of streams, a step": len(on),
        "questions for the current stream, a step": len(current),
    }


class Happens:
    """An event that has happened, or has not yet."""

    def __init__(self, has: bool) -> None:
        self.has = has

    def query(self) -> bool:
        return self.has

    def synchronize(self) -> None:
        self.has = True


def queues() -> Counts:
    """A weight's copy waits for the device to compute; five gradients have arrived."""
    model = paged()
    memory, ended = memory_of(model), []
    transfers: DeviceTransfers = memory.transfers
    for number, block in enumerate(unit.weights for unit in units_of(model)):
        memory.tiers.acquire(block)
        lane = Lane.FROM_DEVICE if number else Lane.TO_DEVICE
        transfers.launched(lane, Happens(number > 0), block, block.nbytes, lambda number=number: ended.append(number))
    transfers.poll()
    return {f"gradients that land while a copy to the device waits, of {number}": len(ended)}


def landing() -> Counts:
    """Gradients of 256 KiB, on this machine's cores."""
    loop = Loop(paged(offload_optimizer="host"))
    where: list[bool] = []
    real = cpu_adam.land

    def land(*rest: Any, **more: Any) -> Any:
        if rest[2] == WIDTH * WIDTH:
            where.append(threading.current_thread().name.startswith("deepoffload"))
        return real(*rest, **more)

    cpu_adam.land = land
    loop.step()
    cpu_adam.land = real
    return {"large gradients that land on autograd's or the program's thread, of 12": where.count(False)}


def alignment() -> Counts:
    model = paged(lambda: Net(24))
    seen: list[int] = []
    for layer in model.modules():
        if not list(layer.children()):
            layer.register_forward_pre_hook(
                lambda layer, _: seen.extend(p.data_ptr() % 256 for p in layer.parameters())
            )
    model(torch.ones(2, 24).to("simgpu"))
    return {"tensors not aligned to 256 bytes, of 36": sum(rest != 0 for rest in seen)}


def registration() -> Counts:
    """Of 192 MiB, where the driver takes 100 MiB at first, and everything later."""
    settings(pinned_max_bytes=100 * MIB)
    arena = Arena(192 * MIB)
    pinned = PinnedArena(Accelerator(torch.device("simgpu")), arena)
    pinned.lock(0, 192 * MIB)
    at_first = pinned.locked_bytes
    settings()
    pinned.lock(0, 192 * MIB)
    later = pinned.locked_bytes
    pinned.release()
    return {
        "registration of 192 MiB, the driver takes 100: MiB locked": at_first / MIB,
        "and when it takes more": later / MIB,
    }


def rest_of_the_budget() -> Counts:
    """Nothing said but the budgets, which hold everything."""
    loop = Loop(paged())
    loop.step(2)
    taken, given = loop.moved()
    return {"defaults, a budget for all: bytes to the device, a step": taken, "and from it": given}


COUNTS = (
    *(state_on_the_device, an_update_on_the_device, places, driver_calls, queues, landing),
    *(alignment, registration, rest_of_the_budget),
)


def table(found: Counts, before: Counts | None) -> Iterator[str]:
    """Markdown."""
    head = ["", *([] if before is None else ["before"]), "now"]
    yield f"| {' | '.join(head)} |"
    yield f"|{' --- |' * len(head)}"
    for what, count in found.items():
        counts = [*([] if before is None else [before.get(what)]), count]
        yield f"| {what} | {' | '.join('' if each is None else f'{each:,.10g}' for each in counts)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="counts of another commit, printed with --json")
    parser.add_argument("--json", action="store_true", help="print numbers, and no table")
    parser.add_argument("--write", type=Path, help="a file for both columns")
    said = parser.parse_args()
    found: Counts = {}
    for count in COUNTS:
        settings()
        found |= count()
    if said.json:
        print(json.dumps(found, indent=1))
        return
    before = None if said.before is None else json.loads(said.before.read_text(encoding="utf-8"))
    print("\n".join(table(found, before)))
    if said.write is not None:
        said.write.write_text(json.dumps({"before": before, "now": found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
