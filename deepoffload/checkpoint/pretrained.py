"""``save_pretrained``: a paged model as safetensors files in the Hugging Face layout, streamed inside the budget."""

from __future__ import annotations

import os
from functools import partial

from torch import nn

from deepoffload.checkpoint import transformers_format
from deepoffload.checkpoint.block_writer import write_small_file
from deepoffload.checkpoint.directory import prepare, publish, staging, sync_file
from deepoffload.checkpoint.progress import Progress
from deepoffload.checkpoint.safetensors_file import failure, write_file
from deepoffload.checkpoint.several_ranks import Alive, on_rank_0
from deepoffload.checkpoint.shards import INDEX_NAME, shard_bytes, split
from deepoffload.checkpoint.tags import checked_directory
from deepoffload.checkpoint.weights import HasModule, plan_weights, unwrapped
from deepoffload.config.units import format_bytes
from deepoffload.errors import UnsupportedError
from deepoffload.memory.lock import SHIELD
from deepoffload.params.torch_private import outside_user_modes

CONFIG_FILES_BYTES = 1 << 20
"""Room asked for in addition to the weights, for configuration files and the index."""


def save_pretrained(
    model: nn.Module | HasModule,
    directory: str | os.PathLike[str],
    max_shard_size: int | str = "5GB",
    safe_serialization: bool = True,
) -> None:
    """Write the weights (and, for models of transformers, the configuration) to ``directory``.

    Parameters are fetched one unit at a time and written from where they lie, so that memory stays within the budget
    plus a few MiB. Names and packing are those of the checkpoint format, so ``from_pretrained`` and every other reader
    of safetensors can load the files. Weights have the dtype they compute in. Tied weights are stored once. The files
    appear when all of them are complete; a save that fails or is killed leaves an earlier one as it was.

    With several ranks, rank 0 writes. The others wait until the files are there, and raise what rank 0 raises: call it
    on all ranks. Rank 0 waits for nobody, so it may also call it alone.

    Args:
        model: any module, paged in part, in whole or not at all; also what ``initialize`` returns.
        directory: made when it does not exist.
        max_shard_size: bytes, or text such as ``"5GB"``; larger models are split, with an index.
        safe_serialization: only True: pickled files would need all weights in memory.

    Raises:
        UsageError: the directory or an argument cannot be used. UnsupportedError: what the format cannot hold,
        quantized models, adapters. IoFailure: the disk is full or failed. ClosedError: the model's engine is closed.
        RankError: a rank has gone; on other ranks than 0, an ``IoFailure`` of rank 0.
    """
    if not safe_serialization:
        raise UnsupportedError(
            "safe_serialization=False would pickle the whole model from memory; leave it out: safetensors files are "
            "written in pieces, and torch and transformers read them"
        )
    module = unwrapped(model, "save_pretrained")
    size = shard_bytes(max_shard_size)
    on_rank_0(module, f"save_pretrained to {directory}", partial(_write, module, directory, size))


def _write(module: nn.Module, directory: str | os.PathLike[str], size_bytes: int, alive: Alive) -> None:
    target = checked_directory(directory)
    transformers_format.refuse_what_is_not_plain(module)
    plan = plan_weights(module, hub_names=transformers_format.is_pretrained_model(module))
    layout = split(plan.entries, size_bytes, plan.num_parameters)
    plan.check_headers(layout)
    made = prepare(target, layout.total_bytes + CONFIG_FILES_BYTES)
    count = f"{len(layout.files)} file{'' if len(layout.files) == 1 else 's'}"
    saved = f"saved {format_bytes(layout.total_bytes)} in {count} to {target}"
    progress = Progress(layout.total_bytes, f"saving to {target}", saved)

    def advance(nbytes: int) -> None:
        progress.advance(nbytes)
        alive()

    with staging(target, made) as staged:
        try:
            if transformers_format.is_pretrained_model(module):
                transformers_format.write_config_files(module, staged)
            for name in os.listdir(staged):
                sync_file(os.path.join(staged, name))
        except OSError as error:
            raise failure("writing", error, error.filename or staged, 0) from error
        if layout.index is not None:
            write_small_file(os.path.join(staged, INDEX_NAME), layout.index.encode())
        with outside_user_modes():
            for name, entries in layout.files.items():
                file = os.path.join(staged, name)
                SHIELD.let_through(write_file, (file, entries, plan.metadata, advance))
        publish(staged, target)
    progress.done()
