"""Counters with one label of their own, and those of API keys."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client.core import CounterMetricFamily

from vllmx_server.keys.ring import MAX_LABELS, OTHER
from vllmx_server.keys.usage import KeyUsage


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
    """Counts of each API key, under names of the file of keys, which `KeyRing.label` bounds. Twice
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
