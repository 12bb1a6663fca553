"""What the measuring processes share. Standard library only."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from cpu_peers.cases import Case, Job, Sample
from cpu_peers.host_load import ForeignLoad, wait_until_quiet


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
