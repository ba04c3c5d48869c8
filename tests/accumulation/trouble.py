"""Exceptions and Ctrl-C in the program's own code, at chosen moments."""

from __future__ import annotations

import os
import signal
from typing import Any

from torch import Tensor, nn

from tests.support.models import next_token_loss


class Trouble:
    """Raises at the n-th of all the moments at which the program's own code runs: in forwards, losses and backwards.

    Attributes:
        left: how many moments pass without it; None: all.
    """

    def __init__(self, model: Any) -> None:
        self.left: int | None = None
        self.raised: type[BaseException] = ArithmeticError
        for module in (model.blocks[1], model.norm):
            module.register_forward_pre_hook(lambda *_: self.moment())
            module.register_full_backward_hook(lambda *_: self.moment())

    def moment(self) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                self.left = None
                if self.raised is KeyboardInterrupt:
                    os.kill(os.getpid(), signal.SIGINT)
                else:
                    raise self.raised("trouble")

    def loss(self, model: nn.Module, tokens: Tensor) -> Tensor:
        found = next_token_loss(model, tokens)
        self.moment()
        return found
