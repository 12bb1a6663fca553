"""Many replicas in simulated time: `python bench/sim/simulate.py --replicas 8 64 512`.

The router is the real one; replicas are modelled (`replica.py`) with measured costs. Prints a table
and, with --plot, draws it.
"""

from __future__ import annotations

import argparse
import gc
import heapq
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from plot import draw
from policies import POLICIES, Policy
from replica import QWEN3_CPU, Machine, Replica, Running
from traces import BLOCK_TOKENS, SHAPES, Request, trace

ANNOUNCE_S = 0.05
"""See `vllmx_engine.core.announcer.INTERVAL_S`."""
WARM_S = 30.0
_END, _ANNOUNCE = 0, 1


@dataclass(frozen=True)
class Result:
    """Figures of a run, of the requests after the first `WARM_S` seconds."""

    policy: str
    trace: str
    num_replicas: int
    num_requests: int
    hit: float
    first_s: tuple[float, float, float]
    """Percentiles 50, 90 and 99 of the seconds to the first token."""
    route_us: float
    """Microseconds of the policy for a request, median."""
    host_s: float
    """CPU seconds of the run."""


class Simulation:
    """One policy over some replicas."""

    def __init__(self, policy: Policy, machine: Machine, num_replicas: int) -> None:
        self.policy = policy
        self.replicas = [Replica(machine) for _ in range(num_replicas)]
        self._events: list[tuple[float, int, int, int]] = []
        """(time, kind, replica, version of the replica's plan)."""
        self._versions = [0] * num_replicas
        self._is_due = [False] * num_replicas
        self.done: list[Running] = []
        self.routed_s: list[float] = []

    def run(self, requests: Sequence[Request]) -> None:
        """Serves all requests to their first tokens."""
        waiting = len(requests)
        for number, request in enumerate(requests):
            self._until(request.at_s)
            began_s = time.perf_counter()
            chosen = self.policy.choose(number, request, request.at_s)
            self.routed_s.append(time.perf_counter() - began_s)
            self.replicas[chosen].add(Running(request, number), request.at_s)
            self._plan(chosen)
        while len(self.done) < waiting:
            self._step()

    def _until(self, now_s: float) -> None:
        while self._events and self._events[0][0] <= now_s:
            self._step()

    def _step(self) -> None:
        now_s, kind, number, version = heapq.heappop(self._events)
        replica = self.replicas[number]
        if kind == _ANNOUNCE:
            self._is_due[number] = False
            replica.advance(now_s)
            self.policy.announced(number, replica.changes(), replica.load(), now_s)
        elif version == self._versions[number]:
            prompt, ended = replica.end(now_s)
            if prompt is not None:
                self.done.append(prompt)
            if ended is not None:
                self.policy.finished(ended.number)
            self._plan(number)

    def _plan(self, number: int) -> None:
        """Takes in a change of a replica."""
        replica = self.replicas[number]
        self._versions[number] += 1
        next_s = replica.next_s()
        if next_s < math.inf:
            heapq.heappush(self._events, (next_s, _END, number, self._versions[number]))
        if self.policy.listens and not self._is_due[number]:
            self._is_due[number] = True
            heapq.heappush(self._events, (replica.now_s + ANNOUNCE_S, _ANNOUNCE, number, 0))


def simulate(
    kind: type[Policy], name: str, num_replicas: int, rate: float, seconds: float, seed: int
) -> Result:
    """One run.

    Args:
        rate: arrivals a second for each replica.
    """
    requests = trace(name, rate * num_replicas, WARM_S + seconds, seed)
    gc.collect()
    gc.disable()  # a collection walks all digests, and would be charged to a policy
    began_s = time.process_time()
    simulation = Simulation(kind(num_replicas), QWEN3_CPU, num_replicas)  # type: ignore[call-arg]
    simulation.run(requests)
    host_s = time.process_time() - began_s
    gc.enable()
    measured = [one for one in simulation.done if one.request.at_s >= WARM_S]
    waits = [one.first_s - one.request.at_s for one in measured]
    hit = sum(min(one.num_hit * BLOCK_TOKENS, one.request.num_tokens - 1) for one in measured)
    p50, p90, p99 = np.percentile(waits, (50, 90, 99))
    return Result(
        simulation.policy.name,
        name,
        num_replicas,
        len(requests),
        hit / sum(one.request.num_tokens for one in measured),
        (float(p50), float(p90), float(p99)),
        1e6 * float(np.median(simulation.routed_s)),
        host_s,
    )


RATES = {"chat": 0.4, "agents": 0.25, "batch": 0.7}
"""Arrivals a second for each replica, which keep prompts waiting half of the time."""


def main(arguments: Sequence[str] | None = None) -> list[Result]:
    """Prints a line for each run."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--replicas", type=int, nargs="+", default=[8, 64, 512])
    add("--traces", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    add("--policies", nargs="+", default=[one.name for one in POLICIES], help="by their names")
    add("--seconds", type=float, default=60.0, help="simulated time that is measured")
    add("--load", type=float, default=1.0, help="factor of the rates of arrivals")
    add("--seed", type=int, default=1)
    add("--plot", type=Path, help="SVG file of the results")
    options = parser.parse_args(arguments)
    found: list[Result] = []
    print("| trace | replicas | policy | requests | hit | p50 ms | p90 | p99 | route us | CPU s |")
    print("|-|-|-|-|-|-|-|-|-|-|")
    for name in options.traces:
        for count in options.replicas:
            for kind in POLICIES:
                if kind.name not in options.policies:
                    continue
                rate = RATES[name] * options.load
                one = simulate(kind, name, count, rate, options.seconds, options.seed)
                found.append(one)
                times = " | ".join(f"{1000 * seconds:.0f}" for seconds in one.first_s)
                print(
                    f"| {one.trace} | {one.num_replicas} | {one.policy} | {one.num_requests} |"
                    f" {one.hit:.3f} | {times} | {one.route_us:.0f} | {one.host_s:.1f} |",
                    flush=True,
                )
    if options.plot is not None:
        rows = [(one.trace, one.num_replicas, one.policy, one.first_s) for one in found]
        options.plot.write_text(draw(rows))
    return found


if __name__ == "__main__":
    main()
    sys.exit(0)
