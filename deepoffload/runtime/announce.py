"""What a program is told: one line when a model is ready, and one for a large model that is not paged."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as registry
from torch.nn.parameter import is_lazy

from deepoffload.config import Config
from deepoffload.config.units import format_bytes
from deepoffload.params.torch_private import parameter_registration_hooks
from deepoffload.runtime.registration import context_is_open
from deepoffload.runtime.watch_hooks import WatchHook, remove_dead
from deepoffload.schedule.placement import Placement

log = logging.getLogger("deepoffload")
start_log = logging.getLogger("deepoffload.start")
progress_log = logging.getLogger("deepoffload.progress")

settings_log = logging.getLogger("deepoffload.settings")


class _OncePerText(logging.Filter):
    """Drops what was said before: a program that makes several engines of one configuration is told once."""

    def __init__(self) -> None:
        super().__init__()
        self._said: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        first = text not in self._said
        self._said.add(text)
        return first


settings_log.addFilter(_OncePerText())


def warn_of_settings(config: Config) -> None:
    """Log what is probably not meant so in a configuration, each text once per process."""
    for warning in config.warnings:
        settings_log.warning(warning)


OUTSIDE_BYTES_MIN = 64 << 20
OUTSIDE_PER_BUDGET = 10
"""Ordinary parameters are mentioned from this size on, and from this part of the host budget on."""


def announce(line: str, by: logging.Logger = start_log) -> None:
    """Say something that is no warning, but that people see by default: it goes to stderr if the program has not set up
    logging, and else it is a record of level INFO. ``logging.getLogger("deepoffload.start").setLevel("WARNING")``
    silences it.
    """
    configured = by.level or log.level
    if by.hasHandlers():
        by.info(line)
    elif configured <= logging.INFO and by.manager.disable < logging.INFO and not by.disabled:
        record = by.makeRecord(by.name, logging.INFO, __file__, 0, f"deepoffload: {line}", (), None)
        logging.StreamHandler().handle(record)


@contextlib.contextmanager
def silently() -> Iterator[None]:
    """Without the line at the start: for models that the program has not made."""
    level = start_log.level
    start_log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        start_log.setLevel(level)


def summary(
    placement: Placement,
    num_parameters: int,
    paths: Sequence[str],
    device: torch.device,
    durable_every: int | None,
    world_size: int = 1,
) -> str:
    """What lies on which tier, how much memory is used, and which steps are durable, in one line: of one rank."""
    kept = [f"{row.name} {format_bytes(row.host_bytes)}" for row in placement.rows if row.resident_blocks]
    paged = [f"{row.name} {format_bytes(row.nvme_bytes)}" for row in placement.rows if row.nvme_bytes]
    sources = [f"{row.name} {format_bytes(row.source_bytes)}" for row in placement.rows if row.source_bytes]
    read = f"; read from the checkpoint: {', '.join(sources)}" if sources else ""
    used = format_bytes(sum(row.host_bytes for row in placement.rows))
    said = {None: "", 1: "; every step is durable"}
    durable = said.get(durable_every, f"; every {durable_every} steps one is durable")
    computing = "" if device.type == "cpu" else f"; computing on {device}"
    kept_by = f" on {world_size} ranks; each keeps in memory" if world_size > 1 else "; kept in memory"
    return (
        f"{num_parameters / 1e6:.1f} M parameters{kept_by}: {', '.join(kept) or 'nothing'}; on NVMe"
        f"{' (' + ', '.join(paths) + ')' if paged else ''}: {', '.join(paged) or 'nothing'}{read}; memory used: {used} "
        f"of {format_bytes(placement.capacity_bytes)}{computing}{durable}"
    )


_BUILT = (
    "a model is built or loaded outside of offload_context while another one is paged: %s of parameters so far (%s), "
    "in memory that host_budget does not count. Build it inside an offload_context to page it"
)
_COPIED = (
    "copy.deepcopy makes ordinary models of paged ones outside of offload_context: %s of parameters so far (%s), in "
    "memory that host_budget does not count. Copy inside an offload_context to page the copy, too"
)

_NOT_PAGED = (
    "%s of the parameters are not paged (of type %s), and stay in memory that host_budget does not count: only dense "
    "real tensors of type Parameter can be paged"
)


class OutsideWatch:
    """Sees models that a program, or a library on its own (a trainer's reference model), builds, loads or copies while
    another one is paged: they take memory that the budget does not count. The first large one is mentioned.

    Args:
        host_bytes: the host budget.
        roots: the paged models. What of them is not paged, and large, is mentioned at once.
    """

    def __init__(self, host_bytes: int, roots: Iterable[nn.Module]) -> None:
        self._limit_bytes = max(OUTSIDE_BYTES_MIN, host_bytes // OUTSIDE_PER_BUDGET)
        sizes = _bytes_not_paged(roots)
        if sizes.total() > self._limit_bytes:
            log.warning(_NOT_PAGED, format_bytes(sizes.total()), ", ".join(sizes))
        self._seen_bytes = 0
        self._said = False
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        remove_dead(parameter_registration_hooks)
        self._ask = _Ask(self, "_on_parameter")
        self._ask.handles = (
            registry.register_module_parameter_registration_hook(self._ask),
            registry.register_module_module_registration_hook(_Ask(self, "_on_module")),
        )

    def remove(self) -> None:
        remove_dead(parameter_registration_hooks)
        self._ask.remove()
        self._modules.clear()

    def _on_module(self, module: nn.Module, name: str, child: Any) -> None:
        if not self._said:
            self._modules.add(module)

    def _on_parameter(self, module: nn.Module, name: str, param: Any) -> None:
        self._comes(param, [module], copied=False)

    def take_copy(self, param: nn.Parameter, name: str, modules: list[nn.Module]) -> None:
        """``copy.deepcopy`` has made a parameter. Of its ``modules`` the first is the whole copy, which has no contents
        yet; without any, nobody can see later whether the parameter still lives."""
        if modules:
            self._comes(param, modules, copied=True)

    def _comes(self, param: Any, modules: list[nn.Module], *, copied: bool) -> None:
        nbytes = _ordinary_bytes(param)
        if not nbytes or self._said or context_is_open():
            return
        self._modules.update(modules)
        self._seen_bytes += nbytes
        if self._seen_bytes > self._limit_bytes:
            self._look(nbytes, modules[0] if copied else None)

    def _look(self, coming_bytes: int, copied: nn.Module | None) -> None:
        """So much has come. Mention the largest model if it is still there: modules come and go, and some are paged.
        ``coming_bytes`` are those of the parameter that is registered right now, or copied, in a copy of ``copied``'s
        class."""
        alive = [module for module in self._modules if "_modules" in module.__dict__]  # copies may not be finished
        inner = {id(child) for module in alive for child in module.modules() if child is not module}
        roots = [module for module in alive if id(module) not in inner]
        sizes = {root: sum(map(_ordinary_bytes, root.parameters())) for root in roots}
        self._seen_bytes = sum(sizes.values()) + coming_bytes
        if self._seen_bytes > self._limit_bytes:
            largest = max(roots, key=sizes.__getitem__) if copied is None else copied
            log.warning(
                _COPIED if copied is not None else _BUILT, format_bytes(self._seen_bytes), type(largest).__name__
            )
            for hook in _asks():  # those of other engines, too
                watch = hook.watch()
                if watch is not None:
                    watch._said = True
                    watch._modules.clear()


class _Ask(WatchHook):
    """A hook of an :class:`OutsideWatch`."""

    def take_copy(self, param: nn.Parameter, name: str, modules: list[nn.Module]) -> None:
        """``page_in_context`` in ``params/copies.py`` asks every hook."""
        watch = self.watch()
        if watch is not None:
            watch.take_copy(param, name, modules)


def _asks() -> list[_Ask]:
    return [hook for hook in list(parameter_registration_hooks.values()) if isinstance(hook, _Ask)]


def _bytes_not_paged(roots: Iterable[nn.Module]) -> Counter[str]:
    """By type, what parameters of paged models take of host memory outside of the budget."""
    sizes: Counter[str] = Counter()
    for param in {id(param): param for root in roots for param in root.parameters()}.values():
        if "_slot" not in param.__dict__ and param.device.type == "cpu" and not is_lazy(param):
            sizes[type(param).__name__] += param.numel() * param.itemsize
    return sizes


def _ordinary_bytes(param: Any) -> int:
    """Bytes of host memory that a parameter takes which is not paged."""
    if type(param) is not nn.Parameter or param.device.type != "cpu":
        return 0
    return int(param.numel() * param.itemsize)
