"""Draws the seconds to the first token of policies as an SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence

Row = tuple[str, int, str, tuple[float, float, float]]
"""Trace, replicas, policy, percentiles in seconds."""
_COLORS = ("#2f6fdb", "#d9822b", "#5b9f5b", "#9a6fb0", "#888888")
_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 250, 200, 52, 56, 24


def draw(rows: Sequence[Row]) -> str:
    """A panel for each trace: p50 (solid) and p99 (dashed) over the number of replicas, both axes
    logarithmic."""
    traces = list(dict.fromkeys(row[0] for row in rows))
    policies = list(dict.fromkeys(row[2] for row in rows))
    counts = sorted({row[1] for row in rows})
    values = [row[3][at] for row in rows for at in (0, 2)]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    width = _LEFT + len(traces) * (_WIDTH + _GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{_TOP + _HEIGHT + 40}"'
        ' font-family="sans-serif" font-size="12" fill="#777">'
    ]
    for number, policy in enumerate(policies):
        x = _LEFT + 150 * number
        parts.append(f'<line x1="{x}" x2="{x + 22}" y1="14" y2="14" {_stroke(number, 0)}/>')
        parts.append(f'<text x="{x + 28}" y="18">{policy}</text>')

    def y_of(seconds: float) -> float:
        return _TOP + _HEIGHT * (high - math.log10(seconds)) / (high - low)

    def x_of(panel: int, count: int) -> float:
        share = counts.index(count) / max(1, len(counts) - 1)
        return _LEFT + panel * (_WIDTH + _GAP) + 14 + share * (_WIDTH - 28)

    for power in range(low, high + 1):
        y = y_of(10.0**power)
        parts.append(f'<line x1="{_LEFT}" x2="{width - _GAP}" y1="{y}" y2="{y}" stroke="#8884"/>')
        parts.append(
            f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{10.0**power:g} s</text>'
        )
    for panel, trace in enumerate(traces):
        middle = _LEFT + panel * (_WIDTH + _GAP) + _WIDTH / 2
        parts.append(
            f'<text x="{middle}" y="{_TOP - 14}" text-anchor="middle">{trace}:'
            " seconds to the first token</text>"
        )
        for count in counts:
            place = f'x="{x_of(panel, count)}" y="{_TOP + _HEIGHT + 16}" text-anchor="middle"'
            parts.append(f"<text {place}>{count}</text>")
        parts.append(
            f'<text x="{middle}" y="{_TOP + _HEIGHT + 32}" text-anchor="middle">replicas; solid'
            " p50, dashed p99</text>"
        )
        for number, policy in enumerate(policies):
            own = sorted(row for row in rows if row[0] == trace and row[2] == policy)
            for at in (0, 2):
                points = " ".join(
                    f"{x_of(panel, row[1]):.1f},{y_of(row[3][at]):.1f}" for row in own
                )
                parts.append(f'<polyline points="{points}" {_stroke(number, at)}/>')
    return "\n".join([*parts, "</svg>\n"])


def _stroke(number: int, at: int) -> str:
    dash = ' stroke-dasharray="5 4"' if at else ""
    return f'fill="none" stroke-width="2" stroke="{_COLORS[number % len(_COLORS)]}"{dash}'
