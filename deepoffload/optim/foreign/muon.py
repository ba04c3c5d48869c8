"""``deepoffload.Muon``: one optimizer for a whole model, Muon for its hidden matrices and AdamW for the rest."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from deepoffload.errors import UsageError
from deepoffload.optim import checks
from deepoffload.optim.foreign.muon_step import MuonWithAdamW
from deepoffload.optim.foreign.paged_optimizer import PagedOptimizer
from deepoffload.optim.handles import handle_of

log = logging.getLogger("deepoffload")

_NAMES_OF_OTHERS = ("embed", "lm_head")
"""DeepSpeed's rule: what has one of these in its name is not for Muon."""

_FOR_MUON = "Muon is for hidden matrices; give it to a group with use_muon=False"

_MUON_KEYS = ("lr", "momentum", "nesterov", "weight_decay", "ns_method", "ns_steps", "ns_coefficients", "adjust_lr_fn")
_ADAM_KEYS = ("lr", "betas", "eps", "weight_decay", "fused", "foreach")


class Muon(PagedOptimizer):
    """``torch.optim.Muon`` for hidden matrices and ``torch.optim.AdamW`` for embeddings, the head, and what is no
    matrix, with DeepSpeed's arguments and defaults, and all state on the tiers.

    A matrix is updated whole, once per step, where the model computes. Its state is one momentum.

    Args:
        params: the model, which is split as :func:`hidden_matrices` says, or groups that say ``use_muon``.
        lr: of both; ``muon_lr`` and ``adam_lr`` go first. Not said: 0.02 for Muon, 3e-4 for AdamW.
        momentum, nesterov, ns_steps, adjust_lr_fn: of ``torch.optim.Muon``.
        ns_method: ``"standard"`` is torch's iteration, in bf16; ``"gram"`` is DeepSpeed's default, which needs fewer
            operations for matrices that are far from square.
        weight_decay: of both.
        betas, eps, fused: of ``torch.optim.AdamW``.
        momentum_dtype: ``"bf16"`` keeps Muon's momentum in 2 bytes. AdamW's moments stay fp32.
        max_grad_norm: as for :class:`~deepoffload.optim.adam.CPUAdam`.

    Raises:
        UsageError: parameters that say nothing of ``use_muon``; an embedding or the head in a group for Muon.
        ValueError: a vector in such a group, or a setting out of range. UnsupportedError: as
        :func:`~deepoffload.optim.foreign.paged_optimizer.paged`.
    """

    def __init__(
        self,
        params: nn.Module | Iterable[Mapping[str, Any]],
        lr: float | Tensor | None = None,
        *,
        muon_lr: float | Tensor | None = None,
        adam_lr: float | Tensor | None = None,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-10,
        ns_method: str = "standard",
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        fused: bool | None = None,
        momentum_dtype: str = "fp32",
        max_grad_norm: float | None = None,
    ) -> None:
        checks.state_dtype(momentum_dtype, "fp32", "bf16")
        if not 0.0 <= checks.number("momentum", momentum) <= 1.0:
            raise ValueError(f"momentum must be from 0 to 1, got {momentum}")
        if isinstance(params, nn.Module):
            params = split_groups(params, [p for p in params.parameters() if p.requires_grad])
        shared = {"lr": lr, "weight_decay": weight_decay}
        muon = {"momentum": momentum, "nesterov": nesterov, "ns_method": ns_method, "ns_steps": ns_steps}
        muon |= {**shared, "adjust_lr_fn": adjust_lr_fn, "lr": lr if muon_lr is None else muon_lr}
        adam = {**shared, "betas": betas, "eps": eps, "fused": fused, "lr": lr if adam_lr is None else adam_lr}
        groups = []
        for group in params:
            if not isinstance(group, Mapping) or "use_muon" not in group:
                raise UsageError(
                    "deepoffload.Muon takes the model, or parameter groups that say use_muon=True or False: from bare "
                    "parameters it cannot tell embeddings and the head"
                )
            known = {**muon, "state_dtype": momentum_dtype} if group["use_muon"] else adam
            listed = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
            if group["use_muon"]:
                _refuse_others(listed)
            said = {key: value for key, value in known.items() if value is not None}
            groups.append({**said, **group, "params": listed})
        super().__init__(MuonWithAdamW, groups, {}, max_grad_norm=max_grad_norm)


def hidden_matrices(model: nn.Module) -> set[int]:
    """The parameters of a model that are for Muon, by ``id``.

    These are matrices, and stacks of experts' matrices, but not: weights of ``nn.Embedding`` (tied ones too), the head
    (what ``get_output_embeddings()`` gives, or the last ``nn.Linear`` if it has an embedding's shape), and what has
    "embed" or "lm_head" in its name. A parameter's attribute ``use_muon`` goes first.

    Raises:
        UsageError: the attribute of an embedding's weight is True.
    """
    embeddings = [m.weight for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
    others = {id(weight) for weight in embeddings} | _head(model, {tuple(weight.shape) for weight in embeddings})
    found = set()
    for name, param in model.named_parameters():
        said = param.__dict__.get("use_muon")
        if said and any(param is weight for weight in embeddings):
            raise UsageError(f"{name}.use_muon is True, but it is an embedding: {_FOR_MUON}")
        is_matrix = param.dim() == 2 or (param.dim() == 3 and "expert" in name)
        is_other = id(param) in others or any(word in name.lower() for word in _NAMES_OF_OTHERS)
        if said or (said is None and is_matrix and not is_other):
            found.add(id(param))
    return found


def _refuse_others(params: Sequence[Any]) -> None:
    """Raise UsageError for embeddings and heads in a group that says ``use_muon``, as far as names are known."""
    for each in params:
        named, param = each if isinstance(each, tuple) else ("", each)
        handle = handle_of(param)
        name = named or ("" if handle is None else handle.name)
        if any(word in name.lower() for word in _NAMES_OF_OTHERS) and not param.__dict__.get("use_muon"):
            raise UsageError(
                f"a group with use_muon=True has {name}, by its name an embedding or the head: {_FOR_MUON}. A matrix "
                "that is neither can say so by its attribute (param.use_muon = True)"
            )


def _head(model: nn.Module, shapes: set[tuple[int, ...]]) -> set[int]:
    output = getattr(model, "get_output_embeddings", None)
    head = output() if callable(output) else None
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if head is None and linear and tuple(linear[-1].weight.shape) in shapes:
        head = linear[-1]
    weight = getattr(head, "weight", None)
    return set() if weight is None else {id(weight)}


def split_groups(model: nn.Module, params: Sequence[Any]) -> list[dict[str, Any]]:
    """Parameters or groups as groups that say ``use_muon``. Settings of a group stay with those that know them."""
    matrices = hidden_matrices(model)
    given = [each for each in params if isinstance(each, Mapping)]
    loose = [each[1] if isinstance(each, tuple) else each for each in params if not isinstance(each, Mapping)]
    groups: list[dict[str, Any]] = []
    for group in [*given, *([{"params": loose}] if loose else [])]:
        listed = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        for use_muon, keys in ((True, _MUON_KEYS), (False, _ADAM_KEYS)):
            mine = [param for param in listed if param.requires_grad and (id(param) in matrices) is use_muon]
            if mine:
                settings = {key: value for key, value in group.items() if key in keys}
                groups.append({"params": mine, "use_muon": use_muon, **settings})
    if not any(group["use_muon"] for group in groups):
        log.warning("Muon: the model has no hidden matrices to train; everything goes to AdamW")
    return groups
