"""Time from the start of a process to its first generated text."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence

from vllmx_core.errors import VllmxError

from vllmx.bench.figures import percentile


def startup(repeat: int, flags: Sequence[str]) -> dict[str, float | int]:
    """Runs `vllmx complete` in fresh processes. `flags` go to it (model, backend, ...)."""
    runs = [_run(flags) for _ in range(repeat + 1)][1:]  # the first one warms the file cache
    firsts, wholes = [first for first, _ in runs], [whole for _, whole in runs]
    return {
        "runs": repeat,
        "first_token_min_s": round(min(firsts), 3),
        "first_token_median_s": round(percentile(firsts, 0.5), 3),
        "first_token_max_s": round(max(firsts), 3),
        "whole_process_median_s": round(percentile(wholes, 0.5), 3),
    }


def _run(flags: Sequence[str]) -> tuple[float, float]:
    prompt = "Once upon a time"
    command = [
        sys.executable,
        "-m",
        "vllmx",
        "complete",
        *flags,
        "--prompts",
        prompt,
        "--max-tokens",
        "8",
        "--ignore-eos",
        "--temperature",
        "0",
    ]
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # noqa: S603
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(len(prompt) + 1)  # the prompt is echoed before the first token
    first = time.perf_counter() - started
    process.stdout.read()
    error = process.stderr.read().decode("utf-8", "replace")
    if process.wait() != 0:
        raise VllmxError(f"vllmx complete failed: {error.strip()[-500:]}")
    return first, time.perf_counter() - started
