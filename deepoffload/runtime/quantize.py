"""Weights in 8 or 4 bits, computed with by torch's own kernels: for inference with a model that the disk must deliver.

int8: ``w = q * scale`` with one scale for each row, symmetric. int4: ``w = (q - 8) * scale + zero`` with a scale and a
zero for each group of a row's elements, q from 0 to 15 (the affine form of torchao and gpt-fast, which torch's kernel
computes with). Both round to nearest. Nothing is calibrated: that is for tools that see data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from deepoffload.errors import UnsupportedError, UsageError
from deepoffload.params.torch_private import int4_product, int8_product, pack_int4

GROUP_SIZES = (32, 64, 128, 256)
"""That torch's int4 kernel computes with."""
OUT_MULTIPLE = 16
"""Of the rows of an int4 weight, likewise."""
CHUNK_NUMEL = 4 << 20
"""Elements that are quantised at once, in fp32."""


class Int8Linear(nn.Module):
    """``nn.Linear`` with int8 weights ``[out, in]`` and a scale for each row.

    The product is computed by ``aten::_weight_int8pack_mm``.
    """

    def __init__(self, weight: Tensor, scales: Tensor, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, self.in_features).contiguous()
        out = int8_product(flat, self.weight, self.scales)
        return _with_bias(out, self.bias).view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, int8"


class Int4Linear(nn.Module):
    """``nn.Linear`` with int4 weights, two in a byte as the processor's kernel wants them, and a scale and a zero for
    each group: ``[in / group, out, 2]``.

    The product is computed by ``aten::_weight_int4pack_mm_for_cpu``.
    """

    def __init__(
        self, weight: Tensor, scales_and_zeros: Tensor, group_size: int, in_features: int, bias: nn.Parameter | None
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, scales_and_zeros.shape[1]
        self.group_size = group_size
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scales_and_zeros = nn.Parameter(scales_and_zeros, requires_grad=False)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, self.in_features).contiguous()
        out = int4_product(flat, self.weight, self.group_size, self.scales_and_zeros)
        return _with_bias(out, self.bias).view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, int4 in groups of {self.group_size}"


def _with_bias(out: Tensor, bias: Tensor | None) -> Tensor:
    return out if bias is None else out + bias


def quantize_weights(model: nn.Module, kind: str, group_size: int = 128, *, head: bool = False) -> nn.Module:
    """Put :class:`Int8Linear` or :class:`Int4Linear` in the place of every ``nn.Linear`` of a model.

    Call it inside an ``offload_context`` with ``inference=True``, after the weights were loaded: weights are quantised
    one by one, and what they were before is forgotten. Of a model in memory it makes the same one.

    Args:
        kind: ``"int8"`` or ``"int4"``.
        group_size: elements of a row that share an int4 scale: 32, 64, 128 or 256.
        head: the layer that ``model.get_output_embeddings()`` names, too. Embeddings are left as they are.

    Returns:
        ``model``.

    Raises:
        UsageError: another ``kind`` or ``group_size``; a weight that is trained, that other modules share, or whose
            width no group divides. Nothing has been changed.
        UnsupportedError: a weight is not on the CPU.
    """
    if kind not in ("int8", "int4"):
        raise UsageError(f'quantize_weights: {kind!r} is unknown; it is "int8" or "int4"')
    if kind == "int4" and group_size not in GROUP_SIZES:
        raise UsageError(f"quantize_weights: group_size {group_size!r} is none of {', '.join(map(str, GROUP_SIZES))}")
    chosen = list(_chosen(model, head))
    users = Counter(id(param) for module in model.modules() for param in module._parameters.values())
    for name, linear in chosen:
        _check(name, linear, kind, group_size, users[id(linear.weight)])
    for name, linear in chosen:
        parent, _, key = name.rpartition(".")
        with torch.no_grad():
            made = _int8(linear) if kind == "int8" else _int4(linear, group_size)
        made.train(linear.training)
        setattr(model.get_submodule(parent), key, made)
    return model


def _chosen(model: nn.Module, head: bool) -> Iterator[tuple[str, nn.Linear]]:
    find: Callable[[], object] | None = getattr(model, "get_output_embeddings", None)
    left = None if head or find is None else find()
    if type(model) is nn.Linear:
        raise UsageError("quantize_weights: the model is one nn.Linear, which cannot be replaced; put it into a module")
    for name, module in model.named_modules():
        if type(module) is nn.Linear and module is not left:
            yield name, module


def _check(name: str, linear: nn.Linear, kind: str, group_size: int, users: int) -> None:
    weight = linear.weight
    what = f"quantize_weights: {name}.weight"
    if weight.requires_grad:
        raise UsageError(f"{what} is trained; freeze it (requires_grad_(False)), or use inference=True")
    if users > 1:
        raise UsageError(f"{what} is tied to another module's, which wants it as it is; untie it first")
    if weight.device.type != "cpu":
        raise UnsupportedError(f"{what} is on {weight.device}; weights in 8 or 4 bits are computed with on the CPU")
    if not weight.is_floating_point() or weight.dtype is torch.float64:
        raise UnsupportedError(f"{what} is {weight.dtype}; torch's kernels compute in fp32, bf16 and fp16")
    out_features, in_features = weight.shape
    if kind == "int4" and (in_features % group_size or out_features % OUT_MULTIPLE):
        raise UsageError(
            f"{what} has the shape [{out_features}, {in_features}]: int4 needs a width that group_size = {group_size} "
            f"divides, and a multiple of {OUT_MULTIPLE} rows; take another group_size, or int8"
        )


def _chunks(linear: nn.Linear) -> Iterator[tuple[int, Tensor]]:
    """Rows of a weight in fp32, a few at a time, and the number of the first."""
    rows, width = linear.weight.shape
    step = max(CHUNK_NUMEL // width, 1)
    for first in range(0, rows, step):
        yield first, linear.weight[first : first + step].float()


def _int8(linear: nn.Linear) -> Int8Linear:
    weight = torch.empty(linear.weight.shape, dtype=torch.int8)
    scales = torch.empty(linear.out_features, dtype=linear.weight.dtype)
    for first, rows in _chunks(linear):
        scale = (rows.abs().amax(1) / 127).clamp(min=torch.finfo(torch.float32).tiny).to(scales.dtype)
        scales[first : first + len(rows)] = scale
        # By what the kernel multiplies with. Below the type's smallest number everything is zero.
        divisor = scale.float().masked_fill(scale == 0, 1.0)
        weight[first : first + len(rows)] = (rows / divisor[:, None]).round_().clamp_(-127, 127).to(torch.int8)
    return Int8Linear(weight, scales, linear.bias)


def _int4(linear: nn.Linear, group_size: int) -> Int4Linear:
    out_features, in_features = linear.weight.shape
    numbers = torch.empty(linear.weight.shape, dtype=torch.int32)
    both = torch.empty(in_features // group_size, out_features, 2, dtype=linear.weight.dtype)
    for first, rows in _chunks(linear):
        groups = rows.view(len(rows), -1, group_size)
        low, high = groups.amin(2), groups.amax(2)
        scale = ((high - low) / 15).clamp(min=1e-6)
        zero = low + 8 * scale
        both[:, first : first + len(rows), 0] = scale.t().to(both.dtype)
        both[:, first : first + len(rows), 1] = zero.t().to(both.dtype)
        found = ((groups - low[..., None]) / scale[..., None]).round_().clamp_(0, 15)
        numbers[first : first + len(rows)] = found.view(len(rows), in_features).to(torch.int32)
    packed = pack_int4(numbers, 1)
    return Int4Linear(packed, both, group_size, in_features, linear.bias)
