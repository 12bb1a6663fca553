"""Prometheus metrics under vLLM's names with the prefix `vllmx:`.

Latencies are observed once a streamed token, so histograms are plain lists here and become
Prometheus families only when somebody scrapes.
"""

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
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from vllmx_engine.formats.named import Origin
from vllmx_engine.link.grammar_process import Refusal
from vllmx_engine.wire.messages import STEP_TOKENS, CoreStats
from vllmx_engine.wire.outputs import RequestMetrics

from vllmx_server.limits.usage import KeyUsage
from vllmx_server.watch.counters import Counter, KeyCounters, tool_families
from vllmx_server.watch.histogram import Histogram
from vllmx_server.watch.tool_counts import ToolCounts, ToolsCounted

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
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class CoreShown(msgspec.Struct, frozen=True):
    """What a process knows of a model's core."""

    stats: CoreStats
    cache: dict[str, str]
    """What `cache_config_info` shows, by label."""
    is_open: bool
    """The process is connected with the core; else this is what it last knew."""


class MetricCounts(msgspec.Struct, frozen=True):
    """What one process has counted, on its way to another."""

    histograms: list[tuple[list[int], float]]
    """Counts and sum, in the order of `Metrics`."""
    counters: list[dict[str, int]]
    """Counts by label, in the order of `Metrics`."""
    http: list[tuple[str, str, str, int]]
    core: CoreShown
    tools: ToolsCounted | None = None


def render_all(metrics: Sequence[Metrics]) -> bytes:
    """The exposition text of several models."""
    return generate_latest(_Together(metrics).registry)


class _Together(Collector):
    """Families of the same name are one, with the samples of all models."""

    def __init__(self, metrics: Sequence[Metrics]) -> None:
        self._metrics = metrics
        self.registry = CollectorRegistry()
        self.registry.register(self)
        for process in (ProcessCollector, PlatformCollector, GCCollector):
            process(registry=self.registry)

    def collect(self) -> Iterator[Metric]:
        found: dict[str, Metric] = {}
        for each in self._metrics:
            for family in each.collect():
                known = found.setdefault(family.name, family)
                if known is not family:
                    known.samples.extend(family.samples)
        yield from found.values()


class RequestTimes:
    """Histograms of where the time of a request goes, all of its choices together."""

    def __init__(self) -> None:
        self.queue = Histogram(REQUEST_S)
        self.prefill = Histogram(REQUEST_S)
        self.decode = Histogram(REQUEST_S)
        self.inference = Histogram(REQUEST_S)
        self.token = Histogram(BETWEEN_TOKENS_S)

    def observe(self, times: RequestMetrics, longest: int) -> None:
        """Records a request that has ended; one that never had a token has nothing to show."""
        first_s, last_s = times.first_token_s, times.last_token_s
        if first_s is None or last_s is None:
            return
        begun_s = min(times.arrival_s + times.queue_s, first_s)
        self.queue.observe(times.queue_s)
        self.prefill.observe(first_s - begun_s)
        self.decode.observe(last_s - first_s)
        self.inference.observe(last_s - begun_s)
        if longest > 1:
            self.token.observe((last_s - first_s) / (longest - 1))

    def observe_pooled(self, times: RequestMetrics) -> None:
        """Records a text that became a vector or a score, for which nothing is decoded."""
        if times.last_token_s is None:
            return
        begun_s = min(times.arrival_s + times.queue_s, times.last_token_s)
        self.queue.observe(times.queue_s)
        self.prefill.observe(times.last_token_s - begun_s)
        self.inference.observe(times.last_token_s - begun_s)


