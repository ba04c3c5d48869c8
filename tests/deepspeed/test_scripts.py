"""Scripts as people write them for DeepSpeed, with one changed import: they run, with the losses of plain PyTorch.

They are small ones of our own, with the calls of DeepSpeedExamples' cifar10, HelloDeepSpeed, GAN and RLHF programs.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import deepoffload
import deepoffload.deepspeed as deepspeed
from deepoffload.deepspeed.accelerator import get_accelerator
from tests.support.loops import assert_same_bits, weights_of
from tests.support.models import TinyGPT, batch, next_token_loss

STEPS = 4
CONSOLIDATED = "_zero3_consolidated_16bit_state_dict"
"""A method that other libraries call, for all its underscore."""


def config_of(nvme_path: Path, **changes: Any) -> dict[str, Any]:
    place = {"device": "nvme", "nvme_path": str(nvme_path)}
    return {
        "train_micro_batch_size_per_gpu": 4,
        "steps_per_print": 2000,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": place},
        "host_budget": "2MiB",
        **changes,
    }


# -- cifar10 ---------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x.view(-1, 16 * 5 * 5))))))


def images(count: int = 16) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    labels = torch.randint(0, 10, (count,), generator=generator)
    return TensorDataset(torch.randn(count, 3, 32, 32, generator=generator), labels)


def cifar10(arguments: list[str], ds_config: dict[str, Any]) -> tuple[list[Tensor], float]:
    """The training and the test of DeepSpeedExamples' cifar10_deepspeed.py."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--moe", default=False, action="store_true")
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args(arguments)
    deepspeed.init_distributed()
    _local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    get_accelerator().set_device(_local_rank)
    trainset = images()
    if torch.distributed.get_rank() == 0:
        torch.distributed.barrier()
    torch.manual_seed(0)
    net = Net()
    parameters = filter(lambda p: p.requires_grad, net.parameters())
    model_engine, optimizer, trainloader, __ = deepspeed.initialize(
        args=args, model=net, model_parameters=parameters, training_data=trainset, config=ds_config
    )
    local_device = get_accelerator().device_name(model_engine.local_rank)
    local_rank = model_engine.local_rank
    target_dtype = None
    if model_engine.bfloat16_enabled():
        target_dtype = torch.bfloat16
    elif model_engine.fp16_enabled():
        target_dtype = torch.half
    criterion = nn.CrossEntropyLoss()
    losses = []
    for _ in range(2):
        for data in trainloader:
            inputs, labels = data[0].to(local_device), data[1].to(local_device)
            if target_dtype is not None:
                inputs = inputs.to(target_dtype)
            loss = criterion(model_engine(inputs), labels)
            model_engine.backward(loss)
            model_engine.step()
            losses.append(loss.detach().clone())
            if local_rank == 0:
                assert loss.item() > 0
    correct = 0
    model_engine.eval()
    with torch.no_grad():
        for inputs, labels in DataLoader(trainset, batch_size=4):
            _, predicted = torch.max(model_engine(inputs.to(target_dtype or torch.float32)).data, 1)
            correct += int((predicted == labels).sum())
    model_engine.destroy()
    return losses, correct / len(trainset)


