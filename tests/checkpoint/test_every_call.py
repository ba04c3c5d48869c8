"""Any system call of a save, load, commit or resume fails: a clear error, and what was there is as it was."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from tests.checkpoint.every_call import OPERATIONS
from tests.checkpoint.training import ALL
from tests.support.failing_calls import run_with_failing_calls

CODES = (errno.EIO, errno.ENOSPC, errno.EDQUOT, 0)
"""0: a write that is short."""


@pytest.mark.timeout(1200)
def test_each_system_call_fails_once(tmp_path: Path) -> None:
    stride = 1 if ALL else 149
    arguments = (tmp_path, ",".join(OPERATIONS), stride, *CODES)
    said = run_with_failing_calls(tmp_path, "tests.checkpoint.every_call", *arguments, timeout_s=1100)
    print(said)
    for name, line in zip(OPERATIONS, said.splitlines(), strict=True):
        assert line.startswith(f"{name}: ") and int(line.split()[1]) > 0
