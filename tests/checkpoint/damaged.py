"""A small checkpoint to be damaged, and something that opens it again and again."""

from __future__ import annotations

import io
import json
import pickle
import struct
import time
import types
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from deepoffload.checkpoint.block_pool import BLOCK_BYTES, BlockPool
from deepoffload.checkpoint.block_reader import BlockReader
from deepoffload.checkpoint.manifest import read_manifest
from deepoffload.checkpoint.source import CheckpointSource
from deepoffload.io.checksums import crc32c_of
from deepoffload.io.engine import IoEngine
from tests.checkpoint.training import adamw
from tests.support.models import mlp, rows

CPU_SECONDS_MAX = 3.0
BYTES_MAX = 64 << 20
"""What finding out that a file is not what it should be may take."""


def trained() -> tuple[Any, Any]:
    """A small model in bf16 and its optimizer, after a step."""
    model, optimizer = built(0)
    model(rows().bfloat16()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def built(seed: int) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = mlp(depth=3).to(torch.bfloat16)
    return model, adamw(model)


def without_checksums(content: bytes) -> bytes:
    """A file of ``torch.save`` as torch writes it when it is told to write no checksums: bytes that are changed in it
    get as far as to what reads them."""
    changed = bytearray(content)
    at = zipfile.ZipFile(io.BytesIO(content)).start_dir
    while changed[at : at + 4] == b"PK\x01\x02":
        changed[at + 16 : at + 20] = bytes(4)
        at += 46 + sum(struct.unpack_from("<HHH", changed, at + 28))
    return bytes(changed)


class Opener:
    """Opens a checkpoint again and again with one I/O engine."""

    def __init__(self) -> None:
        self.io, self.pool = IoEngine(block_bytes=BLOCK_BYTES), BlockPool()

    def open(self, folder: Path, *, data: bool = False) -> None:
        manifest = read_manifest(str(folder))
        reader = BlockReader(self.io, self.pool, str(folder), manifest, lambda nbytes: None)
        try:
            CheckpointSource(str(folder), manifest, reader)
            if data:
                for file in manifest.files:
                    reader.verify(file)
        finally:
            reader.close()


def sealed(folder: Path, body: dict[str, Any]) -> None:
    """Write a manifest whose own checksum is right."""
    rest = json.dumps(body)[1:].encode() + b"\n"
    (folder / "manifest.json").write_bytes(b'{"crc32c": "%08x",\n' % crc32c_of(rest) + rest)


def recorded(folder: Path, name: str, data: bytes) -> None:
    """Replace a small file, with its length and checksums in the manifest."""
    (folder / name).write_bytes(data)
    body = json.loads((folder / "manifest.json").read_bytes())
    del body["crc32c"]
    sums = "".join(f"{crc32c_of(data[at : at + BLOCK_BYTES]):08x}" for at in range(0, len(data), BLOCK_BYTES))
    body["files"][name] = {"bytes": len(data), "crc32c": sums}
    sealed(folder, body)


def deep(levels: int) -> Any:
    made: Any = 1
    for _ in range(levels):
        made = [made]
    return made


def nodes(tree: Any) -> Iterator[tuple[Any, Any]]:
    items = list(tree.items()) if isinstance(tree, dict) else list(enumerate(tree)) if isinstance(tree, list) else []
    for key, value in items:
        yield tree, key
        yield from nodes(value)


class Watched:
    """CPU seconds and memory of a piece of this program."""

    def __enter__(self) -> Watched:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again, see proc(5)
        self._before, self._started = memory("VmRSS"), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.cpu_s = time.process_time() - self._started
        self.more_bytes = memory("VmHWM") - self._before


def memory(field: str) -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(field))


class Stub:
    """Takes the place of DeepSpeed's classes."""

    def __init__(self, *args: Any) -> None:
        self.args = args


def inert() -> Any:
    """A pickle module for ``torch.load`` of files with DeepSpeed's classes."""

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            return Stub if module.startswith("deepspeed") else super().find_class(module, name)

    made = types.ModuleType("inert")
    made.__dict__.update(Unpickler=Unpickler, load=pickle.load)
    return made


def nested(depth: int) -> Any:
    """A number in so many lists."""
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def round_list() -> Any:
    """A list that contains itself."""
    value: list[Any] = []
    value.append(value)
    return value
