"""Models compute on the simulated GPU what they compute on the CPU, bit for bit where the kernels are the same."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

Tensors = list[torch.Tensor]


class Attention(nn.Module):
    def __init__(self, dropout: float = 0.0, masked: bool = False) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.dropout, self.masked = dropout, masked

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.view(2, 6, 2, 8).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mask = torch.ones(6, 6, dtype=torch.bool, device=x.device).tril() if self.masked else None
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=not self.masked, dropout_p=self.dropout
        )


class SelfAttention(nn.MultiheadAttention):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x, x, x)[0]


class Checkpointed(nn.Sequential):
    def __init__(self, reentrant: bool) -> None:
        super().__init__(nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 16))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x.requires_grad_(), use_reentrant=self.reentrant)


class Loss(nn.Module):
    """A language model's loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, labels=ids).loss


class CrossEntropy(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(super().forward(x).flatten(0, 1), x.argmax(-1).flatten(), label_smoothing=0.1)


def gpt2() -> nn.Module:
    made: Any = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 16}
    return Loss(made.GPT2LMHeadModel(made.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)))


def llama() -> nn.Module:
    made: Any = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    return Loss(made.LlamaForCausalLM(made.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1)))


def floats() -> Tensors:
    return [torch.randn(2, 6, 16)]


def image() -> Tensors:
    return [torch.randn(2, 4, 8, 8)]


def ids() -> Tensors:
    return [torch.randint(0, 64, (2, 8))]


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensors]]] = {
    "linear": (lambda: nn.Linear(16, 8), floats),
    "layer norm": (lambda: nn.LayerNorm(16), floats),
    "RMS norm": (lambda: nn.RMSNorm(16), floats),
    "group norm": (lambda: nn.GroupNorm(2, 4), image),
    "embedding": (lambda: nn.Embedding(64, 8, padding_idx=1), ids),
    "sparse embedding": (lambda: nn.Embedding(64, 8, sparse=True), ids),
    "activations": (
        lambda: nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.SiLU(), nn.Softmax(-1), nn.Tanh(), nn.LeakyReLU()),
        floats,
    ),
    "dropout": (lambda: nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.3)), floats),
    "convolution": (
        lambda: nn.Sequential(
            nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 4, 3, groups=2)
        ),
        image,
    ),
    "channels last": (
        lambda: nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8)).to(memory_format=torch.channels_last),
        lambda: [image()[0].to(memory_format=torch.channels_last)],
    ),
    "transposed convolution": (lambda: nn.ConvTranspose2d(4, 8, 3), image),
    "attention": (Attention, floats),
    "attention with dropout": (lambda: Attention(0.3), floats),
    "attention with a mask": (lambda: Attention(masked=True), floats),
    "multi-head attention": (lambda: SelfAttention(16, 2, batch_first=True), floats),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), floats),
    "cross entropy": (lambda: CrossEntropy(16, 16), floats),
    "checkpoint": (lambda: Checkpointed(False), floats),
    "reentrant checkpoint": (lambda: Checkpointed(True), floats),
    "LSTM": (lambda: nn.LSTM(16, 8, 2, batch_first=True, bidirectional=True), floats),
    "LSTM without bias": (lambda: nn.LSTM(16, 8, bias=False), floats),
    "GRU": (lambda: nn.GRU(16, 8, 2), floats),
    "GPT-2": (gpt2, ids),
    "Llama": (llama, ids),
}
FUSED_ON_GPUS = ("LSTM", "LSTM without bias", "GRU")
"""Here torch asks GPUs for other kernels than CPUs, which round otherwise."""


def gradients(model: nn.Module, inputs: Tensors) -> tuple[torch.Tensor, Tensors]:
    torch.manual_seed(5)
    output = model(*inputs)
    output = output[0] if isinstance(output, tuple) else output
    (output if output.dim() == 0 else output.float().pow(2).mean()).backward()
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return output.detach(), [each.to_dense() if each.is_sparse else each for each in found]


