"""Prometheus metrics under vLLM's names with the prefix `vllmx:`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

import msgspec
from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from vllmx_engine.formats.named import Origin
from vllmx_engine.link.grammar_process import Refusal
from vllmx_engine.wire.messages import STEP_TOKENS, CoreStats
from vllmx_engine.wire.outputs import RequestMetrics

from vllmx_server.limits.keys import MAX_LABELS, OTHER
from vllmx_server.limits.usage import KeyUsage
from vllmx_server.watch.counters import (
    Counter,
    Histogram,
    Labelled,
    ToolCounts,
    ToolsCounted,
    histogram_family,
)

FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
BETWEEN_TOKENS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
    5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
REQUEST_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
GRAMMAR_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
CHOICES = (1, 2, 5, 10, 20, 50, 100)
HISTOGRAMS: dict[str, tuple[str, Sequence[float]]] = {
    "request_queue_time_seconds": ("Wait of a request for its turn", REQUEST_S),
    "request_prefill_time_seconds": ("From a request's turn to its first token", REQUEST_S),
    "request_decode_time_seconds": ("From a request's first token to its last", REQUEST_S),
    "request_inference_time_seconds": ("From a request's turn to its last token", REQUEST_S),
    "request_time_per_output_token_seconds": (
        "Mean time of a request's tokens but the first", BETWEEN_TOKENS_S
    ),
    "grammar_compile_time_seconds": ("Check of a grammar that was not known", GRAMMAR_S),
    "request_max_num_generation_tokens": ("Tokens of a request's longest choice", TOKENS),
    "time_to_first_token_seconds": (
        "From the request to a choice's first token", FIRST_TOKEN_S
    ),
    "inter_token_latency_seconds": ("Between two tokens of a choice", BETWEEN_TOKENS_S),
    "e2e_request_latency_seconds": ("From the request to a choice's end", REQUEST_S),
    "request_prompt_tokens": ("Prompt tokens of a choice", TOKENS),
    "request_generation_tokens": ("Generated tokens of a choice", TOKENS),
    "request_params_n": ("Choices of a request", CHOICES),
    "request_params_max_tokens": ("Greatest length that a request allows", TOKENS),
}  # fmt: skip
"""Description and bounds by name."""
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class CoreShown(msgspec.Struct, frozen=True):
    """The state of a model's core as one process knows it."""

    stats: CoreStats
    cache: dict[str, str]
    """Labels of `cache_config_info`."""
    is_open: bool
    """The process is connected to the core; else this is what it last knew."""


class MetricCounts(msgspec.Struct, frozen=True):
    """The counts of one process on their way to another."""

    histograms: dict[str, tuple[list[int], float]]
    """Counts and sum by name."""
    counters: dict[str, list[Labelled]]
    core: CoreShown
    tools: ToolsCounted | None = None


