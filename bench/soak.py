"""Honest clients beside hostile ones, on a real server: do those who behave notice the others?

    python bench/soak.py --minutes 10 [--rate 4] [--hostile-share 0.75]

`vllmx serve` with the demo model and two keys: one of honest clients without limits, one of a guest
with few requests at a time and a place behind all others, which the hostile ones have. Honest chats
arrive by a Poisson process all the time and are streamed. Spans in which they are alone take turns
with longer ones in which `bench/hostile.py` runs (in a process of its own, with the lowest priority
of the system), so that what else the machine does meets both. Reported are the percentiles of
honest clients in both and their ratio (goal: p99 at most 1.2 times), answers of 500 and above
(goal: none), what the hostile ones were told, the memory of each process of the server (goal: in
the last third of the time what it was in the first) and the length of its log.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from residence import Residence
from vllmx.bench.figures import percentile, show
from vllmx.bench.processes import server_process
from vllmx.bench.sse_client import Streamed, stream_completion

HOSTILE = Path(__file__).with_name("hostile.py")
GUEST = ["--concurrency", "2", "--priority-range", "10:20"]
"""What an operator gives whom they do not know: behind everybody else."""
KV = ["--num-kv-blocks", "4096"]
"""Pages are first touched when they are first used: with few of them memory is soon all there."""
_WARM_S = 5.0
_TURN_S = 40.0
"""A span alone and one with hostile clients."""
_SAMPLE_S = 10.0
"""The seconds between two looks at the memory."""
_SETTLE_S = 1.0
"""The seconds after a span has begun: requests of then may have met the one before."""


@dataclass
class Soak:
    """What has been seen so far."""

    honest: dict[str, list[Streamed]] = field(default_factory=lambda: {"alone": [], "hostile": []})
    told: dict[str, Counter[str]] = field(default_factory=dict)
    turns: int = 0
    residence: Residence = field(default_factory=lambda: Residence(os.getpid()))
    log_bytes: int | None = None


async def chats(url: str, key: str, rate: float, seconds: float, seed: int) -> list[Streamed]:
    """Chats that arrive by a Poisson process for so long."""
    source = random.Random(seed)
    tasks: list[asyncio.Task[Streamed]] = []
    end_s = time.perf_counter() + seconds
    due = time.perf_counter()
    while due < end_s:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        text = (
            f"Tell me story {source.randrange(10**9)} about a fox and {source.randrange(99)} hens."
        )
        body = {
            "messages": [{"role": "user", "content": text}], "max_tokens": 48, "ignore_eos": True,
        }  # fmt: skip
        chat = stream_completion(url, "/v1/chat/completions", body, key)
        tasks.append(asyncio.ensure_future(chat))
        due += source.expovariate(rate)
    return list(await asyncio.gather(*tasks))


async def turn(soak: Soak, url: str, keys: tuple[str, str], options: argparse.Namespace) -> None:
    """A span alone and a span with hostile clients."""
    seed = soak.turns
    hostile_s = _TURN_S * options.hostile_share
    alone = await chats(url, keys[0], options.rate, _TURN_S - hostile_s, 2 * seed)
    soak.honest["alone"] += alone
    command = [sys.executable, str(HOSTILE), url, keys[1], str(hostile_s), options.kinds]
    process = await asyncio.create_subprocess_exec(
        "nice", "-n", "19", *command, stdout=subprocess.PIPE
    )
    both = asyncio.gather(
        chats(url, keys[0], options.rate, hostile_s, 2 * seed + 1), process.communicate()
    )
    beside, (output, _) = await both
    soak.honest["hostile"] += beside
    for kind, counts in json.loads(output).items():
        soak.told.setdefault(kind, Counter()).update(counts)
    await asyncio.sleep(_SETTLE_S)


def keys_file(folder: Path) -> tuple[Path, tuple[str, str]]:
    """The keys of an honest client and of a guest, as `vllmx keys add` writes them."""
    path, found = folder / "keys.json", []
    for name, limits in (("honest", []), ("guest", GUEST)):
        command = [sys.executable, "-m", "vllmx", "keys", "add", name, "--file", str(path), *limits]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        found.append(next(line for line in done.stdout.split() if line.startswith("vx-")))
    return path, (found[0], found[1])


def latencies(results: list[Streamed]) -> dict[str, list[float]]:
    good = [each for each in results if each.error is None and each.event_s]
    return {
        "first token": [each.first_token_s for each in good],
        "between tokens": [gap for each in good for gap in each.gaps_s],
        "whole answer": [each.whole_s for each in good],
    }


def report(soak: Soak) -> dict[str, Any]:
    alone, beside = (latencies(soak.honest[name]) for name in ("alone", "hostile"))
    table = []
    for name in alone:
        row: dict[str, Any] = {"honest": name}
        for share in (0.5, 0.99):
            one, two = percentile(alone[name], share), percentile(beside[name], share)
            label = f"p{share * 100:.0f}"
            row |= {f"alone {label} ms": one * 1e3, f"hostile {label} ms": two * 1e3}
            row[f"{label} ratio"] = two / one
        table.append(row)
    results = [each for name in soak.honest.values() for each in name]
    failed = [each.error for each in results if each.error is not None]
    statuses: Counter[str] = Counter()
    for counts in soak.told.values():
        statuses.update(counts)
    return {
        "latencies": table,
        "honest": {"requests": len(results), "failed": len(failed), "first error": failed[:1]},
        "server errors": {key: n for key, n in statuses.items() if key.startswith("5")},
        "told": {kind: dict(counts.most_common()) for kind, counts in soak.told.items()},
        "memory": soak.residence.thirds(),
        "log bytes": soak.log_bytes,
    }


async def run(options: argparse.Namespace, url: str, pid: int, keys: tuple[str, str]) -> Soak:
    await chats(url, keys[0], options.rate, _WARM_S, 10**6)
    soak, end_s = Soak(residence=Residence(pid)), time.monotonic() + options.minutes * 60
    watch = asyncio.ensure_future(soak.residence.watch(_SAMPLE_S))
    while time.monotonic() < end_s or not soak.turns:
        await turn(soak, url, keys, options)
        soak.turns += 1
        print(f"{soak.turns} turns, {soak.residence.newest()}", file=sys.stderr, flush=True)
    watch.cancel()
    soak.log_bytes = soak.residence.log_bytes()
    return soak


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--rate", type=float, default=4.0, help="honest chats a second")
    parser.add_argument("--hostile-share", type=float, default=0.75, help="of the time")
    parser.add_argument("--kinds", default="", help="functions of hostile.py; default: all")
    parser.add_argument("--flags", default="", help="more flags of vllmx serve")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        path, keys = keys_file(Path(scratch))
        flags: tuple[str, ...] = ("--port", "0", "--disable-access-log")
        flags += ("--api-keys-file", str(path), *KV)
        command = [sys.executable, "-m", "vllmx", "serve", *flags]
        with server_process([*command, *options.flags.split()]) as server:
            soak = asyncio.run(run(options, server.url, server.pid, keys))
    found = report(soak)
    if options.json:
        print(json.dumps(found, indent=1))
        return
    print(show(found.pop("latencies"), as_json=False))
    print(show(found.pop("memory"), as_json=False))
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