def test_cifar10(nvme_path):
    config = config_of(nvme_path, optimizer={"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9}})
    torch.manual_seed(3)
    losses, accuracy = cifar10(["--deepspeed"], config)
    torch.manual_seed(3)
    images()
    torch.manual_seed(0)
    net = Net()
    optimizer = deepoffload.CPUSGD(net.parameters(), lr=0.01, momentum=0.9, max_grad_norm=1.0)
    loader = DataLoader(images(), batch_size=4, shuffle=True)
    expected = []
    for _ in range(2):
        for inputs, labels in loader:
            loss = F.cross_entropy(net(inputs), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            expected.append(loss.detach())
    assert_same_bits(expected, losses)
    with torch.no_grad():
        predicted = net(images().tensors[0]).argmax(1)
    assert accuracy == float((predicted == images().tensors[1]).float().mean())


@pytest.mark.parametrize("section", ["bf16", "fp16"])
def test_cifar10_in_16_bits(nvme_path, section, tmp_path):
    config = config_of(nvme_path, optimizer={"type": "Adam", "params": {"lr": 1e-3}}, **{section: {"enabled": True}})
    (tmp_path / "ds_config.json").write_text(json.dumps(config))
    losses, _ = cifar10(["--deepspeed", "--deepspeed_config", str(tmp_path / "ds_config.json")], None)  # type: ignore[arg-type]
    assert len(losses) == 8 and sum(losses[4:]) < sum(losses[:4])


# -- HelloDeepSpeed --------------------------------------------------------------------------------------------------


def hello_deepspeed(folder: Path, ds_config: dict[str, Any], stop_after: int | None) -> list[Tensor]:
    """train_bert_ds.py: an iterator over batches, logging by rank, checkpoints with a client state, and a restart."""
    from deepoffload.deepspeed.utils import RepeatingLoader, logger

    def log(message: str) -> None:
        deepspeed.log_dist(message, ranks=[0], level=20)

    torch.manual_seed(0)
    model = TinyGPT(dropout=0.0)
    log("Model created")
    model_engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=ds_config)
    assert isinstance(model_engine, deepspeed.DeepSpeedEngine)
    start = 1
    checkpoint, client_state = model_engine.load_checkpoint(load_dir=folder)
    if checkpoint is not None:
        start = client_state["checkpoint_step"] + 1
        logger.info("continue at %d", start)
    model_engine.train()
    data = RepeatingLoader([batch(seed) for seed in range(3)])
    for _ in range(start - 1):
        next(data)
    losses = []
    for step in range(start, 2 * STEPS + 1):
        loss = next_token_loss(model_engine, next(data))
        model_engine.backward(loss)
        model_engine.step()
        losses.append(loss.detach().clone())
        log(f"Loss: {sum(losses) / len(losses):.4f}")
        if step == stop_after:
            model_engine.save_checkpoint(save_dir=folder, client_state={"checkpoint_step": step})
            log(f"Saved model to {folder}")
            break
    model_engine.destroy()
    return losses


def test_hello_deepspeed(nvme_path, tmp_path):
    config = config_of(
        nvme_path,
        train_micro_batch_size_per_gpu=2,
        gradient_accumulation_steps=2,
        optimizer={"type": "AdamW", "params": {"lr": 1e-3}},
    )
    losses = hello_deepspeed(tmp_path / "run", config, stop_after=STEPS)
    losses += hello_deepspeed(tmp_path / "run", config, stop_after=None)
    torch.manual_seed(0)
    model = TinyGPT(dropout=0.0)
    optimizer = deepoffload.CPUAdamW(model.parameters(), lr=1e-3, weight_decay=0.0, max_grad_norm=1.0)
    assert_same_bits(plain_losses(model, optimizer, [micro % 3 for micro in range(2 * STEPS)]), losses)


def plain_losses(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[int],
    rate_of: Callable[[int], float] | None = None,
) -> list[Tensor]:
    """The loop without an engine: an update every second batch, at the rate that ``rate_of`` gives."""
    losses = []
    for micro, number in enumerate(batches):
        loss = next_token_loss(model, batch(number))
        (loss / 2).backward()
        losses.append(loss.detach())
        if micro % 2:
            for group in optimizer.param_groups if rate_of is not None else ():
                group["lr"] = rate_of(micro // 2)
            optimizer.step()
            optimizer.zero_grad()
    return losses


# -- bing_bert -------------------------------------------------------------------------------------------------------


def grouped(model: nn.Module) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    no_decay = ("bias", "ln1.weight", "ln2.weight", "norm.weight")
    return [
        {"params": [p for n, p in named if not any(part in n for part in no_decay)], "weight_decay": 0.01},
        {"params": [p for n, p in named if any(part in n for part in no_decay)], "weight_decay": 0.0},
    ]


def rate(step: int) -> float:
    return 1e-3 / (1 + step)


def bing_bert(folder: Path, ds_config: dict[str, Any], steps: range, load: str | None) -> list[Tensor]:
    """deepspeed_train.py: groups, rates set by hand at each boundary, checkpoints with tags of the script's own."""
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    network = TinyGPT(dropout=0.0)
    network, optimizer, _, _ = deepspeed.initialize(
        args=argparse.Namespace(local_rank=0), model=network, model_parameters=grouped(network), config=ds_config
    )
    assert network.train_micro_batch_size_per_gpu() == 2 and network.gradient_accumulation_steps() == 2
    assert network.optimizer_name() != deepspeed.runtime.config.LAMB_OPTIMIZER
    assert network.optimizer_name() != deepspeed.runtime.config.ONEBIT_LAMB_OPTIMIZER
    global_step = 0
    if load is not None:
        _, state = network.load_checkpoint(folder, load)
        global_step = state["last_global_step"]
    network.train()
    losses = []
    for index in steps:
        loss = next_token_loss(network, batch(index).to(network.device))
        losses.append(loss.detach().clone())
        network.backward(loss)
        if network.is_gradient_accumulation_boundary():
            for param_group in optimizer.param_groups:
                param_group["lr"] = rate(global_step)
            network.step()
            global_step += 1
        else:
            network.step()
    assert network.save_checkpoint(folder, f"epoch1_step{global_step}", {"last_global_step": global_step})
    network.destroy()
    return losses


def test_bing_bert(nvme_path, tmp_path):
    config = config_of(
        nvme_path,
        train_micro_batch_size_per_gpu=2,
        gradient_accumulation_steps=2,
        optimizer={"type": "Adam", "params": {"lr": 1e-3, "bias_correction": False}},
    )
    losses = bing_bert(tmp_path, config, range(STEPS), None)
    losses += bing_bert(tmp_path, config, range(STEPS, 2 * STEPS), "epoch1_step2")
    torch.manual_seed(0)
    model = TinyGPT(dropout=0.0)
    optimizer = deepoffload.CPUAdam(grouped(model), lr=1e-3, bias_correction=False)
    optimizer.max_grad_norm = 1.0
    assert_same_bits(plain_losses(model, optimizer, range(2 * STEPS), rate), losses)


# -- a GAN -----------------------------------------------------------------------------------------------------------

NOISE = 16


def generator_net() -> nn.Module:
    return nn.Sequential(nn.Linear(NOISE, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 32), nn.Tanh())


def discriminator_net() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1), nn.Sigmoid())


def noise(step: int) -> Tensor:
    return torch.randn(8, NOISE, generator=torch.Generator().manual_seed(step))


def real(step: int) -> Tensor:
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(1000 + step)).tanh()


