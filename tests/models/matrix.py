"""The matrix: which programs are run on which models, and where the outcome is not "the same bits as plain PyTorch"."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from deepoffload.errors import BudgetError, DeepOffloadError
from tests.models import programs
from tests.models.programs import Program
from tests.models.zoo import FAMILIES, Family
from tests.support.paging import EVICTING, TIGHT, Setting

ONE_UNIT = Setting("one-unit", 1.0)
"""The least budget that the model is accepted with: the largest unit at work, and nothing else."""

SETTINGS = (ONE_UNIT, TIGHT, EVICTING)


def everywhere(family: Family) -> bool:
    return True


def finite_in_fp16(family: Family) -> bool:
    return family.name != "parametrizations"  # an orthogonal weight's gradient is NaN, in plain PyTorch, too


def transformers_only(family: Family) -> bool:
    return family.is_transformer


def with_tiles(family: Family) -> bool:
    return family.name in programs.MLPS


def generating(family: Family) -> bool:
    return family.generates


@dataclass(frozen=True)
class Feature:
    """One column: what the page calls it, the program, the families it is for, and what it is compared with."""

    name: str
    program: Program
    suits: Callable[[Family], bool] = everywhere
    reference: str = "the model as built, in fp32"


SAVING = "`deepoffload.save_pretrained`, reload"
LIBRARY_SAVING = "transformers' `save_pretrained`, reload"
EVALUATION = "evaluation"

LIFE = (
    Feature("initial values", programs.initial),
    Feature(EVALUATION, programs.forward),
    Feature("training with dropout", partial(programs.train, seed=2, steps=2)),
    Feature("accumulation and clipping", partial(programs.train, seed=3, accumulate=2, clip=0.5)),
    Feature("activation checkpoints", partial(programs.checkpointing, use_reentrant=False)),
    Feature("reentrant checkpoints", partial(programs.checkpointing, use_reentrant=True)),
    Feature("autocast to bf16", programs.autocast),
    Feature("`autograd.grad`, `backward(inputs=...)`", programs.asked_for),
    Feature("activations edited in place: the same error or gradients", programs.edits),
    Feature("greedy generation", partial(programs.generate, num_beams=1), generating),
    Feature("beam search", partial(programs.generate, num_beams=2), generating),
    Feature("training after evaluation", partial(programs.train, seed=12)),
    Feature("`state_dict`, `load_state_dict`", programs.state_dict),
    Feature("`torch.distributed.checkpoint`: `async_save`, `load`", programs.distributed_checkpoint),
    Feature("`copy.deepcopy`", programs.deep_copy),
    Feature(SAVING, partial(programs.save, by_library=False)),
    Feature(LIBRARY_SAVING, partial(programs.save, by_library=True), transformers_only),
    Feature("training after saving", partial(programs.train, seed=13)),
)
"""Run one after the other on one model."""


def loaded(family: Family, checkpoint: str) -> Any:
    return type(family.build()).from_pretrained(checkpoint)


@dataclass(frozen=True)
class OwnModel(Feature):
    """A program with its own model.

    Attributes:
        build: makes the model from the family and, where ``checkpoint`` names a dtype, a directory with weights.
    """

    suits: Callable[[Family], bool] = transformers_only
    build: Callable[[Family, str], Any] = lambda family, _: family.build()
    checkpoint: str | None = None
    precision: str = "keep"


LOADED = "`from_pretrained` of the same checkpoint"

OWN = (
    OwnModel("`from_pretrained`, fp32", programs.after_loading, build=loaded, checkpoint="float32", reference=LOADED),
    OwnModel("`from_pretrained`, bf16", programs.after_loading, build=loaded, checkpoint="bfloat16", reference=LOADED),
    OwnModel(
        '`precision="bf16"`',
        programs.first_gradients,
        suits=everywhere,
        precision="bf16",
        reference="`from_pretrained(dtype=bfloat16)`, `.to(bfloat16)`",
    ),
    OwnModel(
        '`precision="fp16"`',
        programs.first_gradients,
        suits=finite_in_fp16,
        precision="fp16",
        reference="`from_pretrained(dtype=float16)`, `.half()`",
    ),
    OwnModel(
        "hooks on parameters, then paging",
        programs.hooks,
        suits=everywhere,
        build=lambda family, _: programs.with_hooks(family.build()),
    ),
    OwnModel(
        "LoRA, then paging",
        partial(programs.lora, late=False),
        build=lambda family, _: programs.add_lora(family, family.build()),
    ),
    OwnModel("paging, then LoRA", partial(programs.lora, late=True)),
    OwnModel(
        "`tile_linear` and `tile_mlp`",
        partial(programs.train, seed=7, steps=2, accumulate=2, clip=0.5),
        suits=with_tiles,
        build=lambda family, _: programs.in_tiles(family, family.build()),
        reference="the same tiles in memory",
    ),
    OwnModel(
        "LoRA, then tiles",
        partial(programs.train, seed=7, steps=2),
        suits=with_tiles,
        build=lambda family, _: programs.in_tiles(family, programs.add_lora(family, family.build())),
        reference="the same tiles in memory",
    ),
    OwnModel("Trainer as it is", partial(programs.trainer, own_optimizer=False, accumulate=1)),
    OwnModel("Trainer with `CPUAdamW`", partial(programs.trainer, own_optimizer=True, accumulate=2)),
)


@dataclass(frozen=True)
class Close:
    """Right up to rounding."""

    relative: float
    why: str


@dataclass(frozen=True)
class Refused:
    """Refused with ``error``, whose message has ``message`` in it.

    Attributes:
        settings: under these, and right under the others.
        always: False where it depends on what the program still holds whether there is room.
    """

    error: type[DeepOffloadError]
    message: str
    why: str
    settings: tuple[Setting, ...] = SETTINGS
    always: bool = True


FAST_PATH = Close(
    1e-5,
    "`torch` takes a fused path for `nn.MultiheadAttention` in evaluation without gradients, and leaves it when a "
    "parameter is not a plain one: the same to about 1e-6 in fp32, and 1e-4 in bf16.",
)

EXCEPTIONS: dict[tuple[str, str], Close | Refused] = {
    ("nn.MultiheadAttention", EVALUATION): FAST_PATH,
    ("nn.TransformerEncoderLayer", EVALUATION): FAST_PATH,
    ("Mixtral", LIBRARY_SAVING): Refused(
        BudgetError,
        "still referred to by the program",
        "transformers takes the experts of all layers apart before it writes any, and holds them meanwhile. It works "
        "when their bytes fit in the budget; `deepoffload.save_pretrained` needs one layer's.",
        (ONE_UNIT,),
        always=False,
    ),
}


def outcome(family: Family, feature: Feature, setting: Setting | None = None) -> Close | Refused | None:
    """What is expected instead of the same bits; None for the same bits. Without ``setting``: under any of them."""
    found = EXCEPTIONS.get((family.name, feature.name))
    if isinstance(found, Refused) and setting is not None and setting.name not in [s.name for s in found.settings]:
        return None
    return found


def own_setting(setting: Setting, feature: OwnModel) -> Setting:
    return replace(setting, precision=feature.precision)


LIKE_OTHERS = ("BERT", "ViT", "Whisper", "GPT-NeoX", "OPT", "nn.GRU", "nn.TransformerEncoderLayer")
"""Families whose lives only the long form runs with little memory, next to everything evicted: their units have the
shapes of others (GPT-2 and Llama, T5, nn.LSTM, nn.MultiheadAttention). :data:`OWN` has both settings for them, too."""

ON_RANKS = (
    "GPT-2",
    "Llama",
    "Mixtral",
    "T5",
    "BERT",
    "Mamba",
    "Whisper",
    "nn.LSTM",
    "nn.MultiheadAttention",
    "convolution and batch norm",
    "parametrizations",
)
"""The families that two ranks train, too: all of :data:`LIFE`, with everything evicted for the first of them."""

SELDOM_ON_RANKS = ("Llama", "BERT", "Mamba", "Whisper")
"""Those that only the long form trains: ``tests.ranks`` has the first one, and the others are much like those that are
left: GPT-2, nn.MultiheadAttention (whose weights are read outside of their modules, too), and T5 with convolutions."""


def cells() -> list[tuple[Family, Feature]]:
    """All pairs that are tested."""
    return [(family, feature) for family in FAMILIES.values() for feature in (*LIFE, *OWN) if feature.suits(family)]
