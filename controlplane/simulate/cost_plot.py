"""Draws what runs cost: one bar for each, as an SVG that needs nothing else."""

from collections.abc import Sequence
from html import escape
from typing import Final

from controlplane.simulate.costs import RunCosts

COLOURS: Final = {"paused": "#e0a030", "quarantined": "#c0392b", "down": "#7f8c8d"}
ROW, LEFT, WIDTH = 26, 260, 440


def plot(rows: Sequence[tuple[str, RunCosts]]) -> str:
    """Return the picture of the share of GPU time that each run lost, by reason."""
    longest = max((costs.lost_share for _, costs in rows), default=0.0) or 1.0
    width, height = LEFT + WIDTH + 60, ROW * (len(rows) + 2)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        '<g font-size="13"><text x="8" y="24">GPU time lost</text>',
    ]
    for number, (reason, colour) in enumerate(COLOURS.items()):
        x = LEFT + 110.0 * number
        parts.append(f'<rect x="{x}" y="14" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 17}" y="24">{reason}</text>')
    for number, (label, costs) in enumerate(rows):
        x, y = float(LEFT), ROW * (number + 2) - 8
        parts.append(f'<text x="{LEFT - 8}" y="{y + 13}" text-anchor="end">{escape(label)}</text>')
        for reason, colour in COLOURS.items():
            length = WIDTH * getattr(costs, reason) / (costs.gpu_hours or 1.0) / longest
            parts.append(f'<rect x="{x:.1f}" y="{y}" width="{length:.1f}" height="{ROW - 8}" fill="{colour}"/>')
            x += length
        parts.append(f'<text x="{x + 6:.1f}" y="{y + 13}">{costs.lost_share:.1%}</text>')
    return "\n".join([*parts, "</g></svg>\n"])
