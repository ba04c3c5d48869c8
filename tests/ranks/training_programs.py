"""What the ranks of a test train, and the one process that has to get the same bits."""

from __future__ import annotations

import hashlib
import math
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import deepoffload
from deepoffload import CPUAdamW, offload_context
from deepoffload.errors import BudgetError
from tests.models.zoo import language, small_gpt2, small_llama, t5, translation
from tests.ranks.mean_of_ranks import MeanOfRanks
from tests.support.inspect import pager_of
from tests.support.models import TinyGPT, batch, mixtral, next_token_loss
from tests.support.rank_processes import ENDS_WITHIN_S, values_of


def tiled(model: Any, max_bytes: int, modules: Any = None) -> Any:
    """With layers and MLPs in tiles."""
    assert deepoffload.tile_linear(model, max_bytes) and deepoffload.tile_mlp(model, 3, modules)
    return model


def frozen_first(model: Any) -> Any:
    """With an embedding that is not trained: no gradient comes to the begin of forward."""
    model.embedding.requires_grad_(False)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": lambda: TinyGPT(dropout=0.0),
    "gpt-wide": lambda: TinyGPT(width=96, depth=2, dropout=0.0),
    "gpt-checkpointed": lambda: TinyGPT(dropout=0.0, checkpointing=False),
    "gpt-reentrant": lambda: TinyGPT(dropout=0.0, checkpointing=True),
    "llama": small_llama,
    "gpt2": small_gpt2,
    "mixtral": mixtral,
    "t5": t5,
    "gpt-tiles": lambda: tiled(TinyGPT(dropout=0.0), 12288, ["mlp"]),
    "gpt-pairs": lambda: Pairs(),
    "gpt-pairs-frozen": lambda: frozen_first(Pairs()),
    "llama-tiles": lambda: tiled(small_llama(), 4096),
}


@dataclass(frozen=True)
class Job:
    """One training run.

    Attributes:
        micro_batches: of each rank in each step.
        data_ranks: for how many ranks there is data: one process trains on all of it, in the order (micro-batch, rank).
        uneven: in which way the programs of the ranks differ: a function of ``UNEVEN``, called before each forward with
            the model, the step and the rank whose data comes. Returns the model to call.
        between_steps: of ``BETWEEN_STEPS``: called after each step. ``before_step``: the same, after each backward.
        clipped: which steps clip, by so little that only all gradients together tell; None: those that exceed ``clip``.
        overflows: steps that nobody makes: the last gradient of the last rank is not finite.
        limits: of the norm, for each step, where ``clipped`` is given. The one process finds them.
        state: the optimizer's state is looked at, too.
        accumulates: with ``deepoffload.accumulate``. The one process has an ordinary loop.
        forward_wait_s: what rank 0 has waited for its disk in each forward, as the counters say.
        device: on which the model computes: ``"simgpu"`` or the CPU.
    """

    model: str = "gpt"
    data_ranks: int = 2
    micro_batches: int = 1
    steps: int = 4
    clip: float | None = 1.0
    torch_clips: bool = False
    scale: float = 1.0
    uneven: str | None = None
    between_steps: str | None = None
    before_step: str | None = None
    clipped: tuple[int, ...] | None = None
    limits: tuple[float, ...] = ()
    overflows: tuple[int, ...] = ()
    state: bool = False
    accumulates: bool = False
    forward_wait_s: float = 0.0
    device: str = "cpu"
    config: dict[str, Any] = field(default_factory=dict)


@dataclass
class Trained:
    """What a run has shown; tensors as lists of bytes, so that processes can compare them."""

    losses: list[float] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    losses_between: list[float] = field(default_factory=list)
    limits: list[float] = field(default_factory=list)
    first_gradients: dict[str, str] = field(default_factory=dict)
    weights: dict[str, str] = field(default_factory=dict)
    state: dict[str, str] = field(default_factory=dict)
    stats: dict[str, float] = field(default_factory=dict)


def digest(tensor: Tensor) -> str:
    plain = tensor.detach().cpu().contiguous().clone().reshape(-1)
    return hashlib.sha256(plain.view(torch.uint8).numpy().tobytes()).hexdigest()[:16] if plain.numel() else ""


def loss_of(model: nn.Module, name: str, seed: int, device: str = "cpu") -> Tensor:
    """The loss of one micro-batch of one rank, whose dropout is that of its seed."""
    torch.manual_seed(seed)
    if name.startswith("gpt") and name != "gpt2":
        return next_token_loss(model, batch(seed).to(device))
    inputs = translation(seed) if name == "t5" else language(seed)
    return model(**{key: value.to(device) for key, value in inputs.items()}).loss


