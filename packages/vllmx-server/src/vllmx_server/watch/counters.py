"""Counters with labels of their own: those of API keys, and of calls of tools."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

from vllmx_server.limits.keys import MAX_LABELS, OTHER
from vllmx_server.limits.usage import KeyUsage
from vllmx_server.watch.histogram import Histogram
from vllmx_server.watch.tool_counts import CALL_S, ToolsCounted


class Counter:
    """Counts by one label beside the model's.

    Args:
        values: of the label, that are shown from the start.
    """

    def __init__(self, name: str, text: str, label: str, values: Sequence[str]) -> None:
        self._name, self._text, self._label = name, text, label
        self.counts = dict.fromkeys(values, 0)

    def add(self, value: str, count: int = 1) -> None:
        """Counts under a value of the label."""
        self.counts[value] = self.counts.get(value, 0) + count

    def family(self, model: str) -> CounterMetricFamily:
        """The counts as Prometheus has them."""
        labels = ["model_name", self._label]
        family = CounterMetricFamily(f"vllmx:{self._name}", self._text, labels=labels)
        for value, count in self.counts.items():
            family.add_metric([model, value], count)
        return family


class KeyCounters:
    """Counts of each API key, under names of the file of keys, which `ApiKeys.label` bounds. Twice
    as many may come when the file is read anew; the rest is counted together."""

    def __init__(self) -> None:
        def counter(name: str, text: str) -> Counter:
            return Counter(f"key_{name}", text, "key", [OTHER])

        self.requests = counter("requests", "Requests that were taken, by API key")
        self.refusals = counter("refusals", "Requests over a limit of their API key")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens, by API key")
        self.generation_tokens = counter("generation_tokens", "Generated tokens, by API key")

    def all(self) -> list[Counter]:
        """Always in this order."""
        return [self.requests, self.refusals, self.prompt_tokens, self.generation_tokens]

    def add(self, label: str, new: KeyUsage) -> None:
        """Counts what a key has used."""
        known = self.requests.counts
        if label not in known and len(known) > 2 * MAX_LABELS:
            label = OTHER
        self.requests.add(label, new.requests)
        self.refusals.add(label, new.refused)
        self.prompt_tokens.add(label, new.prompt_tokens)
        self.generation_tokens.add(label, new.completion_tokens)


def tool_families(counted: ToolsCounted) -> Iterator[Metric]:
    """Calls of MCP servers' tools as Prometheus has them."""
    calls = CounterMetricFamily(
        "vllmx:mcp_calls", "Calls of MCP servers' tools", labels=["server", "tool", "outcome"]
    )
    for server, tool, outcome, count in counted.calls:
        calls.add_metric([server, tool, outcome], count)
    yield calls
    seconds = HistogramMetricFamily(
        "vllmx:mcp_call_time_seconds", "From a call of a tool to its end", labels=["server"]
    )
    for server, counts, total in counted.seconds:
        histogram = Histogram(CALL_S)
        histogram.add(counts, total)
        seconds.add_metric([server], histogram.buckets(), total)
    yield seconds
    restarts = CounterMetricFamily(
        "vllmx:mcp_restarts", "Further attempts to reach an MCP server", labels=["server"]
    )
    for server, count in counted.restarts:
        restarts.add_metric([server], count)
    yield restarts
