"""What the measuring processes share. Standard library only."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from cpu_peers.cases import Case, Job, Sample
from cpu_peers.host_load import ForeignLoad, wait_until_quiet

MAX_PROMPT_TOKENS = 20_000
_NUM_IDS = 1000


def job_from_argv() -> Job:
    return Job.read(Path(sys.argv[1]))


def record(job: Job, case: Case, tokens_per_s: Callable[[], float], variant: str = "") -> None:
    """Waits for a quiet moment, calls `tokens_per_s`, and hands its figure to the harness."""
    wait_until_quiet(job.quiet_wait_s, job.busy_pid)
    with ForeignLoad(job.busy_pid) as load:
        speed = tokens_per_s()
    sample = Sample(case.label, speed, load.cores, variant)
    with Path(job.out).open("a") as file:
        file.write(json.dumps(asdict(sample)) + "\n")


def rate(num_tokens: int, run: Callable[[], object]) -> float:
    """Tokens per second of one call of `run`."""
    start = time.perf_counter()
    run()
    return num_tokens / (time.perf_counter() - start)


def rate_of_generate(case: Case, generate: Callable[[list[list[int]], int], object]) -> float:
    """Tokens per second of an engine that only offers `generate(prompts, num_tokens)`: decoding is
    the difference of a long and a short call. Prompts are random, so that no cache knows them."""

    def seconds(num_tokens: int) -> float:
        prompts = [
            random.choices(range(_NUM_IDS), k=case.num_prompt_tokens) for _ in range(case.batch)
        ]
        return 1 / rate(1, lambda: generate(prompts, num_tokens))

    first_token_s = seconds(1)
    if case.kind == "prefill":
        return case.context / first_token_s
    return case.batch * case.num_steps / (seconds(case.num_steps + 1) - first_token_s)


def affordable(cases: tuple[Case, ...]) -> list[Case]:
    """The cases whose prompts `rate_of_generate` can compute in a minute or so."""
    return [case for case in cases if case.batch * case.num_prompt_tokens <= MAX_PROMPT_TOKENS]
