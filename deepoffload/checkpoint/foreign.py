"""Says what a folder without a manifest of ours is, and how to read it all the same."""

from __future__ import annotations

import os
import re

from deepoffload.checkpoint.file_layout import TRAINING_NAME
from deepoffload.checkpoint.shards import is_weight_file
from deepoffload.errors import UsageError

PROGRAM = "python -m deepoffload.checkpoint"

_DEEPSPEED = re.compile(r"(zero_pp_rank_\d+_)?mp_rank_\d+_(model|optim)_states\.pt|.*_optim_states\.pt")
_NAMES_MAX = 10_000


def refuse_foreign(folder: str) -> None:
    """Raise for a folder that another program has saved, with the command that converts it.

    Args:
        folder: it has no manifest.

    Raises:
        UsageError: it is known what it is.
    """
    try:
        with os.scandir(folder) as entries:
            names = {entry.name for entry, _ in zip(entries, range(_NAMES_MAX), strict=False)}
    except OSError:
        return
    directory, tag = os.path.split(folder)
    if "zero" in names:
        what, command = "a universal checkpoint of DeepSpeed", f"from-universal {directory} --tag {tag}"
    elif any(map(_DEEPSPEED.fullmatch, names)):
        what, command = "a checkpoint of DeepSpeed", f"from-deepspeed {directory} --tag {tag}"
    elif ".metadata" in names:
        what, command = "a checkpoint of torch.distributed.checkpoint", f"from-dcp {folder}"
    elif TRAINING_NAME not in names and any(map(is_weight_file, names)):
        raise UsageError(
            f"{folder} has weights alone, and no training state: load them with transformers' from_pretrained, or with "
            "safetensors.torch.load_file and load_state_dict"
        )
    else:
        return
    raise UsageError(
        f"{folder} is {what}. Convert it, which takes little memory, and load the result: `{PROGRAM} {command} OUTPUT`"
    )
