"""Models whose weights are stored in one form and shown in another: two materialisers, and the paging of a model
through one of them, with the package's own pager, doors and windows, on any device and on the CPU as one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from deepoffload.copies.accelerator import ComputeDevice
from deepoffload.copies.copy_memory import CopyMemory
from deepoffload.copies.cpu_device import CpuDevice
from deepoffload.copies.host_link import HostLink, host_offset
from deepoffload.copies.materialise import Materialiser
from deepoffload.errors import UnsupportedError
from deepoffload.io.engine import IoEngine
from deepoffload.io.swap_space import SwapSpace
from deepoffload.memory.arena import Arena
from deepoffload.memory.block import Block
from deepoffload.memory.form import AS_SHOWN, Form
from deepoffload.memory.tier_manager import TierManager
from deepoffload.optim.device_landing import DeviceLandings
from deepoffload.optim.gradients import Gradients
from deepoffload.params.layout import byte_offsets
from deepoffload.params.open_graphs import OpenGraphs
from deepoffload.params.pager import Pager
from deepoffload.params.parameter import OffloadedParameter
from deepoffload.params.slot import dense_stride
from deepoffload.params.torch_private import outside_user_modes, storage_at, version_of
from deepoffload.params.unit import ParamHandle, Unit, WeightView
from deepoffload.params.use_order import UseOrder
from deepoffload.params.window import Window
from deepoffload.schedule.placement import BlockKind
from tests.support.pager_owner import PagerOwner


class Encoding(Materialiser, Protocol):
    """A materialiser, and how a parameter is stored for it in the first place."""

    def __init__(self, link: HostLink) -> None: ...

    @staticmethod
    def stored(value: Tensor) -> tuple[str, Tensor]:
        """The name of the encoding, and the bytes (uint8) that are stored of a contiguous fp32 tensor."""

    @staticmethod
    def shown_dtype() -> torch.dtype:
        """Of each parameter."""


def _stored_part(stored: Tensor, form: Form) -> Tensor:
    return stored[form.offset_stored : form.offset_stored + form.nbytes_stored]


def _shown_part(shown: Tensor, form: Form) -> Tensor:
    return shown[form.offset_shown : form.offset_shown + form.nbytes_shown]


class Fp32ShownAsBf16:
    """Stored in fp32, shown in bf16. What the program writes is stored exactly."""

    def __init__(self, link: HostLink) -> None:
        self._link = link

    @staticmethod
    def stored(value: Tensor) -> tuple[str, Tensor]:
        return "fp32", value.reshape(-1).view(torch.uint8)

    @staticmethod
    def shown_dtype() -> torch.dtype:
        return torch.bfloat16

    def bring(self, block: Block, shown: Tensor) -> None:
        stored = torch.empty(block.nbytes, dtype=torch.uint8, device=shown.device)
        self._link.bring(stored, host_offset(block))
        for form in block.forms:
            there = _shown_part(shown, form).view(torch.bfloat16)
            there.copy_(_stored_part(stored, form).view(torch.float32))

    def take_back(self, block: Block, shown: Tensor) -> None:
        stored = torch.zeros(block.nbytes, dtype=torch.uint8, device=shown.device)
        for form in block.forms:
            there = _shown_part(shown, form).view(torch.bfloat16)
            _stored_part(stored, form).view(torch.float32).copy_(there)
        self._link.take(stored, host_offset(block))

    def check_take_back(self, block: Block) -> None:
        """Always possible."""


class Int8ShownAsFp32:
    """Matrices are stored as int8 codes with one scale per row, and shown in fp32; all else is stored as it is shown.

    The codes of a weight that the program writes would lose what it wrote: that is refused.
    """

    NAME = "int8 codes with a scale per row"

    def __init__(self, link: HostLink) -> None:
        self._link = link

    @classmethod
    def stored(cls, value: Tensor) -> tuple[str, Tensor]:
        if value.dim() != 2:
            return AS_SHOWN, value.reshape(-1).view(torch.uint8)
        scales = (value.abs().amax(dim=1) / 127).clamp_min(1e-12)
        codes = (value / scales[:, None]).round().to(torch.int8)
        return cls.NAME, torch.cat([scales.view(torch.uint8), codes.reshape(-1).view(torch.uint8)])

    @staticmethod
    def shown_dtype() -> torch.dtype:
        return torch.float32

    @classmethod
    def dequantised(cls, value: Tensor) -> Tensor:
        """What is shown of a parameter with these values."""
        encoding, stored = cls.stored(value)
        shown = torch.empty(value.numel() * 4, dtype=torch.uint8)
        cls._show(Form(0, stored.numel(), 0, shown.numel(), encoding), stored, shown)
        return shown.view(torch.float32).reshape(value.shape)

    @staticmethod
    def _show(form: Form, stored: Tensor, shown: Tensor) -> None:
        part, there = _stored_part(stored, form), _shown_part(shown, form)
        if form.encoding == AS_SHOWN:
            there.copy_(part)
            return
        numel = form.nbytes_shown // 4
        scales = part[: form.nbytes_stored - numel].view(torch.float32)
        codes = part[form.nbytes_stored - numel :].view(torch.int8).view(len(scales), -1)
        there.view(torch.float32).view(len(scales), -1).copy_(codes.float() * scales[:, None])

    def bring(self, block: Block, shown: Tensor) -> None:
        stored = torch.empty(block.nbytes, dtype=torch.uint8, device=shown.device)
        self._link.bring(stored, host_offset(block))
        for form in block.forms:
            self._show(form, stored, shown)

    def take_back(self, block: Block, shown: Tensor) -> None:
        self.check_take_back(block)
        raise AssertionError(f"{block.name} has no codes")

    def check_take_back(self, block: Block) -> None:
        raise UnsupportedError(
            f"the weights of {block.name} are stored as {self.NAME}, which what the program writes cannot be taken "
            "back to; they show the stored values again. Write to a copy of the weight (weight.clone()), or train an "
            "adapter"
        )


class EncodedModel(PagerOwner):
    """``model``, whose modules with parameters of their own (in fp32) are units, stored in one ``encoding``.

    Args:
        device_bytes, host_bytes: the budgets of copies and of the arena.
        accelerator: the device that computes.
    """

    def __init__(
        self,
        model: nn.Module,
        encoding: type[Encoding],
        path: Path,
        *,
        device_bytes: int,
        host_bytes: int,
        accelerator: ComputeDevice | None = None,
        poison: bool = True,
    ) -> None:
        accelerator = accelerator or CpuDevice()
        super().__init__()
        self.encoding = encoding
        io = IoEngine()
        self._last.callback(io.close)
        space = SwapSpace(io, [path])
        self._last.callback(space.close)
        graphs = OpenGraphs()
        order = UseOrder(graphs)
        arena = Arena(host_bytes, lends=accelerator.device.type == "cpu")
        self.memory = memory = CopyMemory(
            lambda copies: TierManager(arena, space, order, copies=copies, poison=poison),
            accelerator,
            device_bytes,
            outside_user_modes=outside_user_modes,
            storage_at=storage_at,
            materialiser=encoding,
            poison=poison,
        )
        self.tiers = memory.tiers
        self._last.callback(self.tiers.close)
        self._last.callback(memory.close)
        self.pager = Pager(self.tiers, order, graphs, memory, self)
        self.gradients = gradients = Gradients(self.pager, from_device=DeviceLandings(memory))
        self.pager.assembled()
        for name, module in model.named_modules():
            params = list(module.named_parameters(recurse=False))
            if params:
                unit = self._store(name, params)
                for handle in unit.handles:
                    gradients.track(handle)
                self._last.callback(Window(self.pager, module, name).remove)
        self.tiers.evict_all()

    def _store(self, name: str, params: list[tuple[str, nn.Parameter]]) -> Unit:
        encoded = [self.encoding.stored(param.detach()) for _, param in params]
        dtype = self.encoding.shown_dtype()
        shown_sizes = [param.numel() * dtype.itemsize for _, param in params]
        stored_at, stored_bytes = byte_offsets([part.numel() for _, part in encoded])
        shown_at, _ = byte_offsets(shown_sizes)
        forms = tuple(
            Form(start, part.numel(), shown_start, size, label)
            for start, (label, part), shown_start, size in zip(stored_at, encoded, shown_at, shown_sizes, strict=True)
        )
        owner = WeightView(self.pager)
        block = self.tiers.create(name, BlockKind.WEIGHT, stored_bytes, owner, forms)
        self._fill(block, [part for _, part in encoded])
        handles = [
            self._adopt(f"{name}.{key}", param, block, form) for (key, param), form in zip(params, forms, strict=True)
        ]
        owner.slots += handles
        unit = Unit(self.pager.life.new_unit_index(), name, handles, block, owner)
        for handle in handles:
            handle.unit = unit
        self.pager.units.append(unit)
        return unit

    def _fill(self, block: Block, parts: list[Tensor]) -> None:
        self.tiers.acquire(block, load=False)
        stored = self._in_arena(block).zero_()
        for form, part in zip(block.forms, parts, strict=True):
            _stored_part(stored, form).copy_(part)
        self.tiers.release(block)

    def _adopt(self, name: str, param: Any, block: Block, form: Form) -> ParamHandle:
        dtype = self.encoding.shown_dtype()
        handle = ParamHandle(self.pager, name, param, dtype, dense_stride(param))
        handle.bind(block, form)
        with outside_user_modes():
            param.__class__ = OffloadedParameter
            param._slot = handle
            handle.uninstall()
            if handle.device != self.memory.device:
                handle.move_to(self.memory.device)
        handle.version = version_of(param)
        return handle

    def stored(self, unit: Unit) -> Tensor:
        """The stored bytes of a unit, brought up to date with what the program has written."""
        return self.stored_bytes(unit.weights)
