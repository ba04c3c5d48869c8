"""Some training steps with random weights, for ``python -m deepoffload.estimate --tune``.

``python -m deepoffload.tuned_steps`` reads one JSON object from standard input: ``model`` (a ``ModelForm``),
``config`` (what ``initialize`` takes), ``micro_batch``, ``checkpointing``, ``tiled_loss`` and ``steps``. It writes one
JSON line for each step, ``{"seconds": ...}``, and ``{"problem": ...}`` where it cannot go on.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from typing import IO, Any

import torch
from torch import Tensor

from deepoffload.deepspeed.initialization import initialize
from deepoffload.errors import DeepOffloadError
from deepoffload.estimate.tuning.model import ModelForm
from deepoffload.params.torch_private import tree_map
from deepoffload.runtime.context import offload_context


def step_seconds(said: Mapping[str, Any]) -> Iterator[float]:
    """Seconds of each step, as they are made.

    Raises:
        DeepOffloadError: the model cannot be built, placed or trained so.
    """
    torch.manual_seed(0)
    form = ModelForm.from_json(said["model"])
    ways = {"checkpointing": said["checkpointing"], "tiled": said["tiled_loss"]}
    with offload_context(said["config"]):
        model, loss_of, vocabulary = form.build(said["micro_batch"], **ways)
    engine = initialize(model=model)[0]

    def loss(called: Any, _: object) -> Tensor:
        def with_tokens(*args: Any, **kwargs: Any) -> Any:
            if vocabulary:
                args, kwargs = _random((args, kwargs), vocabulary)
            return called(*args, **kwargs)

        return loss_of(with_tokens)

    for _ in range(said["steps"]):
        begun = time.perf_counter()
        engine.train_batch(itertools.repeat(None), loss=loss)
        yield time.perf_counter() - begun
    engine.destroy()


def _random(inputs: Any, vocabulary: int) -> Any:
    """``inputs`` with tokens drawn at random: with equal ones there would be nothing to learn."""

    def drawn(value: Any) -> Any:
        if isinstance(value, Tensor) and value.dtype is torch.int64:
            return torch.randint(vocabulary, value.shape)
        return value

    return tree_map(drawn, inputs)


def main() -> int:
    """0 when all steps were made, 1 when not."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    try:
        for seconds in step_seconds(json.load(sys.stdin)):
            _say(answers, seconds=seconds)
    except (DeepOffloadError, RuntimeError, MemoryError) as error:
        _say(answers, problem=f"{type(error).__name__}: {' '.join(str(error).split())}")
        return 1
    return 0


def _say(answers: IO[str], **what: object) -> None:
    answers.write(json.dumps(what) + "\n")
    answers.flush()


if __name__ == "__main__":
    sys.exit(main())
