"""What follows from the measurements: the best setting, the ``aio`` block, half or full duplex."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepoffload.cli.nvme.sweep import Findings
from deepoffload.cli.nvme.types import Pattern, Setting
from deepoffload.io.probe import Bandwidth
from deepoffload.native.aio import REQUEST_BYTES_MAX

# Settings that lie this near together are equally good: the one that needs least memory in flight is taken.
EQUAL_SHARE = 0.97
HALF_DUPLEX_MAX, FULL_DUPLEX_MIN = 0.25, 0.75


@dataclass(frozen=True)
class Choice:
    """The setting to use, and why this one."""

    setting: Setting
    why: str

    @property
    def aio(self) -> dict[str, Any]:
        """A block that ``deepoffload.offload_context`` and ``parse_config`` load as it is."""
        return {
            "aio": {
                "backend": self.setting.backend,
                "block_size": self.setting.block_bytes,
                "queue_depth": self.setting.queue_depth,
            }
        }


def choose(findings: Findings, patterns: Sequence[Pattern]) -> Choice | None:
    """The smallest setting among the best that the engine can be told to use; ``None`` when nothing was measured."""
    usable = [s for s in findings.complete(patterns) if s.block_bytes <= REQUEST_BYTES_MAX]
    for part in (
        [s for s in usable if s.direct and s.files == 1],
        [s for s in usable if s.direct],
        usable,
    ):
        if part:
            usable = part
            break
    else:
        return None
    # A single fast sample may be luck; those that were measured again are known better.
    most = max(_count(findings, setting, patterns) for setting in usable)
    known = [setting for setting in usable if _count(findings, setting, patterns) >= min(most, 2)]
    best = max(findings.score(setting, patterns) for setting in known)
    near = [setting for setting in known if findings.score(setting, patterns) >= EQUAL_SHARE * best]
    chosen = min(near, key=lambda setting: (setting.flight_bytes, -findings.score(setting, patterns)))
    share = findings.score(chosen, patterns) / best
    why = "the fastest" if share == 1 else f"{share:.2f} of the fastest, with the least memory in flight"
    return Choice(chosen, f"{why} ({', '.join(pattern.value for pattern in patterns)}; geometric mean)")


def bandwidth_of(findings: Findings, setting: Setting, path: str) -> Bandwidth:
    """The three rates of a setting for which all patterns were measured."""
    return make_bandwidth(path, setting, {pattern: findings.rate(setting, pattern) for pattern in Pattern})


def make_bandwidth(path: str, setting: Setting, rates: Mapping[Pattern, float]) -> Bandwidth:
    """Of rates in bytes per second, measured just now."""
    return Bandwidth(
        path=path,
        backend=setting.backend,
        direct=setting.direct,
        read_bytes_per_s=rates[Pattern.READ],
        write_bytes_per_s=rates[Pattern.WRITE],
        mixed_bytes_per_s=rates[Pattern.MIXED],
        measured_at_unix_s=time.time(),
    )


def duplex_text(measured: Bandwidth) -> str:
    """Half or full duplex, with the figures that say so."""
    read, write, mixed = (
        rate / 1e6 for rate in (measured.read_bytes_per_s, measured.write_bytes_per_s, measured.mixed_bytes_per_s)
    )
    serial, parallel = 2 / (1 / read + 1 / write), 2 * min(read, write)
    if measured.overlap < HALF_DUPLEX_MAX:
        what = "half duplex: reading and writing share it"
    elif measured.overlap > FULL_DUPLEX_MIN:
        what = "full duplex: it reads and writes at the same time"
    else:
        what = "between half and full duplex"
    return (
        f"{what} (both at once {mixed:.0f} MB/s; one after the other would give {serial:.0f}, "
        f"fully at the same time {parallel:.0f}; overlap {measured.overlap:.2f})"
    )


def best_per_backend(findings: Findings) -> list[Setting]:
    """The best setting of each backend with all three patterns, as the engine would use it: direct where possible."""
    found: dict[str, Setting] = {}
    ranked = findings.complete(list(Pattern))
    for setting in sorted(ranked, key=lambda setting: (not setting.direct, setting.files)):
        found.setdefault(setting.backend, setting)
    for setting in ranked:
        held = found[setting.backend]
        if (setting.direct, setting.files) == (held.direct, held.files):
            if findings.score(setting, list(Pattern)) > findings.score(held, list(Pattern)):
                found[setting.backend] = setting
    return list(found.values())


def _count(findings: Findings, setting: Setting, patterns: Sequence[Pattern]) -> int:
    return min(len(findings.samples[setting, pattern]) for pattern in patterns)
