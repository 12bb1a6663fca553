"""A server in a process of its own, for measurements."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from vllmx_core.errors import ConfigError
from vllmx_core.records import Record

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
    """Runs a server until the block ends. What it says once it serves is read by nobody. Raises
    ConfigError with the end of its output where it does not start.

    Args:
        find_url: where it answers, by what it has written; None as long as it does not.
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