class _Together(Collector):
    """Merges families of the same name, with the samples of all models."""

    def __init__(self, metrics: Sequence[Metrics]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        found: dict[str, Metric] = {}
        for each in self._metrics:
            for family in each.collect():
                known = found.setdefault(family.name, family)
                if known is not family:
                    known.samples.extend(family.samples)
        yield from found.values()


def render_all(metrics: Sequence[Metrics]) -> bytes:
    """The exposition text of several models."""
    registry = CollectorRegistry()
    registry.register(_Together(metrics))
    for process in (ProcessCollector, PlatformCollector, GCCollector):
        process(registry=registry)
    return generate_latest(registry)


class Metrics:
    """All metrics of one model.

    Args:
        model: the name that clients use.
        stats: gives the engine's newest counters.
        cache: labels of `cache_config_info`.

    Attributes:
        tools: calls of MCP servers' tools; None: there are no such servers.
        is_open: this process is connected to the core that `stats` come from.
    """

    def __init__(
        self, model: str, stats: Callable[[], CoreStats], cache: Mapping[str, object]
    ) -> None:
        self.model = model
        self.is_open = True
        self.tools: ToolCounts | None = None
        self.follow(stats, cache)
        self._histograms = {name: Histogram(bounds) for name, (_, bounds) in HISTOGRAMS.items()}
        self.first_token = self._histograms["time_to_first_token_seconds"]
        self.between_tokens = self._histograms["inter_token_latency_seconds"]
        self._finished = Counter(
            "request_success", "Ended choices by reason", ("finished_reason",),
            [("stop",), ("length",), ("abort",), ("error",)],
        )  # fmt: skip
        self._refused_grammars = Counter(
            "grammar_refusals", "Requests that were refused for their grammar", ("reason",),
            [("invalid",), ("overloaded",), ("failed",)],
        )  # fmt: skip
        self._fallbacks = Counter(
            "parser_fallbacks", "Requests with tools whose calls are read by a guess or not at all",
            ("reason",), [("derived",), ("by_markers",), ("not_found",), ("not_parsed",)],
        )  # fmt: skip
        self._keys = [
            Counter(f"key_{name}", text, ("key",), [(OTHER,)], bounded="key", most=2 * MAX_LABELS)
            for name, text in (
                ("requests", "Requests that were taken, by API key"),
                ("refusals", "Requests over a limit of their API key"),
                ("prompt_tokens", "Prompt tokens, by API key"),
                ("generation_tokens", "Generated tokens, by API key"),
            )
        ]
        """Bounded, since the file of keys may be read anew at any time."""
        self._http = Counter(
            "http_requests", "HTTP requests by route and status", ("handler", "method", "status")
        )
        counters = (self._finished, self._refused_grammars, self._fallbacks, *self._keys)
        self._counters = {each.name: each for each in (*counters, self._http)}

    @classmethod
    def elsewhere(cls, model: str) -> Metrics:
        """The metrics of a model that is open in other processes alone."""
        metrics = cls(model, CoreStats, {})
        metrics.is_open = False
        return metrics

    def follow(self, stats: Callable[[], CoreStats], cache: Mapping[str, object]) -> None:
        """Shows the counters of another core of the same model from now on."""
        self._stats = stats
        self._cache = {name: str(value) for name, value in cache.items()}

    def show(self, core: CoreShown) -> None:
        """Shows what another process knows of the core."""
        self.follow(lambda: core.stats, core.cache)

    def begin(self, num_choices: int, max_tokens: int) -> None:
        """Counts one request that the engine took."""
        self._histograms["request_params_n"].observe(num_choices)
        self._histograms["request_params_max_tokens"].observe(max_tokens)

    def finish(self, reason: str, prompt: int, generated: int, seconds: float) -> None:
        """Counts one ended choice."""
        self._finished.add(reason)
        self._histograms["request_prompt_tokens"].observe(prompt)
        self._histograms["request_generation_tokens"].observe(generated)
        self._histograms["e2e_request_latency_seconds"].observe(seconds)

    def finish_request(self, times: RequestMetrics | None, longest: int) -> None:
        """Counts one request whose choices have all ended, the longest with so many tokens."""
        self._histograms["request_max_num_generation_tokens"].observe(longest)
        if times is not None:
            self._observe(times, times.first_token_s, longest)

    def finish_pooled(self, times: RequestMetrics, num_tokens: int, seconds: float) -> None:
        """Counts one text of so many tokens that became a vector or a score."""
        self.finish("stop", num_tokens, 0, seconds)
        self._observe(times, times.last_token_s, 0)

    def _observe(self, times: RequestMetrics, first_s: float | None, num_tokens: int) -> None:
        """Records where the time of a request went, unless it ended before its first token."""
        last_s, found = times.last_token_s, self._histograms
        if first_s is None or last_s is None:
            return
        begun_s = min(times.arrival_s + times.queue_s, first_s)
        found["request_queue_time_seconds"].observe(times.queue_s)
        found["request_prefill_time_seconds"].observe(first_s - begun_s)
        found["request_inference_time_seconds"].observe(last_s - begun_s)
        if num_tokens:
            found["request_decode_time_seconds"].observe(last_s - first_s)
        if num_tokens > 1:
            mean_s = (last_s - first_s) / (num_tokens - 1)
            found["request_time_per_output_token_seconds"].observe(mean_s)

    def grammar_compiled(self, seconds: float) -> None:
        """See `GrammarObserver`."""
        self._histograms["grammar_compile_time_seconds"].observe(seconds)

    def grammar_refused(self, why: Refusal) -> None:
        """See `GrammarObserver`."""
        self._refused_grammars.add(why)

    def parser_fell_back(self, why: Origin | Literal["not_parsed"], count: int = 1) -> None:
        """Counts answers whose calls are read by something less than a known format."""
        if why != "known":
            self._fallbacks.add(why, count=count)

    def count_key(self, label: str, new: KeyUsage) -> None:
        """Counts the usage of an API key, by its `ApiKeys.label`."""
        used = (new.requests, new.refused, new.prompt_tokens, new.completion_tokens)
        for counter, count in zip(self._keys, used, strict=True):
            counter.add(label, count=count)

    def count_http(self, handler: str, method: str, status: int) -> None:
        self._http.add(handler, method, f"{status // 100}xx")

    def counts(self) -> MetricCounts:
        """The counts of this process so far."""
        return MetricCounts(
            {name: (each.counts, each.total) for name, each in self._histograms.items()},
            {name: each.counted() for name, each in self._counters.items()},
            CoreShown(self._stats(), self._cache, self.is_open),
            None if self.tools is None else self.tools.counted(),
        )

    def add(self, counts: MetricCounts) -> None:
        """Adds the counts of another process."""
        for name, (buckets, total) in counts.histograms.items():
            self._histograms[name].add(buckets, total)
        for name, counted in counts.counters.items():
            self._counters[name].add_all(counted)
        if counts.tools is not None:
            self.tools = self.tools or ToolCounts()
            self.tools.add(counts.tools)

    def with_others(self, others: Sequence[MetricCounts]) -> Metrics:
        """The metrics of the whole server: this process's counts and those of others. The core's
        are the newest of a process that is connected to it, if any is."""
        found = (self.counts(), *others)
        cores = (each.core for each in found)
        whole = Metrics.elsewhere(self.model)
        whole.show(max(cores, key=lambda core: (core.is_open, core.stats.num_steps)))
        for counts in found:
            whole.add(counts)
        return whole

    def render(self) -> bytes:
        """The exposition text."""
        return render_all([self])

    def collect(self) -> Iterator[Metric]:
        """All metrics as Prometheus has them."""
        yield from self._core_families()
        yield self._cache_info()
        for counter in self._counters.values():
            yield counter.family(**({} if counter is self._http else {"model_name": self.model}))
        if self.tools is not None:
            yield from self.tools.families()
        now, steps = self._stats(), Histogram(STEP_TOKENS)
        steps.add(now.step_sizes, float(now.prompt_tokens + now.generation_tokens))
        yield histogram_family(
            "iteration_tokens_total", "Tokens of an engine step", "model_name", {self.model: steps}
        )
        for name, histogram in self._histograms.items():
            yield histogram_family(name, HISTOGRAMS[name][0], "model_name", {self.model: histogram})

    def _core_families(self) -> Iterator[Metric]:
        """Gauges and counters of the core, or of each replica with its number as a label."""
        now = self._stats()
        names = ["model_name", "replica"] if now.replicas else ["model_name"]
        found: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}
        for replica, stats in (now.replicas or {"": now}).items():
            labels = [self.model, replica] if now.replicas else [self.model]
            for kind, rows in (
                (GaugeMetricFamily, _gauges(stats)),
                (CounterMetricFamily, _counters(stats)),
            ):
                for name, text, value in rows:
                    family = found.setdefault(name, kind(f"vllmx:{name}", text, labels=names))
                    family.add_metric(labels, value)
        yield from found.values()
        if now.num_drafts:
            places = CounterMetricFamily(
                "vllmx:spec_decode_num_accepted_tokens_per_pos",
                "Draft tokens kept, by their place in the draft",
                labels=["model_name", "position"],
            )
            for place, count in enumerate(now.accepted_at):
                places.add_metric([self.model, str(place)], count)
            yield places

    def _cache_info(self) -> Metric:
        info = GaugeMetricFamily(
            "vllmx:cache_config_info",
            "The KV cache, in labels",
            labels=["model_name", *self._cache],
        )
        info.add_metric([self.model, *self._cache.values()], 1.0)
        return info


