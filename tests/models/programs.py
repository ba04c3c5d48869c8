"""What programs do with a model, each once: the columns of the matrix.

A program gets a :class:`Subject`, does the same with it whether it is paged or plain, and returns what it saw. Those of
:data:`LIFE` are run one after the other on one model, as a real job would (training after generation, and so on).
"""

from __future__ import annotations

import copy
import gc
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint

import deepoffload
from tests.models.zoo import Family, Stack
from tests.support.loops import gradients_of
from tests.support.trainers import arguments_of

LEARNING_RATE = 1e-2


@dataclass
class Subject:
    """A model under test and the optimizer that it has all its life.

    ``CPUAdamW`` takes ordinary parameters, too, and with the same numbers: so all of training is compared bit for bit.

    Attributes:
        folder: in ``directory``, where deepoffload saves the model. Ranks that train one save it together; each of
            those that have a plain one has its own. (transformers saves a plain one on rank 0 alone.)
    """

    family: Family
    model: Any
    directory: Path
    folder: str = "saved"
    optimizer: Any = field(init=False)

    def __post_init__(self) -> None:
        self.optimizer = self.new_optimizer()

    def new_optimizer(self) -> Any:
        return deepoffload.CPUAdamW(
            [p for p in self.model.parameters() if p.requires_grad], lr=LEARNING_RATE, weight_decay=0.1
        )

    @property
    def paged(self) -> bool:
        return any(type(p) is not nn.Parameter for p in self.model.parameters())


Program = Callable[[Subject], Any]


def values_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters and buffers by name; tied ones appear once."""
    found = {name: param.detach().clone() for name, param in model.named_parameters()}
    return found | {name: buffer.clone() for name, buffer in model.named_buffers()}


def initial(subject: Subject) -> Any:
    return values_of(subject.model)


def forward(subject: Subject) -> Any:
    subject.model.eval()
    with torch.no_grad():
        return subject.family.loss(subject.model, 1)


def train(subject: Subject, *, seed: int, steps: int = 1, accumulate: int = 1, clip: float | None = None) -> Any:
    """An ordinary loop. Returns losses, the last step's gradients and the weights after it."""
    model, seen = subject.model, []
    model.train()
    torch.manual_seed(seed)
    for step in range(steps):
        for micro in range(accumulate):
            loss = subject.family.loss(model, 100 * seed + 10 * step + micro) / accumulate
            loss.backward()
            seen.append(loss.detach())
        if clip is not None:
            seen.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip))
        gradients = gradients_of(model) if step == steps - 1 else {}
        subject.optimizer.step()
        subject.optimizer.zero_grad()
    return seen, gradients, values_of(model)


@contextmanager
def checkpoints(model: Any, use_reentrant: bool | None) -> Iterator[None]:
    """Activation checkpoints (None: without): transformers' own switch, or torch's function around every layer."""
    if use_reentrant is None:
        yield
    elif isinstance(model, Stack):
        model.use_reentrant = use_reentrant
        try:
            yield
        finally:
            model.use_reentrant = None
    else:
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        if use_reentrant:
            model.enable_input_require_grads()
        try:
            yield
        finally:
            if use_reentrant:
                model.disable_input_require_grads()
            model.gradient_checkpointing_disable()


def checkpointing(subject: Subject, *, use_reentrant: bool) -> Any:
    """A step with activation checkpoints."""
    with checkpoints(subject.model, use_reentrant):
        return train(subject, seed=4 + use_reentrant)


