"""Every error a user can meet, one class per kind of remedy.

User mistakes are ``ValueError``s, faults of the machine are ``RuntimeError``s or ``OSError``s. Each message says what
happened, where (parameter name, tier, path, offset, errno name) and what to change.
"""

from __future__ import annotations

import errno as _errno
import os


class DeepOffloadError(Exception):
    """Base class of everything that deepoffload raises on purpose."""


class ConfigError(DeepOffloadError, ValueError):
    """The configuration is wrong: unknown key, wrong type, or values that contradict each other."""


class BudgetError(DeepOffloadError, ValueError):
    """A byte budget cannot hold what must be there at once. The message carries the placement table where there is
    one.

    ``enough_bytes``: a memory budget that holds it, where memory is what is missing and that is known.
    ``enough_nvme_bytes``: the same of NVMe.
    """

    def __init__(self, message: str, enough_bytes: int | None = None, *, enough_nvme_bytes: int | None = None) -> None:
        super().__init__(message)
        self.enough_bytes = enough_bytes
        self.enough_nvme_bytes = enough_nvme_bytes


class PlacementError(BudgetError):
    """The model cannot be placed within the budgets; raised before training starts."""


class DevicePlacementError(PlacementError):
    """The device budget cannot hold the weights of one call. ``enough_bytes`` is a device budget that does."""


class UsageError(DeepOffloadError, ValueError):
    """The API was called in a way that cannot work (a context inside a context, ``.to(device)`` on a paged model,
    ...)."""


class LossScaleError(DeepOffloadError, ArithmeticError):
    """fp16 gradients overflow although the loss scale is at its minimum. The step was not made."""


class ClosedError(DeepOffloadError, RuntimeError):
    """A parameter, gradient or engine was used after its engine was closed."""


class UnsupportedError(DeepOffloadError, RuntimeError):
    """A feature that deepoffload refuses because it would be silently wrong (DDP around a paged model, jit.trace,
    ...)."""


class RankError(DeepOffloadError, RuntimeError):
    """Another rank has failed, has gone, or does something else. The message names it, and what this rank was at."""


class IoFailure(DeepOffloadError, OSError):
    """A transfer failed. ``errno``, ``filename``, ``offset`` (bytes) and ``nbytes`` say where."""

    def __init__(self, action: str, code: int, path: str, offset: int, nbytes: int, remedy: str = "") -> None:
        name = _errno.errorcode.get(code, str(code))
        message = f"{action} failed with {name} ({os.strerror(code)}) at offset {offset}, length {nbytes} bytes"
        OSError.__init__(self, code, f"{message}. {remedy}" if remedy else message, path)
        self.offset = offset
        self.nbytes = nbytes

    @classmethod
    def about(cls, name: str, failure: IoFailure) -> IoFailure:
        """The same failure, saying which block it was."""
        error = cls.__new__(cls)
        OSError.__init__(error, failure.errno, f"{name}: {failure.strerror}", failure.filename)
        error.offset, error.nbytes = failure.offset, failure.nbytes
        return error


class IoTimeout(DeepOffloadError, TimeoutError):
    """A transfer did not finish within the stated limit; it is still in flight and its buffer still in use."""
