"""Curricula cut what the engine is given, and layer drop comes by the configuration, in the numbers of plain loops."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepoffload
from deepoffload.config import parse_config
from deepoffload.deepspeed.curriculum import cut
from deepoffload.errors import ConfigError, UsageError
from deepoffload.integrations.transformers import optimizers_of
from deepoffload.schedules import layer_drop, sequence_length
from tests.schedules.models import DroppingGPT
from tests.support.loops import assert_same_bits, weights_of
from tests.support.models import CONTEXT, VOCABULARY, TinyGPT, batch, llama, next_token_loss
from tests.support.paging import plain

LINEAR = {
    "min_difficulty": 4,
    "max_difficulty": CONTEXT,
    "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 6, "difficulty_step": 4},
}
ROOT = {**LINEAR, "schedule_type": "fixed_root", "schedule_config": {**LINEAR["schedule_config"], "root_degree": 2}}  # type: ignore[dict-item]
DISCRETE = {
    **LINEAR,
    "schedule_type": "fixed_discrete",
    "schedule_config": {"difficulty": [4, 8, CONTEXT], "max_step": [2, 3]},
}
LENGTHS = {
    "fixed_linear": [4, 8, 8, 12, 12, 16, 16],
    "fixed_root": [8, 8, 12, 12, 12, 16, 16],
    "fixed_discrete": [4, 4, 8, 16, 16, 16, 16],
}
ADAMW = {"type": "AdamW", "params": {"lr": 1e-3}}


@pytest.mark.parametrize("said", [LINEAR, ROOT, DISCRETE], ids=lambda said: str(said["schedule_type"]))
def test_lengths_are_those_of_deepspeeds_formulas(said: dict[str, Any]) -> None:
    config = {name: value for name, value in said.items() if name != "schedule_config"} | said["schedule_config"]
    lengths = [sequence_length(step, **config) for step in range(7)]
    assert lengths == LENGTHS[said["schedule_type"]]


def test_a_length_is_never_below_the_first_multiple_and_stays_at_the_end() -> None:
    config: dict[str, Any] = {"schedule_type": "fixed_linear", "total_curriculum_step": 100, "difficulty_step": 16}
    assert sequence_length(0, min_difficulty=8, max_difficulty=64, **config) == 16
    twice: dict[str, Any] = {"schedule_type": "fixed_discrete", "difficulty": (4, 16, 8), "max_step": (1, 1)}
    assert [sequence_length(step, min_difficulty=4, max_difficulty=16, **twice) for step in range(3)] == [4, 8, 8]
    falling: dict[str, Any] = {"schedule_type": "fixed_discrete", "difficulty": (4, 16, 8), "max_step": (1, 2)}
    assert [sequence_length(step, min_difficulty=4, max_difficulty=16, **falling) for step in range(4)] == [
        4,
        16,
        16,
        16,
    ]


WRONG = {
    "no schedule": ({"min_difficulty": 1, "max_difficulty": 2}, "schedule_type has to be said"),
    "no steps": ({**LINEAR, "schedule_config": {"difficulty_step": 8}}, "total_curriculum_step and difficulty_step"),
    "no degree": ({**LINEAR, "schedule_type": "fixed_root"}, "root_degree"),
    "a list too short": ({**DISCRETE, "schedule_config": {"difficulty": [4], "max_step": [2]}}, "one shorter"),
    "steps that fall": ({**DISCRETE, "schedule_config": {"difficulty": [4, 8, 9], "max_step": [3, 2]}}, "rising"),
    "an end below the beginning": ({**LINEAR, "max_difficulty": 2}, "not below the first"),
    "another schedule": ({**LINEAR, "schedule_type": "custom"}, "fixed_linear"),
    "another kind": ({**LINEAR, "curriculum_type": "voc"}, "seqlen"),
    "a misspelt key": ({**LINEAR, "schedule_config": {"difficulty_steps": 8}}, "did you mean"),
}


@pytest.mark.parametrize(("said", "text"), WRONG.values(), ids=list(WRONG))
def test_a_curriculum_that_cannot_be_is_refused(said: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        parse_config({"curriculum_learning": {"enabled": True, **said}})


def test_what_of_a_batch_is_cut() -> None:
    whole: dict[str, Any] = {
        "input_ids": torch.zeros(2, 8, dtype=torch.long),
        "attention_mask": torch.ones(2, 1, 8, 8),
        "embeddings": torch.zeros(2, 8, 5),
        "position_ids": torch.arange(8),
        "labels_of_rows": torch.zeros(2, dtype=torch.long),
        "pair": (torch.zeros(2, 8), [torch.zeros(2, 3)]),
        "other": "text",
    }
    shapes = {name: tuple(value.shape) for name, value in cut(whole, 5).items() if isinstance(value, Tensor)}
    assert shapes == {
        "input_ids": (2, 5),
        "attention_mask": (2, 1, 5, 5),
        "embeddings": (2, 5, 5),
        "position_ids": (5,),
        "labels_of_rows": (2,),
    }
    assert [tuple(t.shape) for t in (cut(whole, 5)["pair"][0], cut(whole, 5)["pair"][1][0])] == [(2, 5), (2, 3)]
    masks = {"tokens": torch.zeros(2, 8), "keys": torch.ones(2, 1, 1, 8), "all": torch.ones(8, 8)}
    assert [tuple(mask.shape) for mask in cut(masks, 5).values()] == [(2, 5), (2, 1, 1, 5), (5, 5)]
    wide = (torch.zeros(2, 8, 8), torch.ones(2, 8, 8, dtype=torch.bool))
    assert [tuple(t.shape) for t in cut(wide, 5)] == [(2, 5, 8), (2, 5, 5)], (
        "embeddings as wide as the sequence is long"
    )
    assert cut(whole, 9) is whole and whole["input_ids"].shape == (2, 8)
    with pytest.raises(UsageError, match="no tensor of shape"):
        cut({"x": torch.zeros(3)}, 5)


class LossInside(DroppingGPT):
    """A model that gets labels, too."""

    def forward(self, tokens: Tensor, labels: Tensor, **schedule: Any) -> Tensor:  # type: ignore[override]
        logits = super().forward(tokens, **schedule)[:, :-1]
        return nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1))


def settings(nvme_path: Path, **more: Any) -> dict[str, Any]:
    said = {"host_budget": "1MiB", "nvme_path": str(nvme_path), "optimizer": ADAMW, "gradient_clipping": 0.0}
    return {**said, "debug": {"poison": True}, **more}


def test_both_schedules_at_once_train_as_a_plain_loop(nvme_path: Path, tmp_path: Path) -> None:
    """And a run that is continued goes on where it stood."""
    drop = {"enabled": True, "theta": 0.4, "gamma": 0.5}
    said = settings(
        nvme_path, progressive_layer_drop=drop, curriculum_learning={"enabled": True, **LINEAR}, timeline=True
    )
    model = plain(LossInside)
    reference = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    paged = plain(LossInside)
    engine, *_ = deepoffload.initialize(model=paged, config=said)
    losses: list[list[Tensor]] = [[], []]
    for number, one in enumerate((model, engine)):
        torch.manual_seed(5)
        one.train()
        for step in range(8):
            tokens = batch(step)
            if one is engine:
                assert engine.get_pld_theta() == layer_drop(step, theta=0.4, gamma=0.5)
                assert engine.curriculum_seqlen() == (LENGTHS["fixed_linear"] + [16])[step]
                loss = engine(tokens, labels=tokens)
                engine.backward(loss)
                engine.step()
            else:
                short = tokens[:, : (LENGTHS["fixed_linear"] + [16])[step]]
                theta = layer_drop(step, theta=0.4, gamma=0.5)
                loss = model(short, labels=short, progressive_layer_drop=True, pld_theta=theta)
                loss.backward()
                reference.step()
                reference.zero_grad()
            losses[number].append(loss.detach())
    assert_same_bits(losses[0][:1], losses[1][:1])
    assert [float(loss) for loss in losses[1]] == pytest.approx([float(loss) for loss in losses[0]], rel=1e-5)
    assert paged.lengths == model.lengths and paged.left_out == model.left_out > 5
    engine.eval()
    engine(batch(0), labels=batch(0))
    assert paged.lengths[-1] == CONTEXT, "an evaluation is not cut"
    engine.save_checkpoint(tmp_path / "saved")
    other, *_ = deepoffload.initialize(model=plain(LossInside), config=said)
    assert other.curriculum_seqlen() == 4
    other.load_checkpoint(tmp_path / "saved")
    assert (other.curriculum_seqlen(), other.get_pld_theta()) == (CONTEXT, engine.get_pld_theta())
    assert_same_bits(weights_of(paged), weights_of(other.module))
    engine.close()
    other.close()


class CutsItself(TinyGPT):
    def forward(self, tokens: Tensor, curriculum_seqlen: int | None = None) -> Tensor:
        self.told = curriculum_seqlen
        return super().forward(tokens[:, :curriculum_seqlen])


def test_a_model_that_takes_the_length_cuts_itself(nvme_path: Path) -> None:
    engine, *_ = deepoffload.initialize(
        model=CutsItself(), config=settings(nvme_path, curriculum_learning={"enabled": True, **LINEAR})
    )
    assert engine(batch(0)).shape[1] == engine.told == 4
    engine.close()


def test_lengths_that_change_cost_no_faults(nvme_path: Path) -> None:
    said = settings(nvme_path, curriculum_learning={"enabled": True, **LINEAR}, host_budget="768KiB")
    engine, *_ = deepoffload.initialize(model=TinyGPT(depth=8, dropout=0.0), config=said)
    faults = []
    for step in range(8):
        logits = engine(batch(step))
        short = batch(step)[:, : logits.shape[1]]
        engine.backward(next_token_loss(lambda _, logits=logits: logits, short))  # type: ignore[arg-type]
        engine.step()
        faults.append(engine.stats()["faults"])
    assert engine.stats()["disk_bytes_read"] > 0
    assert faults[2] == faults[-1]
    engine.close()


def test_a_model_that_drops_no_layers_is_refused_before_anything(nvme_path: Path) -> None:
    model = TinyGPT()
    with pytest.raises(ConfigError, match="forward of TinyGPT takes no progressive_layer_drop and no pld_theta"):
        deepoffload.initialize(model=model, config=settings(nvme_path, progressive_layer_drop={"enabled": True}))
    assert all(type(param) is nn.Parameter for param in model.parameters())
    with pytest.raises(ConfigError, match="forward of LlamaForCausalLM takes no progressive_layer_drop"):
        deepoffload.initialize(model=llama(), config=settings(nvme_path, progressive_layer_drop={"enabled": True}))


def test_trainers_that_call_the_model_themselves_refuse_schedules(nvme_path: Path) -> None:
    said = settings(nvme_path, curriculum_learning={"enabled": True, **LINEAR})
    with pytest.raises(ConfigError, match="curriculum_learning.enabled = true: .* and the Trainer calls it itself"):
        optimizers_of(said, TinyGPT())


def test_sections_that_are_off_change_nothing(nvme_path: Path) -> None:
    off = {"progressive_layer_drop": {"enabled": False, "theta": 0.1}, "curriculum_learning": {"enabled": False}}
    engine, *_ = deepoffload.initialize(model=partial(DroppingGPT, depth=2)(), config=settings(nvme_path, **off))
    engine(batch(0))
    assert (engine.get_pld_theta(), engine.curriculum_seqlen()) == (None, None)
    assert engine.lengths == [CONTEXT] and engine.left_out == 0
    engine.close()
