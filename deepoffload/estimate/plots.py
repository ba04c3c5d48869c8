"""Pictures; they need matplotlib, which is in the extra ``bench``."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from typing import Any

from deepoffload.errors import ConfigError, UnsupportedError
from deepoffload.estimate.zero_infinity import SEQUENCE, Moved, curve

BATCHES = (1, 2, 4, 8, 16)
HIDDEN_SIZES = (2048, 8192, 16384, 32768, 65536)


def check_plot(option: str, path: str) -> None:
    """Before anything is computed.

    Raises:
        UnsupportedError: matplotlib is missing.
        ConfigError: the name is not a picture's, or its directory does not exist.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UnsupportedError(f"{option}: matplotlib is not installed; pip install 'deepoffload[bench]'")
    if not path.endswith((".png", ".svg", ".pdf")):
        raise ConfigError(f"{option}: {path} does not end in .png, .svg or .pdf")
    if not os.path.isdir(os.path.dirname(path) or "."):
        raise ConfigError(f"{option}: the directory of {path} does not exist")


def plot_efficiency(path: str) -> None:
    """Efficiency against bandwidth for what moves, as in figure 3 of the ZeRO-Infinity paper."""
    figure, panels = _figure(3)
    for panel, moved in zip(panels, Moved, strict=True):
        states = moved is Moved.OPTIMIZER
        low, high = (1e9, 1e13) if states else (1e8, 1e12)
        bandwidths = [low * (high / low) ** (n / 100) for n in range(101)]
        if moved is Moved.ACTIVATIONS:
            lines = {f"hidden {h}": curve(moved, bandwidths, tokens=SEQUENCE, hidden=h) for h in HIDDEN_SIZES}
        else:
            lines = {f"batch {b}": curve(moved, bandwidths, tokens=b * SEQUENCE) for b in BATCHES}
        for label, values in lines.items():
            panel.plot([bandwidth / 1e9 for bandwidth in bandwidths], values, label=label)
        panel.set(title=moved.value, xlabel="GB/s", xscale="log", ylim=(0, 1))
        panel.grid(alpha=0.3)
        panel.legend(fontsize=7)
    panels[0].set_ylabel(f"efficiency (V100, sequences of {SEQUENCE})")
    figure.savefig(path, dpi=120)


def plot_budgets(points: Sequence[tuple[int, float, float]], path: str, title: str) -> None:
    """Step time against host budget. ``points``: (bytes, seconds of the step, seconds of computing)."""
    figure, panels = _figure(1)
    budgets = [point[0] / 2**30 for point in points]
    panels[0].plot(budgets, [point[1] for point in points], marker="o", markersize=3, label="step")
    panels[0].plot(budgets, [point[2] for point in points], linestyle="--", label="computing alone")
    panels[0].set(title=title, xlabel="host budget (GiB)", ylabel="seconds")
    panels[0].set_ylim(bottom=0)
    panels[0].grid(alpha=0.3)
    panels[0].legend()
    figure.savefig(path, dpi=120)


def _figure(panels: int) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.0 * panels, 4), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, panels, squeeze=False)[0]
