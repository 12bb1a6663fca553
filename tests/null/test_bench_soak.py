"""`bench/soak.py`: what it makes of what clients saw."""

from __future__ import annotations

import importlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from vllmx.bench.sse_client import Streamed

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> Any:
    if not (BENCH / "soak.py").exists():
        pytest.skip("the benchmarks are not beside these tests")
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("soak")


def test_honest_clients_alone_and_beside_others(soak: Any) -> None:
    seen = soak.Soak()
    seen.honest["alone"] = [Streamed(0.0, [0.1, 0.2], 2), Streamed(5.0, [5.1, 5.2], 2)]
    seen.honest["hostile"] = [Streamed(1.0, [1.2, 1.3], 2), Streamed(2.0, error="refused")]
    seen.told = {"no HTTP": Counter({"400": 3, "505": 1}), "schemas": Counter({"500": 2})}
    seen.memory = [(60.0, 80.04, 150.0)]
    found = soak.report(seen)
    first = found["latencies"][0]
    assert first["honest"] == "first token"
    assert first["p99 ratio"] == pytest.approx(2.0)
    assert found["latencies"][1]["p50 ratio"] == pytest.approx(1.0)
    assert found["honest"] == {"requests": 4, "failed": 1, "first error": ["refused"]}
    assert found["server errors"] == {"500": 2}
    assert found["memory"] == [{"minute": 1.0, "server MB": 80.0, "core MB": 150.0}]


def test_hostile_kinds_are_named_as_they_are_asked_for(soak: Any) -> None:
    hostile = importlib.import_module("hostile")
    target = hostile.Target("127.0.0.1", 1, "key", 0.0)
    assert b"Authorization: Bearer key\r\nContent-Length: 5\r\n" in target.head("/x", 5)
    target.came("idle", b"HTTP/1.1 408 \r\n")
    target.came("idle", b"")
    assert target.answers == {"idle": Counter({"408": 1, "closed": 1})}
    assert len({kind.__name__ for kind in hostile.KINDS}) == 11
