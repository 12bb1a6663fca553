"""Writes docs/monitoring/grafana.json and alerts.yaml; a test compares them with what this program
would write and with the metrics that a server has.

    python docs/list_dashboard.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "monitoring"
_MODEL = '{model_name=~"$model"}'
_BY_MODEL = "sum by (model_name)"


def _rate(name: str, by: str = "model_name") -> str:
    return f"sum by ({by}) (rate(vllmx:{name}{_MODEL}[$__rate_interval]))"


def _quantile(share: float, name: str) -> str:
    rate = f"rate(vllmx:{name}_bucket{_MODEL}[$__rate_interval])"
    return f"histogram_quantile({share}, sum by (le, model_name) ({rate}))"


PANELS: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("Sequences", "short", {
        "{{model_name}} running": f"{_BY_MODEL} (vllmx:num_requests_running{_MODEL})",
        "{{model_name}} waiting": f"{_BY_MODEL} (vllmx:num_requests_waiting{_MODEL})",
    }),
    ("Tokens a second", "short", {
        "{{model_name}} generated": _rate("generation_tokens_total"),
        "{{model_name}} of prompts": _rate("prompt_tokens_total"),
    }),
    ("Time to first token", "s", {
        "{{model_name}} median": _quantile(0.5, "time_to_first_token_seconds"),
        "{{model_name}} p99": _quantile(0.99, "time_to_first_token_seconds"),
    }),
    ("Between tokens", "s", {
        "{{model_name}} median": _quantile(0.5, "inter_token_latency_seconds"),
        "{{model_name}} p99": _quantile(0.99, "inter_token_latency_seconds"),
    }),
    ("Where requests spend time, p99", "s", {
        "{{model_name}} queue": _quantile(0.99, "request_queue_time_seconds"),
        "{{model_name}} prefill": _quantile(0.99, "request_prefill_time_seconds"),
        "{{model_name}} decode": _quantile(0.99, "request_decode_time_seconds"),
    }),
    ("KV cache in use", "percentunit", {
        "{{model_name}}": f"max by (model_name) (vllmx:kv_cache_usage_perc{_MODEL})",
    }),
    ("Prompt tokens found in the cache", "percentunit", {
        "{{model_name}}": f"{_rate('prefix_cache_hits_total')}"
        f" / {_rate('prefix_cache_queries_total')}",
    }),
    ("Preemptions a second", "short", {"{{model_name}}": _rate("num_preemptions_total")}),
    ("Choices that ended, a second", "short", {
        "{{finished_reason}}": _rate("request_success_total", "finished_reason"),
    }),
    ("Checks of grammars", "s", {
        "{{model_name}} median": _quantile(0.5, "grammar_compile_time_seconds"),
        "{{model_name}} p99": _quantile(0.99, "grammar_compile_time_seconds"),
    }),
    ("Refused grammars, a second", "short", {
        "{{reason}}": _rate("grammar_refusals_total", "reason"),
    }),
    ("Calls of tools read by a guess or not, a second", "short", {
        "{{reason}}": _rate("parser_fallbacks_total", "reason"),
    }),
    ("Generated tokens a second, by key", "short", {
        "{{key}}": _rate("key_generation_tokens_total", "key"),
    }),
    ("Requests a second, by key", "short", {
        "{{key}}": _rate("key_requests_total", "key"),
        "{{key}} over a limit": _rate("key_refusals_total", "key"),
    }),
    ("Calls of MCP servers' tools, a second", "short", {
        "{{server}} {{tool}} {{outcome}}": "sum by (server, tool, outcome)"
        " (rate(vllmx:mcp_calls_total[$__rate_interval]))",
    }),
    ("Calls of MCP servers' tools, p99", "s", {
        "{{server}}": "histogram_quantile(0.99, sum by (le, server)"
        " (rate(vllmx:mcp_call_time_seconds_bucket[$__rate_interval])))",
    }),
    ("MCP servers that were started again, a second", "short", {
        "{{server}}": "sum by (server) (rate(vllmx:mcp_restarts_total[$__rate_interval]))",
    }),
    ("HTTP answers a second", "short", {
        "{{status}}": "sum by (status) (rate(vllmx:http_requests_total[$__rate_interval]))",
    }),
)  # fmt: skip

ALERTS: tuple[tuple[str, str, str, str], ...] = (
    ("VllmxDown", 'up{job="vllmx"} == 0', "1m", "a server does not answer /metrics"),
    ("VllmxErrors", 'sum(rate(vllmx:http_requests_total{status=~"5.."}[5m])) > 0.1', "5m",
     "more than one answer in ten seconds is a 5xx"),
    ("VllmxSlowFirstToken",
     "histogram_quantile(0.99, sum by (le) (rate(vllmx:time_to_first_token_seconds_bucket[5m])))"
     " > 10", "10m", "the 99th percentile to the first token is above 10 s"),
    ("VllmxQueueGrows", "sum(vllmx:num_requests_waiting) > 100", "10m",
     "more than 100 sequences have waited for ten minutes"),
    ("VllmxPreempts", "sum(rate(vllmx:num_preemptions_total[5m])) > 1", "10m",
     "sequences are computed again for want of KV cache: lower --max-num-seqs or the context"),
    ("VllmxGrammarsWait",
     'sum(rate(vllmx:grammar_refusals_total{reason!="invalid"}[5m])) > 0.1', "5m",
     "requests are refused because too many grammars wait, or because their check fails"),
    ("VllmxCallsNotRead",
     'sum(rate(vllmx:parser_fallbacks_total{reason=~"not_.*"}[15m])) > 0.1', "15m",
     "calls of tools reach clients as text: name the format with --tool-parser"),
    ("VllmxToolsDown", "sum by (server) (increase(vllmx:mcp_restarts_total[15m])) > 5", "5m",
     "an MCP server cannot be reached, or ends again and again: the log says why"),
    ("VllmxStands", "sum(vllmx:num_requests_running) > 0 and"
     " sum(rate(vllmx:engine_steps_total[5m])) == 0", "5m", "sequences run and no step ends"),
)  # fmt: skip


def board() -> str:
    """The dashboard as Grafana imports it."""
    panels = []
    for index, (title, unit, queries) in enumerate(PANELS):
        targets = [
            {"refId": chr(65 + n), "expr": expression, "legendFormat": legend}
            for n, (legend, expression) in enumerate(queries.items())
        ]
        panels.append(
            {
                "id": index + 1,
                "title": title,
                "type": "timeseries",
                "datasource": {"type": "prometheus", "uid": "${source}"},
                "gridPos": {"x": 12 * (index % 2), "y": 8 * (index // 2), "w": 12, "h": 8},
                "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
                "targets": targets,
            }
        )
    models: dict[str, Any] = {
        "name": "model",
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "query": "label_values(vllmx:num_requests_running, model_name)",
        "refresh": 2,
        "multi": True,
        "includeAll": True,
    }
    source = {"name": "source", "type": "datasource", "query": "prometheus"}
    made = {
        "title": "vllmx",
        "uid": "vllmx",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [source, models]},
        "panels": panels,
    }
    return json.dumps(made, indent=1) + "\n"


def alerts() -> str:
    """Rules as Prometheus reads them."""
    rules = [
        {"alert": name, "expr": expression, "for": time, "annotations": {"summary": text}}
        for name, expression, time, text in ALERTS
    ]
    made = {"groups": [{"name": "vllmx", "rules": rules}]}
    text: str = yaml.safe_dump(made, sort_keys=False, width=160)
    return text


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in (("grafana.json", board()), ("alerts.yaml", alerts())):
        (FOLDER / name).write_text(text)
        sys.stdout.write(f"wrote docs/monitoring/{name}\n")
