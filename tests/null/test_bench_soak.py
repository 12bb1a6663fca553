"""`bench/soak.py`: what it makes of what clients saw."""

from __future__ import annotations

import importlib
import os
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
    seen.told = {"no HTTP": Counter({"400": 3, "431": 1}), "schemas": Counter({"500": 2})}
    seen.residence.samples = [(10.0 * n, {"server": 80.04 + n, "core": 150.0}) for n in range(6)]
    found = soak.report(seen)
    first = found["latencies"][0]
    assert first["honest"] == "first token"
    assert first["p99 ratio"] == pytest.approx(2.0)
    assert found["latencies"][1]["p50 ratio"] == pytest.approx(1.0)
    assert found["honest"] == {"requests": 4, "failed": 1, "first error": ["refused"]}
    assert found["server errors"] == {"500": 2}
    server, core = found["memory"]
    assert (server["process"], server["minutes"]) == ("server", 0.8)
    assert (server["first third MB"], server["last third MB"]) == (80.5, 84.5)
    assert (server["ratio"], server["greatest MB"]) == (1.05, 85.0)
    assert (core["first third MB"], core["ratio"]) == (150.0, 1.0)


def test_the_memory_of_a_process_is_looked_at(soak: Any) -> None:
    residence = soak.Residence(os.getpid())
    residence.look()
    assert residence.newest()["server"] > 1.0


def test_hostile_kinds_are_named_as_they_are_asked_for(soak: Any) -> None:
    hostile = importlib.import_module("hostile")
    target = hostile.Target("127.0.0.1", 1, "key", 0.0)
    assert b"Authorization: Bearer key\r\nContent-Length: 5\r\n" in target.head("/x", 5)
    target.came("idle", b"HTTP/1.1 408 \r\n")
    target.came("idle", b"")
    assert target.answers == {"idle": Counter({"408": 1, "closed": 1})}
    assert len({kind.__name__ for kind in hostile.KINDS}) == 11