def _gauges(now: CoreStats) -> list[tuple[str, str, float]]:
    used = 1 - now.num_free_blocks / now.num_blocks if now.num_blocks else 0.0
    gauges: list[tuple[str, str, float]] = [
        ("num_requests_running", "Sequences in the running batch", now.num_running),
        ("num_requests_waiting", "Sequences that wait", now.num_waiting),
        ("kv_cache_usage_perc", "Share of KV blocks in use, 1 = all", used),
    ]
    if now.num_state_slots:
        share = now.num_used_slots / now.num_state_slots
        gauges += [
            ("state_slot_usage_perc", "Share of state slots of running sequences", share),
            ("state_snapshots", "Prefixes whose states are kept", now.num_snapshots),
        ]
    if now.num_stored_blocks >= 0:
        gauges += [
            (
                "kv_host_blocks",
                "KV blocks in host memory below the device",
                now.num_host_blocks,
            ),
            ("kv_host_bytes", "Bytes of these", now.host_block_bytes),
            ("kv_store_blocks", "KV blocks on disk or in another store", now.num_stored_blocks),
            ("kv_store_bytes", "Bytes of the store", now.stored_bytes),
        ]
    gauges += [
        ("sessions", "Sessions that pin KV blocks", now.num_sessions),
        ("session_blocks", "KV blocks that sessions pin", now.num_pinned_blocks),
    ]
    return gauges


def _counters(now: CoreStats) -> list[tuple[str, str, float]]:
    return [
        ("prompt_tokens", "Prompt tokens processed", now.prompt_tokens),
        ("generation_tokens", "Tokens generated", now.generation_tokens),
        ("num_preemptions", "Preemptions", now.num_preemptions),
        ("prefix_cache_queries", "Prompt tokens looked up", now.prefix_cache_queries),
        ("prefix_cache_hits", "Prompt tokens found in the cache", now.prefix_cache_hits),
        ("kv_tier_tokens", "Prompt tokens found below the device", now.tier_tokens),
        ("kv_tier_given_up", "Fetches that took too long", now.num_given_up_fetches),
        ("kv_store_failures", "Failed calls of --kv-connector", now.num_store_failures),
        ("kv_peer_tokens", "Prompt tokens computed by another replica", now.peer_tokens),
        ("kv_peer_failures", "Replicas that had no blocks to give", now.num_peer_failures),
        ("engine_steps", "Steps of the engine", now.num_steps),
        ("spec_decode_num_drafts", "Rows of steps with draft tokens", now.num_drafts),
        ("spec_decode_num_draft_tokens", "Draft tokens", now.num_draft_tokens),
        ("spec_decode_num_accepted_tokens", "Draft tokens kept", now.num_accepted_tokens),
    ]
