"""Text as bytes, and batches of it."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

TEXT_BYTES_MAX = 32 << 20
"""As much text as is read: it stays in memory, and a demonstration sees far less of it."""

_SKIPPED = frozenset({"__pycache__", "site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"})


def standard_library() -> Path:
    """Where the running Python keeps the source of its standard library: text that is always there."""
    return Path(sysconfig.get_paths()["stdlib"])


def load_text(path: Path | None) -> bytes:
    """The text of a file, or of all text files below a directory in the order of their names.

    ``None``: the standard library's ``*.py``. Files with a zero byte are no text. At most ``TEXT_BYTES_MAX`` are read.

    Raises:
        ValueError: there is no text at ``path``.
        OSError: it cannot be read.
    """
    root = standard_library() if path is None else path
    files = _files(root, ".py" if path is None else "") if root.is_dir() else iter([root])
    parts: list[bytes] = []
    room = TEXT_BYTES_MAX
    for file in files:
        with open(file, "rb") as stream:
            part = stream.read(room)
        if b"\0" not in part:
            parts.append(part)
            room -= len(part)
        if room <= 0:
            break
    text = b"".join(parts)
    if not text:
        raise ValueError(f"{root} holds no text")
    return text


def _files(root: Path, suffix: str) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED and not name.startswith("."))
        for name in sorted(names):
            path = Path(folder) / name
            if name.endswith(suffix) and not name.startswith(".") and path.is_file():
                yield path


class Batches:
    """Random stretches of a text. Batch number ``n`` is the same whenever it is asked for.

    Args:
        text: at least ``seq + 1`` bytes.
    """

    def __init__(self, text: bytes, *, batch: int, seq: int, seed: int) -> None:
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._batch = batch
        self._seq = seq
        self._seed = seed

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets, ``(batch, seq)`` int64 each."""
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + number)
        starts = torch.randint(len(self._text) - self._seq, (self._batch,), generator=generator)
        rows = torch.stack([self._text[start : start + self._seq + 1] for start in starts.tolist()]).long()
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
