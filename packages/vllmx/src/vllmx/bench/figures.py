"""Medians, percentiles and tables."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

Record = Mapping[str, float | int | str]


def percentile(values: Sequence[float], share: float) -> float:
    """Linear interpolation between the nearest ranks; NaN for no values."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread(name: str, values_s: Sequence[float]) -> dict[str, float]:
    """p50, p90 and p99 of durations, in milliseconds."""
    return {
        f"{name}_p{round(share * 100)}_ms": round(percentile(values_s, share) * 1e3, 2)
        for share in (0.5, 0.9, 0.99)
    }


def show(records: Sequence[Record], as_json: bool) -> str:
    """A table with a column for each figure, `-` where a record lacks it, or JSON."""
    if as_json:
        return json.dumps(list(records), indent=1)
    header = list(dict.fromkeys(name for record in records for name in record))
    rows = [[_text(record.get(name, "-")) for name in header] for record in records]
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in [header, *rows]
    ]
    return "\n".join(lines)


def _text(value: float | int | str) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)
