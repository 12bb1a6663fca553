"""Medians, ranges and ratios of the samples, as records and as a Markdown table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from cpu_peers.cases import Case, Sample
from cpu_peers.host_load import QUIET_CORES


@dataclass(frozen=True)
class Taken:
    """A sample with where it comes from."""

    peer: str
    weights: str
    round: int
    busy_core: bool
    sample: Sample

    @property
    def is_quiet(self) -> bool:
        return self.sample.foreign_cores is None or self.sample.foreign_cores < QUIET_CORES


@dataclass(frozen=True)
class Figure:
    """The speed of one engine in one case, tokens per second."""

    peer: str
    weights: str
    case: str
    busy_core: bool
    variant: str
    median: float
    low: float
    high: float
    num_samples: int
    quiet: bool
    """Only samples during which others used less than `QUIET_CORES` were counted; False: there were
    none, so all were."""

    def __str__(self) -> str:
        mark = "" if self.quiet else "~"
        return f"{mark}{_short(self.median)} ({_short(self.low)}-{_short(self.high)})"


def summarise(taken: Iterable[Taken]) -> list[Figure]:
    """One figure for each engine, type and case: that of the variant that the engine kept to, or
    of the one with the best median if it measured all of them equally often."""
    groups: dict[tuple[str, str, str, bool], dict[str, list[Taken]]] = {}
    for item in taken:
        key = (item.peer, item.weights, item.sample.case, item.busy_core)
        groups.setdefault(key, {}).setdefault(item.sample.variant, []).append(item)
    return [_best(list(variants.values())) for variants in groups.values()]


def _best(variants: Sequence[list[Taken]]) -> Figure:
    most = max(map(len, variants))
    figures = [_figure(items) for items in variants if len(items) == most]
    return max(figures, key=lambda figure: figure.median)


def _figure(items: Sequence[Taken]) -> Figure:
    quiet = [item for item in items if item.is_quiet]
    speeds = [item.sample.tokens_per_s for item in quiet or items]
    first = items[0]
    return Figure(
        peer=first.peer,
        weights=first.weights,
        case=first.sample.case,
        busy_core=first.busy_core,
        variant=first.sample.variant,
        median=median(speeds),
        low=min(speeds),
        high=max(speeds),
        num_samples=len(speeds),
        quiet=bool(quiet),
    )


def speed_table(figures: Sequence[Figure], cases: Sequence[Case], busy_core: bool) -> str:
    """The table of one type: a row for each case with every engine's speed, then our ratio to each
    other."""
    found = {(f.peer, f.case): f for f in figures if f.busy_core == busy_core}
    title = f"{figures[0].weights}, tok/s" + ", one core busy elsewhere" * busy_core
    peers = list(dict.fromkeys(f.peer for f in figures))
    ratios = [(peer, other) for peer in peers if _is_ours(peer) for other in peers]
    ratios = [(peer, other) for peer, other in ratios if not _is_ours(other)]
    rows = [[title, *peers, *(f"{peer} / {other}" for peer, other in ratios)]]
    for case in cases:
        cells = [found.get((peer, case.label)) for peer in peers]
        row = [case.label, *(str(cell) if cell else "-" for cell in cells)]
        for peer, other in ratios:
            row.append(_ratio(found.get((peer, case.label)), found.get((other, case.label))))
        rows.append(row)
    return _markdown(rows)


def busy_table(figures: Sequence[Figure], cases: Sequence[Case]) -> str:
    """The table of one type: what is left of each engine's speed when a core is busy."""
    found = {(f.peer, f.case, f.busy_core): f for f in figures}
    peers = list(dict.fromkeys(f.peer for f in figures))
    rows = [[f"{figures[0].weights}, busy / free", *peers]]
    for case in cases:
        cells = [
            _ratio(found.get((peer, case.label, True)), found.get((peer, case.label, False)))
            for peer in peers
        ]
        rows.append([case.label, *cells])
    return _markdown(rows)


def _is_ours(peer: str) -> bool:
    return peer.startswith("vllmx")


def _ratio(numerator: Figure | None, denominator: Figure | None) -> str:
    if numerator is None or denominator is None:
        return "-"
    return f"{numerator.median / denominator.median:.2f}"


def _short(speed: float) -> str:
    return f"{speed:.1f}" if speed < 100 else f"{speed:.0f}"


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])
