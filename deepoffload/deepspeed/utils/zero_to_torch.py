"""``deepspeed.utils.zero_to_torch``: weights of any floating-point type out of a checkpoint, as a command."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from deepoffload.deepspeed.names import submodules
from deepoffload.deepspeed.utils.zero_to_fp32 import OUTPUT_DTYPE_NAMES, convert_zero_checkpoint_to_state_dict
from deepoffload.errors import DeepOffloadError


def main(args: Sequence[str] | None = None) -> None:
    """DeepSpeed's command ``zero_to_torch.py``. Raises SystemExit: what does not work is said, with status 1."""
    run(args, asks_for_type=True)


def run(args: Sequence[str] | None, *, asks_for_type: bool) -> None:
    """Convert as the arguments of a command say; fp32 where ``asks_for_type`` is false."""
    parser = argparse.ArgumentParser(description="Convert a checkpoint of deepoffload's or DeepSpeed's to weights.")
    parser.add_argument("checkpoint_dir", help="the folder that has the file latest")
    parser.add_argument("output_dir", help="a new folder for the weights")
    if asks_for_type:
        parser.add_argument("--dtype", choices=sorted(OUTPUT_DTYPE_NAMES), required=True, help="of the weights")
    parser.add_argument("--max_shard_size", default="5GB", help="of a file, such as 500MB")
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors")
    parser.add_argument("-t", "--tag", help="of the checkpoint, such as global_step1")
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="leave out what was not trained")
    parser.add_argument("-d", "--debug", action="store_true", help="accepted")
    said = parser.parse_args(args)
    try:
        convert_zero_checkpoint_to_state_dict(
            said.checkpoint_dir,
            said.output_dir,
            dtype=said.dtype if asks_for_type else "fp32",
            max_shard_size=said.max_shard_size,
            safe_serialization=said.safe_serialization,
            tag=said.tag,
            exclude_frozen_parameters=said.exclude_frozen_parameters,
        )
    except DeepOffloadError as error:
        parser.exit(1, f"{parser.prog}: {error}\n")


__getattr__ = submodules(__name__, (), "utils.zero_to_torch")
