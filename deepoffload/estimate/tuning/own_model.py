"""A program's own model: a function of the program makes it, and says how its loss is computed."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from deepoffload.errors import ConfigError, UnsupportedError
from deepoffload.estimate.dry_run import LossOf

CHOICES = ("checkpointing", "tiled_loss")
"""Arguments of the function that candidates vary, where it has them."""


@dataclass(frozen=True)
class OwnModel:
    """``function(micro_batch, checkpointing=..., tiled_loss=..., seq=...)`` of the program gives a model and what
    computes its loss. It has those of the named arguments that it wants.

    Attributes:
        said: where the function is, ``FILE.py:FUNCTION`` or ``package.module:FUNCTION``.
        takes: names of its arguments.
    """

    said: str
    function: Callable[..., Any]
    takes: frozenset[str]

    @classmethod
    def named(cls, said: str) -> OwnModel:
        """The function. The module is imported, as another program would import it.

        Raises:
            ConfigError: there is no such function, or importing its module fails.
        """
        place, _, name = said.rpartition(":")
        if not place or not name:
            raise ConfigError(f"--model {said}: expected FILE.py:FUNCTION or package.module:FUNCTION")
        try:
            module = _from_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
        except Exception as error:  # the program's code may raise anything
            raise ConfigError(f"--model {said}: importing {place} fails: {type(error).__name__}: {error}") from error
        function = getattr(module, name, None)
        if not callable(function):
            raise ConfigError(f"--model {said}: {place} has no function {name}")
        takes = frozenset(inspect.signature(function).parameters)
        if "micro_batch" not in takes:
            raise ConfigError(f"--model {said}: {name} needs an argument micro_batch, the sequences of a micro-batch")
        return cls(said, function, takes)

    def make(self, micro_batch: int, length: int, *, checkpointing: bool, tiled: bool) -> tuple[nn.Module, LossOf]:
        """The model, and what calls it once and gives its loss.

        Raises:
            UnsupportedError: the function cannot make it with checkpointing, or with a loss in tiles.
            ConfigError: the function fails, or gives something else.
        """
        wanted = dict(zip(CHOICES, (checkpointing, tiled), strict=True))
        for name, value in wanted.items():
            if value and name not in self.takes:
                raise UnsupportedError(f"{self.said} has no argument {name}")
        more = {**wanted, "seq": length}
        try:
            made = self.function(micro_batch=micro_batch, **{key: more[key] for key in more if key in self.takes})
        except Exception as error:
            raise ConfigError(f"{self.said} fails: {type(error).__name__}: {error}") from error
        if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module) and callable(made[1])):
            raise ConfigError(
                f"{self.said} gave a {type(made).__name__}; expected a model and a function: loss(call) calls what it "
                "is given in the place of the model, once, and returns the loss"
            )
        model, loss_of = made
        return model, loss_of


def _from_file(path: Path) -> Any:
    """The module of a file. Its folder is searched for what it imports, as when it is run."""
    path = path.absolute()
    name = path.stem
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return known
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
