"""``python -m deepoffload.estimate --inference``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deepoffload.estimate.__main__ import main

MODEL = ["--parameters", "1.2e9", "--layers", "24", "--hidden", "2048", "--inference"]


def test_reads_seconds_and_the_cache_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = tmp_path / "machine.json"
    machine.write_text(json.dumps({"host_memory_bytes": "8GiB", "nvme_bytes": "1TB", "nvme_read_bytes_per_s": 2e9}))
    asked = [*MODEL, "--machine", str(machine), "--host-budget", "512MiB", "--batch", "4", "--context", "1000"]
    assert main([*asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kv_cache_bytes"] == 2 * 24 * 2048 * 2 * 4 * 1000
    weights = 2 * found["model"]["parameters"]
    assert weights - (512 << 20) < found["read_bytes_per_forward"] < weights
    assert found["seconds_per_token"] >= found["read_bytes_per_forward"] / 2e9 * 0.999
    assert main(asked) == 0
    assert "KV cache" in (said := capsys.readouterr().out) and "expected per forward pass" in said
    assert main([*asked[:-1], "1000000"]) == 1, "the cache alone takes more than the memory"
    assert main([*asked, "--checkpointing"]) == 2
