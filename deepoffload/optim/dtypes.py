"""The types that the kernels know, by torch's."""

from __future__ import annotations

import torch

from deepoffload.native.cpu_adam import DType

NATIVE_DTYPES = {torch.float32: DType.FP32, torch.bfloat16: DType.BF16, torch.float16: DType.FP16}