def autocast(subject: Subject) -> Any:
    """Gradients of fp32 weights that are used in bf16."""
    subject.model.train()
    torch.manual_seed(6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = subject.family.loss(subject.model, 600)
    loss.backward()
    gradients = gradients_of(subject.model)
    subject.optimizer.zero_grad()
    return loss.detach(), gradients


def asked_for(subject: Subject) -> Any:
    """Gradients that are returned instead of accumulated, and those of some parameters only."""
    params = [param for param in subject.model.parameters() if param.requires_grad]
    subject.model.train()
    torch.manual_seed(14)
    found = torch.autograd.grad(subject.family.loss(subject.model, 1400), params, allow_unused=True)
    returned = [None if grad is None else grad.detach().clone() for grad in found]
    subject.family.loss(subject.model, 1401).backward(inputs=params[::2])
    gradients = gradients_of(subject.model)
    subject.optimizer.zero_grad()
    return returned, gradients


def edits(subject: Subject) -> Any:
    """Activations that are edited in place after autograd may have saved them: gradients, or the words of the error."""

    def edit(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.is_floating_point():
            with torch.no_grad():
                output.mul_(2.0)

    found: list[Any] = []
    subject.model.train()
    leaves = [module for module in subject.model.modules() if not any(True for _ in module.children())]
    for leaf in (leaves[0], leaves[len(leaves) // 2], leaves[-1]):
        handle = leaf.register_forward_hook(edit)
        torch.manual_seed(15)
        try:
            subject.family.loss(subject.model, 1500).backward()
            found.append(gradients_of(subject.model))
        except RuntimeError as error:
            found.append(re.sub(r", which is output \d+ of [\w:]+,", "", str(error)))
        handle.remove()
        subject.optimizer.zero_grad()
    return found


def with_hooks(model: Any) -> Any:
    """The model with hooks on its parameters that write down what they see."""
    seen = model.seen_by_hooks = []
    for param in model.parameters():
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    return model


def hooks(subject: Subject) -> Any:
    """What hooks see of two gradients that add up."""
    subject.model.train()
    for seed in range(2):
        torch.manual_seed(seed)
        subject.family.loss(subject.model, seed).backward()
    return [list(subject.model.seen_by_hooks), gradients_of(subject.model)]


def distributed_checkpoint(subject: Subject) -> Any:
    """Saved in the background, changed, and loaded again."""
    directory = subject.directory / "distributed"
    checkpoint.async_save({"model": subject.model.state_dict()}, checkpoint_id=str(directory)).result()
    before = values_of(subject.model)
    with torch.no_grad():
        for param in subject.model.parameters():
            param.mul_(2.0)
    state = {"model": subject.model.state_dict()}
    checkpoint.load(state, checkpoint_id=str(directory))
    subject.model.load_state_dict(state["model"])
    remove(directory)
    return before, values_of(subject.model)


def meet() -> None:
    """Wait for the other ranks, where there are some: what they do to files is over."""
    if dist.is_initialized():
        dist.barrier()


def remove(directory: Path) -> None:
    """Remove what all ranks have read."""
    meet()
    shutil.rmtree(directory, ignore_errors=True)
    meet()


def generate(subject: Subject, *, num_beams: int) -> Any:
    subject.model.eval()
    prompt = subject.family.prompt(7)
    tokens = subject.model.generate(**prompt, max_new_tokens=6, do_sample=False, num_beams=num_beams)
    return tokens.clone()


def state_dict(subject: Subject) -> Any:
    """Copies of all values, which are then put back after the weights have been changed."""
    values = {name: value.clone() for name, value in subject.model.state_dict().items()}
    with torch.no_grad():
        for param in subject.model.parameters():
            param.mul_(2.0)
    missing = subject.model.load_state_dict(values)
    return values, list(missing.missing_keys), values_of(subject.model)


def deep_copy(subject: Subject) -> Any:
    """A copy has the same values and is not the same model."""
    other = copy.deepcopy(subject.model)
    with torch.no_grad():
        next(other.parameters()).add_(1.0)
    seen = values_of(other)
    del other
    return seen, values_of(subject.model)


def save(subject: Subject, *, by_library: bool) -> Any:
    """What ``from_pretrained`` makes of the saved model in plain PyTorch."""
    target = subject.directory / ("by library" if by_library else subject.folder)
    try:
        if by_library:
            subject.model.save_pretrained(target)
        else:
            deepoffload.save_pretrained(subject.model, target, max_shard_size="60KB")
    finally:
        meet()
    try:
        if subject.family.is_transformer:
            return values_of(type(subject.model).from_pretrained(target))
        from safetensors.torch import load_file

        loaded: dict[str, Tensor] = {}
        for path in sorted(target.glob("*.safetensors")):
            loaded |= load_file(path)
        return dict(sorted(loaded.items()))
    finally:
        remove(target)


def after_loading(subject: Subject) -> Any:
    return initial(subject), forward(subject), train(subject, seed=8, clip=0.5), forward(subject)


def first_gradients(subject: Subject) -> Any:
    """Before an update: after it, master weights differ that plain PyTorch does not have."""
    subject.model.train()
    torch.manual_seed(5)
    loss = subject.family.loss(subject.model, 501)
    loss.backward()
    return initial(subject), loss.detach(), gradients_of(subject.model)


def lora(subject: Subject, *, late: bool) -> Any:
    """Adapters put on a paged model, or paged with it, are trained and merged; the merged model goes on training."""
    if late:
        subject.model = add_lora(subject.family, subject.model)
        subject.optimizer = subject.new_optimizer()
    trained = train(subject, seed=9, steps=2, clip=0.5)
    subject.model = subject.model.merge_and_unload()
    merged = initial(subject), forward(subject)
    for param in subject.model.parameters():
        param.requires_grad_(True)
    subject.optimizer = subject.new_optimizer()
    return trained, merged, train(subject, seed=10)


MLPS: dict[str, str | None] = {
    "Llama": None,
    "Mixtral": "experts",
    "T5": "DenseReluDense",
    "BERT": "intermediate",
}
"""Families whose MLPs are computed in tiles, and what these are called where their class does not say so."""


def in_tiles(family: Family, model: Any) -> Any:
    """With MLPs in tiles, and the linear layers of all but the head, to which embeddings may be tied."""
    whole = model.get_base_model() if hasattr(model, "get_base_model") else model
    head = whole.get_output_embeddings()
    bodies = [child for child in whole.children() if not isinstance(child, nn.Linear) and head not in child.modules()]
    assert sum(len(deepoffload.tile_linear(body, 3000)) for body in bodies) > 0
    assert deepoffload.tile_mlp(model, 3, MLPS[family.name])
    return model


def add_lora(family: Family, model: Any) -> Any:
    import peft

    config = peft.LoraConfig(r=2, lora_dropout=0.1, target_modules=list(family.lora), init_lora_weights="gaussian")
    return peft.get_peft_model(model, config)


class Batches(torch.utils.data.Dataset[Any]):
    """Rows of a family's batches."""

    def __init__(self, family: Family) -> None:
        self.rows = [
            {key: value[row] for key, value in family.inputs(seed).items()} for seed in range(4) for row in range(2)
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


def trainer(subject: Subject, *, own_optimizer: bool, accumulate: int) -> Any:
    """The Trainer with its default clipping, and with its default optimizer or ours."""
    from transformers import Trainer

    arguments = arguments_of(
        subject.directory / "trainer",
        gradient_accumulation_steps=accumulate,
        max_steps=3,
        learning_rate=LEARNING_RATE,
    )
    optimizers = (subject.optimizer if own_optimizer else None, None)
    job = Trainer(subject.model, arguments, train_dataset=Batches(subject.family), optimizers=optimizers)
    job.train()
    logged = [(entry["loss"], entry["grad_norm"]) for entry in job.state.log_history if "loss" in entry]
    assert len(logged) == 3
    return logged, values_of(subject.model)


def kept_after_forward(subject: Subject, use_reentrant: bool | None = None) -> Any:
    """Bytes that a forward with a graph has left allocated next to the weights, and all that it holds of these."""
    subject.model.train()
    torch.manual_seed(11)
    gc.collect()  # not while we count
    activities = [torch.profiler.ProfilerActivity.CPU]
    with checkpoints(subject.model, use_reentrant):
        with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
            loss = subject.family.loss(subject.model, 1100)
    events = profile.profiler.kineto_results.events()
    kept = sum(event.nbytes() for event in events if event.name() == "[memory]")
    numbers = deepoffload.stats(subject.model) if subject.paged else {}
    del loss
    return Kept(kept, int(numbers.get("host_weight_bytes", 0)), sum(p.nbytes for p in subject.model.parameters()))


@dataclass(frozen=True)
class Kept:
    activation_bytes: int
    resident_weight_bytes: int
    model_bytes: int
