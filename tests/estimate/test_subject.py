"""What is estimated: modules, configurations, numbers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deepoffload.config import Config, Precision
from deepoffload.errors import ConfigError, UsageError
from deepoffload.estimate import Batch, from_config, from_counts, from_module
from deepoffload.estimate.__main__ import main
from deepoffload.estimate.dry_run import dry_run
from deepoffload.estimate.measure import process_bytes
from deepoffload.runtime.compute_types import ComputeTypes, compute_types
from tests.support.models import TinyGPT

MIB = 1 << 20
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128, "n_positions": 32}


def written(path: Path, settings: Any) -> Path:
    path.write_text(json.dumps(settings))
    return path


def in_bf16(model: nn.Module) -> ComputeTypes:
    return compute_types(Config(precision=Precision.BF16), [model])


@pytest.mark.parametrize("settings", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_a_config_by_transformers_and_by_its_sizes_is_about_the_same(tmp_path, settings):
    file = written(tmp_path / "config.json", settings)
    built, counted = from_config(file), from_config(tmp_path, arithmetic=True)
    assert "transformers" in built.source and "sizes" in counted.source
    assert built.num_parameters == pytest.approx(counted.num_parameters, rel=0.02)
    assert all(param.is_meta for param in built.module.parameters())


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "olmo2", "phi3", "cohere"])
def test_the_gate_is_counted_where_the_file_leaves_it_to_the_default(tmp_path, family):
    settings = {key: value for key, value in LLAMA.items() if key not in ("hidden_act", "architectures")}
    file = written(tmp_path / "config.json", {**settings, "model_type": family, "pad_token_id": 0})
    built, counted = from_config(file), from_config(file, arithmetic=True)
    assert built.num_parameters == pytest.approx(counted.num_parameters, rel=0.02)


@pytest.mark.parametrize("settings", [LLAMA, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("arithmetic", [False, True])
def test_activations_of_a_config(tmp_path, settings, arithmetic):
    file = written(tmp_path / "config.json", settings)
    plain = from_config(file, Batch(2, 16), arithmetic=arithmetic)
    saving = from_config(file, Batch(2, 16), arithmetic=arithmetic, checkpointing=True)
    whole, less = (dry_run(s.module, s.loss_of, types=in_bf16(s.module)) for s in (plain, saving))
    assert less.saved_bytes < whole.saved_bytes
    assert less.recomputes and not whole.recomputes and less.flops > whole.flops
    assert whole.peak_bytes >= whole.saved_bytes >= whole.head_bytes > 0


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"hidden_size": 64, "vocab_size": 8}, "num_hidden_layers"),
        ({"num_hidden_layers": 2, "vocab_size": 8}, "hidden_size"),
        ({"num_hidden_layers": 2, "hidden_size": 64}, "vocab_size"),
        ({"num_hidden_layers": 0, "hidden_size": 64, "vocab_size": 8}, "num_hidden_layers"),
        ({"num_hidden_layers": 2, "hidden_size": "big", "vocab_size": 8}, "hidden_size"),
        ([1, 2], "list"),
        ({**LLAMA, "num_attention_heads": "four"}, "llama"),
    ],
)
def test_a_config_that_lacks_something_names_it(tmp_path, settings, named):
    with pytest.raises(ConfigError, match=named):
        from_config(written(tmp_path / "config.json", settings))


MIXTRAL = {
    **LLAMA,
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
MIXTRAL_8X7B = {
    **MIXTRAL,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}
QWEN_MOE = {
    **LLAMA,
    "model_type": "qwen2_moe",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 80,
}


def test_experts_gates_and_groups_are_counted_by_sizes(tmp_path):
    off = []
    for settings in (
        MIXTRAL,
        MIXTRAL_8X7B,
        QWEN_MOE,
        {**LLAMA, "tie_word_embeddings": True, "model_type": "gemma", "hidden_act": "gelu", "head_dim": 16},
    ):
        file = written(tmp_path / "config.json", {**settings, "architectures": None})
        built, counted = from_config(file), from_config(file, arithmetic=True)
        if built.num_parameters != pytest.approx(counted.num_parameters, rel=0.01):
            off.append(f"{settings['model_type']}: {counted.num_parameters} instead of {built.num_parameters}")
        if counted.num_parameters < 1e9:
            runs = [dry_run(s.module, s.loss_of, types=in_bf16(s.module)) for s in (built, counted)]
            if runs[1].flops != pytest.approx(runs[0].flops, rel=0.5):
                off.append(f"{settings['model_type']}: operations {runs[1].flops} instead of {runs[0].flops}")
    assert not off, off
    whole = from_config(written(tmp_path / "config.json", MIXTRAL_8X7B), arithmetic=True)
    assert whole.num_parameters == pytest.approx(46.7e9, rel=0.001)


def test_what_sizes_do_not_tell_is_refused_with_the_reason(tmp_path):
    accepted = []
    for more, reason in (
        ({"kv_lora_rank": 512}, "latent keys"),
        ({"is_encoder_decoder": True}, "an encoder and a decoder"),
        ({"vision_config": {"hidden_size": 3}}, "parts for text"),
        ({"state_size": 16}, "a state-space model"),
        ({"layers_block_type": ["mamba", "attention"]}, "several sorts"),
        ({**MIXTRAL, "first_k_dense_replace": 3}, "dense layers before"),
        ({**MIXTRAL, "decoder_sparse_step": 2}, "dense layers between"),
        ({**MIXTRAL, "num_experts_per_tok": None}, "num_experts_per_tok"),
        ({"num_zero_experts": 4}, "num_zero_experts"),
        ({"multi_query": True}, "one key and value"),
    ):
        try:
            from_config(written(tmp_path / "config.json", {**LLAMA, **more}), arithmetic=True)
        except ConfigError as error:
            assert reason in str(error)
        else:
            accepted.append(more)
    assert not accepted, accepted


def test_sizes_are_not_taken_without_saying_so(tmp_path):
    file = written(tmp_path / "config.json", {**LLAMA, "model_type": "grandllama"})
    note, assumed = from_config(file).notes
    assert "does not know the model type 'grandllama', so the sizes in it are taken" in note
    assert "perceptrons of three matrices, linear layers without biases (hidden_act is 'silu')" in assumed
    assert from_config(file, arithmetic=True).notes == (assumed,)
    bare = {key: LLAMA[key] for key in ("num_hidden_layers", "hidden_size", "vocab_size")}
    (assumed,) = from_config(written(file, bare), arithmetic=True).notes
    for guess in (
        "two matrices",
        "shares the embedding's weights",
        "1 heads",
        "as many heads",
        "4 x hidden size wide, 256",
    ):
        assert guess in assumed
    with pytest.raises(ConfigError, match="does not know the model type 'grandllama'.*latent keys"):
        from_config(written(file, {**LLAMA, "model_type": "grandllama", "kv_lora_rank": 8}))


def test_sizes_that_are_transformers_own_are_named(tmp_path):
    file = tmp_path / "config.json"
    partly = {key: value for key, value in LLAMA.items() if key != "num_hidden_layers"}
    (note,) = from_config(written(file, partly)).notes
    assert note.endswith("not said there, so as transformers has it: num_hidden_layers = 32")
    assert not from_config(written(file, LLAMA)).notes and not from_config(written(file, GPT2), Batch(1, 8)).notes


def test_transformers_that_cannot_be_imported_is_done_without(tmp_path):
    file = written(tmp_path / "config.json", LLAMA)
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "__init__.py").write_text("raise ImportError('torch is too old')")
    code = f"from deepoffload.estimate import from_config; s = from_config({str(file)!r}); print(s.notes, s.source)"
    path = f"{tmp_path}:{Path(__file__).parents[2]}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": path})
    assert "transformers is installed and cannot be imported (ImportError: torch is too old)" in done.stdout, (
        done.stderr
    )
    assert "by the sizes in it" in done.stdout


SMALL_BERT = {
    "model_type": "bert", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64,
    "vocab_size": 64, "max_position_embeddings": 24,
}  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "most"),
    [
        ({**SMALL_BERT, "architectures": ["BertForMaskedLM"]}, 24),
        ({**SMALL_BERT, "model_type": "roberta", "pad_token_id": 1, "max_position_embeddings": 26}, 24),
        ({"model_type": "opt", "hidden_size": 32, "word_embed_proj_dim": 32, "num_hidden_layers": 1, "ffn_dim": 64,
          "num_attention_heads": 2, "vocab_size": 64, "max_position_embeddings": 24}, 24),
        ({**GPT2, "n_positions": 24}, 24),
        ({"model_type": "gptj", "n_embd": 32, "n_layer": 1, "n_head": 2, "rotary_dim": 8, "n_positions": 24,
          "vocab_size": 64}, 24),
    ],
    ids=["bert", "roberta", "opt", "gpt2", "gptj"],
)  # fmt: skip
def test_a_model_has_as_many_tokens_as_its_table_has_positions(tmp_path, settings, most):
    file = written(tmp_path / "config.json", settings)
    subject = from_config(file)
    assert subject.batch.length == most and f"has {most} positions" in subject.notes[0]
    assert dry_run(subject.module, subject.loss_of, types=in_bf16(subject.module)).flops > 0
    assert from_config(file, Batch(1, most)).batch.length == most
    with pytest.raises(ConfigError, match=rf"has {most} positions, so .* cannot have {most + 1} tokens"):
        from_config(file, Batch(1, most + 1))


def test_positions_without_a_table_are_no_limit(tmp_path):
    subject = from_config(written(tmp_path / "config.json", {**LLAMA, "max_position_embeddings": 24}), Batch(1, 40))
    assert subject.batch.length == 40 and "states 24 positions" in subject.notes[0]
    by_sizes = from_config(tmp_path / "config.json", Batch(1, 40), arithmetic=True)
    assert by_sizes.batch.length == 40 and "states 24 positions" in by_sizes.notes[-1] and "of 40" in by_sizes.notes[-1]
    assert not any("states" in said for said in from_config(tmp_path / "config.json", Batch(1, 24)).notes)


def test_a_context_beyond_the_positions_is_said(tmp_path, capsys):
    (tmp_path / "machine.json").write_text('{"host_memory_bytes": "1GiB"}')
    asked = ["--inference", "--machine", str(tmp_path / "machine.json"), "--config"]
    written(tmp_path / "config.json", {**LLAMA, "max_position_embeddings": 24})
    assert main([*asked, str(tmp_path), "--context", "40", "--json"]) == 0
    said = capsys.readouterr()
    assert "states 24 positions" in said.err and "of 40 tokens" in said.err
    assert json.loads(said.out)["notes"] == said.err.splitlines()[-1:]
    written(tmp_path / "config.json", {**GPT2, "n_positions": 24})
    assert main([*asked, str(tmp_path), "--context", "40"]) == 2
    assert "has 24 positions, so its sequences cannot have 40 tokens" in capsys.readouterr().err
    assert main([*asked, str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["context"] == 24


def test_what_depends_on_values_is_refused_before_it_is_built(tmp_path):
    """Switch Transformers ask which experts are used, and call a kernel for each."""
    settings = {
        "model_type": "switch_transformers", "d_model": 8, "d_kv": 8, "d_ff": 8, "num_layers": 9000, "num_heads": 1,
        "num_decoder_layers": 9000, "num_experts": 2048, "num_sparse_encoder_layers": 9000, "vocab_size": 64,
        "num_sparse_decoder_layers": 9000, "pad_token_id": 0, "decoder_start_token_id": 0,
    }  # fmt: skip
    with pytest.raises(UsageError, match="depends on values .*nonzero.*Give the number of parameters"):
        from_config(written(tmp_path / "config.json", settings))


def test_a_config_that_is_not_there_or_no_json(tmp_path):
    with pytest.raises(ConfigError, match="config.json"):
        from_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        from_config(tmp_path)


def test_counts_give_a_decoder_of_that_size():
    subject = from_counts(125_000_000, 12, 768)
    assert subject.num_parameters == pytest.approx(125e6, rel=1e-3)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((0, 1, 1), "parameters"),
        ((10**6, -1, 64), "layers"),
        ((10**6, 1, 0), "hidden"),
        ((10**6, 100, 4096), "too few"),
    ],
)
def test_counts_that_make_no_sense(arguments, named):
    with pytest.raises(ConfigError, match=named):
        from_counts(*arguments)


def test_a_live_module_is_left_as_it_is():
    model = TinyGPT(checkpointing=False)
    before = {name: (id(param), param.clone()) for name, param in model.named_parameters()}
    run = dry_run(model, lambda call: call(torch.zeros(2, 16).long()).sum(), windows=list(model.blocks))
    assert run.recomputes and run.peak_bytes > 0
    for name, param in model.named_parameters():
        identity, values = before[name]
        assert id(param) == identity and torch.equal(param, values) and param.grad is None
    assert not model.blocks[0]._forward_hooks and not model.blocks[0]._forward_pre_hooks


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_model_and_its_tokens_may_be_on_the_meta_device(device):
    """They have shapes, which is all that is looked at."""
    found = []
    for tokens_device in ("cpu", device):
        with torch.device(tokens_device):
            tokens = torch.zeros(2, 16).long()
        with torch.device(device):
            model = TinyGPT()

        def loss_of(call: Any, tokens: torch.Tensor = tokens, model: nn.Module = model) -> torch.Tensor:
            at = torch.arange(15, device=next(model.parameters()).device) + tokens.to(tokens.device)[:, 1:]
            return nn.functional.cross_entropy(call(tokens)[:, :-1].flatten(0, 1), at.flatten())

        found.append(dry_run(model, loss_of))
    assert found[0].peak_bytes == pytest.approx(found[1].peak_bytes, abs=256), "but for the tokens themselves"
    assert found[0].flops == found[1].flops > 0


def test_saved_bytes_are_those_that_autograd_keeps():
    """Against torch's own account of a real run."""
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16))
    kept: dict[int, int] = {}
    weights = {param.untyped_storage().data_ptr() for param in model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    x = torch.randn(8, 32)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(x).sum()
    run = dry_run(model, lambda call: call(torch.zeros(8, 32)).sum())
    assert run.saved_bytes == sum(kept.values()) + loss.nbytes
    assert run.flops == 2 * 8 * (32 * 64 + 64 * 16) * 3 - 2 * 8 * 32 * 64  # nothing goes back into the input


def test_a_model_that_looks_at_values_is_refused_with_a_way_out():
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight.sum() if x.sum().item() > 0 else self.weight.mean()

    with pytest.raises(UsageError, match="shapes alone"):
        dry_run(Looks(), lambda call: call(torch.zeros(3)))
    with pytest.raises(UsageError, match="loss"):
        dry_run(nn.Linear(3, 3), lambda call: None)


def test_what_is_no_module():
    with pytest.raises(ConfigError, match="nn.Module"):
        from_module("gpt2")  # type: ignore[arg-type]


SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
OTHERS: dict[str, dict[str, Any]] = {
    "ViTForImageClassification": {"model_type": "vit", "image_size": 32, "patch_size": 16, **SMALL},
    "CLIPModel": {
        "model_type": "clip",
        "text_config": {**SMALL, "vocab_size": 64},
        "vision_config": {**SMALL, "image_size": 32, "patch_size": 16},
    },
    "WhisperForConditionalGeneration": {
        "model_type": "whisper", "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "vocab_size": 64,
        "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
        "max_source_positions": 20, "max_target_positions": 20, "is_encoder_decoder": True,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
    },
    "ResNetForImageClassification": {
        "model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]
    },
    "MixtralForCausalLM": {
        "model_type": "mixtral", "vocab_size": 64, "num_local_experts": 4, "num_key_value_heads": 2, **SMALL
    },
    "BertForSequenceClassification": {"model_type": "bert", "vocab_size": 64, **SMALL},
    "VideoMAEForVideoClassification": {
        "model_type": "videomae", "image_size": 32, "patch_size": 16, "num_frames": 4, **SMALL
    },
}  # fmt: skip


def test_a_model_of_language_and_pictures_is_run_on_tokens(tmp_path):
    """Gemma 3 counts the places for pictures by the values of tokens."""
    text = {**SMALL, "vocab_size": 64, "num_key_value_heads": 1, "head_dim": 16, "sliding_window": 8}
    vision = {**SMALL, "image_size": 32, "patch_size": 16}
    settings = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": text,
                "vision_config": {**vision, "model_type": "siglip_vision_model"}, "mm_tokens_per_image": 4}  # fmt: skip
    subject = from_config(written(tmp_path / "config.json", settings), Batch(1, 16))
    assert "run on tokens alone" in subject.notes[0]
    assert dry_run(subject.module, subject.loss_of, types=in_bf16(subject.module)).flops > 0


