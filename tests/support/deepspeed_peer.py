"""DeepSpeed as the other side of checkpoints: trains a small model with ZeRO on several processes, saves and continues.

Run it with a Python that has DeepSpeed 0.19.8 (benchmarks/end_to_end/requirements-deepspeed.txt)::

    python tests/support/deepspeed_peer.py make OUT --stage 3 --ranks 2 --precision bf16
    python tests/support/deepspeed_peer.py universal OUT
    python tests/support/deepspeed_peer.py continue UNIVERSAL --stage 2 --ranks 3 --precision bf16
    python tests/support/deepspeed_peer.py fixtures tests/checkpoint/data/deepspeed_0.19.8.tar.xz

``make`` also writes ``losses.json``, with those of the steps after the save. ``universal`` runs DeepSpeed's converter,
and writes what it makes of weights and moments to ``expected.pt``. ``continue`` compares what DeepSpeed has loaded with
the files, bit by bit. (DeepSpeed has no fp16 on a CPU.)
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

STEPS = 3
BATCH = 6
TOKENS = 37
ARRAYS = ("fp32", "exp_avg", "exp_avg_sq")
FIXTURES = {  # name: stage, ranks, precision, whether a universal checkpoint is made of it, too
    "zero1": (1, 2, "bf16", False),
    "zero2": (2, 3, "bf16", True),
    "zero2_one": (2, 1, "fp32", False),
    "zero3": (3, 2, "bf16", True),
    "zero3_fp32": (3, 3, "fp32", False),
    "zero3_one": (3, 1, "bf16", False),
}


class PeerModel(nn.Module):
    """Odd sizes, a tied head, a frozen layer, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(TOKENS, 10)
        self.frozen = nn.Linear(10, 10)
        self.up = nn.Linear(10, 7)
        self.norm = nn.LayerNorm(7)
        self.down = nn.Linear(7, 10, bias=False)
        self.head = nn.Linear(10, TOKENS, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor([0.5, 1.5, 1.0]))
        self.frozen.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        hidden = hidden + self.down(self.norm(self.up(self.frozen(hidden).tanh()))) * self.scale[1].to(hidden.dtype)
        logits = self.head(hidden).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())


def tokens_of(step: int) -> Tensor:
    """The whole batch of a step."""
    return torch.randint(0, TOKENS, (BATCH, 5), generator=torch.Generator().manual_seed(100 + step))


def param_groups(model: nn.Module) -> list[dict[str, object]]:
    """Matrices with weight decay, vectors without; frozen parameters in none."""
    trained = [param for param in model.parameters() if param.requires_grad]
    return [
        {"params": [param for param in trained if param.dim() > 1], "weight_decay": 0.1},
        {"params": [param for param in trained if param.dim() < 2], "weight_decay": 0.0},
    ]


def configuration(stage: int, ranks: int, precision: str, *, universal: bool) -> dict[str, object]:
    return {
        "train_micro_batch_size_per_gpu": BATCH // ranks,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, "sub_group_size": 150, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "checkpoint": {"load_universal": universal},
        **({"bf16": {"enabled": True}} if precision == "bf16" else {}),
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_min_lr": 0.001, "warmup_max_lr": 0.01, "warmup_num_steps": 5},
        },
    }


def _engine(stage: int, ranks: int, precision: str, *, universal: bool):  # type: ignore[no-untyped-def]
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    model = PeerModel()
    optimizer = torch.optim.AdamW(param_groups(model), lr=1e-2, betas=(0.9, 0.95), eps=1e-6)
    config = configuration(stage, ranks, precision, universal=universal)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def _train(engine, first: int, ranks: int) -> list[float]:  # type: ignore[no-untyped-def]
    losses = []
    for step in range(first, first + STEPS):
        loss = engine(tokens_of(step).chunk(ranks)[engine.global_rank])
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        torch.distributed.all_reduce(mean)
        losses.append(mean.item() / ranks)
    return losses