def gan(nvme_path: Path) -> list[Tensor]:
    """gan_deepspeed_train.py: two engines, whose graphs meet; each optimizer is the script's own. The script calls the
    models, not the engines."""
    torch.manual_seed(1)
    net_g, net_d = generator_net(), discriminator_net()
    optimizer_d = torch.optim.Adam(net_d.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizer_g = torch.optim.Adam(net_g.parameters(), lr=2e-3, betas=(0.5, 0.999))
    config = config_of(nvme_path, train_micro_batch_size_per_gpu=8, zero_allow_untested_optimizer=True)
    engine_d, optimizer_d, _, _ = deepspeed.initialize(
        model=net_d, model_parameters=net_d.parameters(), optimizer=optimizer_d, config=config
    )
    engine_g, optimizer_g, _, _ = deepspeed.initialize(
        model=net_g, model_parameters=net_g.parameters(), optimizer=optimizer_g, config=config
    )
    criterion = nn.BCELoss()
    losses = []
    for step in range(STEPS):
        net_d.zero_grad()
        loss_real = criterion(net_d(real(step)).view(-1), torch.ones(8))
        engine_d.backward(loss_real)
        fake = net_g(noise(step))
        loss_fake = criterion(net_d(fake.detach()).view(-1), torch.zeros(8))
        engine_d.backward(loss_fake)
        engine_d.step()
        net_g.zero_grad()
        loss_g = criterion(net_d(fake).view(-1), torch.ones(8))
        engine_g.backward(loss_g)
        engine_g.step()
        losses += [loss_real.detach(), loss_fake.detach(), loss_g.detach()]
    engine_d.destroy()
    engine_g.destroy()
    return losses


def plain_gan() -> list[Tensor]:
    torch.manual_seed(1)
    net_g, net_d = generator_net(), discriminator_net()
    optimizer_d = torch.optim.Adam(net_d.parameters(), lr=2e-3, betas=(0.5, 0.999))
    optimizer_g = torch.optim.Adam(net_g.parameters(), lr=2e-3, betas=(0.5, 0.999))
    losses = []
    for step in range(STEPS):
        net_d.zero_grad()
        loss_real = F.binary_cross_entropy(net_d(real(step)).view(-1), torch.ones(8))
        loss_real.backward()
        fake = net_g(noise(step))
        loss_fake = F.binary_cross_entropy(net_d(fake.detach()).view(-1), torch.zeros(8))
        loss_fake.backward()
        nn.utils.clip_grad_norm_(net_d.parameters(), 1.0)
        optimizer_d.step()
        net_g.zero_grad()
        loss_g = F.binary_cross_entropy(net_d(fake).view(-1), torch.ones(8))
        loss_g.backward()
        nn.utils.clip_grad_norm_(net_g.parameters(), 1.0)
        optimizer_g.step()
        losses += [loss_real.detach(), loss_fake.detach(), loss_g.detach()]
    return losses


def test_a_gan_with_two_engines(nvme_path):
    assert_same_bits(plain_gan(), gan(nvme_path))


# -- a GPT as Megatron's scripts train it ----------------------------------------------------------------------------


class CheckpointedGPT(nn.Module):
    """A GPT whose blocks are behind ``deepspeed.checkpointing``, with a named random state in them."""

    def __init__(self, checkpoint: Any) -> None:
        super().__init__()
        self.inner = TinyGPT(depth=3, dropout=0.0)
        self.checkpoint = checkpoint

    def block(self, number: int, x: Tensor) -> Tensor:
        y = self.inner.blocks[number](x)
        with deepspeed.checkpointing.get_cuda_rng_tracker().fork():
            return F.dropout(y, 0.2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.inner.embedding(tokens) + self.inner.position[: tokens.shape[1]]
        for number in range(len(self.inner.blocks)):
            x = self.checkpoint(self.block, number, x)
        return self.inner.head(self.inner.norm(x))


def test_a_gpt_with_activation_checkpoints(nvme_path):
    def call(function: Any, *args: Any) -> Any:
        return function(*args)

    settings = {"lr": 1e-3, "weight_decay": 0.1}
    deepspeed.checkpointing.model_parallel_cuda_manual_seed(11)
    torch.manual_seed(0)
    reference = CheckpointedGPT(call)
    optimizer = deepoffload.CPUAdamW(reference.parameters(), **settings)
    optimizer.max_grad_norm = 1.0
    expected = []
    for step in range(STEPS):
        loss = next_token_loss(reference, batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.detach())

    config = config_of(nvme_path, activation_checkpointing={"partition_activations": True, "cpu_checkpointing": True})
    deepspeed.checkpointing.configure(mpu_=None, deepspeed_config=config)
    assert deepspeed.checkpointing.is_configured()
    deepspeed.checkpointing.model_parallel_cuda_manual_seed(11)
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=config, remote_device="nvme", enabled=True):
        model = CheckpointedGPT(deepspeed.checkpointing.checkpoint)
    matrices = {"params": [p for p in model.parameters() if p.dim() > 1]}
    vectors = {"params": [p for p in model.parameters() if p.dim() < 2]}
    made = deepspeed.ops.adam.DeepSpeedCPUAdam([matrices, vectors], **settings, adamw_mode=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=made, config=config)
    losses = []
    for step in range(STEPS):
        loss = next_token_loss(engine, batch(step))
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
        assert engine.get_global_grad_norm() > 0 and engine.was_step_applied()
    assert_same_bits(expected, losses)
    assert_same_bits(weights_of(reference), weights_of(model))
    state = getattr(engine, CONSOLIDATED)()
    assert_same_bits(dict(reference.state_dict()), {name: value.clone() for name, value in state.items()})
    engine.destroy()


class MegatronSchedule:
    """No scheduler of torch's: it counts samples, and its step needs an argument."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.samples = optimizer, 0

    def step(self, increment: int) -> None:
        self.samples += increment
        for group in self.optimizer.param_groups:
            group["lr"] = 1e-3 / (1 + self.samples)

    def state_dict(self) -> dict[str, int]:
        return {"samples": self.samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.samples = state["samples"]
        self.step(0)


def megatron(folder: Path, config: dict[str, Any] | None, steps: range) -> list[Tensor]:
    """training.py without pipeline: an mpu in any case, a boundary that the program sets, and a state_dict for the time
    of a save that gives a mapping for each part. Without a configuration: the loop in plain PyTorch."""
    one = SimpleNamespace(get_model_parallel_world_size=lambda: 1, get_data_parallel_group=lambda: None)
    torch.manual_seed(0)
    with deepspeed.zero.Init(mpu=one, config_dict_or_path=config, enabled=config is not None):
        model = nn.ModuleDict({"language_model": TinyGPT(dropout=0.0)})
    optimizer = deepspeed.ops.adam.DeepSpeedCPUAdam(model.parameters(), lr=1e-3)
    schedule = MegatronSchedule(optimizer)
    losses, engine = [], None
    if config is None:
        optimizer.max_grad_norm = 1.0
    else:
        engine, optimizer, _, schedule = deepspeed.initialize(
            model=model, optimizer=optimizer, lr_scheduler=schedule, mpu=one, config=config
        )
        engine.load_checkpoint(folder)
    for step in steps:
        for micro in range(2):
            loss = next_token_loss(model["language_model"], batch(2 * step + micro))
            losses.append(loss.detach().clone())
            if engine is None:
                (loss / 2).backward()
            else:
                engine.set_gradient_accumulation_boundary(micro == 1)
                engine.backward(loss)
        if engine is None:
            optimizer.step()
            optimizer.zero_grad()
            schedule.step(4)
        else:
            engine.step(lr_kwargs={"increment": 4})
            assert engine.was_step_applied() and engine.get_global_grad_norm() > 0
    if engine is not None:
        own = model.state_dict
        model.state_dict = lambda **more: {name: part.state_dict(**more) for name, part in model.items()}
        engine.save_checkpoint(folder)
        model.state_dict = own
        engine.destroy()
    return losses


def test_a_gpt_with_the_calls_of_megatron(nvme_path, tmp_path):
    config = config_of(nvme_path, train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=2)
    found = megatron(tmp_path, config, range(STEPS // 2)) + megatron(tmp_path, config, range(STEPS // 2, STEPS))
    assert_same_bits(megatron(tmp_path, None, range(STEPS)), found)


# -- what programs for RLHF do between two models --------------------------------------------------------------------


def test_a_moving_average_of_weights(nvme_path):
    """DeepSpeed-Chat's EMA: parameters of two models gathered, one of them edited."""
    torch.manual_seed(0)
    config = config_of(nvme_path, optimizer={"type": "AdamW", "params": {"lr": 1e-2}})
    with deepspeed.zero.Init(config_dict_or_path=config):
        actor = TinyGPT(dropout=0.0)
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=config):
        ema = TinyGPT(dropout=0.0)
    engine, *_ = deepspeed.initialize(model=actor, config=config)
    average = weights_of(actor)
    engine_ema, *_ = deepspeed.initialize(model=ema, config={key: config[key] for key in config if key != "optimizer"})
    for step in range(2):
        engine.backward(next_token_loss(engine, batch(step)))
        engine.step()
        engine.offload_states()
        engine.reload_states()
        engine.empty_partition_cache()
        with torch.no_grad():
            for param, param_ema in zip(engine.module.parameters(), ema.parameters(), strict=True):
                assert param.ds_status == deepspeed.zero.ZeroParamStatus.NOT_AVAILABLE
                with deepspeed.zero.GatheredParameters([param, param_ema]):
                    param_ema.data.copy_(torch.lerp(param.data, param_ema.data, 0.9))
            for name, value in weights_of(actor).items():
                average[name] = torch.lerp(value, average[name], 0.9)
    assert_same_bits(average, weights_of(ema))
    engine.destroy()
    engine_ema.destroy()
