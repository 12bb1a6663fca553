"""Microseconds of a sum between two ranks of MLX, in the graph and through the host.

    python bench/metal_sums.py [--rows 1 8 32 512] [--rounds 5] [--json]

Two processes and MLX's CPU device: 57 times a product of (rows, 1024) with (1024, 64) and one back,
as between the sums of a decode step of Qwen3-0.6B there is work of the ranks' own; without sums,
with sums by MLX's ring and with sums through the host. What a sum takes is the difference to the
chain without, divided by 57, of medians of rounds in which the three take turns. Bytes are those
that one rank hands to the other for a sum.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
from vllmx.bench.figures import Record, show
from vllmx_metal.ranks import MetalHostRanks, MetalRanks
from vllmx_metal.ring import meet
from vllmx_tp.communicator import SharedMemoryCommunicator
from vllmx_tp.region import Region

RANKS, WIDTH, INNER, SUMS = 2, 1024, 64, 57
ROWS = (1, 8, 32, 512)


def chain(
    x: mx.array, weights: tuple[mx.array, mx.array], add: Callable[[mx.array], mx.array]
) -> float:
    """Seconds of all products, with `add` behind each pair."""
    began_s = time.perf_counter()
    for _ in range(SUMS):
        x = add(x @ weights[0] @ weights[1])
    mx.eval(x)
    return time.perf_counter() - began_s


def measure(region: Region, rank: int, rows_of: list[int], rounds: int) -> list[Record]:
    """One record for each number of rows; both ranks do the same."""
    mx.set_default_device(mx.cpu)
    own = SharedMemoryCommunicator(region, rank)
    ring, host = meet(own), MetalHostRanks(own)
    assert ring is not None
    assert ring.runs_ahead, "MLX has no ring here; the log says why"
    ways: dict[str, MetalRanks | None] = {"none": None, "ring": ring, "host": host}
    weights = (mx.full((WIDTH, INNER), 1 / WIDTH), mx.full((INNER, WIDTH), 0.5 / INNER))
    records: list[Record] = []
    for rows in rows_of:
        taken: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(rounds + 1):
            for way, ranks in ways.items():
                host.all_reduce(mx.zeros((1, 1)))  # both begin together
                add = (lambda x: x) if ranks is None else ranks.all_reduce
                taken[way].append(chain(mx.ones((rows, WIDTH)), weights, add))
        middle = {way: statistics.median(seconds[1:]) for way, seconds in taken.items()}
        size = 4 * rows * WIDTH
        records.append(
            {
                "rows": rows,
                "without, us": round(1e6 * middle["none"] / SUMS, 1),
                "ring, us a sum": round(1e6 * (middle["ring"] - middle["none"]) / SUMS, 1),
                "host, us a sum": round(1e6 * (middle["host"] - middle["none"]) / SUMS, 1),
                "ring, bytes": 2 * (RANKS - 1) * size // RANKS,
                "host, bytes": size,
            }
        )
    return records


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--region", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.region is not None:
        measure(Region(args.region, RANKS), 1, args.rows, args.rounds)
        return
    region = Region.create(RANKS)
    command = [sys.executable, __file__, *sys.argv[1:], "--region", str(region.fd)]
    other = subprocess.Popen(command, pass_fds=(region.fd,))
    try:
        with ThreadPoolExecutor(1) as pool:
            work = pool.submit(measure, region, 0, args.rows, args.rounds)
            while not work.done():
                if other.poll():
                    region.aborted[0] = 1
                time.sleep(0.1)
        print(show(work.result(), as_json=args.json))
    finally:
        region.aborted[0] = 1
        other.wait()


if __name__ == "__main__":
    main()