class Metrics(Collector):
    """All metrics of one server.

    Args:
        model: the name that clients use.
        stats: gives the engine's newest counters.
        cache: what `cache_config_info` shows, by label.

    Attributes:
        tools: calls of MCP servers' tools; None: there are no such servers.
        is_open: `stats` are those of a core that this process is connected with.
    """

    def __init__(
        self, model: str, stats: Callable[[], CoreStats], cache: Mapping[str, object]
    ) -> None:
        self.model = model
        self.is_open = True
        self.follow(stats, cache)
        self.first_token = Histogram(FIRST_TOKEN_S)
        self.between_tokens = Histogram(BETWEEN_TOKENS_S)
        self._request_time = Histogram(REQUEST_S)
        self._prompt_tokens = Histogram(TOKENS)
        self._generation_tokens = Histogram(TOKENS)
        self._max_tokens = Histogram(TOKENS)
        self._num_choices = Histogram(CHOICES)
        self._longest_choice = Histogram(TOKENS)
        self._times = RequestTimes()
        self._grammar_time = Histogram(GRAMMAR_S)
        self._finished = Counter(
            "request_success", "Ended choices by reason", "finished_reason",
            ("stop", "length", "abort", "error"),
        )  # fmt: skip
        self._refused_grammars = Counter(
            "grammar_refusals", "Requests that were refused for their grammar", "reason",
            ("invalid", "overloaded", "failed"),
        )  # fmt: skip
        self._fallbacks = Counter(
            "parser_fallbacks", "Requests with tools whose calls are read by a guess or not at all",
            "reason", ("derived", "by_markers", "not_found", "not_parsed"),
        )  # fmt: skip
        self._keys = KeyCounters()
        self.tools: ToolCounts | None = None
        self._http: dict[tuple[str, str, str], int] = {}
        self._registry = CollectorRegistry()
        self._registry.register(self)
        for process in (ProcessCollector, PlatformCollector, GCCollector):
            process(registry=self._registry)

    @classmethod
    def elsewhere(cls, model: str) -> Metrics:
        """The metrics of a model that other processes alone have anything to tell of."""
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
        self._num_choices.observe(num_choices)
        self._max_tokens.observe(max_tokens)

    def finish(self, reason: str, prompt: int, generated: int, seconds: float) -> None:
        """Counts one ended choice."""
        self._finished.add(reason)
        self._prompt_tokens.observe(prompt)
        self._generation_tokens.observe(generated)
        self._request_time.observe(seconds)

    def finish_request(self, times: RequestMetrics | None, longest: int) -> None:
        """Counts one request whose choices have all ended, the longest with so many tokens."""
        self._longest_choice.observe(longest)
        if times is not None:
            self._times.observe(times, longest)

    def finish_pooled(self, times: RequestMetrics, num_tokens: int, seconds: float) -> None:
        """Counts one text of so many tokens that became a vector or a score."""
        self.finish("stop", num_tokens, 0, seconds)
        self._times.observe_pooled(times)

    def grammar_compiled(self, seconds: float) -> None:
        """See `GrammarObserver`."""
        self._grammar_time.observe(seconds)

    def grammar_refused(self, why: Refusal) -> None:
        """See `GrammarObserver`."""
        self._refused_grammars.add(why)

    def parser_fell_back(self, why: Origin | Literal["not_parsed"], count: int = 1) -> None:
        """Counts answers whose calls are read by something less than a known format."""
        if why != "known":
            self._fallbacks.add(why, count)

    def count_key(self, label: str, new: KeyUsage) -> None:
        """Counts what an API key has used, under a name of `ApiKeys.label`."""
        self._keys.add(label, new)

    def count_http(self, handler: str, method: str, status: int) -> None:
        """Counts one HTTP request."""
        key = (handler, method, f"{status // 100}xx")
        self._http[key] = self._http.get(key, 0) + 1

    def counts(self) -> MetricCounts:
        """What this process has counted so far."""
        return MetricCounts(
            histograms=[(each.counts, each.total) for each in self._histograms()],
            counters=[each.counts for each in self._counters()],
            http=[(*key, count) for key, count in self._http.items()],
            core=CoreShown(self._stats(), self._cache, self.is_open),
            tools=None if self.tools is None else self.tools.counted(),
        )

    def add(self, counts: MetricCounts) -> None:
        """Counts what another process has counted."""
        for each, (buckets, total) in zip(self._histograms(), counts.histograms, strict=True):
            each.add(buckets, total)
        for counter, found in zip(self._counters(), counts.counters, strict=True):
            for label, count in found.items():
                counter.add(label, count)
        for *key, count in counts.http:
            name = (key[0], key[1], key[2])
            self._http[name] = self._http.get(name, 0) + count
        if counts.tools is not None:
            self.tools = self.tools or ToolCounts()
            self.tools.add(counts.tools)

    def with_others(self, others: Sequence[MetricCounts]) -> Metrics:
        """The metrics of the whole server, of which other processes have counted so much. Those of
        the core are of a process that is connected with it, if any is, and the newest."""
        found = (self.counts(), *others)
        cores = (each.core for each in found)
        whole = Metrics.elsewhere(self.model)
        whole.show(max(cores, key=lambda core: (core.is_open, core.stats.num_steps)))
        for counts in found:
            whole.add(counts)
        return whole

    def render(self) -> bytes:
        """The exposition text."""
        return generate_latest(self._registry)

    def _histograms(self) -> list[Histogram]:
        """Histograms that are counted here, always in this order."""
        times = self._times
        return [
            self.first_token, self.between_tokens, self._request_time, self._prompt_tokens,
            self._generation_tokens, self._max_tokens, self._num_choices, self._longest_choice,
            times.queue, times.prefill, times.decode, times.inference, times.token,
            self._grammar_time,
        ]  # fmt: skip

    def _counters(self) -> list[Counter]:
        """Counters that are counted here by a label, always in this order."""
        return [self._finished, self._refused_grammars, self._fallbacks, *self._keys.all()]

    def collect(self) -> Iterator[Metric]:
        yield from self._gauges()
        yield from self._core_counters()
        yield from (counter.family(self.model) for counter in self._counters())
        yield self._http_counter()
        if self.tools is not None:
            yield from tool_families(self.tools.counted())
        steps = Histogram(STEP_TOKENS)
        now = self._stats()
        steps.counts, steps.total = (
            list(now.step_sizes),
            float(now.prompt_tokens + now.generation_tokens),
        )
        for name, text, histogram in (
            ("iteration_tokens_total", "Tokens of an engine step", steps),
            ("request_queue_time_seconds", "Wait of a request for its turn", self._times.queue),
            ("request_prefill_time_seconds", "From a request's turn to its first token",
             self._times.prefill),
            ("request_decode_time_seconds", "From a request's first token to its last",
             self._times.decode),
            ("request_inference_time_seconds", "From a request's turn to its last token",
             self._times.inference),
            ("request_time_per_output_token_seconds", "Mean time of a request's tokens but the"
             " first", self._times.token),
            ("grammar_compile_time_seconds", "Check of a grammar that was not known",
             self._grammar_time),
            ("request_max_num_generation_tokens", "Tokens of a request's longest choice",
             self._longest_choice),
            ("time_to_first_token_seconds", "From the request to a choice's first token",
             self.first_token),
            ("inter_token_latency_seconds", "Between two tokens of a choice", self.between_tokens),
            ("e2e_request_latency_seconds", "From the request to a choice's end",
             self._request_time),
            ("request_prompt_tokens", "Prompt tokens of a choice", self._prompt_tokens),
            ("request_generation_tokens", "Generated tokens of a choice", self._generation_tokens),
            ("request_params_n", "Choices of a request", self._num_choices),
            ("request_params_max_tokens", "Greatest length that a request allows",
             self._max_tokens),
        ):  # fmt: skip
            family = HistogramMetricFamily(f"vllmx:{name}", text, labels=["model_name"])
            family.add_metric([self.model], histogram.buckets(), histogram.total)
            yield family

    def _gauges(self) -> Iterator[Metric]:
        now = self._stats()
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
        for name, text, value in gauges:
            family = GaugeMetricFamily(f"vllmx:{name}", text, labels=["model_name"])
            family.add_metric([self.model], value)
            yield family
        info = GaugeMetricFamily(
            "vllmx:cache_config_info",
            "The KV cache, in labels",
            labels=["model_name", *self._cache],
        )
        info.add_metric([self.model, *self._cache.values()], 1.0)
        yield info

    def _core_counters(self) -> Iterator[Metric]:
        now = self._stats()
        for name, text, value in (
            ("prompt_tokens", "Prompt tokens processed", now.prompt_tokens),
            ("generation_tokens", "Tokens generated", now.generation_tokens),
            ("num_preemptions", "Preemptions", now.num_preemptions),
            ("prefix_cache_queries", "Prompt tokens looked up", now.prefix_cache_queries),
            ("prefix_cache_hits", "Prompt tokens found in the cache", now.prefix_cache_hits),
            ("engine_steps", "Steps of the engine", now.num_steps),
        ):
            family = CounterMetricFamily(f"vllmx:{name}", text, labels=["model_name"])
            family.add_metric([self.model], value)
            yield family

    def _http_counter(self) -> Metric:
        http = CounterMetricFamily(
            "vllmx:http_requests",
            "HTTP requests by route and status",
            labels=["handler", "method", "status"],
        )
        for key, count in self._http.items():
            http.add_metric(key, count)
        return http
