"""A picture of the sweep; needs matplotlib, which is in the extra ``bench``."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from deepoffload.cli.nvme.types import Pattern, Result
from deepoffload.config.units import format_bytes
from deepoffload.errors import ConfigError, UnsupportedError

LINE_STYLES = {"libaio": "-", "io_uring": "--", "pool": ":"}


def check_plot(path: str) -> None:
    """Before anything is measured.

    Raises:
        UnsupportedError: matplotlib is missing.
        ConfigError: the name is not a picture's.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UnsupportedError(
            "--plot: matplotlib is not installed; pip install 'deepoffload[bench]' or leave --plot out"
        )
    if not path.endswith((".png", ".svg", ".pdf")):
        raise ConfigError(f"--plot: {path} does not end in .png, .svg or .pdf")


def plot(results: Sequence[Result], title: str, path: str) -> None:
    """Rate against blocks in flight, a panel per pattern and a line per backend, block size, and kind.

    Colours tell block sizes, line styles backends; squares are several files, crosses buffered transfers.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    blocks = sorted({result.setting.block_bytes for result in results})
    patterns = [pattern for pattern in Pattern if any(result.pattern is pattern for result in results)]
    figure = Figure(figsize=(5.2 * len(patterns), 5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=9)
    panels = figure.subplots(1, len(patterns), sharey=True, squeeze=False)[0]
    for panel, pattern in zip(panels, patterns, strict=True):
        lines: dict[tuple[str, int, bool, int], list[Result]] = {}
        for result in results:
            if result.pattern is pattern:
                s = result.setting
                lines.setdefault((s.backend, s.block_bytes, s.direct, s.files), []).append(result)
        for (backend, block, direct, files), line in sorted(lines.items()):
            line.sort(key=lambda result: result.setting.queue_depth)
            label = f"{backend} {format_bytes(block)}" + ("" if direct else ", buffered")
            panel.errorbar(
                [result.setting.queue_depth for result in line],
                [result.bytes_per_s / 1e6 for result in line],
                yerr=[result.bytes_per_s * result.spread / 2e6 for result in line],
                color=f"C{blocks.index(block) % 10}",
                marker="o" if direct and files == 1 else "s" if direct else "x",
                markersize=4,
                linestyle=LINE_STYLES.get(backend, "-"),
                capsize=2,
                label=label if files == 1 else f"{label}, {files} files",
            )
        depths = sorted({result.setting.queue_depth for result in results})
        panel.set_xscale("log", base=2)
        panel.set_xticks(depths, [str(depth) for depth in depths])
        panel.set(title=pattern.value, xlabel="blocks in flight")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("MB/s (median; bars: half the spread)")
    panels[0].set_ylim(bottom=0)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=7)
    figure.savefig(path, dpi=120)
