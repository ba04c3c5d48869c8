"""What has to be equal on all ranks that train one model: versions, the configuration, the model, and its values."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from deepoffload.config import Config, as_written
from deepoffload.errors import ConfigError, UnsupportedError, UsageError
from deepoffload.io.checksums import crc32c
from deepoffload.params.sharding import HOW_TO_SHARD, refuse_wrapped
from deepoffload.params.torch_private import get_data
from deepoffload.params.unit import ParamHandle
from deepoffload.runtime.agreement import Agreement
from deepoffload.runtime.building import BuildingMemory

_OF_A_RANK = frozenset(
    (
        *("nvme_path", "timeline", "steps_per_print", "wall_clock_breakdown", "aio", "checkpoint.share"),
        *("tensorboard", "csv_monitor", "wandb", "comet", "flops_profiler"),
    )
)
"""What a configuration may say otherwise on one rank than on the others: no number depends on it. (Whether it has
``nvme_path`` has to be the same.)"""

_DISTRIBUTED = ("torch.distributed.tensor", "torch.distributed._tensor")

_SEED_ADVICE = (
    "Each rank builds the whole model: call torch.manual_seed with the same number on all ranks before it is built (or "
    "load the same checkpoint), and seed by rank only after it"
)

_MODEL_ADVICE = "Build the same model on all ranks, in the same types, and freeze the same parameters on all"
_CONFIG_ADVICE = "Give all ranks the same configuration, and install the same versions on all hosts"


def compare_settings(agreement: Agreement, config: Config) -> None:
    """Raise ConfigError on all ranks where versions or configurations differ. To be called before anything is built."""
    facts = {
        "the version of torch": torch.__version__,
        "the version of deepoffload": sys.modules["deepoffload"].__version__,
    }
    for key, said in as_written(config).items():
        if key not in _OF_A_RANK and key.partition(".")[0] not in _OF_A_RANK:
            facts[key] = said
    facts["nvme_path"] = "set" if config.nvme_path else "not set"
    agreement.compare(facts, "the configuration", _CONFIG_ADVICE, error=ConfigError)


def compare_models(agreement: Agreement, roots: Sequence[nn.Module]) -> None:
    """Raise UsageError on all ranks where models have other parameters or buffers, shapes, dtypes, or trainable ones.
    Values of buffers may differ: running statistics are those of a rank's own data."""
    facts = {}
    for number, root in enumerate(roots, start=1):
        where = "" if len(roots) == 1 else f"model {number}: "
        for name, param in root.named_parameters():
            facts[where + name] = described(param)
        for name, buffer in root.named_buffers():
            facts[where + name] = f"a {'lazy ' if is_lazy(buffer) else ''}buffer {_type_of(buffer)}"
    agreement.compare(facts, "the model", _MODEL_ADVICE, error=UsageError)


def described(param: Tensor) -> str:
    """Type, shape and use of a parameter, for people."""
    if is_lazy(param):
        return "a lazy parameter"
    return f"{_type_of(param)} ({'trained' if param.requires_grad else 'frozen'})"


def _type_of(tensor: Tensor) -> str:
    shape = "" if is_lazy(tensor) else f"{list(tensor.shape)}"
    return f"{str(tensor.dtype).removeprefix('torch.')}{shape}"


def is_distributed(param: Tensor) -> bool:
    """Whether a parameter is a DTensor, or FSDP's."""
    return any(kind.__module__.startswith(_DISTRIBUTED) for kind in (type(param), type(get_data(param))))


def refuse_distributed(roots: Sequence[nn.Module]) -> None:
    """Raise UnsupportedError for a model with DTensors among its parameters, or with modules that are replicated or
    sharded by torch."""
    for root in roots:
        refuse_wrapped(root)
        refuse_dtensors(root)


def refuse_dtensors(root: nn.Module) -> None:
    """Raise UnsupportedError for a model with DTensors among its parameters."""
    for name, param in root.named_parameters():
        if is_distributed(param):
            raise UnsupportedError(
                f"{name} is a DTensor: a model that is sharded already can be paged for inference only "
                f'(inference=True, with several ranks ranks="local", and its types as they are). {HOW_TO_SHARD}'
            )


def refuse_ordinary(roots: Sequence[nn.Module], handles: Sequence[ParamHandle]) -> None:
    """Raise UnsupportedError for a trained parameter that is not paged: nothing adds its gradients up over ranks. One
    without elements has none."""
    paged = {id(handle.tensor) for handle in handles}
    for root in roots:
        for name, param in root.named_parameters():
            if param.requires_grad and param.numel() and id(param) not in paged:
                raise UnsupportedError(
                    f"{name} cannot be paged (it is {described(param)} on {param.device}), so with several ranks "
                    "nothing adds its gradients up. Freeze it (requires_grad_(False)), or convert it"
                )


class ValueSums:
    """The checksums of what parameters are registered with, taken while their bytes move into units. ``building``:
    knows those of parameters of which each rank has kept a part."""

    def __init__(self, building: BuildingMemory | None) -> None:
        self._facts: dict[str, str] = {}
        self._building = building

    def take(self, handle: ParamHandle, address: int) -> None:
        """``address``: of the whole value, in host memory. Where ranks have put it together of their parts, it says
        nothing: then what was noted before counts."""
        known = ""
        if self._building is not None and handle.block is not None:
            self._building.take_value_of_rank_0(handle.block, address, handle.nbytes)
            known = self._building.fact(handle.block)
        name = handle.name
        if name in self._facts:  # models of one context may have parameters of the same name
            name = f"{name} (parameter {len(self._facts) + 1})"
        self._facts[name] = known or f"{crc32c(address, handle.nbytes):08x}"

    def compare(self, agreement: Agreement, roots: Sequence[nn.Module]) -> None:
        """Raise UsageError on all ranks where values differ; the message names the first such parameter. Where rank 0's
        values are for all, the buffers of ``roots`` get them, too."""
        if self._building is not None and self._building.rank_0 is not None:
            self._building.rank_0.give_buffers(roots)
        agreement.compare(self._facts, "the checksum of the model's values", _SEED_ADVICE, error=UsageError)
