"""The simulator of replicas: its times, and what it must find."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.bench_scripts import BENCH, bench_modules


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(BENCH / "sim"))
    with bench_modules(monkeypatch) as load:
        yield load


def test_times_of_two_requests_by_hand(bench: Any) -> None:
    """The second's prompt is half cached, and computed at half speed beside the first's rows."""
    traces, replicas, simulate = bench("traces"), bench("replica"), bench("simulate")
    policies = bench("policies")
    machine = replicas.Machine(
        token_s=0.001, steps=((1, 0.01), (2, 0.01)), num_rows=2, num_blocks=100
    )
    digests = [bytes([at]) * 16 for at in range(20)]
    first = traces.Request(0.0, digests[:10], 8, 128, 100, "")
    second = traces.Request(0.5, [*digests[:4], *digests[10:14]], 8, 128, 16, "")
    simulation = simulate.Simulation(policies.LeastSeconds(1), machine, 1)
    simulation.run([first, second])
    one, other = simulation.done
    assert one.first_s == pytest.approx(0.128)
    assert other.num_hit == 4
    assert other.first_s == pytest.approx(0.5 + 2 * 0.064)
    while simulation._events:
        simulation._step()
    (replica,) = simulation.replicas
    # 99 tokens in steps of 10 ms, of which those beside the prompt take 20 ms.
    assert replica.ended_s == pytest.approx(0.128 + 0.99 + 0.064, abs=0.001)
    assert (replica.num_owned, replica.num_requests, replica.queued_s) == (0, 0, 0.0)


def test_a_crowd_does_not_drive_sessions_from_their_blocks(bench: Any) -> None:
    """More prompts than can be computed at once. A router that only looks for a free replica
    finds 0.73 of the tokens cached, hashing 0.90."""
    simulate = bench("simulate")
    policies = bench("policies")
    kinds = (policies.LeastSeconds, policies.SessionHash)
    ours, hashed = (simulate.simulate(kind, "agents", 8, 0.4, 60.0, 1) for kind in kinds)
    assert ours.hit > hashed.hit
    assert all(mine < its for mine, its in zip(ours.first_s, hashed.first_s, strict=True))


def test_the_least_seconds_win_and_the_plot_shows_them(bench: Any, tmp_path: Path) -> None:
    simulate = bench("simulate")
    plot = tmp_path / "plot.svg"
    found = simulate.main(
        ["--replicas", "4", "--traces", "chat", "--seconds", "60", "--plot", str(plot)]
    )
    by_name = {one.policy: one for one in found}
    assert {one.num_requests for one in found} == {by_name["vllmx"].num_requests}
    best, turns = by_name["vllmx"], by_name["round robin"]
    assert best.hit > 1.2 * turns.hit
    assert all(ours < theirs for ours, theirs in zip(best.first_s, turns.first_s, strict=True))
    assert plot.read_text().count("<polyline") == 2 * len(found)
