"""One parameter's state in a checkpoint, in the order in which its elements lie in memory now."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from deepoffload.checkpoint.block_reader import FileSpan
from deepoffload.checkpoint.source import StoredTensor
from deepoffload.errors import UsageError
from deepoffload.native import cpu_adam
from deepoffload.native.cpu_adam import STATE_BLOCK
from deepoffload.optim.foreign.packed import is_packed_key
from deepoffload.optim.rule import SCALE_SUFFIX
from deepoffload.optim.state import MASTER_PART_KEYS, to_fp32
from deepoffload.optim.threads import num_threads

LEADS = frozenset(MASTER_PART_KEYS.values())


class StoredParam:
    """What a checkpoint has of one parameter.

    Args:
        shape, stride: of the parameter now; the stride is that of dense memory.
        order: as :class:`~deepoffload.checkpoint.manifest.TensorRecord` has it, of the parameter now.
        arrays: stored arrays by key, with ``remainder`` or ``master`` among them, and scales.
        weight: the stored weight, when it is stored whole and in this order; else ``gather`` makes it.
        shapes_vary: the arrays are those of a program's own optimizer, which may have any shape (``row_var`` of
            Adafactor has one element per row).

    Raises:
        UsageError: an array has another shape than the parameter.
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        order: tuple[int, ...] | None,
        arrays: Mapping[str, StoredTensor],
        weight: StoredTensor | None,
        weight_dtype: torch.dtype | None,
        gather: Callable[[], Tensor | None],
        *,
        shapes_vary: bool = False,
    ) -> None:
        self.name = name
        self.shape = shape
        self.stride = stride
        self.order = order
        self.arrays = arrays
        self.weight_dtype = weight_dtype
        self._weight = weight
        self._gather = gather
        self._gathered: Tensor | None = None
        self._reordered: dict[str, Tensor] = {}
        for key, array in arrays.items():
            scales = key.endswith(SCALE_SUFFIX) and key.removesuffix(SCALE_SUFFIX) in arrays
            numel = torch.Size(shape).numel()
            expected = (-(-numel // STATE_BLOCK),) if scales else shape
            if array.shape != expected and not (shapes_vary and key not in LEADS):
                raise UsageError(f"{name}.{key} has shape {array.shape} in the checkpoint, the parameter has {shape}")

    @property
    def keys(self) -> list[str]:
        """Arrays, without scales and what completes the weight."""
        return [
            key
            for key in self.arrays
            if key not in LEADS and not (key.endswith(SCALE_SUFFIX) and key.removesuffix(SCALE_SUFFIX) in self.arrays)
        ]

    def corrects(self, dtype: torch.dtype) -> bool:
        """Whether a weight of ``dtype`` becomes what the stored master gives, because it was saved in another type."""
        return self.weight_dtype not in (dtype, None) and bool(LEADS & self.arrays.keys())

    def weight_spans(self, start: int, numel: int) -> Iterator[FileSpan]:
        """What :meth:`master` reads, as far as it lies in the order of the parameter."""
        tensors = [self._weight] if "master" not in self.arrays else []
        tensors += [self.arrays[key] for key in LEADS & self.arrays.keys() if self.lies_as_stored(key)]
        for tensor in tensors:
            if tensor is not None:
                yield tensor.span(start, numel)

    def lies_as_stored(self, key: str) -> bool:
        """Whether elements of an array have the order of the parameter's memory; bytes of packed state do not move."""
        return is_packed_key(key) or self.arrays[key].record.order == self.order

    def fp32(self, key: str, start: int, numel: int) -> Tensor:
        """Elements of an array in fp32."""
        if self.lies_as_stored(key):
            return self._decoded(key, start, numel)
        if key not in self._reordered:
            array = self.arrays[key]
            values = array.in_shape(self._decoded(key, 0, array.record.numel))
            self._reordered = {key: self._in_memory_order(values)}  # one at a time
        return self._reordered[key][start : start + numel]

    def whole(self, key: str) -> Tensor:
        """All of an array in fp32, in the parameter's shape."""
        array = self.arrays[key]
        return array.in_shape(self._decoded(key, 0, array.record.numel)).contiguous()

    def remainder(self, start: int, numel: int) -> Tensor:
        """Elements of the 16-bit remainder."""
        if self.lies_as_stored("remainder"):
            return self.arrays["remainder"].read(start, numel)
        return self._in_memory_order(self.arrays["remainder"].whole())[start : start + numel]

    def master(self, start: int, numel: int) -> Tensor:
        """The exact fp32 values of the weight as it was saved."""
        if "master" in self.arrays:
            return self.fp32("master", start, numel)
        stored = self._stored_weight(start, numel)
        if "remainder" not in self.arrays or stored.dtype is not torch.bfloat16:
            return stored.float()
        low = self.remainder(start, numel).contiguous()
        values = torch.empty(numel, dtype=torch.float32, device="cpu")
        cpu_adam.merge_fp32(stored.data_ptr(), low.data_ptr(), values.data_ptr(), numel, num_threads=num_threads())
        return values

    def _stored_weight(self, start: int, numel: int) -> Tensor:
        if self._weight is not None:
            return self._weight.read(start, numel)
        if self._gathered is None:
            made = self._gather()
            if made is None:
                raise UsageError(f"the checkpoint does not have the weight {self.name}")
            self._gathered = made.as_strided((made.numel(),), (1,))
        return self._gathered[start : start + numel].contiguous()

    def forget(self) -> None:
        """Give back what was gathered."""
        self._gathered = None
        self._reordered = {}

    def _decoded(self, key: str, start: int, numel: int) -> Tensor:
        """Elements in stored order, in fp32."""
        array = self.arrays[key]
        if key + SCALE_SUFFIX not in self.arrays:
            values = array.read(start, numel)
            return values if values.dtype is torch.float32 else values.float()
        first = start // STATE_BLOCK * STATE_BLOCK
        last = min(-(-(start + numel) // STATE_BLOCK) * STATE_BLOCK, array.record.numel)
        codes = array.read(first, last - first)
        blocks = -(-last // STATE_BLOCK) - first // STATE_BLOCK
        scales = self.arrays[key + SCALE_SUFFIX].read(first // STATE_BLOCK, blocks)
        values = torch.empty(last - first, dtype=torch.float32, device="cpu")
        to_fp32(codes, scales, values.data_ptr())
        return values[start - first : start - first + numel].contiguous()

    def _in_memory_order(self, values: Tensor) -> Tensor:
        laid = torch.empty_strided(self.shape, self.stride, dtype=values.dtype, device="cpu").copy_(values)
        return laid.as_strided((laid.numel(),), (1,))