def test_a_model_of_language_and_sounds_is_run_on_tokens(tmp_path):
    """Qwen2-Audio counts the places for sounds by the values of tokens, too."""
    audio = {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 64}
    settings = {"model_type": "qwen2_audio", "architectures": ["Qwen2AudioForConditionalGeneration"],
                "text_config": {"model_type": "qwen2", "vocab_size": 64, "num_key_value_heads": 1, **SMALL},
                "audio_config": {"model_type": "qwen2_audio_encoder", **audio}}  # fmt: skip
    subject = from_config(written(tmp_path / "config.json", settings), Batch(1, 16))
    assert any("where sounds are among them" in note for note in subject.notes)
    assert dry_run(subject.module, subject.loss_of, types=in_bf16(subject.module)).flops > 0


def test_layers_that_are_skipped_at_random_are_counted(tmp_path):
    """M2M100 and NLLB draw a number for each layer, which nobody has on shapes."""
    settings = {"model_type": "m2m_100", "architectures": ["M2M100ForConditionalGeneration"], "d_model": 32,
                "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
                "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 64, "is_encoder_decoder": True}  # fmt: skip
    flops = []
    for share in (0.0, 0.05):
        file = written(tmp_path / "config.json", {**settings, "encoder_layerdrop": share, "decoder_layerdrop": share})
        subject = from_config(file, Batch(1, 16))
        assert any("skips layers at random" in note for note in subject.notes) == bool(share)
        flops.append(dry_run(subject.module, subject.loss_of, types=in_bf16(subject.module)).flops)
    assert flops[0] == flops[1] > 0


@pytest.mark.parametrize("kind", OTHERS)
def test_pictures_sound_and_experts(tmp_path, kind):
    subject = from_config(written(tmp_path / "config.json", {**OTHERS[kind], "architectures": [kind]}), Batch(1, 16))
    assert subject.name == kind
    assert subject.batch.length == (1 if kind.startswith(("ViT", "ResNet", "Video")) else 16)
    run = dry_run(subject.module, subject.loss_of, types=in_bf16(subject.module))
    assert run.flops > 0 and run.saved_bytes > 0


def test_a_process_is_measured_with_what_the_model_loads(tmp_path):
    pytest.importorskip("transformers")
    subject = from_config(written(tmp_path / "config.json", LLAMA))
    assert "transformers.models.llama.modeling_llama" in subject.libraries
    assert from_counts(20_000_000, 4, 256, vocabulary=1000).libraries == ()
    bare, with_unknown = process_bytes([]), process_bytes(["there_is_no_such_module", *subject.libraries])
    assert with_unknown > bare + 64 * MIB, "transformers and torch's compiler, behind a module that is not there"
    assert process_bytes() > bare + 32 * MIB, "torch's compiler"
