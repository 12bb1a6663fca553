"""Speed of the CPU backend by the dtype of its KV cache.

    python bench/kv_cache.py --model FOLDER [--dtypes bf16,int8,fp8] [--batches 1,8,32]
        [--context 2000] [--prefills 512] [--rounds 5] [--threads N] [--json]

Tokens per second as in bench/peers_cpu.py: steps of the backend, greedy sampling included, every
page of the cache written before. The dtypes take turns in each round of a case, so that a slow
minute of the machine hits all of them; for that a model of each is in memory. Every sample goes to
standard error; then come medians over the rounds, and the median of the rounds' ratios to the first
dtype.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys

from cpu_peers.cases import Case, Job, make_cases
from cpu_peers.vllmx_step_worker import load, measure_decode, measure_prefill, touch_pages
from vllmx_core.system.processors import available_processors

Speeds = dict[str, dict[str, list[float]]]
"""Tokens per second of each round, by case and dtype."""


def measure(job: Job, dtypes: list[str], rounds: int) -> Speeds:
    speeds: Speeds = {case.label: {dtype: [] for dtype in dtypes} for case in job.cases}
    models = {dtype: load(job, dtype) for dtype in dtypes}
    for model in models.values():
        touch_pages(model)
    for case in job.cases:
        run = measure_prefill if case.kind == "prefill" else measure_decode
        for _ in range(rounds):
            for dtype, model in models.items():
                speeds[case.label][dtype].append(run(model, case))
                print(f"{case.label} {dtype} {speeds[case.label][dtype][-1]:.4g}", file=sys.stderr)
    for model in models.values():
        model.close()
    return speeds


def table(speeds: Speeds, dtypes: list[str]) -> str:
    lines = ["| tokens/s | " + " | ".join(dtypes) + " |", "|-" * (len(dtypes) + 1) + "|"]
    for label, by_dtype in speeds.items():
        cells = []
        for dtype in dtypes:
            speed = statistics.median(by_dtype[dtype])
            pairs = zip(by_dtype[dtype], by_dtype[dtypes[0]], strict=True)
            ratio = statistics.median(own / first for own, first in pairs)
            cells.append(f"{speed:.4g} ({ratio:.2f})")
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtypes", default="bf16,int8,fp8")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--prefills", default="512")
    parser.add_argument("--context", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=available_processors())
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",") if part]

    cases: list[Case] = make_cases(
        numbers(arguments.prefills), numbers(arguments.batches), [arguments.context]
    )
    job = Job(arguments.model, "", tuple(cases), arguments.threads, None, 0.0)
    dtypes = arguments.dtypes.split(",")
    speeds = measure(job, dtypes, arguments.rounds)
    print(json.dumps(speeds) if arguments.json else table(speeds, dtypes))


if __name__ == "__main__":
    main()
