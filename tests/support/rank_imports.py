"""What the server that forks the processes of ranks imports, so that they need not: three seconds of CPU for each.

``multiprocessing`` imports this module by its name in the server. No test does.
"""

from __future__ import annotations

import gc
import warnings

import torch._dynamo  # noqa: F401  what the first optimizer imports

warnings.simplefilter("error", FutureWarning)  # names of torch that are on their way out

import deepoffload.deepspeed.engine  # noqa: E402
import deepoffload.runtime.context  # noqa: E402, F401

gc.collect()
gc.freeze()  # ranks, whose engines collect garbage, need not look at it
