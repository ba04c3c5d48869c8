"""``tile_loss``: lets a causal language model of transformers compute its loss without the logits of all tokens."""

from __future__ import annotations

import inspect
import sys
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from deepoffload.errors import UnsupportedError, UsageError
from deepoffload.tiling.head_output import LAZY, HeadOutput
from deepoffload.tiling.loss import loss_in_tiles

_INSTEAD = "compute the loss yourself with deepoffload.tiled_loss(hidden, head, targets)"
_CHANGING = ("final_logit_softcapping", "logits_soft_cap", "logit_scale", "logits_scaling", "lm_head_multiplier")
"""Settings by which models change their logits on the way to the loss. A scale of 1 is applied, too."""


def tile_loss(model: nn.Module, max_bytes: int | str = "32MiB") -> None:
    """Let ``model(..., labels=...)`` of transformers compute its loss as :func:`~deepoffload.tiled_loss` does.

    For causal language models whose loss is transformers' ``ForCausalLMLoss``. ``outputs.logits`` are made when
    somebody looks at them. Names, ``save_pretrained`` and ``generate`` stay as they are. Call it once, inside the
    context or after it, and after ``tile_linear``.

    Args:
        max_bytes: as :func:`~deepoffload.tiled_loss` has it.

    Raises:
        UsageError: no model of transformers, or called before. UnsupportedError: a model whose loss is another one,
            that computes it in its own code, changes its logits before, or has no plain linear head. Nothing has been
            changed then. Where a model changes its logits and no setting tells, its first loss raises.
    """
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        raise UsageError(f"tile_loss takes a model of transformers, not {type(model).__name__}; for others {_INSTEAD}")
    name = type(model).__name__
    head: Any = model.get_output_embeddings()
    if type(head) in LAZY.values():
        raise UsageError(f"tile_loss: {name} computes its loss in tiles already")
    why = _why_not(model, head)
    if why is not None:
        raise UnsupportedError(f"tile_loss: {name} {why}; {_INSTEAD}")
    head.__class__ = LAZY[type(head)]
    model.loss_function = partial(_causal_loss, model=name, max_bytes=max_bytes)


def _why_not(model: Any, head: Any) -> str | None:
    """What of a model does not fit."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    if type(head) not in LAZY:
        found = "" if head is None else f", but {type(head).__name__}"
        return f"has no nn.Linear as its head{found}"
    if model.loss_function is not ForCausalLMLoss:
        loss = model.loss_function
        return f"has another loss than ForCausalLMLoss: {getattr(loss, '__name__', type(loss).__name__)}"
    code = inspect.unwrap(type(model).forward).__code__
    if "loss_function" not in code.co_names:
        return "does not call self.loss_function: it computes its loss in its own code"
    config = getattr(model.config, "text_config", model.config)
    for key in _CHANGING:
        value = getattr(config, key, None)
        if value is not None:
            return f"changes its logits before the loss ({key}={value})"
    return None


def _causal_loss(
    logits: Any,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    *,
    model: str,
    max_bytes: int | str,
    **kwargs: Any,
) -> Tensor:
    """As ``ForCausalLMLoss`` of transformers 5."""
    if type(logits) is not HeadOutput or logits.is_made:
        raise UnsupportedError(
            f"tile_loss: {model} changes its logits between the head and the loss, or looks at them there, so all of "
            f"them have to be there; do not call tile_loss, or {_INSTEAD}"
        )
    hidden, head = logits.hidden, logits.head
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    targets = shift_labels.reshape(-1).to(hidden.device)
    reduction = "mean" if num_items_in_batch is None else "sum"
    flat = hidden.reshape(-1, hidden.shape[-1])
    loss = loss_in_tiles(flat, head, targets, ignore_index, reduction, 0.0, max_bytes)
    if num_items_in_batch is None:
        return loss
    return loss / (num_items_in_batch.to(loss.device) if isinstance(num_items_in_batch, Tensor) else num_items_in_batch)
