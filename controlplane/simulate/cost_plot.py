"""Draws what runs cost: one bar for each, as an SVG that needs nothing else."""

from collections.abc import Sequence
from html import escape
from typing import Final

from controlplane.simulate.costs import RunCosts

COLOURS: Final = {"paused": "#e0a030", "quarantined": "#c0392b", "down": "#7f8c8d"}
ROW, LEFT, WIDTH, RIGHT = 26, 260, 440, 60


def plot(rows: Sequence[tuple[str, RunCosts]]) -> str:
    """Return the picture of the share of GPU time that each run lost, by reason."""
    longest = max((costs.lost_share for _, costs in rows), default=0.0) or 1.0
    parts = []
    for number, (label, costs) in enumerate(rows):
        x, y = float(LEFT), ROW * (number + 2)
        parts.append(f'<text x="{LEFT - 8}" y="{y + 13}" text-anchor="end">{escape(label)}</text>')
        for reason, colour in COLOURS.items():
            width = WIDTH * getattr(costs, reason) / (costs.gpu_hours or 1.0) / longest
            parts.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW - 8}" fill="{colour}"/>')
            x += width
        parts.append(f'<text x="{x + 6:.1f}" y="{y + 13}">{costs.lost_share:.1%}</text>')
    x = LEFT
    for reason, colour in COLOURS.items():
        parts.append(
            f'<rect x="{x}" y="14" width="12" height="12" fill="{colour}"/><text x="{x + 17}" y="24">{reason}</text>'
        )
        x += 110
    width, height = LEFT + WIDTH + RIGHT, ROW * (len(rows) + 2) + 8
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif"'
    title = (
        f' font-size="13"><rect width="{width}" height="{height}" fill="white"/><text x="8" y="24">GPU time lost</text>'
    )
    return "\n".join([head + title, *parts, "</svg>\n"])
