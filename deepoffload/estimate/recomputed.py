"""Units that run again in backward: what is kept of them for each micro-batch is what they were called with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint


@contextmanager
def recomputed(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Until this ends, calls of these modules keep their arguments alone, as those of units do where ``activations`` is
    ``recompute``. A module inside another one of them runs again with that one. As in the engine, a unit that is one
    linear layer keeps no less then.
    """
    inner = {child for module in modules for child in module.modules() if child is not module}
    with ExitStack() as stack:
        for module in modules:
            if module not in inner:
                stack.enter_context(_recomputed(module))
        yield


@contextmanager
def _recomputed(module: nn.Module) -> Iterator[None]:
    own, forward = module.__dict__.get("forward"), module.forward

    def in_checkpoint(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    module.forward = in_checkpoint
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own