class Ordered(nn.Module):
    """A GPT whose blocks come in another order, perhaps not all of them, or some of them several times; perhaps each in
    a reentrant checkpoint."""

    def __init__(self, model: nn.Module, order: Sequence[int], *, recomputes: bool = False) -> None:
        super().__init__()
        self.model, self.order, self.recomputes = [model], order, recomputes  # in a list: it is no child

    def forward(self, tokens: Tensor) -> Tensor:
        model: Any = self.model[0]
        x = model.embedding(tokens) + model.position[: tokens.shape[1]]
        for number in self.order:
            block = model.blocks[number]
            x = checkpoint(block, x, use_reentrant=True) if self.recomputes else block(x)
        return model.head(model.norm(x))


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.halves = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x: Tensor, half: int) -> Tensor:
        return x + torch.tanh(self.halves[half](x))


class Pairs(nn.Module):
    """Units that are used in the first half of forward, and again in the second, the last one first: so backward is in
    the middle of all of them at once."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 16)
        self.pairs = nn.ModuleList(Pair() for _ in range(6))
        self.head = nn.Linear(16, 64)

    def forward(self, tokens: Tensor, used: Sequence[int] = tuple(range(6))) -> Tensor:
        x = self.embedding(tokens)
        for number, half in [*((n, 0) for n in used), *((n, 1) for n in reversed(used))]:
            x = self.pairs[number](x, half)
        return self.head(x)


class Some(nn.Module):
    """Some units of ``Pairs``."""

    def __init__(self, model: nn.Module, used: Sequence[int]) -> None:
        super().__init__()
        self.model, self.used = [model], used  # in a list: it is no child

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model[0](tokens, self.used)


class Watched(nn.Module):
    """A model that a transform of ``torch.func`` runs before each forward, while gradients of other ranks come, and a
    profiler in the forward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = [model]  # in a list: it is no child

    def forward(self, tokens: Tensor) -> Tensor:
        def total(factor: Tensor) -> Tensor:
            return torch.stack([self.model[0](tokens).sum() * factor for _ in range(4)]).sum()

        torch.func.grad(total)(torch.ones(()))
        with torch.profiler.profile():
            return self.model[0](tokens)


class Places(nn.Module):
    """Some halves of pairs in an order that a seed gives; perhaps each in a reentrant checkpoint, else a few of them
    past the forward of their module."""

    def __init__(self, model: nn.Module, seed: int, recomputes: bool) -> None:
        super().__init__()
        self.model, self.recomputes = [model], recomputes  # in a list: it is no child
        dice = random.Random(seed)
        halves = [(number, half) for number in range(6) for half in range(2)]
        self.uses = dice.sample(halves, dice.randrange(5, 12))
        self.past = {use for use in self.uses if not recomputes and dice.random() < 0.3}

    def forward(self, tokens: Tensor) -> Tensor:
        model: Any = self.model[0]
        x = model.embedding(tokens)
        if not x.requires_grad:
            x.requires_grad_()  # else reentrant checkpoints give no gradients
        for number, half in self.uses:
            pair = model.pairs[number]
            if (number, half) in self.past:
                x = x + torch.tanh(F.linear(x, pair.halves[half].weight, pair.halves[half].bias))
            else:
                x = checkpoint(pair, x, half, use_reentrant=True) if self.recomputes else pair(x, half)
        return model.head(x)


def watch(model: nn.Module, step: int, reader: int) -> nn.Module:
    """All ranks are watched."""
    return Watched(model)


