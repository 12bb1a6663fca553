"""The exposition text, read back by Prometheus's own parser."""

from __future__ import annotations

import random
from pathlib import Path
from unittest.mock import AsyncMock

import pytest
from prometheus_client.parser import text_string_to_metric_families
from vllmx_core.errors import GrammarCheckError
from vllmx_engine.wire.messages import STEP_TOKENS, CoreStats
from vllmx_engine.wire.outputs import RequestMetrics
from vllmx_server.limits.keys import MAX_LABELS
from vllmx_server.limits.usage import KeyUsage
from vllmx_server.watch.counters import Histogram
from vllmx_server.watch.metrics import BETWEEN_TOKENS_S, Metrics

from tests.waiting import PATIENCE_S

from .conftest import MakeServer, Served
from .test_keys import Clock, key_file


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


def test_each_replica_has_its_own_samples() -> None:
    each = {"0": CoreStats(prompt_tokens=7, num_running=2), "1": CoreStats(prompt_tokens=5)}
    metrics = Metrics("m", lambda: CoreStats(prompt_tokens=12, replicas=each), {})
    families = {f.name: f for f in text_string_to_metric_families(metrics.render().decode())}
    for name, values in (("prompt_tokens", [7, 5]), ("num_requests_running", [2, 0])):
        samples = families[f"vllmx:{name}"].samples
        assert [sample.value for sample in samples] == values
        assert [sample.labels["replica"] for sample in samples] == ["0", "1"]


def test_slots_are_shown_of_models_that_have_them() -> None:
    for stats, names in (
        (CoreStats(num_state_slots=8, num_used_slots=2, num_snapshots=3), {0.25, 3.0}),
        (CoreStats(), set[float]()),
    ):
        text = Metrics("m", lambda stats=stats: stats, {}).render().decode()  # type: ignore[misc]
        families = text_string_to_metric_families(text)
        assert {s.value for f in families if "state_" in f.name for s in f.samples} == names


def test_histogram_counts_like_its_definition() -> None:
    values = [random.uniform(0, 100) for _ in range(500)] + list(BETWEEN_TOKENS_S)
    histogram = Histogram(BETWEEN_TOKENS_S)
    for value in values:
        histogram.observe(value)
    for bound, count in histogram.buckets():
        assert count == sum(value <= float(bound) for value in values)


def test_the_times_of_a_request_add_up() -> None:
    metrics = Metrics("m", CoreStats, {})
    times = RequestMetrics(10.0, first_token_s=15.0, last_token_s=17.0, queue_s=3.0)
    metrics.finish_request(times, longest=4)
    metrics.finish_request(RequestMetrics(10.0), longest=0)  # ended before its first token
    text = metrics.render().decode()
    for name, count, total in (
        ("request_queue_time_seconds", 1.0, 3.0),
        ("request_prefill_time_seconds", 1.0, 2.0),
        ("request_decode_time_seconds", 1.0, 2.0),
        ("request_inference_time_seconds", 1.0, 4.0),
        ("request_time_per_output_token_seconds", 1.0, 2 / 3),
        ("request_max_num_generation_tokens", 2.0, 4.0),
    ):
        assert f'vllmx:{name}_count{{model_name="m"}} {count}\n' in text
        assert f'vllmx:{name}_sum{{model_name="m"}} {total}\n' in text


def test_steps_are_counted_by_their_tokens() -> None:
    sizes = [0] * (len(STEP_TOKENS) + 1)
    sizes[1], sizes[-1] = 2, 1
    stats = CoreStats(prompt_tokens=20_000, generation_tokens=12, step_sizes=tuple(sizes))
    text = Metrics("m", lambda: stats, {}).render().decode()
    for bound, count in (("1.0", 0.0), ("8.0", 2.0), ("16384.0", 2.0), ("+Inf", 3.0)):
        line = f'vllmx:iteration_tokens_total_bucket{{le="{bound}",model_name="m"}} {count}\n'
        assert line in text
    assert 'vllmx:iteration_tokens_total_sum{model_name="m"} 20012.0\n' in text


async def test_a_request_is_seen_in_all_of_them(served: Served) -> None:
    answer = await served.complete("abcdefg", n=3, max_tokens=5, ignore_eos=True)
    await served.becomes_idle()
    text = (await served.client.get("/metrics")).text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    label = '{model_name="fake"}'
    for name in ("queue", "prefill", "decode", "inference"):
        assert values[f"vllmx:request_{name}_time_seconds_count{label}"] == "1.0"
    assert values[f"vllmx:request_max_num_generation_tokens_sum{label}"] == "5.0"
    assert values[f"vllmx:request_params_n_sum{label}"] == "3.0"
    assert answer["usage"]["completion_tokens"] == 15
    assert float(values[f"vllmx:iteration_tokens_total_sum{label}"]) == 3 * (7 + 5)


TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
TEMPLATE = Path(__file__).parents[2] / "data" / "templates" / "qwen2.5.jinja"
TALK = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 40}


async def values_of(served: Served, name: str, label: str) -> dict[str, float]:
    """The values of one counter, by one of its labels."""
    text = (await served.client.get("/metrics", headers={"x-api-key": "plain"})).text
    return {
        sample.labels[label]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == f"vllmx:{name}"
    }


async def test_grammars_and_calls_that_are_not_read(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The form of the answer makes the model begin a call that is none."""
    path, reasons = "/v1/chat/completions", "parser_fallbacks_total"
    engine = {"chat_template": str(TEMPLATE)}
    async with make_server(engine=engine, max_model_len=4096) as served:
        for _ in range(2):  # the second one is known
            form = {"choice": ["<tool_call> look"]}
            body = {**TALK, "tools": TOOLS, "structured_outputs": form}
            answer = await served.client.post(path, json=body)
            message = answer.json()["choices"][0]["message"]
            assert message["content"] == form["choice"][0], answer.text
        refused = await served.client.post(
            path, json={**TALK, "structured_outputs": {"regex": "("}}
        )
        assert refused.status_code == 400
        await served.becomes_idle()
        assert await values_of(served, reasons, "reason") == {
            "derived": 2,
            "by_markers": 0,
            "not_found": 0,
            "not_parsed": 2,
        }
        refusals = await values_of(served, "grammar_refusals_total", "reason")
        assert refusals == {"invalid": 1, "overloaded": 0, "failed": 0}
        busy = GrammarCheckError("the server is too busy: try again later")
        monkeypatch.setattr(served.llm.grammars, "check", AsyncMock(side_effect=busy))
        late = await served.client.post(path, json={**TALK, "structured_outputs": {"regex": "a"}})
        assert (late.status_code, late.headers["retry-after"]) == (503, "5")
        assert late.json()["error"]["code"] == "grammar_check_unavailable"
        refusals = await values_of(served, "grammar_refusals_total", "reason")
        assert refusals == {"invalid": 1, "overloaded": 1, "failed": 0}
        checked = await values_of(served, "grammar_compile_time_seconds_count", "model_name")
        assert checked == {"fake": 2}
    async with make_server() as served:
        assert (await served.client.post(path, json={**TALK, "tools": TOOLS})).is_success
        assert (await values_of(served, reasons, "reason"))["not_found"] == 1


async def test_keys_have_the_names_of_their_file_and_no_others(
    tmp_path: Path, make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllmx_server.limits.keys.MAX_LABELS", 2)
    limits = {"requests_per_minute": 1}
    flags = {
        "api_keys_file": key_file(tmp_path, ann={}, bob=limits, eve={}),
        "api_key": ("plain",),
    }
    async with make_server(flags) as served:
        served.state.limiter.clock = Clock()  # type: ignore[attr-defined]
        for name in ("secret-ann", "secret-bob", "secret-bob", "secret-eve", "plain", "nobody"):
            headers = {"x-api-key": name}
            body = {"prompt": "ab", "max_tokens": 4, "ignore_eos": True, "user": name}
            await served.client.post("/v1/completions", json=body, headers=headers)
        await served.server.drain(PATIENCE_S)
        requests = await values_of(served, "key_requests_total", "key")
        assert requests == {"ann": 1, "bob": 1, "other": 2}
        refusals = await values_of(served, "key_refusals_total", "key")
        assert refusals == {"ann": 0, "bob": 1, "other": 0}
        tokens = await values_of(served, "key_generation_tokens_total", "key")
        assert tokens == {"ann": 4, "bob": 4, "other": 8}


def test_names_of_keys_are_bounded_however_often_their_file_changes() -> None:
    metrics = Metrics("m", CoreStats, {})
    for number in range(10 * MAX_LABELS):
        metrics.count_key(f"key-{number}", KeyUsage(requests=1))
    found = metrics.counts().counters["key_requests"]
    assert len(found) <= 2 * MAX_LABELS + 1
    assert sum(count for _, count in found) == 10 * MAX_LABELS
