"""Models on a device from their making to their end: how they come there, what is done to them, errors, close()."""

from __future__ import annotations

import gc
import signal
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepoffload
from deepoffload.errors import BudgetError, ClosedError, PlacementError, UnsupportedError
from deepoffload.runtime.context import engine_of
from tests.support.gpu import Gpu, memory_of, on_cpu
from tests.support.loops import assert_same_bits, gradients_of, weights_of
from tests.support.models import mlp


class Net(nn.Module):
    """With a buffer, and a weight used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp(64, 4)
        self.tied = nn.Linear(64, 64)
        self.tied.weight = self.layers[0].weight
        self.register_buffer("scale", torch.full((64,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.tied(self.layers(x)) * self.scale


TIGHT = 64 << 10


def rows(gpu: Gpu, seed: int = 0) -> Tensor:
    return gpu.put(torch.randn(3, 64, generator=torch.Generator().manual_seed(seed)))


def adamw(model: nn.Module) -> Any:
    return deepoffload.CPUAdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def train(gpu: Gpu, model: nn.Module, optimizer: Any, steps: int = 2) -> Any:
    for seed in range(steps):
        model(rows(gpu, seed)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return on_cpu(weights_of(model))


def expected(gpu: Gpu, build: Any = Net, steps: int = 2) -> Any:
    plain = gpu.plain(build)
    return train(gpu, plain, adamw(plain), steps)


# -- how they come there


def test_built_on_the_cpu_and_under_the_device(gpu: Gpu) -> None:
    for built_on in ("cpu", gpu.device):
        with gpu.context(TIGHT), torch.device(built_on):
            model = Net()
        assert {p.device.type for p in (*model.parameters(), *model.buffers())} == {torch.device(gpu.device).type}
        if built_on == "cpu":
            torch.manual_seed(0)
        plain = gpu.plain(Net)
        model.load_state_dict(plain.state_dict())
        assert_same_bits(train(gpu, plain, adamw(plain)), train(gpu, model, adamw(model)))
        del model, plain


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.arange(64) / 64.0, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x.float() * self.frequencies).to(x.dtype)


def test_buffers_come_along_and_those_of_another_type_stay(gpu: Gpu) -> None:
    def build() -> nn.Sequential:
        return nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), Table(), nn.Linear(64, 64))

    def run(model: nn.Sequential) -> Any:
        loss = model(rows(gpu, 3).bfloat16()).float().square().mean()
        loss.backward()
        gradients = [param.grad for param in model.parameters()]
        return on_cpu([loss, gradients, dict(model.named_buffers())])

    model, plain = gpu.paged(build, 64 << 10, precision="bf16"), gpu.plain(build)
    table = plain[2].frequencies
    plain.bfloat16()
    plain[2].frequencies = table
    plain.load_state_dict(model.state_dict())
    assert_same_bits(run(plain), run(model))
    for one in (plain, model):
        one.zero_grad()
        one.append(nn.BatchNorm1d(64).bfloat16())
    plain.to(gpu.device)  # where a paged model's late layers come by themselves
    assert_same_bits(run(plain), run(model))
    assert {buffer.device.type for buffer in model.buffers()} == {torch.device(gpu.device).type}


@pytest.mark.parametrize("on_device", [False, True])
def test_built_on_meta_and_materialised(gpu: Gpu, on_device: bool) -> None:
    with gpu.context(TIGHT):
        with torch.device("meta"):
            model = mlp(64, 4)
        model.to_empty(device=gpu.device if on_device else "cpu")
    plain = gpu.plain(lambda: mlp(64, 4))
    model.load_state_dict(plain.state_dict())
    assert_same_bits(train(gpu, plain, adamw(plain)), train(gpu, model, adamw(model)))


@pytest.mark.parametrize("built_on_device", [False, True])
def test_initialize(gpu: Gpu, built_on_device: bool) -> None:
    torch.manual_seed(0)
    model = Net().to(gpu.device) if built_on_device else Net()
    params = list(model.parameters())
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 1e-2}}
    config = {
        "device": gpu.device,
        "device_budget": TIGHT,
        "host_budget": 4 << 20,
        "nvme_path": str(gpu.nvme_path),
        "optimizer": optimizer,
        "gradient_clipping": 0.0,
        "train_micro_batch_size_per_gpu": 3,
    }
    engine, _, _, _ = deepoffload.initialize(model=model, config=config)
    assert engine.device == params[0].device
    for seed in range(2):
        engine.backward(engine(rows(gpu, seed)).square().mean())
        engine.step()
    assert all(one is other for one, other in zip(params, model.parameters(), strict=True))
    assert_same_bits(expected(gpu), on_cpu(weights_of(model)))


def test_the_second_device(gpu: Gpu) -> None:
    if gpu.module.device_count() < 2:
        pytest.skip("there is one device")
    kind = torch.device(gpu.device).type
    with gpu.context(TIGHT, device=f"{kind}:1"):
        torch.manual_seed(0)
        model = Net()
    assert gpu.module.current_device() == 0
    other = Gpu(f"{kind}:1", gpu.nvme_path)
    assert_same_bits(expected(other), train(other, model, adamw(model)))
    assert memory_of(model).device.index == 1


def test_two_engines_on_one_device(gpu: Gpu) -> None:
    """One model feeds the other, and one optimizer trains both."""

    def both(first: nn.Module, second: nn.Module) -> Any:
        optimizer = deepoffload.CPUAdamW([*first.parameters(), *second.parameters()], lr=1e-2, max_grad_norm=0.1)
        for seed in range(3):
            second(first(rows(gpu, seed))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return on_cpu([weights_of(first), weights_of(second)])

    plain = both(gpu.plain(Net), gpu.plain(Net))
    assert_same_bits(plain, both(gpu.paged(Net, TIGHT), gpu.paged(Net, 2 * TIGHT)))


# -- what is done to them


def edit_weights(model: nn.Module, optimizer: Any) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1.5)
            param.data.clamp_(-0.1, 0.1)


def assign_data(model: nn.Module, optimizer: Any) -> None:
    for param in model.parameters():
        param.data = param.data * 0.5


def edit_gradients(model: nn.Module, optimizer: Any) -> None:
    for param in model.parameters():
        if param.grad is not None:
            param.grad.mul_(0.5)
            param.grad = param.grad + 1.0
            param.grad.view(-1)[0] = 3.0


def assign_gradients(model: nn.Module, optimizer: Any) -> None:
    for param in model.parameters():
        param.grad = torch.ones_like(param)


def keep_views(model: nn.Module, optimizer: Any) -> None:
    model.kept = [param.detach().view(-1)[:3] for param in list(model.parameters())[:2]]


def through_the_optimizers_state(model: nn.Module, optimizer: Any) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


def freeze(model: nn.Module, optimizer: Any) -> None:
    first = next(model.parameters())
    first.requires_grad_(not first.requires_grad)


def infer(model: nn.Module, optimizer: Any) -> None:
    with torch.inference_mode():
        model(torch.ones(1, 64, device=next(model.parameters()).device))


EDITS = (
    edit_weights,
    assign_data,
    edit_gradients,
    assign_gradients,
    keep_views,
    through_the_optimizers_state,
    freeze,
    infer,
)


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("edit", EDITS)
def test_edits(gpu: Gpu, edit: Any, clip: float | None) -> None:
    """Between backward and step, and after the step."""
    seen = []
    for model in (gpu.plain(Net), gpu.paged(Net, 2 * TIGHT, host_budget=512 << 10)):
        optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-2, max_grad_norm=clip)
        for seed in range(3):
            model(rows(gpu, seed)).square().mean().backward()
            if seed != 1:
                edit(model, optimizer)
            optimizer.step()
            if seed != 0:
                edit(model, optimizer)
            optimizer.zero_grad()
        seen.append([on_cpu(weights_of(model)), on_cpu(getattr(model, "kept", []))])
    assert_same_bits(*seen)


def test_inference_comes_first(gpu: Gpu) -> None:
    """What is allocated under inference mode is used in training."""
    model = gpu.paged(Net, TIGHT)
    infer(model, None)
    assert_same_bits(expected(gpu), train(gpu, model, adamw(model)))


def test_graphs_that_live_on(gpu: Gpu) -> None:
    """Two backwards of one graph, and two graphs at once."""
    seen = []
    for model in (gpu.plain(Net), gpu.paged(Net, TIGHT)):
        one, two = (model(rows(gpu, seed)).square().mean() for seed in range(2))
        one.backward(retain_graph=True)
        two.backward()
        one.backward()
        seen.append(on_cpu(gradients_of(model)))
    assert_same_bits(*seen)


def test_grad_scaler(gpu: Gpu) -> None:
    seen = []
    for model in (gpu.plain(Net), gpu.paged(Net, 2 * TIGHT)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        scaler = torch.amp.GradScaler(torch.device(gpu.device).type, init_scale=1024.0)
        for seed in range(2):
            scaler.scale(model(rows(gpu, seed)).square().mean()).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        seen.append(on_cpu(weights_of(model)))
    assert_same_bits(*seen)


def test_layers_that_come_later(gpu: Gpu) -> None:
    """Made on the device after the context has ended: paged at the next call, in an optimizer before that."""
    seen = []
    for model in (gpu.plain(Net), gpu.paged(Net, 2 * TIGHT)):
        torch.manual_seed(2)
        model.layers.append(nn.Linear(64, 64, device=gpu.device))
        seen.append(train(gpu, model, adamw(model), 3))
    assert_same_bits(*seen)


def test_saved_and_loaded(gpu: Gpu, tmp_path: Any) -> None:
    model = gpu.paged(Net, TIGHT)
    values = train(gpu, model, adamw(model))
    deepoffload.save_pretrained(model, tmp_path / "ours")
    torch.save(model.state_dict(), tmp_path / "torch.pt")
    from safetensors.torch import load_file

    ours = load_file(tmp_path / "ours" / "model.safetensors")
    for name, value in values.items():
        assert_same_bits(value, ours[name])
    other = gpu.paged(Net, TIGHT)
    other.load_state_dict(torch.load(tmp_path / "torch.pt"))
    assert_same_bits(values, on_cpu(weights_of(other)))


# -- errors, and the end


class Boom(Exception):
    pass


def test_exceptions_in_forward_and_backward(gpu: Gpu) -> None:
    model = gpu.paged(Net, TIGHT)
    optimizer = adamw(model)

    def boom(*_: Any) -> None:
        raise Boom

    hook = model.layers[2].register_forward_hook(boom)
    with pytest.raises(Boom):
        model(rows(gpu))
    hook.remove()
    result = model(rows(gpu))
    hidden = model.layers(rows(gpu))
    hidden.register_hook(boom)
    with pytest.raises(Boom):
        (model.tied(hidden) * model.scale).square().mean().backward()
    del result, hidden
    optimizer.zero_grad()
    assert_same_bits(expected(gpu), train(gpu, model, optimizer))


def test_ctrl_c(gpu: Gpu) -> None:
    model = gpu.paged(Net, TIGHT)
    optimizer = adamw(model)

    def interrupt(*_: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    for layer in (model.layers[0], model.layers[4]):
        hook = layer.register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(rows(gpu)).sum().backward()
        hook.remove()
    optimizer.zero_grad()
    assert_same_bits(expected(gpu), train(gpu, model, optimizer))


def test_the_device_runs_out_of_memory(gpu: Gpu) -> None:
    """The program's own allocation fails in the middle of a forward; the next one goes on."""
    model = gpu.paged(Net, TIGHT)
    optimizer = adamw(model)
    total = gpu.module.mem_get_info()[1]

    def take_all(*_: Any) -> None:
        torch.empty(2 * total, dtype=torch.uint8, device=gpu.device)

    hook = model.layers[3].register_forward_hook(take_all)
    with pytest.raises(torch.OutOfMemoryError):
        model(rows(gpu))
    hook.remove()
    assert_same_bits(expected(gpu), train(gpu, model, optimizer))


