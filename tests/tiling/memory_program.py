"""What a process takes at most for the loss of 1,024 tokens and 32,000 classes on a paged head; prints MiB as JSON.

``SWAP_DIRECTORY all|tiled_loss|linear_cross_entropy``
"""

from __future__ import annotations

import ctypes
import json
import sys

import torch
from torch import nn
from torch.nn import functional as F

import deepoffload
from tests.support.memory_watch import MemoryWatch, give_back

TOKENS, FEATURES, CLASSES = 1024, 64, 32_000
SWAP, WHICH = sys.argv[1:]
M_MMAP_THRESHOLD = -3
# Large blocks go back to the system at once: what the C library keeps for later is not what the loss takes.
assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 256 << 10) == 1


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(FEATURES, FEATURES)
        self.head = nn.Linear(FEATURES, CLASSES, bias=False)


torch.manual_seed(0)
with deepoffload.offload_context(host_budget="40MiB", nvme_path=SWAP):
    model = Model()
x, targets = torch.randn(TOKENS, FEATURES), torch.randint(0, CLASSES, (TOKENS,))
peaks, watch = [], MemoryWatch()
for _ in range(2):
    give_back()
    watch.take_peak()
    before_bytes = watch.take_peak()
    hidden = model.body(x)
    if WHICH == "all":
        loss = F.cross_entropy(model.head(hidden), targets)
    elif WHICH == "tiled_loss":
        loss = deepoffload.tiled_loss(hidden, model.head, targets)
    else:
        options = nn.LinearCrossEntropyOptions()
        loss = F.linear_cross_entropy(hidden, model.head.weight, targets, options=options)
    loss.backward()
    model.zero_grad()
    peaks.append((watch.take_peak() - before_bytes) / 2**20)
    value = float(loss.detach())
    del loss, hidden
print(json.dumps({"peak": peaks[-1], "loss": value}))
