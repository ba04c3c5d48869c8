"""What DeepSpeed's ZeRO-3 does between autograd's gradients and the new weights, part by part.

Written after DeepSpeed 0.19.8, runtime/zero/stage3.py, for one rank, bf16, one backward per step, the optimizer on the
CPU; every part names the function that does it there. Memory that DeepSpeed keeps from step to step is kept here,
temporary tensors are temporary. The reduce-scatter of the only rank with itself is left out. All parts are always made:
the norm also where nothing is clipped, the pass that unscales also where the factor is one. ``whole.py`` measures
them next to DeepSpeed's own engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.cpu_adam.buffers import Buffers

Part = Callable[[], Any]
CLIP_NORM = 1.0
LANDING = ("gradient into the bucket", "concatenation, division", "into the partition", "norm in double", "fp32, flat")
STEP = ("unscale and clip", "Adam on the master", "weights to bf16")


def zero3_parts(b: Buffers, parameter_numel: int, adam: Callable[[], Any]) -> dict[str, Part]:
    """The parts in their order; ``adam`` updates ``b.weight`` from ``b.grad``."""

    def split(flat: Tensor) -> tuple[Tensor, ...]:
        return flat.split(parameter_numel)

    grads, buckets, partitions = split(b.grad16), split(b.bucket16), split(b.landed16)
    norms: list[Tensor] = []

    def into_the_bucket() -> None:  # __add_grad_to_ipg_bucket
        for bucket, grad in zip(buckets, grads, strict=True):
            bucket.copy_(grad)

    def concatenation() -> None:  # reduce_scatter_coalesced; a bucket takes 5e8 elements
        flat = torch.cat(buckets) if len(buckets) > 1 else buckets[0]
        flat.div_(1)

    def into_the_partition() -> None:  # partition_grads
        for partition, bucket in zip(partitions, buckets, strict=True):
            partition.copy_(bucket)

    def norm() -> None:  # _constant_buffered_norm2
        norms.clear()
        for partition in partitions:
            norms.append((partition.data.to(torch.double).norm(2) ** 2.0) ** 0.5)

    def to_fp32() -> None:  # _offload_grad_partition_at_boundary
        for flat, partition in zip(split(b.grad), partitions, strict=True):
            flat.copy_(partition.to(dtype=torch.float32))

    def unscale_and_clip() -> None:  # complete_grad_norm_calculation_for_cpu_offload, unscale_and_clip_grads
        total = torch.stack([each**2 for each in norms]).sum().float() ** 0.5 if norms else torch.tensor(1.0)
        clip = torch.clamp((total + 1e-6) / CLIP_NORM, min=1.0)
        b.grad.mul_(1.0 / clip)

    def to_bf16() -> None:  # _reassign_or_swap_out_partitioned_parameters
        b.weight16.data.copy_(b.weight.data)

    calls = (into_the_bucket, concatenation, into_the_partition, norm, to_fp32, unscale_and_clip, adam, to_bf16)
    return dict(zip((*LANDING, *STEP), calls, strict=True))
