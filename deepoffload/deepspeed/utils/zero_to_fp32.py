"""``deepspeed.utils.zero_to_fp32``: exact fp32 weights out of a checkpoint, ours or one that DeepSpeed has saved."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from deepoffload.checkpoint.convert.exports import write_pickled_weights, write_weights
from deepoffload.checkpoint.convert.output import check_free
from deepoffload.checkpoint.convert.own_reader import open_own
from deepoffload.checkpoint.convert.tensors import Values, in_fp32, numel_of
from deepoffload.checkpoint.convert.training_run import TrainingRun
from deepoffload.checkpoint.convert.zero import read_zero
from deepoffload.checkpoint.shards import shard_bytes
from deepoffload.checkpoint.tags import checked_directory, checked_tag, folder_to_load
from deepoffload.deepspeed.names import submodules
from deepoffload.errors import UnsupportedError, UsageError

_Model = TypeVar("_Model", bound=nn.Module)

OUTPUT_DTYPE_NAMES = {
    **dict.fromkeys(("fp32", "float32"), torch.float32),
    **dict.fromkeys(("fp16", "float16"), torch.float16),
    **dict.fromkeys(("bf16", "bfloat16"), torch.bfloat16),
}
"""DeepSpeed's names of the types that weights can be written in."""


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Tensor]:
    """The whole ``state_dict`` in fp32, in memory. ``deepoffload.TrainingState`` loads without that.

    Args:
        tag: what the file ``latest`` names when not said.
        exclude_frozen_parameters: leave out what no optimizer trained and is no buffer.
        lazy_mode: only False.

    Raises:
        UsageError: the checkpoint is missing or damaged. UnsupportedError: ``lazy_mode``.
    """
    if lazy_mode:
        raise UnsupportedError(
            "lazy_mode=True: use convert_zero_checkpoint_to_fp32_state_dict, which goes tensor by tensor, and open its "
            "files with safetensors.safe_open"
        )
    with _opened(checkpoint_dir, tag) as run:
        left_out = _frozen(run) if exclude_frozen_parameters else set()
        weights = {name: _tensor(run.exact(name)) for name in run.weights if name not in left_out}
        return weights | {alias: weights[name] for alias, name in run.aliases.items() if name in weights}


def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    dtype: torch.dtype | str = torch.float32,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the weights tensor by tensor: as ``pytorch_model.bin`` for ``torch.load``, or as safetensors.

    Args:
        dtype: of floating-point weights, which are rounded from their fp32 masters.
        max_shard_size: of a file; None writes one.
        safe_serialization: safetensors; with the names of the hub where the model is one of transformers.
        exclude_frozen_parameters: only with ``safe_serialization=False``.

    Raises:
        UsageError: the checkpoint is missing or damaged, the place is taken, or another type. IoFailure: no room.
    """
    wanted = OUTPUT_DTYPE_NAMES.get(str(dtype).removeprefix("torch.").lower())
    if wanted is None:
        raise UsageError(f"dtype={dtype!r}: expected one of {', '.join(OUTPUT_DTYPE_NAMES)}")
    if safe_serialization and exclude_frozen_parameters:
        raise UnsupportedError(
            "exclude_frozen_parameters=True with safe_serialization=True: all weights are written; leave one out"
        )
    limit = sys.maxsize if max_shard_size is None else shard_bytes(max_shard_size)
    output = check_free(os.fspath(output_dir))
    with _opened(checkpoint_dir, tag) as run:
        if safe_serialization:
            write_weights(run, output, limit, lambda nbytes: None, wanted)
        else:
            write_pickled_weights(run, output, limit, wanted, _frozen(run) if exclude_frozen_parameters else ())


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """:func:`convert_zero_checkpoint_to_state_dict` in fp32."""
    convert_zero_checkpoint_to_state_dict(
        checkpoint_dir, output_dir, torch.float32, max_shard_size, safe_serialization, tag, exclude_frozen_parameters
    )


def main(args: Sequence[str] | None = None) -> None:
    """DeepSpeed's command ``zero_to_fp32.py``. Raises SystemExit: what does not work is said, with status 1."""
    from deepoffload.deepspeed.utils.zero_to_torch import run  # it needs the function above

    run(args, asks_for_type=False)


def load_state_dict_from_zero_checkpoint(
    model: _Model, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> _Model:
    """Put the fp32 weights of a checkpoint into a model, and return it. A weight takes them in its own type."""
    model.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False)
    return model


@contextlib.contextmanager
def _opened(checkpoint_dir: str | os.PathLike[str], tag: str | None) -> Iterator[TrainingRun]:
    directory = checked_directory(checkpoint_dir)
    try:
        folder = folder_to_load(directory, None if tag is None else checked_tag(tag))
    except UsageError as ours:
        try:
            theirs = read_zero(directory, tag)
        except UsageError:
            raise ours from None
        yield theirs
        return
    if folder is None:
        yield read_zero(directory, tag)
        return
    with open_own(folder, lambda nbytes: None) as run:
        yield run


def _frozen(run: TrainingRun) -> set[str]:
    trained = set(run.trained())
    if not trained:
        raise UsageError(
            "exclude_frozen_parameters: the checkpoint has no optimizer, so it does not say what is frozen"
        )
    return {name for name in run.weights if name not in trained and run.weights[name].dtype.is_floating_point}


def _tensor(values: Values) -> Tensor:
    best = in_fp32(values)
    return best.read(0, numel_of(best)).reshape(best.shape).clone(memory_format=torch.contiguous_format)


__getattr__ = submodules(__name__, (), "utils.zero_to_fp32")