@pytest.mark.parametrize("name", MODELS)
def test_forward_and_backward_as_on_the_cpu(simulated_gpu: str, name: str) -> None:
    make_model, make_inputs = MODELS[name]
    torch.manual_seed(0)
    model, inputs = make_model(), make_inputs()
    moved, moved_inputs = copy.deepcopy(model).to(simulated_gpu), [each.to(simulated_gpu) for each in inputs]
    output, expected = gradients(model, inputs)
    moved_output, found = gradients(moved, moved_inputs)
    assert moved_output.device.type == simulated_gpu
    assert len(found) == len(expected) > 0
    for one, other in zip([output, *expected], [moved_output, *found], strict=True):
        if name in FUSED_ON_GPUS:
            torch.testing.assert_close(other.cpu(), one)
        else:
            assert torch.equal(other.cpu(), one)


OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.AdamW, {"foreach": False}),
    (torch.optim.AdamW, {"foreach": True}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.AdamW, {"amsgrad": True}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (torch.optim.Adafactor, {}),
    (torch.optim.RMSprop, {}),
]


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS)
def test_optimizers_as_on_the_cpu(simulated_gpu: str, kind: type[torch.optim.Optimizer], options: dict) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
    inputs = floats()[0]
    results = []
    for device in ("cpu", simulated_gpu):
        trained = copy.deepcopy(model).to(device)
        optimizer = kind(trained.parameters(), **options)
        for _ in range(3):
            trained(inputs.to(device)).pow(2).mean().backward()
            torch.nn.utils.clip_grad_norm_(trained.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        results.append([parameter.detach().cpu() for parameter in trained.parameters()])
    assert all(map(torch.equal, *results))
    assert not any(map(torch.equal, model.parameters(), results[0]))


def test_a_module_that_moves_keeps_its_parameters(simulated_gpu: str) -> None:
    model = nn.Linear(2, 2)
    before = list(model.parameters())
    model.to(simulated_gpu)
    assert [id(each) for each in before] == [id(each) for each in model.parameters()]
    assert before[0].device.type == simulated_gpu
    model.to("cpu")
    assert before[0].device.type == "cpu"


# ---- autograd


def test_backward_runs_in_the_device_s_own_thread(simulated_gpu: str) -> None:
    threads: dict[str, int] = {}
    x = [torch.ones(3, device=f"simgpu:{index}", requires_grad=True) for index in range(2)]
    for index, each in enumerate(x):
        y = each * 2
        y.register_hook(lambda _, index=index: threads.__setitem__(f"backward {index}", threading.get_ident()))
        x[index] = y
    (x[0].sum() + x[1].sum().to("simgpu:0")).backward()
    assert len({threading.get_ident(), *threads.values()}) == 3


def test_backward_runs_on_the_stream_of_forward(simulated_gpu: str) -> None:
    side, seen = torch.simgpu.Stream(), []
    weight = torch.ones(3, device=simulated_gpu, requires_grad=True)
    side.wait_stream(torch.simgpu.current_stream())
    with side:
        y = weight * 2
        y.register_hook(lambda _: seen.append(torch.simgpu.current_stream()))
        loss = y.sum()
    torch.simgpu.current_stream().wait_stream(side)
    loss.backward()
    assert seen == [side]
    assert weight.grad.tolist() == [2.0] * 3


def test_gradients_of_two_streams_add_up(simulated_gpu: str) -> None:
    weight = torch.ones(1000, device=simulated_gpu, requires_grad=True)
    losses = []
    for factor in (2.0, 3.0):
        with torch.simgpu.Stream() as side:
            side.wait_stream(torch.simgpu.default_stream())
            losses.append((weight * factor).sum())
        torch.simgpu.current_stream().wait_stream(side)
    (losses[0] + losses[1]).backward()
    assert weight.grad.eq(5).all()


# ---- what depends on the device's name


def test_autocast(simulated_gpu: str) -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16)).to(simulated_gpu)
    with torch.autocast(simulated_gpu, dtype=torch.bfloat16):
        middle = model[0](floats()[0].to(simulated_gpu))
        normal = model[1](middle)
        out = model[2](normal)
        loss = functional.mse_loss(out, torch.zeros_like(out))
    assert [each.dtype for each in (middle, normal, out, loss)] == [
        torch.bfloat16,
        torch.float32,
        torch.bfloat16,
        torch.float32,
    ]
    loss.backward()
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model[0](floats()[0].to(simulated_gpu)).dtype == torch.float32


