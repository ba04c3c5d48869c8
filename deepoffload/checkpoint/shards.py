"""Which tensor goes into which file: the Hugging Face layout."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deepoffload.checkpoint.safetensors_file import Entry
from deepoffload.config.units import parse_bytes
from deepoffload.errors import UsageError

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
PICKLED_NAME = "pytorch_model.bin"
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


@dataclass(frozen=True)
class Layout:
    """Files and what is in them; ``index`` is the text of the index file, None for a single file."""

    files: Mapping[str, tuple[Entry, ...]]
    index: str | None
    total_bytes: int


def split(
    entries: Sequence[Entry], max_shard_bytes: int, num_parameters: int, single_name: str = WEIGHTS_NAME
) -> Layout:
    """Fill shards in order, as ``huggingface_hub`` does; a tensor above ``max_shard_bytes`` gets its own shard.

    Args:
        single_name: of the file where one is enough; those of several, and of their index, are made of it.
    """
    shards: list[list[Entry]] = []
    current: list[Entry] = []
    current_bytes = 0
    for entry in entries:
        if entry.nbytes > max_shard_bytes:
            shards.append([entry])
            continue
        if current_bytes + entry.nbytes > max_shard_bytes:
            shards.append(current)
            current, current_bytes = [], 0
        current.append(entry)
        current_bytes += entry.nbytes
    if current or not shards:
        shards.append(current)
    total = sum(entry.nbytes for entry in entries)
    if len(shards) == 1:
        return Layout({single_name: tuple(shards[0])}, None, total)
    stem, dot, kind = single_name.rpartition(".")
    files = {
        f"{stem}-{number:05d}-of-{len(shards):05d}{dot}{kind}": tuple(shard) for number, shard in enumerate(shards, 1)
    }
    index = {
        "metadata": {"total_parameters": num_parameters, "total_size": total},
        "weight_map": {entry.name: name for name, shard in files.items() for entry in shard},
    }
    return Layout(files, json.dumps(index, indent=2, sort_keys=True) + "\n", total)


def is_weight_file(name: str) -> bool:
    """True for names that a save of ours, or of transformers, may have left in a directory."""
    return name in (WEIGHTS_NAME, INDEX_NAME) or _SHARD.fullmatch(name) is not None


def shard_bytes(max_shard_size: int | str) -> int:
    """The size that a user has given.

    Raises:
        UsageError: it is none, or not positive.
    """
    try:
        nbytes = parse_bytes(max_shard_size)
    except ValueError as error:
        raise UsageError(f"max_shard_size: {error}") from error
    if nbytes < 1:
        raise UsageError("max_shard_size has to be positive")
    return nbytes
