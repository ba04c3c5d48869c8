"""``offload_context``: build or load a model inside it, and its parameters are paged."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, overload

from torch import nn

from deepoffload.config import Config, Precision, parse_config
from deepoffload.errors import BudgetError, RankError, UnsupportedError, UsageError
from deepoffload.params.torch_compiler import is_compiling_callers, seen_by_compiler
from deepoffload.params.unit import ParamHandle
from deepoffload.runtime.engine import Engine
from deepoffload.runtime.large_buffers import page_large_buffers
from deepoffload.runtime.ranks import RankChoice
from deepoffload.runtime.registration import ConstructionHooks, context_is_open
from deepoffload.runtime.statistics import stats_of_ranks
from deepoffload.runtime.wrapped_weights import page_wrapped_weights

_BEFORE = "build the model before, in Python, and compile its layers, or the training step (docs/compile.md)"


class offload_context:  # noqa: N801 - reads as a function, like torch.no_grad
    """Within it, modules are built (or loaded) under the budget; when it ends, they are placed and ready to train.

    ``with offload_context(config): model = ...`` adopts every ``nn.Parameter`` that is registered, in place. At the end
    units are found and placed, weights take their compute dtype, and the swap space is reserved.

    Args:
        config: path of a JSON file, a mapping (DeepSpeed's keys work), a :class:`Config`, or nothing.
        group, mesh: the ranks that train this model, as a process group or a ``DeviceMesh`` with one dimension. Not
            said: those of the default group, or those that the launcher has started.
        ranks: ``"local"``: this process has the model for itself, also where there are others. Or the section ``ranks``
            of the configuration.
        overrides: our own keys as keyword arguments, such as ``host_budget="2GiB"``, ``nvme_path="/mnt/nvme"``.

    Attributes:
        engine: the :class:`~deepoffload.runtime.engine.Engine` (from ``__enter__`` on).

    Raises:
        ConfigError: on construction of this object, before anything is touched.
        PlacementError, UsageError: when the context ends; nothing is left behind. Where a parameter does not fit while
            the model is built, the rest is built on the meta device, so that the error can name a budget for all of it.
    """

    _values_of_rank_0 = False
    """What :class:`RankChoice` is told."""

    def __init__(
        self,
        config: str | os.PathLike[str] | Mapping[str, Any] | Config | None = None,
        *,
        group: Any = None,
        mesh: Any = None,
        ranks: str | Mapping[str, Any] | None = None,
        **overrides: Any,
    ) -> None:
        _refuse_compiler()
        self._ranks = RankChoice(group, mesh, ranks, values_of_rank_0=self._values_of_rank_0)
        with self._ranks.telling("reading the configuration"):
            self.config = parse_config(config, world_size=self._ranks.world_size, **self._ranks.settings, **overrides)
        self.engine: Engine | None = None
        self._hooks: ConstructionHooks | None = None

    def __enter__(self) -> offload_context:
        _refuse_compiler()
        if self.engine is not None:
            raise UsageError("this offload_context has been used already; make a new one for the next model")
        if context_is_open():
            raise UsageError(
                "offload_context inside offload_context: build the models one after the other, or all in one"
            )
        self.engine = Engine(self.config, self._ranks.open(self.config))
        self._hooks = self.engine.construction()
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        engine, hooks = self.engine, self._hooks
        if engine is None or hooks is None:
            return
        hooks.__exit__()
        hooks.end_waiting()
        self._hooks = None
        short = hooks.shortage is not None and not isinstance(error, BudgetError)
        if error is not None and not (short and isinstance(error, Exception)):
            if isinstance(error, Exception):
                with suppress(RankError):  # what has happened here is raised
                    hooks.meet_at_end()
                engine.agreement.tell(error, "building the model")
            engine.close(f"its offload_context was left by {type(error).__name__}")
            return
        try:
            hooks.meet_at_end()
            with engine.agreement.together("building the model"):
                if short:
                    raise hooks.refusal(error)
                roots = hooks.roots()
                if self.config.inference:
                    in_their_types = self.config.precision is Precision.KEEP
                    if in_their_types:
                        page_wrapped_weights(roots, hooks.adopt, alone=engine.link is None)
                    page_large_buffers(roots, engine.pager.origins if in_their_types else None)
                hooks.take_unregistered(roots)
                engine.assemble(roots, hooks.handles)
        except BaseException as failure:
            engine.close(f"its offload_context ended with {type(failure).__name__}")
            raise


def _refuse_compiler() -> None:
    """Dynamo compiles functions that get weights while these come and go: what it expects of them is wrong at once."""
    if is_compiling_callers():
        raise UnsupportedError(f"offload_context in a function that torch.compile compiles: {_BEFORE}")


seen_by_compiler(offload_context.__init__, _BEFORE)
seen_by_compiler(offload_context.__enter__, _BEFORE)
seen_by_compiler(_refuse_compiler, _BEFORE)


def engine_of(model: nn.Module) -> Engine:
    """The engine whose parameters ``model`` has.

    Raises:
        UsageError: the model has no paged parameters, or is none.
    """
    if not callable(getattr(model, "parameters", None)):
        raise UsageError(f"a paged model is wanted, not {type(model).__name__}")
    for param in model.parameters():
        slot = param.__dict__.get("_slot")
        if isinstance(slot, ParamHandle) and isinstance(slot.pager.engine, Engine):
            return slot.pager.engine
    raise UsageError(
        f"{type(model).__name__} has no offloaded parameters: build it inside deepoffload.offload_context, or pass it "
        "to deepoffload.initialize"
    )


@overload
def stats(model: nn.Module) -> dict[str, float]: ...


@overload
def stats(model: nn.Module, *, all_ranks: bool) -> dict[str, float] | list[dict[str, float]]: ...


def stats(model: nn.Module, *, all_ranks: bool = False) -> dict[str, float] | list[dict[str, float]]:
    """Numbers of the engine behind ``model``; see :meth:`Engine.stats`.

    Args:
        all_ranks: those of every rank, in rank order, as a list. Every rank then calls it.
    """
    engine = engine_of(model)
    return stats_of_ranks(engine.link, engine.stats()) if all_ranks else engine.stats()


def last_micro_batch(model: nn.Module) -> None:
    """Say that the next backward is the last one before ``optimizer.step()``, in a loop that accumulates gradients.

    With ``step_overlap="speculative"`` that backward updates units. Without this call the last step's number of
    gradients tells which backward is the last; the engine of :func:`initialize` knows it. Other values of
    ``step_overlap`` do nothing with it.

    Raises:
        UsageError: ``model`` has no offloaded parameters.
    """
    speculation = engine_of(model).gradients.speculation
    if speculation is not None:
        speculation.announce(True)