def test_gradient_scaler(simulated_gpu: str) -> None:
    weight = nn.Parameter(torch.ones(3, device=simulated_gpu))
    scaler = torch.amp.GradScaler(simulated_gpu, init_scale=4.0)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler.scale(weight.sum()).backward()
    assert weight.grad.tolist() == [4.0] * 3
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [0.0] * 3
    scaler.scale(weight.sum() * float("inf")).backward()
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [0.0] * 3
    assert scaler.get_scale() == 2.0


def test_random_numbers(simulated_gpu: str) -> None:
    torch.manual_seed(3)
    on_cpu = torch.randn(5)
    torch.manual_seed(3)
    first = torch.randn(5, device=simulated_gpu)
    assert torch.equal(first.cpu(), on_cpu)
    assert torch.equal(torch.randn(5), on_cpu)
    state = torch.simgpu.get_rng_state()
    dropped = functional.dropout(torch.ones(100, device=simulated_gpu))
    assert not torch.equal(functional.dropout(torch.ones(100, device=simulated_gpu)), dropped)
    torch.simgpu.set_rng_state(state)
    assert torch.equal(functional.dropout(torch.ones(100, device=simulated_gpu)), dropped)
    with torch.random.fork_rng(device_type=simulated_gpu):
        torch.randn(5, device=simulated_gpu)
    own = torch.Generator(device=simulated_gpu).manual_seed(3)
    assert torch.equal(torch.randn(5, device=simulated_gpu, generator=own), first)
    with pytest.raises(RuntimeError, match="generator"):
        torch.randn(5, device=simulated_gpu, generator=torch.Generator())


def test_saving_and_loading(simulated_gpu: str) -> None:
    file = io.BytesIO()
    torch.save({"weight": torch.arange(3.0, device="simgpu:1")}, file)
    for options, device in (({}, "simgpu:1"), ({"map_location": "cpu"}, "cpu"), ({"map_location": "simgpu:0"}, None)):
        file.seek(0)
        loaded = torch.load(file, **options)["weight"]
        assert str(loaded.device) == (device or "simgpu:0")
        assert loaded.tolist() == [0.0, 1.0, 2.0]


def test_compiled(simulated_gpu: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU()).to(simulated_gpu)
    inputs = torch.randn(2, 4, device=simulated_gpu)
    expected = model(inputs)
    assert torch.equal(torch.compile(model, backend="aot_eager", fullgraph=True)(inputs), expected)


def test_results_of_any_size(simulated_gpu: str) -> None:
    x = torch.tensor([3.0, 0.0, 1.0], device=simulated_gpu)
    assert x.nonzero().tolist() == [[0], [2]]
    out = torch.empty(0, device=simulated_gpu)
    torch.add(x, 1, out=out)
    assert out.tolist() == [4.0, 1.0, 2.0]
    assert x[torch.tensor([2, 0])].tolist() == [1.0, 3.0]
    assert [part.tolist() for part in x.sort()] == [[0.0, 1.0, 3.0], [1, 2, 0]]
    assert torch.arange(3, device=simulated_gpu).device == x.device
    assert torch.complex(x, x).conj().imag.tolist() == [-3.0, 0.0, -1.0]
    assert "simgpu:0" in repr(x)
    assert x.resize_(2, 2)[0].tolist() == [3.0, 0.0]
