"""The page ``docs/what_works.md``, made from the matrix that the tests run.

python -m tests.models.what_works > docs/what_works.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from tests.models.matrix import (
    LIFE,
    LIKE_OTHERS,
    ON_RANKS,
    OWN,
    SELDOM_ON_RANKS,
    SETTINGS,
    Close,
    Feature,
    Refused,
    outcome,
)
from tests.models.more_families import MORE
from tests.models.refusals import REFUSALS
from tests.models.zoo import LAYERS, TRANSFORMERS, Family

_HEAD = """# What works

Made from the tests (`tests/models`) by `python -m tests.models.what_works > docs/what_works.md`; do not edit.

Every cell below is a test. Small models with random weights are run in plain PyTorch and with deepoffload, and their
losses, gradients, tokens, weights and buffers are compared. The first rows are run with everything evicted as soon as
it may be, so that every weight goes to disk and back all the time; and with the least memory that the model is accepted
with, or a little more. The rows from `from_pretrained` on have one of the first and the last of these, in turns.
`MODELS=all` runs each cell in all ways. Without it, the first rows of
{like_others},
which are much like others, have everything evicted only. Memory that is taken back is filled with NaN, so that a late
reader would be seen.

- **=** the same numbers, bit for bit, as plain PyTorch with what the row is compared with; also after updates, with
  `CPUAdamW` on both sides (a step of `torch.optim.AdamW` differs [by rounding](optimizers.md#numerics-in-fp32)). The
  rows of `precision` end with the first gradients: later weights come from fp32 masters, which the plain model lacks
- **~** the same up to rounding; the note says why
- **(=)** as **=** when there is memory enough, else refused with an error that says so; the note says more
- **no** refused with an error that says so
- empty: the model has no such thing

For all of them, a forward pass leaves the bytes of its activations in memory, the same number as in plain PyTorch, and
no weights but those in the budget.
"""

_ON_RANKS = """
## On two ranks

{names}: the rows from initial values to training after saving, all **=**. Two processes run the same program with the
same data, once with everything in memory; the first model also with everything evicted. The plain program that they are
compared with adds half of each gradient twice, as the mean over two ranks does. Where gradients accumulate, that rounds
otherwise than adding it once. ({seldom}: with `MODELS=all`.)

An edit in place of a weight or a gradient (`param.mul_`, torch's `clip_grad_norm_`) waits for all ranks, which have to
make the same one; otherwise all raise `RankError`.

Refused there, and not with one rank: a backward that adds to a `.grad` which the program has assigned.
Views of gradients that the program keeps need room for the whole copies of these; else `BudgetError` says how much.

[Several ranks](ranks.md) has the rest: updates inside backward (`step_overlap="in_backward"`) and
`deepoffload.accumulate` work there, the latter with one micro-batch after the other.
[Trainers](trainers.md#several-ranks) has those of transformers, accelerate and Lightning.
"""

_REFUSED = """
## Refused for every model

Each raises the error named, before anything is changed.

| what | error | instead |
| --- | --- | --- |
"""

_OTHERWISE = """
## Otherwise than in plain PyTorch

- `param.data = new` between a forward and its backward: torch goes backward with the old memory; ours has been
  written over, so backward raises "modified by an inplace operation". Tensors that are views of the old values keep
  them (with torch 2.11, which has no way to do so, the assignment raises); arrays of NumPy and DLPack
  capsules see the new ones, and what is written to them reaches the parameter. What is assigned is copied in the
  parameter's own strides: later edits of `new` do not reach it, and a transposed `new` may give products that differ
  by rounding.
  `torch.utils.swap_tensors` on a paged parameter raises. So does `torch.Tensor.set_(param, new)` while the bytes are
  away; `param.set_(new)` works.
- An edit of a weight between a forward and its backward raises "modified by an inplace operation" under the program's
  own `saved_tensors_hooks` and `save_on_cpu`, too, where plain PyTorch continues with what they have kept. They get
  activations, and weights only where everything stays in memory: their copies would be a second model. Call backward
  before the edit.
- `torch.cond`, `while_loop`, `scan`, `map` and `flex_attention` compile the functions that they are given. They work
  with the weights of a module that is one unit. With weights of a module that the budget splits, and outside of every
  module, they raise torch's error, with our reason: "the bytes of a paged weight come and go". Use Python's `if` and
  `for`, or give them `weight.clone()` as an operand ([compile.md](compile.md)).
- `torch.func` and `torch.vmap` over paged parameters work through modules (`functional_call`, a module inside a
  transform), and `vmap` and `jvp` work with raw parameters, too. `grad`, `vjp` and `jacrev` of a function of a raw
  parameter, outside of any module, work while its bytes are in memory, and raise "Cannot access data pointer" else:
  torch wraps the parameter in native code without asking its class. Pass `param.detach()`.
- `functional_call` with other weights over a non-reentrant checkpoint: the checkpoint runs again with the module's own
  weights, so torch finds wrong gradients; ours raises `CheckpointError`. Put `functional_call` inside the checkpoint.
- The `backward` of a loss of a tensor subclass, where torch handles it, runs with `__torch_function__` switched off:
  hooks, and custom functions that keep a weight as an attribute, then raise the same error where its bytes are away.
  Call `loss.as_subclass(torch.Tensor).backward()`.
- Under one `torch.autocast` block, torch uses the cast of a weight again in a second forward, and adds the two
  gradients in 16 bits; ours casts again and adds in 32, and a step inside the block is seen by the next forward. (Tied
  weights, and a model that is one unit as a whole, do as in plain PyTorch.) One forward per block, or
  `cache_enabled=False`, is the same bit for bit. Of an input that requires a gradient itself and enters several layers,
  that gradient alone is added in 32 bits, too (behind a reentrant checkpoint it is as in plain PyTorch).
- A weight's cast under `torch.autocast` is made again for backward: an edit of the weight in between raises "modified
  by an inplace operation", where plain PyTorch continues with the old cast. So does an edit of a weight under
  `torch.autograd.graph.allow_mutation_on_saved_tensors`.
- `copy.deepcopy` of a paged model is an ordinary model, outside of every budget, unless an `offload_context` is open:
  then the copy is paged, too (a teacher). The log mentions a large one (64 MiB, and a tenth of `host_budget`).
  `deepoffload.initialize` pages a copy afterwards.
- Only Ctrl-C (SIGINT) is held back while books are being changed. A handler of another signal that raises then
  (`signal.alarm`, SIGTERM) ends the engine: what comes after it raises `ClosedError`, which names the handler. Let it
  set a flag that the loop looks at. While a layer computes, or the disk is waited for, it may raise. A Ctrl-C in the
  instant in which `step()` returns comes after the step.
"""


def markdown() -> str:
    """The whole page."""
    notes: list[str] = []
    parts = [_HEAD.format(like_others=", ".join(LIKE_OTHERS))]
    for title, families in (("Models of transformers", TRANSFORMERS), ("Layers of torch", LAYERS)):
        parts.append(f"\n## {title}\n\n{_table(families, notes)}")
    names = ", ".join(family.name for family in MORE)
    parts.append(f"\n{names}: the rows from initial values to training after saving, all **=**.\n")
    parts.append(_ON_RANKS.format(names=", ".join(ON_RANKS), seldom=", ".join(SELDOM_ON_RANKS)))
    if notes:
        numbered = [f"{number}. {note}" for number, note in enumerate(notes, 1)]
        parts.append("\n## Notes\n\n" + "\n".join(numbered) + "\n")
    rows = [f'| {r.what} | `{r.error.__name__}`: "{r.message}" | {r.instead} |' for r in REFUSALS]
    return "".join([*parts, _REFUSED, "\n".join(rows), "\n", _OTHERWISE])


def _table(families: Sequence[Family], notes: list[str]) -> str:
    features = [feature for feature in (*LIFE, *OWN) if any(feature.suits(family) for family in families)]
    lines = [_row(["", "compared with", *(family.name for family in families)]), _row(["---"] * (len(families) + 2))]
    for feature in features:
        lines.append(_row([feature.name, feature.reference, *(_cell(family, feature, notes) for family in families)]))
    return "\n".join(lines) + "\n"


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(family: Family, feature: Feature, notes: list[str]) -> str:
    if not feature.suits(family):
        return ""
    found = outcome(family, feature)
    if found is None:
        return "="
    note = found.why
    if isinstance(found, Refused):
        note += f' The error: `{found.error.__name__}`, "{found.message}".'
    if note not in notes:
        notes.append(note)
    mark = "~" if isinstance(found, Close) else "no" if found.always and found.settings == SETTINGS else "(=)"
    return f"{mark} [{notes.index(note) + 1}](#notes)"


if __name__ == "__main__":
    sys.stdout.write(markdown())
