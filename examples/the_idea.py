"""The idea of deepoffload in a hundred lines of plain PyTorch, without deepoffload.

    python examples/the_idea.py

A model's weights and optimizer state live in files. Hooks read each layer's weights just before they are used and drop
them after it; autograd keeps names instead of weights; each gradient is used up as soon as it is there. The losses are
those of an ordinary loop, bit for bit. What this toy gets wrong, and which part of deepoffload puts it right, is listed
at the end: that list is why the rest of the code exists.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

LAYERS, WIDTH, STEPS, LR = 12, 256, 5, 1e-3


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)])


def adam(weight: Tensor, gradient: Tensor, state: Tensor, step: int) -> None:
    """One Adam step in place; ``state`` holds exp_avg and exp_avg_sq (Kingma and Ba, 2015)."""
    state[0].lerp_(gradient, 0.1)
    state[1].mul_(0.999).addcmul_(gradient, gradient, value=0.001)
    denominator = (state[1] / (1 - 0.999**step)).sqrt_().add_(1e-8)
    weight.addcdiv_(state[0], denominator, value=-LR / (1 - 0.9**step))


class Pager:
    """Keeps every parameter of a model in files, and brings it into memory while somebody uses it."""

    def __init__(self, model: nn.Module, directory: Path) -> None:
        self.directory, self.step = directory, 1
        self.resident_bytes = self.peak_bytes = 0
        self.by_address: dict[int, nn.Parameter] = {}
        self.names = {param: name for name, param in model.named_parameters()}
        for param in self.names:
            self._write("state", param, torch.zeros(2, *param.shape))
            self._write("weight", param, param.detach())
            self._drop(param)
            param.register_post_accumulate_grad_hook(self.update)  # a gradient is ready
        for layer in model.children():
            layer.register_forward_pre_hook(self.enter)
            layer.register_forward_hook(self.leave)

    def enter(self, layer: nn.Module, args: Any) -> None:
        for param in layer.parameters():
            self.fetch(param)

    def leave(self, layer: nn.Module, args: Any, output: Any) -> None:
        for param in layer.parameters():
            self.evict(param)

    # A parameter that is away shows one NaN, expanded to its shape: it takes no memory, and a late reader is seen.

    def fetch(self, param: nn.Parameter) -> Tensor:
        if param.data.data_ptr() not in self.by_address:
            param.data = self._read("weight", param, param.shape)
            self.by_address[param.data.data_ptr()] = param
            self.resident_bytes += param.nbytes
            self.peak_bytes = max(self.peak_bytes, self.resident_bytes)
        return param.data

    def evict(self, param: nn.Parameter) -> None:
        if self.by_address.pop(param.data.data_ptr(), None) is not None:
            self.resident_bytes -= param.nbytes
            self._drop(param)

    def update(self, param: nn.Parameter) -> None:
        """Make the optimizer step of one parameter, and forget its gradient."""
        weight, state = self.fetch(param), self._read("state", param, (2, *param.shape))
        adam(weight, param.grad, state, self.step)
        self._write("weight", param, weight)
        self._write("state", param, state)
        param.grad = None
        self.evict(param)

    # Autograd keeps what backward needs. For a weight, or a view of one, it keeps the description.

    def pack(self, tensor: Tensor) -> Any:
        param = self.by_address.get(tensor.untyped_storage().data_ptr())
        return tensor if param is None else (param, tensor.size(), tensor.stride(), tensor.storage_offset())

    def unpack(self, packed: Any) -> Tensor:
        return packed if isinstance(packed, Tensor) else self.fetch(packed[0]).as_strided(*packed[1:])

    def _drop(self, param: nn.Parameter) -> None:
        param.data = torch.tensor(float("nan")).expand(param.shape)

    def _write(self, kind: str, param: nn.Parameter, value: Tensor) -> None:
        value.numpy().tofile(self.directory / f"{self.names[param]}.{kind}")

    def _read(self, kind: str, param: nn.Parameter, shape: Any) -> Tensor:
        file = self.directory / f"{self.names[param]}.{kind}"
        return torch.from_file(str(file), shared=False, size=file.stat().st_size // 4).clone().view(shape)


def batch(step: int) -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))


def plain_losses() -> list[float]:
    model, losses = build(), []
    states = [torch.zeros(2, *param.shape) for param in model.parameters()]
    for step in range(1, STEPS + 1):
        loss = model(batch(step)).square().mean()
        loss.backward()
        losses.append(loss.item())
        for param, state in zip(model.parameters(), states, strict=True):
            adam(param.data, param.grad, state, step)
            param.grad = None
    return losses


def paged_losses(directory: Path) -> tuple[list[float], Pager]:
    model, losses = build(), []
    pager = Pager(model, directory)
    for pager.step in range(1, STEPS + 1):
        with torch.autograd.graph.saved_tensors_hooks(pager.pack, pager.unpack):
            loss = model(batch(pager.step)).square().mean()
        loss.backward()
        losses.append(loss.item())
    return losses, pager


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        losses, pager = paged_losses(Path(directory))
    total = 3 * sum(param.numel() * 4 for param in pager.names)
    print(f"weights and Adam's state: {total / 1e6:.1f} MB; weights in memory at once: {pager.peak_bytes / 1e6:.1f} MB")
    print("losses, paged:", *(f"{loss:.6f}" for loss in losses))
    print("losses, plain:", *(f"{loss:.6f}" for loss in plain_losses()))
    assert losses == plain_losses()


WHAT_THE_TOY_GETS_WRONG = """
what goes wrong here                                             which part of deepoffload puts it right
---------------------------------------------------------------  ------------------------------------------------------
it waits for every read: the disk idles while it computes        schedule/trace, schedule/planner, params/prefetcher
a file per tensor, through the page cache, one request at a time io/swap_space, io/engine, csrc/aio
nobody counts gradients, state and holes: no budget is kept      memory/arena, memory/tier_manager, schedule/placement
the model must fit in memory once, before it is paged            runtime/construct
weights used outside of a layer's forward are NaN                params/parameter (the door of each operation)
x = w.view(-1), kept over an eviction, shows old values          params/slot ("alias = lease"), memory/limbo
checkpoints push their own hooks, which hide these               params/saved (hooks that compose)
clipping by the global norm, accumulation: the update comes      optim/gradients, optim/update (a step that waits
  before all gradients are there                                   for the norm, deferred to the weight's next use)
p.grad, p.data = ..., state_dict(), deepcopy: NaN or nothing     params/new_data, params/state_dict_values,
                                                                 params/copies
bf16 weights lose their fp32 master                              csrc/cpu_adam, optim/state (the split master)
Adam in five passes over memory                                  csrc/cpu_adam (one pass), native/cpu_adam
Ctrl-C or a full disk between two files: half a step             memory/lock, optim/update (a step is finished later)
a GPU has its own memory                                         copies/copy_memory, optim/device_landing
"""

if __name__ == "__main__":
    main()
    print(WHAT_THE_TOY_GETS_WRONG)
