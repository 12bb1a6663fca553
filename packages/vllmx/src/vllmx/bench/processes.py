"""Processes that are measured: a server, and commands from their start to the first text."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from vllmx_core.errors import ConfigError, VllmxError
from vllmx_core.records import Record

from vllmx.bench.figures import percentile

_STOP_S = 30.0


class ServerProcess(Record):
    """The address at which a server answers, and its process."""

    url: str
    """The server's address, without /v1."""
    pid: int


def first_url(text: str) -> str | None:
    """The URL that is the first word of a line."""
    for line in text.splitlines(keepends=True):
        if line.strip().startswith("http") and line.endswith("\n"):
            return line.split()[0].removesuffix("/v1")
    return None


@contextmanager
def server_process(
    command: Sequence[str],
    environment: Mapping[str, str] | None = None,
    find_url: Callable[[str], str | None] = first_url,
) -> Iterator[ServerProcess]:
    """Runs a server until the block ends; its later output is dropped. Raises ConfigError with the
    end of its output if it does not start.

    Args:
        find_url: finds the server's address in its output; None while it is not there.
    """
    environment = dict(os.environ if environment is None else environment)
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(  # noqa: S603 - our own command
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment
        )
        try:
            while (url := find_url(text := _text(output.fileno()))) is None:
                if process.poll() is not None:
                    said = text.strip()[-800:] or f"exit code {process.returncode}"
                    raise ConfigError(f"the server did not start: {said.removeprefix('error: ')}")
                time.sleep(0.02)
            yield ServerProcess(url, process.pid)
        finally:
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _text(descriptor: int) -> str:
    """Reads the output by position: the process writes through the same open file."""
    return os.pread(descriptor, 1 << 20, 0).decode("utf-8", "replace")


def startup(repeat: int, flags: Sequence[str]) -> dict[str, float | int]:
    """Measures the time from the start of `vllmx complete` to its first generated text, in fresh
    processes. `flags` go to the command (model, backend, ...)."""
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
