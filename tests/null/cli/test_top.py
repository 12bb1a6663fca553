"""`vllmx top`: figures out of two looks at /metrics, and what is said where there are none."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from click.testing import CliRunner
from vllmx.cli.top import shown, top
from vllmx.live_figures import figures, quantile, scrape, sparkline
from vllmx_core.errors import ConfigError

TEXT = """# HELP vllmx:num_requests_running Sequences in the running batch
vllmx:num_requests_running{{model_name="a"}} 2.0
vllmx:num_requests_running{{model_name="b"}} 1.0
vllmx:num_requests_waiting{{model_name="a"}} 4.0
vllmx:kv_cache_usage_perc{{model_name="a"}} 0.25
vllmx:kv_cache_usage_perc{{model_name="b"}} 0.125
vllmx:generation_tokens_total{{model_name="a"}} {tokens}
vllmx:engine_steps_total{{model_name="a"}} {steps}
vllmx:prefix_cache_queries_total{{model_name="a"}} {tokens}
vllmx:prefix_cache_hits_total{{model_name="a"}} {hits}
vllmx:time_to_first_token_seconds_bucket{{le="0.1",model_name="a"}} {fast}
vllmx:time_to_first_token_seconds_bucket{{le="0.2",model_name="a"}} {all}
vllmx:time_to_first_token_seconds_bucket{{le="+Inf",model_name="a"}} {all}
vllmx:time_to_first_token_seconds_sum{{model_name="a"}} 3.0
process_cpu_seconds_total 5.0
"""
OLD = {"tokens": 100, "steps": 10, "hits": 0, "fast": 5, "all": 5}
NEW = {"tokens": 300, "steps": 20, "hits": 50, "fast": 10, "all": 15}


def test_figures_between_two_looks() -> None:
    found = figures(scrape(TEXT.format(**OLD), 1.0), scrape(TEXT.format(**NEW), 3.0))
    assert found is not None
    assert (found.running, found.waiting, found.kv_share) == (3.0, 4.0, 0.25)
    assert found.generated_s == 100.0
    assert found.prefix_share == 0.25
    assert found.first_token_s == pytest.approx((0.1, 0.198))  # 5 below 0.1, 5 up to 0.2
    assert found.between_tokens_s == (None, None)
    text = shown("http://x", found, [50.0, 100.0])
    assert "3 running, 4 waiting" in text
    assert "median 100 ms, p99 198 ms" in text
    assert "[#####               ] 25%" in text


def test_a_server_that_began_anew_says_nothing() -> None:
    assert figures(scrape(TEXT.format(**NEW), 1.0), scrape(TEXT.format(**OLD), 3.0)) is None


def test_quantiles() -> None:
    assert quantile({}, 0.5) is None
    assert quantile({1.0: 0.0, math.inf: 0.0}, 0.5) is None
    assert quantile({1.0: 0.0, math.inf: 4.0}, 0.5) == 1.0
    assert quantile({1.0: 10.0, 2.0: 10.0, math.inf: 10.0}, 0.5) == 0.5


def test_sparks() -> None:
    assert sparkline([0, 0], 10) == "▁▁"
    assert sparkline([5, 0, 7, 14], 3) == "▁▅█"


class Handler(BaseHTTPRequestHandler):
    looks: list[dict[str, int]]

    def do_GET(self) -> None:
        if self.headers.get("Authorization") != "Bearer key":
            self.send_error(401)
            return
        values = self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]
        body = TEXT.format(**values).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Says nothing."""


@pytest.fixture
def server() -> Iterator[str]:
    handler = type("OneHandler", (Handler,), {"looks": [dict(OLD), dict(NEW)]})
    made = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{made.server_address[1]}"
    made.shutdown()
    thread.join()
    made.server_close()


def test_a_server_is_looked_at(server: str) -> None:
    arguments = ["--url", server, "--api-key", "key", "--interval", "0.1", "--count", "2", "--json"]
    done = CliRunner().invoke(top, arguments, catch_exceptions=False)
    first, second = map(json.loads, done.output.splitlines())
    assert first["running"] == 3
    assert first["generated_s"] > 0
    assert second["generated_s"] == 0


def test_who_does_not_answer_is_named(server: str) -> None:
    def run(*arguments: str) -> None:
        CliRunner().invoke(top, [*arguments, "--count", "1"], catch_exceptions=False)

    with pytest.raises(ConfigError, match="answers 401: give --api-key"):
        run("--url", server)
    with pytest.raises(ConfigError, match=r"no server answers at http://127\.0\.0\.1:1 "):
        run("--url", "http://127.0.0.1:1")
    with pytest.raises(ConfigError, match="must begin with http"):
        run("--url", "ftp://x")


def test_each_replica_has_a_line() -> None:
    line = 'vllmx:{name}{{model_name="a",replica="{replica}"}} {value}\n'

    def text(tokens: dict[str, int]) -> str:
        rows = [("generation_tokens_total", one, count) for one, count in tokens.items()]
        rows += [("num_requests_running", one, 2) for one in tokens]
        rows += [("kv_cache_usage_perc", one, 0.5) for one in tokens]
        return "".join(line.format(name=name, replica=one, value=v) for name, one, v in rows)

    old, new = text({"0": 100, "1": 500}), text({"0": 300, "1": 40, "10": 20})
    found = figures(scrape(old, 1.0), scrape(new, 3.0))
    assert found is not None
    rates = {name: one["generated_s"] for name, one in found.replicas.items()}
    assert rates == {"0": 100.0, "1": 20.0, "10": 10.0}  # 1 was started again
    assert found.running == 6
    assert "replica 10      2 running, 0 waiting, 10.0 tokens/s, KV 50%" in shown("x", found, [])
