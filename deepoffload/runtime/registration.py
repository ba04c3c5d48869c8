"""Parameters while a context is open: each is paged when it is registered, if the budget holds it.

If it does not, the model cannot be used. Which budget is enough is known only when all of the model is built. So the
rest of the context builds it without bytes, on the meta device, and the error at its end names a budget for all of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from traceback import format_exception_only
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from deepoffload.copies.rank_link import RankLink
from deepoffload.errors import BudgetError, UsageError
from deepoffload.memory.block import is_backed
from deepoffload.native.aio import round_up
from deepoffload.params.pager import Pager
from deepoffload.params.torch_private import outside_user_modes, parameter_registration_hooks
from deepoffload.params.unit import ParamHandle
from deepoffload.runtime.agreement import Agreement
from deepoffload.runtime.building import BuildingMemory, kept_bytes
from deepoffload.runtime.construct import adopt, adoptable
from deepoffload.runtime.waiting import WaitingWeights
from deepoffload.runtime.whole_copies import ONE_RANK_HAS
from deepoffload.schedule.nvme_room import set_up_nvme_bytes


class ShortageError(BudgetError):
    """A parameter does not fit while a model is built. Which budget is enough is not known yet.

    ``on_disk``: it is NVMe that is full.
    """

    def __init__(self, message: str, *, on_disk: bool = False) -> None:
        super().__init__(message)
        self.on_disk = on_disk


Refusal = Callable[[Sequence[nn.Module], ShortageError, int], BudgetError]
"""From models that were counted, the first parameter that did not fit, and the bytes that registered parameters took at
once, to the error for the user."""


def take(
    pager: Pager, param: Tensor, name: str, capacity_bytes: int, building: BuildingMemory | None = None
) -> ParamHandle:
    """Adopt ``param``. ``building``: what several ranks keep while they build a model.

    Raises:
        ShortageError: memory of ``capacity_bytes`` cannot hold it, now or ever.
        BudgetError: it could, if the program did not keep views of others.
        UsageError: it was made in torch's inference mode.
    """
    if param.is_inference():
        raise UsageError(
            f"{name} was made under torch.inference_mode(), where torch does not tell whether a tensor has changed: "
            "build or load the model outside of it, and call it inside"
        )
    what = f"{name} ({param.nbytes:,} bytes)"
    if round_up(param.nbytes) > capacity_bytes:
        raise ShortageError(_above_budget(pager, what, capacity_bytes))
    if building is not None:
        building.make_room(param.nbytes)
    if _fills_nvme(pager, round_up(param.nbytes), capacity_bytes):
        raise ShortageError(
            f"no room for {what}, because NVMe is full: memory and NVMe hold what was registered before it, and need "
            "room to exchange two parameters",
            on_disk=True,
        )
    try:
        return _adopted(pager, param, name, building)
    except BudgetError:
        if pager.tiers.space is not None:
            raise  # views, of which the program may hold fewer
    raise ShortageError(
        f"no room for {what}: parameters registered before it take "
        f"{_registered_bytes(pager, capacity_bytes):,} bytes of {capacity_bytes:,}"
    )


def _above_budget(pager: Pager, what: str, capacity_bytes: int) -> str:
    budget_bytes = pager.tiers.arena.capacity_bytes
    left = f", of which gradients on their way from the device leave {capacity_bytes:,}"
    return (
        f"{what} alone is larger than the budget of {budget_bytes:,} bytes"
        f"{left if capacity_bytes < budget_bytes else ''}{f' {ONE_RANK_HAS}' if pager.link is not None else ''}"
    )


def _adopted(pager: Pager, param: Tensor, name: str, building: BuildingMemory | None) -> ParamHandle:
    try:
        return adopt(pager, param, name, building)
    except BudgetError:
        if building is None or not building.put_all_away():
            raise
    return adopt(pager, param, name, building)


def _fills_nvme(pager: Pager, nbytes: int, capacity_bytes: int) -> bool:
    """Whether memory and NVMe are too full for one more parameter. See [Note: room on NVMe] in
    ``schedule.nvme_room``."""
    tiers, space = pager.tiers, pager.tiers.space
    if space is None or space.budget_bytes is None:
        return False
    at_most = tiers.arena.used_bytes + space.used_bytes + nbytes
    if set_up_nvme_bytes(capacity_bytes, at_most, capacity_bytes) <= space.budget_bytes:
        return False  # without a look at each block
    there = (block for block in tiers.blocks() if not is_backed(block) and not tiers.is_empty(block.id))
    rooms = [nbytes, *(block.room_bytes for block in there)]
    return set_up_nvme_bytes(capacity_bytes, sum(rooms), max(rooms)) > space.budget_bytes


def _registered_bytes(pager: Pager, capacity_bytes: int) -> int:
    """What is in memory, without the way of gradients from a device, which is no part of ``capacity_bytes``."""
    arena = pager.tiers.arena
    return max(arena.used_bytes - (arena.capacity_bytes - capacity_bytes), 0)


class ConstructionHooks:
    """torch's global registration hooks, on while a context is open.

    Args:
        capacity_bytes: of memory, for what is registered.
        refusal: makes the error for a model that the budget does not hold.
        link: to the other ranks; None with one.

    Attributes:
        kept: what this rank keeps of the model, where there are others.
        handles: of the parameters that were paged.
        shortage: the first parameter that did not fit, if there was one. Parameters that come after it are replaced by
            ones on the meta device.
    """

    def __init__(self, pager: Pager, capacity_bytes: int, refusal: Refusal, link: RankLink | None = None) -> None:
        self.pager = pager
        self.kept = None if link is None else BuildingMemory(pager.tiers, link, capacity_bytes)
        self.handles: list[ParamHandle] = []
        self.shortage: ShortageError | None = None
        self._capacity_bytes = capacity_bytes
        self._refusal = refusal
        self._counted = WeakTensorKeyDictionary()
        self._stand_ins: list[weakref.ref[nn.Parameter]] = []
        self._peak_bytes = 0
        self._modules: weakref.WeakKeyDictionary[nn.Module, None] = weakref.WeakKeyDictionary()
        self._removable: list[Any] = []
        self._waiting = WaitingWeights()

    def __enter__(self) -> ConstructionHooks:
        registration = torch.nn.modules.module
        self._removable = [
            registration.register_module_parameter_registration_hook(self._on_parameter),  # type: ignore[arg-type]  # may return one
            registration.register_module_module_registration_hook(self._on_module),
        ]
        return self

    def __exit__(self, *exc_info: object) -> None:
        for removable in self._removable:
            removable.remove()
        self._removable.clear()

    def meet_at_end(self) -> None:
        """Return when all ranks have left the context. Nothing to do with one.

        Raises:
            RankError: another rank still looks at a parameter of which each rank has a part.
        """
        if self.kept is not None:
            self.kept.meet_at_end()

    def begin_placing(self, handles: Sequence[ParamHandle], agreement: Agreement) -> BuildingMemory | None:
        """The model is built. Returns :attr:`kept`; every rank then has the parts that others ask for."""
        if self.kept is not None:
            self.kept.begin_placing(handles)
            agreement.gather(None, "placing the model")
        return self.kept

    def is_on(self) -> bool:
        """Whether the context is open."""
        return bool(self._removable)

    def refusal(self, ended_by: BaseException | None = None) -> BudgetError:
        """The error for a model that did not fit, as far as it was built. ``ended_by``: the program's error, after
        which nothing was built any more; it may come from weights that have no bytes."""
        shortage = self.shortage
        if shortage is None:
            raise RuntimeError("every parameter has found room")
        if ended_by is not None:
            cause = "".join(format_exception_only(ended_by)).strip()
            counted = f"{shortage}. Counted is what was built until, without its bytes: {cause}"
            shortage = ShortageError(counted, on_disk=shortage.on_disk)
        return self._refusal(self.roots(), shortage, self._peak_bytes)

    def _on_parameter(self, module: nn.Module, name: str, param: Any) -> nn.Parameter | None:
        self._modules.setdefault(module)
        full_name = f"{type(module).__name__}.{name}"
        return None if self._waits(module, name, param, full_name) else self._take_or_count(param, full_name)

    def _waits(self, module: nn.Module, name: str, param: Any, full_name: str) -> bool:
        """Whether a parameter above the budget stays an ordinary one until its layer is split. Not where only bytes
        come: the layer was there before them."""
        if self.shortage is not None or self.pager.tiers.space is None or not adoptable(self.pager, param):
            return False
        if round_up(param.nbytes) <= self._capacity_bytes or self._whole_is_known():
            return False
        what = f"{full_name} ({param.nbytes:,} bytes)"
        return self._waiting.take(module, name, param, _above_budget(self.pager, what, self._capacity_bytes))

    def end_waiting(self) -> None:
        """Nothing more is split: what is still above the budget is a shortage."""
        for layer, why in self._waiting.left():
            self.shortage = self.shortage or ShortageError(why)
            layer._parameters["weight"] = self._count(layer.weight)

    def registered_in(self, param: nn.Parameter) -> list[nn.Module]:
        """The modules built in this context that have ``param``."""
        return [
            module for module in self._modules if any(each is param for each in module.__dict__["_parameters"].values())
        ]

    def take_copy(self, param: nn.Parameter, name: str, modules: list[nn.Module]) -> nn.Parameter | None:
        """Page a parameter that ``copy.deepcopy`` has made, which registers nothing. Returns what stands for it in a
        model that is only counted."""
        self._modules.update(dict.fromkeys(modules))
        return self._take_or_count(param, f"{name} (copy)")

    def _take_or_count(self, param: Any, name: str) -> nn.Parameter | None:
        if self.shortage is None:
            try:
                self._take(param, name)
            except ShortageError as error:
                self.shortage = _without_traceback(error)
                if self._whole_is_known():
                    self._note_peak(round_up(param.nbytes))
                    raise self.refusal() from None
        return None if self.shortage is None else self._count(param)

    def take_unregistered(self, roots: list[nn.Module]) -> None:
        """Page what came into a model past the hooks: ``to_empty`` writes into ``_parameters`` itself."""
        for root in roots:
            for name, param in root.named_parameters():
                self.adopt(param, name)

    def adopt(self, param: Any, name: str) -> ParamHandle | None:
        """Page a parameter that no hook can replace."""
        try:
            return self._take(param, name)
        except ShortageError as error:
            self.shortage = self.shortage or _without_traceback(error)
            self._note_peak(round_up(param.nbytes))
            raise self.refusal() from None

    def _take(self, param: Any, name: str) -> ParamHandle | None:
        if not adoptable(self.pager, param):
            return None
        handle = take(self.pager, param, name, self._capacity_bytes, self.kept)
        self.handles.append(handle)
        return handle

    def _whole_is_known(self) -> bool:
        """True where the rest of the model is there, on the meta device, and only its bytes are loaded."""
        return any(p is not None and p.is_meta for module in self._modules for p in module._parameters.values())

    def _count(self, param: Any) -> nn.Parameter | None:
        """What stands for a parameter in a model that is only counted; None for one that takes no room."""
        if not adoptable(self.pager, param):
            return None
        stand_in: nn.Parameter | None = self._counted.get(param)
        if stand_in is None:
            self._note_peak(round_up(param.nbytes))
            with outside_user_modes():
                stand_in = nn.Parameter(torch.empty_like(param, device="meta"), param.requires_grad)
            self._counted[param] = stand_in
            self._stand_ins.append(weakref.ref(stand_in))
        return stand_in

    def _note_peak(self, coming_bytes: int) -> None:
        """What must be in memory at once while the model is built: without NVMe, all that is registered and alive.
        Where NVMe is full, what both must hold."""
        on_disk = self.shortage is not None and self.shortage.on_disk
        if on_disk or self.pager.tiers.space is None:
            alive = (stand_in() for stand_in in self._stand_ins)
            ranks = 1 if self.kept is None else self.kept.world_size
            coming_bytes += sum(kept_bytes(param.nbytes, ranks) for param in alive if param is not None)
            tiers = self.pager.tiers
            registered = _registered_bytes(self.pager, self._capacity_bytes)
            blocks = (block for block in tiers.blocks() if not tiers.is_empty(block.id))
            coming_bytes += sum(block.room_bytes for block in blocks) if on_disk else registered
        self._peak_bytes = max(self._peak_bytes, coming_bytes)

    def _on_module(self, module: nn.Module, name: str, child: Any) -> None:
        self._modules.setdefault(module)
        if isinstance(child, nn.Module):
            self._modules.setdefault(child)

    def roots(self) -> list[nn.Module]:
        """Modules built in the context that live on and are part of no other, in the order in which they were built,
        which is the same on all ranks."""
        alive = [module for module in self._modules if "_modules" in module.__dict__]  # copies may not be finished
        inner = {id(child) for module in alive for child in module.modules() if child is not module}
        return [module for module in alive if id(module) not in inner and next(module.parameters(), None) is not None]


def _without_traceback(error: ShortageError) -> ShortageError:
    """The same error; its traceback would keep modules alive."""
    return ShortageError(str(error), on_disk=error.on_disk)


def context_is_open() -> bool:
    """Whether what is registered or copied now is paged."""
    return _open_hooks() is not None


def _open_hooks() -> ConstructionHooks | None:
    hooks = list(parameter_registration_hooks.values())  # a context may end in another thread, or in a collection
    owners = (getattr(hook, "__self__", None) for hook in hooks)
    return next((owner for owner in owners if isinstance(owner, ConstructionHooks)), None)


def registered_in(param: nn.Parameter) -> list[nn.Module]:
    """The modules built in the context that is open that have ``param``; none where no context is."""
    hooks = _open_hooks()
    return [] if hooks is None else hooks.registered_in(param)


def refuse_meta(root: nn.Module) -> None:
    """Raise for parameters that were never given real memory."""
    on_meta = [name for name, param in root.named_parameters() if param.is_meta]
    if on_meta:
        shown = ", ".join(on_meta[:5]) + (f" and {len(on_meta) - 5} more" if len(on_meta) > 5 else "")
        raise UsageError(
            f"{len(on_meta)} parameters of {type(root).__name__} are still on the meta device when offload_context "
            f"ends: {shown}. Load or initialise them inside the context (from_pretrained without device_map, or "
            "model.to_empty(device='cpu') and a checkpoint), or build the model without a meta device: the context "
            "keeps it within the budget anyway"
        )
