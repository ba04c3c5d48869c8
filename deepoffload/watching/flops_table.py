"""The table of a profile, laid out as DeepSpeed's flops profiler does, with waits and bytes in addition."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator

from deepoffload.config.tools import FlopsProfilerConfig
from deepoffload.errors import ConfigError
from deepoffload.watching.flops import ModuleCost, Profile

_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "K"), (1.0, ""), (1e-3, "m"), (0.0, "u"))


def table(profile: Profile, said: FlopsProfilerConfig, micro_batch: int | None) -> str:
    """For people. ``micro_batch``: samples of the forward, where they are known."""
    total = profile.modules[""]
    rows = [("params", _short(total.parameters).strip())]
    if micro_batch is not None:
        rows.append(("batch size", str(micro_batch)))
    backward = profile.backward_flops
    counted = backward is not None
    if backward is None:
        backward = round((2 + said.recompute_fwd_factor) * total.flops)
    rows += [
        ("fwd MACs", f"{_short(total.macs)}MACs"),
        ("fwd flops", _short(total.flops)),
        ("fwd latency", f"{_short(total.seconds)}s"),
        ("fwd FLOPS = fwd flops / fwd latency", f"{_rate(total.flops, total.seconds)}FLOPS"),
        ("bwd flops" if counted else f"bwd flops, taken as {2 + said.recompute_fwd_factor:g} * fwd", _short(backward)),
    ]
    if counted:
        both_s = total.seconds + profile.backward_s
        rows += [
            ("bwd latency", f"{_short(profile.backward_s)}s"),
            ("fwd+bwd FLOPS", f"{_rate(total.flops + backward, both_s)}FLOPS"),
        ]
    rows += [
        ("step latency", f"{_short(profile.step_s)}s"),
        ("bytes read, bytes written", f"{_short(profile.read_bytes)}B, {_short(profile.written_bytes)}B"),
        ("waited for transfers", f"{_short(profile.waited_s)}s"),
    ]
    lines = [
        "-------------------------- deepoffload Flops Profiler --------------------------",
        f"Profile of the step after {said.profile_step} updates: one micro-batch; bytes and waits of the whole step",
        *(f"{name + ':':<60}  {value}" for name, value in rows),
        "",
        "----------------------------- Aggregated Profile -----------------------------",
        *_aggregated(profile, said),
    ]
    if said.detailed:
        lines += [
            "",
            "------------------------------ Detailed Profile ------------------------------",
            *_detailed(profile),
        ]
    return "\n".join([*lines, "-" * 78, ""])


def check_output(said: FlopsProfilerConfig) -> None:
    """Raise ConfigError where the file for the table cannot be written. Its directory is made."""
    if not said.enabled or not said.output_file:
        return
    path = os.path.expanduser(said.output_file)
    try:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        with open(path, "a", encoding="utf-8"):
            pass
    except (OSError, ValueError) as error:  # a path with a null byte is a ValueError
        raise ConfigError(
            f"flops_profiler.output_file = {said.output_file!r} cannot be written: "
            f"{getattr(error, 'strerror', None) or error}"
        ) from error


def show(text: str, said: FlopsProfilerConfig) -> None:
    """Write the table to its file, or to standard output."""
    if said.output_file:
        with open(os.path.expanduser(said.output_file), "w", encoding="utf-8") as file:
            file.write(text)
    else:
        sys.stdout.write(text)
        sys.stdout.flush()


def _aggregated(profile: Profile, said: FlopsProfilerConfig) -> Iterator[str]:
    """For each depth, the classes of modules that have the most of each."""
    by_depth: dict[int, dict[str, ModuleCost]] = {}
    for name, cost in profile.modules.items():
        kinds = by_depth.setdefault(name.count(".") + bool(name), {})
        of_kind = kinds.setdefault(cost.kind, ModuleCost(cost.kind, 0))
        of_kind.parameters += cost.parameters
        of_kind.flops += cost.flops
        of_kind.seconds += cost.seconds
        of_kind.waited_s += cost.waited_s
        of_kind.moved_bytes += cost.moved_bytes
    deepest = max(by_depth)
    yield f"Top {said.top_modules} modules in terms of params, MACs, fwd latency, waits or bytes at each depth:"
    columns: list[tuple[str, Callable[[ModuleCost], float], Callable[[ModuleCost], str]]] = [
        ("params", lambda cost: cost.parameters, lambda cost: _short(cost.parameters).strip()),
        ("MACs", lambda cost: cost.macs, lambda cost: f"{_short(cost.macs)}MACs"),
        ("fwd latency", lambda cost: cost.seconds, lambda cost: f"{_short(cost.seconds)}s"),
        ("fwd wait", lambda cost: cost.waited_s, lambda cost: f"{_short(cost.waited_s)}s"),
    ]
    if profile.bytes_known:
        columns.append(("bytes", lambda cost: cost.moved_bytes, lambda cost: f"{_short(cost.moved_bytes)}B"))
    for depth in range(deepest + 1 if said.module_depth < 0 else min(said.module_depth, deepest) + 1):
        yield f"depth {depth}:"
        for title, size, shown in columns:
            top = sorted(by_depth[depth].values(), key=size, reverse=True)[: said.top_modules]
            yield f"    {title:<11} - { ({cost.kind: shown(cost) for cost in top}) }"


def _detailed(profile: Profile) -> Iterator[str]:
    """Every module, indented as it lies in the model."""
    total = profile.modules[""]
    yield "Each module has its params, MACs, fwd latency and waits in it, with shares of the model's, and its bytes."
    for name, cost in profile.modules.items():
        items = [
            f"{_short(cost.parameters).strip()} = {_percent(cost.parameters, total.parameters)} Params",
            f"{_short(cost.macs)}MACs = {_percent(cost.macs, total.macs)} MACs",
            f"{_short(cost.seconds)}s = {_percent(cost.seconds, total.seconds)} latency",
            f"{_rate(cost.flops, cost.seconds)}FLOPS",
            f"{_short(cost.waited_s)}s waited",
        ]
        if profile.bytes_known:
            items.append(f"{_short(cost.moved_bytes)}B moved")
        place = f"({name.rpartition('.')[2]}): " if name else ""
        yield f"{'  ' * (name.count('.') + bool(name))}{place}{cost.kind}({', '.join(items)})"


def _short(number: float) -> str:
    """Two decimals and a prefix, as DeepSpeed writes numbers."""
    size, unit = next((size, unit) for size, unit in _UNITS if number >= size or not size)
    if number == 0:
        size, unit = 1.0, ""
    return f"{round(number / (size or 1e-6), 2):g} {unit}"


def _rate(flops: float, seconds: float) -> str:
    return _short(flops / seconds if seconds else 0.0)


def _percent(part: float, whole: float) -> str:
    return f"{round(100 * part / whole, 2) if whole else 0:g}%"
