"""The DeepSpeed of this machine, for tests that compare with it."""

from __future__ import annotations

import importlib.util
import os
import sys

import pytest

DEEPSPEED_PYTHON = os.environ.get("DEEPSPEED_PYTHON") or (
    sys.executable if importlib.util.find_spec("deepspeed") else ""
)
"""An interpreter that has DeepSpeed; empty where there is none."""

needs_deepspeed = pytest.mark.skipif(
    not DEEPSPEED_PYTHON, reason="DeepSpeed is not here; DEEPSPEED_PYTHON may name an interpreter that has it"
)
