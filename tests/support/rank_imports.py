"""What the server that forks the processes of ranks imports, so that they need not: seconds of CPU for each.

``multiprocessing`` imports this module by its name in the server. No test does.
"""

from __future__ import annotations

import gc
import warnings
from contextlib import suppress

import torch._dynamo  # noqa: F401  what transformers and checkpoints of activations import

warnings.simplefilter("error", FutureWarning)  # names of torch that are on their way out

import deepoffload.deepspeed.engine  # noqa: E402
import deepoffload.runtime.context  # noqa: E402, F401

with suppress(ImportError):  # models of several tests; there are environments without transformers
    import transformers.models.gpt2.modeling_gpt2
    import transformers.models.llama.modeling_llama
    import transformers.models.mixtral.modeling_mixtral
    import transformers.models.t5.modeling_t5  # noqa: F401

gc.collect()
gc.freeze()  # ranks, whose engines collect garbage, need not look at it
