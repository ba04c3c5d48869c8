"""Functions that need no bytes of what they are called with: they pass every door, or are answered from the slot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deepoffload.params.torch_private import outside_user_modes, past_doors

_ATTRIBUTES = (
    "shape dtype device requires_grad is_leaf grad_fn layout ndim names itemsize nbytes output_nr retains_grad name "
    "is_cuda is_meta is_sparse is_sparse_csr is_quantized is_mkldnn is_nested is_cpu is_xpu is_mps _version "
    "_backward_hooks _post_accumulate_grad_hooks grad_dtype _base"
).split()
_METHODS = (
    "size dim numel nelement ndimension is_floating_point is_complex is_signed element_size get_device register_hook "
    "register_post_accumulate_grad_hook is_inference is_same_size has_names __len__ __hash__ "
    "is_conj is_neg retain_grad dim_order"
).split()


def _metadata() -> frozenset[Any]:
    functions: set[Any] = {torch.is_floating_point, torch.is_complex, torch.numel, torch.is_same_size}
    for name in _ATTRIBUTES:
        attribute: Any = getattr(Tensor, name, None)
        if hasattr(attribute, "__get__"):
            functions.add(attribute.__get__)
        if name in ("_backward_hooks", "_post_accumulate_grad_hooks", "grad_dtype") and hasattr(attribute, "__set__"):
            functions.add(attribute.__set__)
    functions |= {getattr(Tensor, name) for name in _METHODS if hasattr(Tensor, name)}
    return frozenset(functions)


METADATA = _metadata()


def layout_answers(
    layout_of: Callable[[Any], Any], offset_of: Callable[[Any], int] = lambda tensor: 0
) -> dict[Any, Callable[[Any, Any, Any], Any]]:
    """Questions that a stand-in would answer wrongly, or not at all: how the elements lie, and in what memory.

    Args:
        layout_of: what a tensor has its ``shape``, ``stride`` and ``dtype`` from.
        offset_of: where its elements begin, in elements.
    """

    def stride(func: Any, args: Any, kwargs: Any) -> Any:
        strides = tuple(layout_of(args[0]).stride)
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        return strides if dim is None else strides[dim]

    def storage_offset(func: Any, args: Any, kwargs: Any) -> int:
        return offset_of(args[0])

    def is_contiguous(func: Any, args: Any, kwargs: Any) -> bool:
        layout = layout_of(args[0])
        with outside_user_modes():
            like = torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device="meta")
            return like.is_contiguous(*args[1:], **kwargs)

    def of_its_device(func: Any, args: Any, kwargs: Any) -> Any:
        device = past_doors(Tensor.device.__get__, args[:1])
        with outside_user_modes():
            return func(torch.empty(1, device=device), *args[1:], **kwargs)

    return {
        Tensor.stride: stride,
        Tensor.storage_offset: storage_offset,
        Tensor.is_contiguous: is_contiguous,
        Tensor.is_shared: of_its_device,  # to ask a stand-in would end the process
        Tensor.is_pinned: of_its_device,
    }


LAYOUT = layout_answers(lambda tensor: tensor._slot)
"""Of parameters and gradients."""
