"""The command line of ``train_gpt.py``: everything that can be wrong with it is said before anything starts."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from deepoffload.config.units import format_bytes, parse_bytes
from gpt.data import standard_library
from gpt.model import SIZES, Shape
from gpt.ranks import this_rank

BUDGET_PARTS = 6
"""The default budget is this part of weights + gradients + optimizer state, rounded down to 16 MiB."""

STATE_BYTES = {"bf16": 14, "fp32": 16}
"""Per parameter: weight, gradient, and optimizer state (for bf16 with the lower half of the fp32 master)."""

PLAIN_BYTES = {"bf16": 22, "fp32": 20}
"""What plain PyTorch takes per parameter at its peak: weight, gradient, their fp32 masters (bf16), two moments."""

_MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")


@dataclass(frozen=True)
class Options:
    """What was asked for. Sizes in bytes; ``nvme_path`` None: no disk; ``clip`` None: no clipping."""

    size: str
    precision: str
    data: Path | None
    host_budget: int
    nvme_path: Path
    steps: int
    batch: int
    seq: int
    lr: float
    clip: float | None
    accumulate: int
    seed: int
    checkpointing: bool
    generate: int
    save: Path | None
    save_every: int
    resume: bool
    json: Path | None
    compare: bool
    plain: bool

    @property
    def shape(self) -> Shape:
        return SIZES[self.size]

    @property
    def num_parameters(self) -> int:
        return self.shape.num_parameters(self.seq)

    @property
    def model_bytes(self) -> int:
        """Weights + gradients + optimizer state."""
        return self.num_parameters * STATE_BYTES[self.precision]


def parse_options(arguments: Sequence[str] | None = None) -> Options:
    """Exits with a usage message and status 2 when the arguments cannot work."""
    parser = _parser()
    said = parser.parse_args(arguments)
    shape, seq = SIZES[said.size], said.seq
    model_bytes = shape.num_parameters(seq) * STATE_BYTES[said.precision]
    budget = said.host_budget if said.host_budget is not None else default_budget(model_bytes)
    nvme_path = said.nvme_path if said.nvme_path is not None else default_nvme_path()
    if nvme_path is None:
        parser.error("--nvme-path: no writable directory on a disk was found; name one")
    options = Options(
        size=said.size,
        precision=said.precision,
        data=said.data,
        host_budget=budget,
        nvme_path=nvme_path,
        steps=said.steps,
        batch=said.batch,
        seq=seq,
        lr=said.lr,
        clip=said.clip or None,
        accumulate=said.accumulate,
        seed=said.seed,
        checkpointing=said.checkpointing,
        generate=said.generate,
        save=said.save,
        save_every=said.save_every,
        resume=said.resume,
        json=said.json,
        compare=said.compare,
        plain=said.plain,
    )
    problem = _problem(options)
    if problem is not None:
        parser.error(problem)
    return options


def default_budget(model_bytes: int) -> int:
    step = 16 << 20
    return max(step, model_bytes // BUDGET_PARTS // step * step)


def default_nvme_path() -> Path | None:
    """The repository, else the current, the home or the temporary directory: the first writable one on a disk.

    The swap file has no name from the moment it exists, so nothing appears there and nothing can stay behind.
    """
    for path in (Path(__file__).resolve().parents[2], Path.cwd(), Path.home(), Path("/var/tmp")):
        if os.access(path, os.W_OK | os.X_OK) and file_system(path) not in _MEMORY_FILE_SYSTEMS:
            return path
    return None


def file_system(path: Path) -> str:
    """The type of the file system that holds ``path``, such as ``"ext4"``; empty when it is not known."""
    real = os.path.realpath(path)
    found = max(
        (part for part in psutil.disk_partitions(all=True) if _holds(part.mountpoint, real)),
        key=lambda part: len(part.mountpoint),
        default=None,
    )
    return found.fstype if found is not None else ""


def _holds(mountpoint: str, path: str) -> bool:
    return path == mountpoint or path.startswith(mountpoint.rstrip("/") + "/")


def _problem(options: Options) -> str | None:
    if this_rank().world_size > 1 and (options.plain or options.compare or options.save_every):
        return "--plain, --compare and --save-every are for one process: leave them out, or start without torchrun"
    if options.plain and (options.compare or options.save):
        return "--plain is the other side of --compare, and has nothing to save with"
    path = options.nvme_path
    if not options.plain:
        if not path.is_dir():
            return f"--nvme-path {path}: {'is not a directory' if path.exists() else 'does not exist'}"
        if not os.access(path, os.W_OK | os.X_OK):
            return f"--nvme-path {path}: this user may not write there"
    if options.save is None and (options.save_every or options.resume):
        return f"{'--save-every' if options.save_every else '--resume'} needs --save DIR"
    if options.resume and not options.save_every:
        return "--resume needs --save-every N: it continues a run that was saved that way"
    if options.resume and options.compare:
        return "--compare trains from the beginning, --resume does not"
    if options.save is not None and options.save.exists() and not options.resume:
        if not options.save.is_dir() or any(options.save.iterdir()):
            hint = "; --resume continues the run in it" if (options.save / "latest").exists() else ""
            return f"--save {options.save}: exists and is not an empty directory{hint}"
    for name, file in (("--save", options.save), ("--json", options.json)):
        if file is not None and not os.access(file.resolve().parent, os.W_OK | os.X_OK):
            return f"{name} {file}: its directory does not exist or is not writable"
    if options.json is not None and options.json.is_dir():
        return f"--json {options.json}: is a directory"
    if options.compare or options.plain:
        needed = options.num_parameters * PLAIN_BYTES[options.precision]
        available = psutil.virtual_memory().available
        if needed > available:
            flag = "--plain" if options.plain else "--compare"
            return f"{flag}: plain PyTorch needs {format_bytes(needed)}, and {format_bytes(available)} are available"
    return None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="train_gpt.py",
        description="Train a byte-level GPT whose weights, gradients and optimizer state live on disk.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--size", choices=SIZES, default="125m", help="parameters, about")
    add("--precision", choices=STATE_BYTES, default="bf16", help="of the weights; optimizer state is fp32 in both")
    add("--data", type=_path, help=f"text: a file or a directory; not said: *.py of {standard_library()}")
    add("--host-budget", type=_bytes, metavar="BYTES", help="memory for weights, gradients, optimizer state and "
        f"buffers, such as 256MiB; not said: 1/{BUDGET_PARTS} of the first three")  # fmt: skip
    add("--nvme-path", type=Path, metavar="DIR", help="where the swap file lives; not said: next to this repository")
    add("--steps", type=_whole(1), default=40, help="optimizer steps")
    add("--batch", type=_whole(1), default=8, help="sequences per batch")
    add("--seq", type=_whole(2), default=128, help="bytes per sequence")
    add("--lr", type=_number, default=2e-4, help="highest learning rate")
    add("--clip", type=_number, default=1.0, help="global gradient norm; 0: no clipping")
    add("--accumulate", type=_whole(1), default=1, help="batches per optimizer step")
    add("--seed", type=_whole(0), default=0, help="of weights and batches")
    add("--checkpointing", action="store_true", help="recompute activations in backward")
    add("--generate", type=_whole(0), nargs="?", const=120, default=0, metavar="N", help="write N bytes at the end")
    add("--save", type=Path, metavar="DIR", help="write the trained weights there as safetensors")
    add(
        "--save-every",
        type=_whole(0),
        default=0,
        metavar="N",
        help="save the run there every N steps, and at the end",
    )
    add("--resume", action="store_true", help="continue from the newest of these, if there is one")
    add("--json", type=Path, metavar="FILE", help="write all numbers there")
    add("--compare", action="store_true", help="train the same in plain PyTorch, in a separate process")
    add("--plain", action="store_true", help="train in plain PyTorch only (what --compare starts)")
    return parser


def _whole(least: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected a whole number of at least {least}, not {text!r}")
        return int(text)

    return convert


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number of at least 0, not {text!r}")
    return value


def _bytes(text: str) -> int:
    try:
        value = parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if not value:
        raise argparse.ArgumentTypeError("expected more than 0 bytes")
    return value


def _path(text: str) -> Path:
    path = Path(text)
    if not path.exists():
        raise argparse.ArgumentTypeError(f"{text} does not exist")
    if not os.access(path, os.R_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be read")
    return path
