"""Ranks on several hosts, as far as one machine can show it: each is alone on its host."""

from __future__ import annotations

from pathlib import Path

from tests.ranks.hosts import on_two_hosts
from tests.support.rank_processes import values_of

MIB = 1 << 20


def test_two_hosts(tmp_path: Path) -> None:
    both = values_of(on_two_hosts, 2, str(tmp_path))
    for number, found in enumerate(both):
        one_host, apart = found["together"], found["apart"]
        assert (one_host["hosts"], one_host["local_rank"]) == ((0, 0), number)
        assert (apart["hosts"], apart["local_rank"]) == ((0, 1), 0)
        assert one_host["host_budget_bytes"] == 8 * MIB and apart["host_budget_bytes"] == 16 * MIB
        for other in ("apart", "on disk", "after that"):
            assert found[other]["norms"] == one_host["norms"] and found[other]["weights"] == one_host["weights"], other
        assert "ranks.transport asks for 'memory', but the ranks run on 2 hosts" in found["by memory"]
        assert "nvme_path" in found["missing"] and "not mounted does not exist" in found["missing"]
        assert found["budgets"].startswith("ConfigError: the configuration differs between ranks: host_budget is ")
    first, second = both
    assert "by memory: every rank" in first["transports"][0]
    assert all(text.endswith("by group: the ranks run on 2 hosts") for text in first["transports"][1:])
    assert first["missing"].startswith("ConfigError: rank 1 has failed at ") and len(first["transports"]) >= 4
    assert second["missing"].startswith("ConfigError: nvme_path: ")
