"""What /metrics tells of calls of MCP servers' tools."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families
from vllmx_engine.wire.messages import CoreStats
from vllmx_server.limits.keys import OTHER
from vllmx_server.watch.counters import MAX_TOOLS, ToolCounts
from vllmx_server.watch.metrics import Metrics

from tests.waiting import wait_until

from .conftest import Started, StartServers, scripted


def values_of(metrics: Metrics, name: str) -> dict[tuple[str, ...], float]:
    """The samples of a metric, by the values of their labels in the order of the labels' names."""
    return {
        tuple(sample.labels.values()): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
        if sample.name == f"vllmx:{name}"
    }


def metrics_of(counts: ToolCounts) -> Metrics:
    metrics = Metrics("m", CoreStats, {})
    metrics.tools = counts
    return metrics


def until_counted(started: Started, name: str, count: int) -> Metrics:
    """The metrics, once one of them has come so far."""
    metrics = metrics_of(started.servers.counts)
    wait_until(lambda: sum(values_of(metrics, name).values()) >= count)
    return metrics


def test_calls_by_what_became_of_them(start_servers: StartServers) -> None:
    started = start_servers(s=scripted("well"), slow=scripted("well", callTimeoutSeconds=0.3))
    for name in ("s__echo", "s__echo", "s__fail", "slow__hang"):
        started.call(name)
    started.call("s__env", "no JSON")
    left = started.begin("s__hang")
    assert left.cancel()
    metrics = until_counted(started, "mcp_calls_total", 6)
    assert values_of(metrics, "mcp_calls_total") == {
        ("ok", "s", "echo"): 2,
        ("error", "s", "fail"): 1,
        ("timed_out", "slow", "hang"): 1,
        ("failed", "s", "env"): 1,
        ("cancelled", "s", "hang"): 1,
    }
    assert values_of(metrics, "mcp_call_time_seconds_count") == {("s",): 5, ("slow",): 1}
    assert values_of(metrics, "mcp_call_time_seconds_sum")[("slow",)] >= 0.3


def test_restarts_are_counted(start_servers: StartServers) -> None:
    started = start_servers(s=scripted("dies"), other=scripted("well"))
    assert started.settle("other") is None
    metrics = until_counted(started, "mcp_restarts_total", 2)
    assert values_of(metrics, "mcp_restarts_total")[("other",)] == 0


def test_names_of_tools_are_bounded() -> None:
    counts = ToolCounts()
    for number in range(10 * MAX_TOOLS):
        counts.called("s", f"tool-{number}", "ok", 0.0)
    twice = metrics_of(ToolCounts())
    for _ in range(2):
        twice.add(metrics_of(counts).counts())
    found = values_of(twice, "mcp_calls_total")
    assert len(found) == MAX_TOOLS + 1
    assert found[("ok", "s", OTHER)] == 2 * 9 * MAX_TOOLS
    assert values_of(twice, "mcp_call_time_seconds_count") == {("s",): 20 * MAX_TOOLS}


def test_a_server_without_tools_tells_of_none() -> None:
    assert "mcp_" not in Metrics("m", CoreStats, {}).render().decode()