def _state(engine) -> dict[str, dict[str, Tensor]]:  # type: ignore[no-untyped-def]
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found = {}
    for name, param in engine.module.named_parameters():
        if param.requires_grad:
            found[name] = {
                key: safe_get_full_fp32_param(param) if key == "fp32" else safe_get_full_optimizer_state(param, key)
                for key in ARRAYS
            }
    return found


def _work(rank: int, parsed: argparse.Namespace, port: int) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(parsed.ranks), LOCAL_SIZE=str(parsed.ranks))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    loading = parsed.what == "continue"
    engine = _engine(parsed.stage, parsed.ranks, parsed.precision, universal=loading)
    if loading:
        engine.load_checkpoint(parsed.directory)
        _compare(engine, Path(parsed.directory))
    losses = _train(engine, engine.global_steps, parsed.ranks)
    result = {"losses": losses}
    if not loading:
        engine.save_checkpoint(parsed.directory, client_state={"epoch": 2, "note": "hello", "seen": torch.arange(3)})
        result = {"losses": losses, "next": _train(engine, STEPS, parsed.ranks)}
        if rank == 0:
            (Path(parsed.directory) / "losses.json").write_text(json.dumps(result))
    if rank == 0:
        print("RESULT " + json.dumps(result), flush=True)


def _compare(engine, directory: Path) -> None:  # type: ignore[no-untyped-def]
    folder = directory / (directory / "latest_universal").read_text() / "zero"
    for name, held in _state(engine).items():
        for key, value in held.items():
            saved = torch.load(folder / name / f"{key}.pt", weights_only=True)
            saved = saved["param"] if isinstance(saved, dict) else saved
            assert torch.equal(value.flatten(), saved.flatten()), f"{name}.{key} is not what the file has"


def _universal(directory: str) -> None:
    source = f"{directory}/global_step{STEPS}"
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    command += ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    command += ["--input_folder", source, "--output_folder", f"{source}_universal"]
    subprocess.run(command, check=True)
    held = {}
    for folder in sorted(path for path in Path(f"{source}_universal/zero").iterdir() if (path / "exp_avg.pt").exists()):
        files = {key: torch.load(folder / f"{key}.pt", weights_only=True) for key in ARRAYS}
        held[folder.name] = {key: value["param"] if isinstance(value, dict) else value for key, value in files.items()}
    torch.save(held, Path(directory) / "expected.pt")


def _fixtures(archive: str) -> None:
    with tempfile.TemporaryDirectory() as made, tarfile.open(archive, "w:xz", preset=9) as out:
        for name, (stage, ranks, precision, universal) in FIXTURES.items():
            place = Path(made) / name
            command = [sys.executable, __file__, "make", str(place), "--precision", precision]
            subprocess.run([*command, "--stage", str(stage), "--ranks", str(ranks)], check=True)
            _universal(str(place))
            if not universal:
                shutil.rmtree(place / f"global_step{STEPS}_universal")
                (place / "latest_universal").unlink()
            for script in place.glob("*.py"):  # DeepSpeed copies its own tools into every checkpoint
                script.unlink()
            for file in sorted(path for path in place.rglob("*") if path.is_file()):
                info = tarfile.TarInfo(str(file.relative_to(made)))
                data = file.read_bytes()
                info.size = len(data)
                out.addfile(info, io.BytesIO(data))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("make", "universal", "continue", "fixtures"))
    parser.add_argument("directory")
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--precision", default="bf16")
    parsed = parser.parse_args()
    os.environ["DS_ACCELERATOR"] = "cpu"
    if parsed.what == "universal":
        _universal(parsed.directory)
    elif parsed.what == "fixtures":
        _fixtures(parsed.directory)
    else:
        os.makedirs(parsed.directory, exist_ok=True)
        port = 20000 + os.getpid() % 20000
        torch.multiprocessing.spawn(_work, (parsed, port), nprocs=parsed.ranks)


if __name__ == "__main__":
    main()
