"""transformers' ``Trainer`` as tests run it: quiet, on the CPU, with batches of two."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def arguments_of(folder: Path, **more: Any) -> Any:
    """``TrainingArguments`` that log every step; a test that needs no transformers does not import it."""
    from transformers import TrainingArguments

    settings = {"logging_steps": 1, "save_strategy": "no", "per_device_train_batch_size": 2, **more}
    return TrainingArguments(
        output_dir=str(folder),
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **settings,
    )
