"""The exposition text, read back by Prometheus's own parser."""

from __future__ import annotations

import random

from prometheus_client.parser import text_string_to_metric_families
from vllmx_engine.messages import CoreStats
from vllmx_server.metrics import BETWEEN_TOKENS_S, Histogram, Metrics


def test_exposition_holds_vllms_names() -> None:
    stats = CoreStats(
        num_running=3, num_waiting=2, num_free_blocks=25, num_blocks=100, prompt_tokens=7
    )
    metrics = Metrics("m", lambda: stats, {"block_size": 16})
    metrics.finish("stop", 10, 4, 0.5)
    metrics.first_token.observe(0.02)
    families = {f.name: f for f in text_string_to_metric_families(metrics.render().decode())}
    values = {
        sample.name: sample.value
        for family in families.values()
        for sample in family.samples
        if "le" not in sample.labels and sample.labels.get("finished_reason", "stop") == "stop"
    }
    assert values["vllmx:num_requests_running"] == 3
    assert values["vllmx:num_requests_waiting"] == 2
    assert values["vllmx:kv_cache_usage_perc"] == 0.75
    assert values["vllmx:prompt_tokens_total"] == 7
    assert values["vllmx:request_success_total"] == 1
    assert values["vllmx:e2e_request_latency_seconds_sum"] == 0.5
    assert values["vllmx:time_to_first_token_seconds_count"] == 1


def test_histogram_counts_like_its_definition() -> None:
    values = [random.uniform(0, 100) for _ in range(500)] + list(BETWEEN_TOKENS_S)
    histogram = Histogram(BETWEEN_TOKENS_S)
    for value in values:
        histogram.observe(value)
    for bound, count in histogram.buckets():
        assert count == sum(value <= float(bound) for value in values)