def test_closed_with_views_held(gpu: Gpu) -> None:
    model = gpu.paged(Net, TIGHT)
    train(gpu, model, adamw(model))
    view = model.tied.weight.detach()
    values = on_cpu(view)
    model(rows(gpu)).sum().backward()
    engine_of(model).close()
    assert_same_bits(values, on_cpu(view))
    with pytest.raises(ClosedError):
        model(rows(gpu))


def test_made_and_closed_again_and_again(gpu: Gpu) -> None:
    def once(close: bool) -> None:
        model = gpu.paged(Net, TIGHT)
        model(rows(gpu)).sum().backward()
        if close:
            engine_of(model).close()

    once(True)
    gc.collect()
    before = gpu.module.memory_allocated()
    for number in range(20):
        once(number % 2 == 0)
    gc.collect()
    gpu.module.synchronize()
    assert gpu.module.memory_allocated() <= before


def test_views_that_leave_no_room(gpu: Gpu) -> None:
    model = gpu.paged(Net, TIGHT)
    with pytest.raises(BudgetError, match="device_budget"):
        held = [param.detach() for param in model.parameters() if param.dim() == 2]
        assert held
    assert_same_bits(expected(gpu), train(gpu, model, adamw(model)))


def test_the_host_budget_that_is_named_is_enough(gpu: Gpu) -> None:
    with pytest.raises(PlacementError, match="to at least [0-9]+ bytes") as refused:
        gpu.paged(lambda: mlp(128, 4), host_budget=400 << 10)
    assert refused.value.enough_bytes is not None
    gpu.paged(lambda: mlp(128, 4), host_budget=refused.value.enough_bytes)


def test_moved_to_its_device_while_it_is_built(gpu: Gpu) -> None:
    with gpu.context():
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).to(gpu.device)
        halved = nn.Linear(8, 8).to(gpu.device, torch.bfloat16)
    kinds = {value.device.type for value in (*model.parameters(), *model.buffers(), *halved.parameters())}
    assert kinds == {torch.device(gpu.device).type} and halved.weight.dtype is torch.bfloat16
    model(gpu.put(torch.ones(4, 8))).sum().backward()
    with pytest.raises(UnsupportedError, match="a paged model stays on its device"):
        model.cpu()


def test_a_layer_that_comes_late_and_is_larger_than_the_model(gpu: Gpu) -> None:
    model = gpu.paged(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    model[1] = gpu.put(nn.Linear(8, 4096))
    assert model(gpu.put(torch.ones(4, 8))).shape == (4, 4096)
