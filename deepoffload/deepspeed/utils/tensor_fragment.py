"""``deepspeed.utils.tensor_fragment``: where DeepSpeed's ``safe_*`` functions come from."""

from __future__ import annotations

from deepoffload.deepspeed.names import submodules
from deepoffload.deepspeed.utils.fp32_access import safe_get_full_fp32_param as safe_get_full_fp32_param
from deepoffload.deepspeed.utils.fp32_access import safe_get_full_grad as safe_get_full_grad
from deepoffload.deepspeed.utils.fp32_access import safe_get_full_optimizer_state as safe_get_full_optimizer_state
from deepoffload.deepspeed.utils.fp32_access import safe_get_local_fp32_param as safe_get_local_fp32_param
from deepoffload.deepspeed.utils.fp32_access import safe_get_local_grad as safe_get_local_grad
from deepoffload.deepspeed.utils.fp32_access import safe_get_local_optimizer_state as safe_get_local_optimizer_state
from deepoffload.deepspeed.utils.fp32_access import safe_set_full_fp32_param as safe_set_full_fp32_param
from deepoffload.deepspeed.utils.fp32_access import safe_set_full_grad as safe_set_full_grad
from deepoffload.deepspeed.utils.fp32_access import safe_set_full_optimizer_state as safe_set_full_optimizer_state
from deepoffload.deepspeed.utils.fp32_access import safe_set_local_fp32_param as safe_set_local_fp32_param
from deepoffload.deepspeed.utils.fp32_access import safe_set_local_grad as safe_set_local_grad
from deepoffload.deepspeed.utils.fp32_access import safe_set_local_optimizer_state as safe_set_local_optimizer_state
from deepoffload.deepspeed.utils.fp32_access import safe_update_full_grad_vectorized as safe_update_full_grad_vectorized

__getattr__ = submodules(__name__, (), "utils.tensor_fragment")