class Selective(nn.Module):
    """A GPT whose blocks are recomputed, without their products: a mode of torch's records what forward computes, and
    lets the recomputation do nothing else."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = [model]  # in a list: it is no child

    def forward(self, tokens: Tensor) -> Tensor:
        model: Any = self.model[0]
        kept = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
        x = model.embedding(tokens) + model.position[: tokens.shape[1]]
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=False, context_fn=kept)
        return model.head(model.norm(x))


def recompute(model: nn.Module, step: int, reader: int) -> nn.Module:
    """All ranks keep a part of their activations."""
    return Selective(model)


def leave_a_layer_out(model: nn.Module, step: int, reader: int) -> nn.Module:
    """Rank 1 leaves a block out in every second step, all ranks leave one out in the third."""
    if step == 2:
        return Ordered(model, (0, 2, 3))
    return Ordered(model, (0, 1, 3)) if reader == 1 and step % 2 else model


def leave_pairs_out(model: nn.Module, step: int, reader: int) -> nn.Module:
    """Rank 1 uses two of the units whose gradients come in two parts, and so announces less often than rank 0 does."""
    return Some(model, (2, 5)) if reader == 1 else model


def go_about(model: nn.Module, step: int, reader: int) -> nn.Module:
    """Each rank uses other halves of pairs in each step."""
    return Places(model, 100 * step + reader, recomputes=False)


def go_about_twice(model: nn.Module, step: int, reader: int) -> nn.Module:
    """The same, recomputed."""
    return Places(model, 100 * step + reader, recomputes=True)


def repeat_layers(model: nn.Module, step: int, reader: int) -> nn.Module:
    """Layers at several places, one after the other and apart, recomputed: their gradients come as often."""
    return Ordered(model, ((0, 1, 0, 2, 1, 3), (3, 0, 0, 0, 2))[reader % 2], recomputes=True)


def turn_round(model: nn.Module, step: int, reader: int) -> nn.Module:
    """Every second rank has its layers in the other order."""
    return Ordered(model, (3, 2, 1, 0)) if reader % 2 else model


def begin_late(model: nn.Module, step: int, reader: int) -> nn.Module:
    """The other ranks begin when rank 0 has made its backward, and says so in ``end_turn``."""
    import torch.distributed as dist

    if reader and dist.is_initialized():
        dist.barrier()
    return model


UNEVEN: dict[str, Callable[[nn.Module, int, int], nn.Module]] = {
    "layer drop": leave_a_layer_out,
    "other order": turn_round,
    "pairs": leave_pairs_out,
    "places": go_about,
    "places again": go_about_twice,
    "repeats": repeat_layers,
    "turns": begin_late,
    "watched": watch,
    "selective": recompute,
}


def evaluate_on_rank_0(model: nn.Module, job: Job, step: int) -> list[float]:
    """The other ranks wait in a barrier of the program's."""
    import torch.distributed as dist

    found: list[float] = []
    if os.environ["RANK"] == "0":
        with torch.no_grad():
            found = [float(loss_of(model, job.model, 999 + step + number, job.device)) for number in range(2)]
    if dist.is_initialized():
        dist.barrier()
    return found


def look_at_weights(model: nn.Module, job: Job, step: int) -> list[float]:
    """Each rank looks at other weights, in another order."""
    names = sorted(name for name, _ in model.named_parameters())
    params = dict(model.named_parameters())
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return [float(params[name].detach().float().norm()) for name in (names[rank::world_size] if step % 2 else names)]


def look_through_views(model: nn.Module, job: Job, step: int) -> list[float]:
    """The program holds views of all weights for good. Each step writes what it has made into them."""
    if step == 0:
        model.__dict__["held"] = [param.detach().view(-1)[:5] for param in model.parameters()]
    return [float(view.float().sum()) for view in model.__dict__["held"]]


def edit_weights(model: nn.Module, job: Job, step: int) -> list[float]:
    """All ranks change weights, by a door and behind it."""
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.75)
            param.detach().view(-1)[:3] += 0.5
    return []


def look_at_gradients(model: nn.Module, job: Job, step: int) -> list[float]:
    """Rank 0 alone does, in every second step. The others wait in a barrier of the program's."""
    import torch.distributed as dist

    found: list[float] = []
    if os.environ["RANK"] == "0" and step % 2:
        found = [float(param.grad.sum()) for param in model.parameters() if param.grad is not None][::2]
    if dist.is_initialized():
        dist.barrier()
    return found


def edit_gradients(model: nn.Module, job: Job, step: int) -> list[float]:
    """All ranks change some of them."""
    for param in list(model.parameters())[:: 3 + step]:
        if param.grad is not None:
            param.grad.mul_(0.5)
    return []


def drop_gradients(model: nn.Module, job: Job, step: int) -> list[float]:
    """In some steps all gradients are dropped, so that there is nothing to step with."""
    if step % 3 == 2:
        model.zero_grad()
    return []


def end_turn(model: nn.Module, job: Job, step: int) -> list[float]:
    """See ``begin_late``."""
    import torch.distributed as dist

    if os.environ["RANK"] == "0" and dist.is_initialized():
        dist.barrier()
    return []


