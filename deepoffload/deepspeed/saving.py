"""``engine.save_checkpoint`` and its like: DeepSpeed's names for writing and reading a run."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from deepoffload.checkpoint.loading import Wanted
from deepoffload.config import Config
from deepoffload.deepspeed.checkpoints import EngineCheckpoints, save_weights
from deepoffload.errors import UnsupportedError
from deepoffload.runtime.loop import TrainingLoop


class EngineSaving:
    """Part of :class:`~deepoffload.deepspeed.engine.TrainingEngine`."""

    module: nn.Module
    optimizer: torch.optim.Optimizer | None
    lr_scheduler: Any
    loop: TrainingLoop
    _config: Config
    _refuse_closed: Callable[[], None]
    _saved_by: EngineCheckpoints | None

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """Refused: the model's own method would take all weights into memory."""
        raise UnsupportedError(
            "engine.save_pretrained: use deepoffload.save_pretrained(engine, directory), which stays inside the budget"
        )

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: object = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write everything that the run consists of to ``save_dir/tag``, within the budget (docs/checkpoints.md). With
        ``checkpoint.writer.decoupled`` it returns at once, and the files are complete at a later step. In the middle of
        an update, the gradients so far are left out, with a warning. Returns True, as DeepSpeed does.

        Args:
            tag: ``global_step<n>`` when not said.
            client_state: numbers, strings, bytes, None, lists, tuples, dicts, ``argparse.Namespace``, tensors, numpy's
                arrays and numbers; :meth:`load_checkpoint` returns them.
            save_latest: name the tag in the file ``latest``. With ``zero_optimization.stage``, the scripts
                ``zero_to_fp32.py`` and ``zero_to_torch.py`` stand next to it.
            exclude_frozen_parameters: leave frozen weights out; loading leaves them as they are.

        Raises:
            UsageError: gradients wait for the step that updates, or the directory cannot be used. UnsupportedError: a
            value that a checkpoint does not hold. IoFailure: no room on the disk, or a transfer failed. Also what the
            save before failed with, if it was a decoupled one.
        """
        self._checkpoints().save(
            save_dir,
            tag,
            client_state,
            update_latest=save_latest,
            leave_out_frozen=exclude_frozen_parameters,
        )
        return True

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: object = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., object] | None = None,
    ) -> tuple[str | None, Any]:
        """Take over what :meth:`save_checkpoint` has written, also from this engine itself. With
        ``checkpoint.load_universal``: a universal checkpoint of DeepSpeed's.

        Args:
            tag: what the file ``latest`` names when not said.
            custom_load_fn: puts the weights in, as ``custom_load_fn(src=state_dict, dst=module)``. The tensors of
                ``src`` are mapped from the files, by the names that these have, and take no memory. What it writes
                are the weights from then on: exact masters are not loaded, optimizer states are.

        Returns:
            The checkpoint's folder and its client state; ``(None, None)`` where no tag is said, and no file ``latest``.

        Raises:
            UsageError: the checkpoint is missing, damaged, or of another model or optimizer; the message names the
            argument that allows it. IoFailure: it cannot be read.
        """
        wanted = Wanted(
            strict=load_module_strict,
            optimizer=load_optimizer_states,
            schedule=load_lr_scheduler_states,
            weights_only=load_module_only,
            custom_load=custom_load_fn,
        )
        return self._checkpoints().load(load_dir, tag, wanted)

    def resume(self) -> int:
        """With the key ``durability``: take over the last durable step that an earlier run has left.

        Returns:
            How many updates it stands after (:attr:`global_steps`); 0 where there is none.

        Raises:
            UsageError: it is of another model or optimizer, or damaged. IoFailure: it cannot be read.
        """
        return self._checkpoints().resume()

    def discard(self) -> None:
        """With the key ``durability``: give up the durable state of an earlier run, and of this one. The next update
        makes the run durable again. To begin from a checkpoint, or from the start, where :meth:`resume` would not.

        Raises:
            UsageError: there is no durable state. IoFailure: the disk failed, and it may still be there.
        """
        self._checkpoints().discard()

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the weights alone, in the type in which they compute, as ``torch.save(state_dict)`` does.

        Raises:
            UsageError: the directory or the name cannot be used. IoFailure: no room on the disk.
        """
        save_weights(self.module, save_dir, save_filename, leave_out_frozen=exclude_frozen_parameters)
        return True

    def _checkpoints(self) -> EngineCheckpoints:
        self._refuse_closed()
        if self._saved_by is None:
            self._saved_by = EngineCheckpoints(self.module, self.optimizer, self.lr_scheduler, self.loop, self._config)
        return self._saved_by
