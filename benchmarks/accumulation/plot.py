"""Step time and bytes against the number of micro-batches, as SVG: two panels, a line for each order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT, LEFT, TOP, GAP = 360, 240, 60, 40, 90
COLOURS = {"horizontal": "#b04a2f", "vertical": "#1f5fa8"}

Lines = Mapping[str, Sequence[tuple[float, float]]]


def svg(title: str, panels: Mapping[str, Lines]) -> str:
    """``panels``: by what is on the vertical axis, points (micro-batches, value) of each order."""
    size = f'width="{LEFT + len(panels) * (WIDTH + GAP)}" height="{HEIGHT + 2 * TOP + 20}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="18">{escape(title)}</text>',
    ]
    for number, (name, lines) in enumerate(panels.items()):
        parts += _panel(LEFT + number * (WIDTH + GAP), name, lines)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(left: float, name: str, lines: Lines) -> list[str]:
    points = [point for line in lines.values() for point in line]
    most_x, most_y = max(x for x, _ in points), max(y for _, y in points)
    bottom = TOP + HEIGHT

    def place(x: float, y: float) -> str:
        return f"{left + WIDTH * x / most_x:.1f},{bottom - HEIGHT * y / most_y:.1f}"

    parts = [
        f'<path d="M{left},{TOP} V{bottom} H{left + WIDTH}" fill="none" stroke="black"/>',
        f'<text x="{left}" y="{TOP - 6}">{escape(name)}</text>',
        f'<text x="{left + WIDTH}" y="{bottom + 32}" text-anchor="end">micro-batches in a step</text>',
        f'<text x="{left - 6}" y="{TOP + 10}" text-anchor="end">{most_y:.3g}</text>',
        f'<text x="{left - 6}" y="{bottom}" text-anchor="end">0</text>',
    ]
    for x in sorted({x for x, _ in points}):
        at = left + WIDTH * x / most_x
        parts.append(f'<text x="{at:.1f}" y="{bottom + 16}" text-anchor="middle">{x:g}</text>')
    for row, (order, line) in enumerate(lines.items()):
        colour = COLOURS[order]
        joined = " ".join(place(x, y) for x, y in sorted(line))
        parts.append(f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [
            f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>' for x, y in (p.split(",") for p in joined.split())
        ]
        parts.append(f'<text x="{left + 12}" y="{TOP + 14 + 16 * row}" fill="{colour}">{order}</text>')
    return parts