BETWEEN_STEPS: dict[str, Callable[[nn.Module, Job, int], list[float]]] = {
    "evaluation": evaluate_on_rank_0,
    "looks": look_at_weights,
    "views": look_through_views,
    "edits": edit_weights,
    "gradient looks": look_at_gradients,
    "gradient edits": edit_gradients,
    "drops": drop_gradients,
    "turns": end_turn,
}


LEAST = "8KiB"
"""A budget of this size is raised to the least one with which the model can be trained."""


def build(job: Job, path: str | None) -> tuple[nn.Module, Any]:
    config = dict(job.config)
    if job.device != "cpu":
        from tests.support.simulated_gpu import install

        install()
        config["device"] = job.device
    if path is not None and config.get("nvme_budget"):
        config["nvme_path"] = path
    try:
        return _build(job.model, config)
    except BudgetError as error:
        if config["host_budget"] != LEAST:
            raise
        return _build(job.model, {**config, "host_budget": error.enough_bytes})


def _build(model_name: str, config: dict[str, Any]) -> tuple[nn.Module, Any]:
    torch.manual_seed(11)
    context = offload_context(config)
    with context:
        model = MODELS[model_name]()
    return model.train(), context.engine


@contextmanager
def spoiled_embedding(model: nn.Module) -> Iterator[None]:
    """The gradient of the embedding, the last one of backward, is not finite."""
    embedding = next(module for module in model.modules() if isinstance(module, nn.Embedding))
    hook = embedding.register_forward_hook(
        lambda _, inputs, output: output.register_hook(lambda grad: grad * math.inf) and None
    )
    try:
        yield
    finally:
        hook.remove()


def limit_of(model: nn.Module, clips: bool) -> float:
    """For a step that clips by little, or does not clip."""
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    return float(torch.nn.utils.get_total_norm(grads)) * (0.99 if clips else 2.0)


