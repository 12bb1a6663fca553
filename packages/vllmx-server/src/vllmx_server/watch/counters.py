"""Counters and histograms, which become Prometheus families only when somebody scrapes: to observe
a value, which happens once a streamed token, is a look-up and an addition."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Literal

import msgspec
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

from vllmx_server.limits.keys import OTHER

Labelled = tuple[tuple[str, ...], int]
"""The values of a counter's labels, and their count."""


class Histogram:
    """Counts in buckets with inclusive upper bounds."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def add(self, counts: Sequence[int], total: float) -> None:
        """Adds the counts of another histogram with the same bounds."""
        self.counts = [a + b for a, b in zip(self.counts, counts, strict=True)]
        self.total += total

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts by upper bound, as Prometheus wants them."""
        names = [*map(str, map(float, self.bounds)), "+Inf"]
        return list(zip(names, accumulate(self.counts), strict=True))


def histogram_family(
    name: str, text: str, label: str, found: Mapping[str, Histogram]
) -> HistogramMetricFamily:
    """Histograms by the value of a label."""
    family = HistogramMetricFamily(f"vllmx:{name}", text, labels=[label])
    for value, histogram in found.items():
        family.add_metric([value], histogram.buckets(), histogram.total)
    return family


class Counter:
    """Counts by the values of labels.

    Args:
        start: values that are shown from the start.
        bounded: the label whose further values count as `OTHER` once there are `most` counts.
    """

    def __init__(
        self,
        name: str,
        text: str,
        labels: Sequence[str],
        start: Iterable[tuple[str, ...]] = (),
        *,
        bounded: str | None = None,
        most: int = 0,
    ) -> None:
        self.name, self._text, self._labels = name, text, labels
        self._bounded = None if bounded is None else labels.index(bounded)
        self._most = most
        self.counts = dict.fromkeys(start, 0)

    def add(self, *values: str, count: int = 1) -> None:
        at = self._bounded
        if at is not None and values not in self.counts and len(self.counts) >= self._most:
            values = (*values[:at], OTHER, *values[at + 1 :])
        self.counts[values] = self.counts.get(values, 0) + count

    def counted(self) -> list[Labelled]:
        return list(self.counts.items())

    def add_all(self, counted: Iterable[Labelled]) -> None:
        """Adds the counts of another counter."""
        for values, count in counted:
            self.add(*values, count=count)

    def family(self, **before: str) -> CounterMetricFamily:
        """The counts as Prometheus has them, with further labels `before`."""
        labels = [*before, *self._labels]
        family = CounterMetricFamily(f"vllmx:{self.name}", self._text, labels=labels)
        for values, count in self.counts.items():
            family.add_metric([*before.values(), *values], count)
        return family


MAX_TOOLS = 256
"""Tools and outcomes that are counted by name: servers may rename their tools at any time."""
CALL_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
Outcome = Literal["ok", "error", "failed", "timed_out", "cancelled"]
"""The end of a call. `error`: reported by the tool; `failed`: without an answer; `cancelled`: the
request that waited for it has ended."""


class ToolsCounted(msgspec.Struct, frozen=True):
    """`ToolCounts` on the way to another process."""

    calls: list[Labelled]
    restarts: list[Labelled]
    seconds: dict[str, tuple[list[int], float]]
    """Counts and sum by server."""


class ToolCounts:
    """Calls of MCP servers' tools, counted and read by any thread.

    Args:
        servers: shown from the start.
    """

    def __init__(self, servers: Iterable[str] = ()) -> None:
        names = list(servers)
        self._lock = threading.Lock()
        self._calls = Counter(
            "mcp_calls", "Calls of MCP servers' tools", ("server", "tool", "outcome"),
            bounded="tool", most=MAX_TOOLS,
        )  # fmt: skip
        self._restarts = Counter(
            "mcp_restarts", "Further attempts to reach an MCP server", ("server",),
            [(name,) for name in names],
        )  # fmt: skip
        self._seconds = {name: Histogram(CALL_S) for name in names}

    def called(self, server: str, tool: str, outcome: Outcome, seconds: float) -> None:
        """Counts a call that has ended."""
        with self._lock:
            self._calls.add(server, tool, outcome)
            self._seconds.setdefault(server, Histogram(CALL_S)).observe(seconds)

    def restarted(self, server: str) -> None:
        """Counts a further attempt to reach a server."""
        with self._lock:
            self._restarts.add(server)

    def counted(self) -> ToolsCounted:
        with self._lock:
            return ToolsCounted(
                self._calls.counted(),
                self._restarts.counted(),
                {name: (list(each.counts), each.total) for name, each in self._seconds.items()},
            )

    def add(self, more: ToolsCounted) -> None:
        """Adds the counts of another process."""
        with self._lock:
            self._calls.add_all(more.calls)
            self._restarts.add_all(more.restarts)
            for server, (counts, total) in more.seconds.items():
                self._seconds.setdefault(server, Histogram(CALL_S)).add(counts, total)

    def families(self) -> Iterator[Metric]:
        """The counts as Prometheus has them."""
        with self._lock:
            yield self._calls.family()
            yield histogram_family(
                "mcp_call_time_seconds", "From a call of a tool to its end", "server", self._seconds
            )
            yield self._restarts.family()