def train(job: Job, path: str | None = None) -> Trained:
    """Run by each rank, and by one process as the reference."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    ranks = [rank] if world_size > 1 else range(job.data_ranks)
    model, engine = build(job, path)
    early = engine.gradients.early
    if job.uneven is not None and world_size > 1:
        engine.gradients.contributions.wait_s = 0.1  # else each step waits for seconds before contributions are moved
    optimizer = CPUAdamW(model.parameters(), lr=1e-2, max_grad_norm=None if job.torch_clips else job.clip)
    optimizer.skip_non_finite = bool(job.overflows)
    found, mean = Trained(), MeanOfRanks(model, job.data_ranks)
    for step in range(job.steps):
        if job.accumulates and world_size > 1:
            seeds = [10_000 * step + 100 * micro + rank for micro in range(job.micro_batches)]
            losses = deepoffload.accumulate(
                model, seeds, lambda model, seed: loss_of(model, job.model, seed, job.device) * job.scale
            )
            found.losses += [float(loss) / job.scale for loss in losses]
        for micro in range(0 if job.accumulates and world_size > 1 else job.micro_batches):
            if early is not None:
                early.paused = micro < job.micro_batches - 1  # as DeepSpeed's engine says it
            for reader in ranks:
                called = model if job.uneven is None else UNEVEN[job.uneven](model, step, reader)
                overflows = step in job.overflows and reader == job.data_ranks - 1
                with spoiled_embedding(model) if overflows else nullcontext():
                    loss = loss_of(called, job.model, 10_000 * step + 100 * micro + reader, job.device)
                if rank == 0:
                    pager_of(model).tiers.counters.wait_s += job.forward_wait_s
                (loss * job.scale / job.micro_batches).backward()
                if world_size == 1:
                    mean.backward_is_over()
                found.losses.append(float(loss.detach()))
        if world_size == 1:
            mean.make()
        if job.before_step is not None:
            found.losses_between += BETWEEN_STEPS[job.before_step](model, job, step)
        if step == 0 and early is None:
            found.first_gradients = {
                name: digest(param.grad) for name, param in model.named_parameters() if param.grad is not None
            }
        if job.torch_clips and job.clip is not None:
            found.norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), job.clip)))
        if job.clipped is not None:
            found.limits.append(job.limits[step] if job.limits else limit_of(model, step in job.clipped))
            optimizer.max_grad_norm = found.limits[-1]
        optimizer.step()
        optimizer.zero_grad()
        if not job.torch_clips:
            found.norms.append(None if step in job.overflows else optimizer.grad_norm)
        if job.between_steps is not None:
            found.losses_between += BETWEEN_STEPS[job.between_steps](model, job, step)
    found.weights = {name: digest(value) for name, value in model.state_dict().items()}
    if job.state:
        found.state = state_of(optimizer)
    found.stats = dict(deepoffload.stats(model))
    engine.close()
    return found


def state_of(optimizer: CPUAdamW) -> dict[str, str]:
    """All arrays of its state, by the number of the parameter."""
    state = optimizer.state_dict()["state"]
    return {f"{number}.{key}": digest(value) for number, arrays in state.items() for key, value in arrays.items()}


class References:
    """What one process gets with everything in memory and gradients in fp32: trained once for all tests that compare
    with it, those of several jobs one after the other in the same process."""

    def __init__(self) -> None:
        self._found: dict[str, Trained] = {}

    def of(self, jobs: Sequence[Job]) -> list[Trained]:
        alone = [self._alone(job) for job in jobs]
        missing = {repr(job): job for job in alone if repr(job) not in self._found}
        if missing:
            (found,) = values_of(train_all, 1, list(missing.values()), limit_s=_limit_s(alone))
            self._found |= zip(missing, found, strict=True)
        return [self._found[repr(job)] for job in alone]

    @staticmethod
    def _alone(job: Job) -> Job:
        config = {key: value for key, value in job.config.items() if key in ("precision", "keep_fp32")}
        return replace(job, config={**config, "gradient_dtype": "fp32", "host_budget": "256MiB"})


@cache
def references() -> References:
    """Those of this process."""
    return References()


def reference(job: Job) -> Trained:
    return references().of([job])[0]


def with_limits(job: Job) -> Job:
    """The same job, with what one process has found."""
    return job if job.clipped is None else replace(job, limits=tuple(reference(job).limits))


def check_equal(job: Job, ranks: Sequence[Trained]) -> None:
    """Compare every bit of what ranks have shown with one process."""
    expected, world_size = reference(job), len(ranks)
    for rank, got in enumerate(ranks):
        where = f"of rank {rank} in {job}"
        assert got.losses == expected.losses[rank::world_size], f"losses {where}"
        assert got.norms == expected.norms, f"norms {where}"
        assert got.first_gradients == _gradients_to_see(job, expected), f"gradients {where}"
        assert got.weights == expected.weights, f"weights {where}"
        assert got.state == expected.state, f"optimizer state {where}"
    if "looks" not in (job.between_steps, job.before_step):  # there each rank looks at other weights
        assert ranks[0].losses_between == expected.losses_between


def _gradients_to_see(job: Job, found: Trained) -> dict[str, str]:
    """Updates inside backward have used them."""
    return {} if job.config.get("step_overlap") == "in_backward" else found.first_gradients


def train_all(jobs: Sequence[Job], path: str | None = None) -> list[Trained]:
    """One after the other, in the same processes."""
    return [train(job, path) for job in jobs]


def _limit_s(jobs: Sequence[Job]) -> float:
    return max(ENDS_WITHIN_S, 60.0 * len(jobs))


def check_all(jobs: Sequence[Job], path: Path, world_size: int = 2) -> list[list[Trained]]:
    """Train, and compare every bit with one process. Returns what the ranks have shown, by job."""
    references().of(jobs)
    found = values_of(train_all, world_size, [with_limits(job) for job in jobs], str(path), limit_s=_limit_s(jobs))
    by_job = [list(ranks) for ranks in zip(*found, strict=True)]
    for job, ranks in zip(jobs, by_job, strict=True):
        check_equal(job, ranks)
    assert not list(path.iterdir())
    return by_job


def check_all_with_ranks(jobs: Sequence[Job], path: Path, world_size: int) -> list[list[Trained]]:
    """The same, compared with as many ranks that update inside their step."""
    references().of([job for job in jobs if job.clipped is not None])
    jobs = [with_limits(job) for job in jobs]
    without = [replace(job, config={**job.config, "step_overlap": "none"}) for job in jobs]
    found = values_of(train_all, world_size, [*jobs, *without], str(path), limit_s=_limit_s(jobs))
    for rank, trained in enumerate(found):
        for job, got, expected in zip(jobs, trained, trained[len(jobs) :], strict=False):
            expected = replace(expected, stats={}, first_gradients=_gradients_to_see(job, expected))
            assert replace(got, stats={}) == expected, f"rank {rank}: {job}"
    return [list(ranks) for ranks in zip(*found, strict=True)][: len(jobs)]
