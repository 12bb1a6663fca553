"""Servers that are measured: their processes, the CPU time of each, and how they are started."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from vllmx.bench.processes import first_url, server_process


@dataclass(frozen=True, slots=True)
class Server:
    """A server process and where it answers."""

    name: str
    url: str
    pid: int

    @property
    def api_pids(self) -> list[int]:
        """The processes that answer: the workers, or the server itself where it has none."""
        workers = [
            child
            for child in _children(self.pid)
            if b"vllmx_server.host.worker" in Path(f"/proc/{child}/cmdline").read_bytes()
        ]
        return workers or [self.pid]

    def cpu_s(self) -> float:
        """The CPU time so far of the processes that answer."""
        return sum(map(_cpu_s, self.api_pids))

    def whole_cpu_s(self) -> float:
        """The CPU time so far of the server and of all processes behind it."""
        return sum(map(_cpu_s, _tree(self.pid)))

    def memory_mb(self) -> float:
        """Memory that is resident, of all processes that answer."""
        pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in self.api_pids]
        return sum(pages) * os.sysconf("SC_PAGE_SIZE") / 1e6


def _cpu_s(pid: int) -> float:
    """The CPU time of all threads of a process, of those that ended too, by the clock that Linux's
    `clock_getcpuclockid` names."""
    return time.clock_gettime((~pid << 3) | 2)


def _children(pid: int) -> list[int]:
    """Processes that any thread of a process started."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for each in lists for child in each.read_text().split()]


def _tree(pid: int) -> list[int]:
    return [pid, *(one for child in _children(pid) for one in _tree(child))]


@contextmanager
def running(
    name: str,
    command: Sequence[str],
    environment: Mapping[str, str] | None = None,
    find_url: Callable[[str], str | None] = first_url,
) -> Iterator[Server]:
    """A server, with these variables besides our own.

    Args:
        find_url: where it answers, by what it has written; None as long as it does not.
    """
    own = {**os.environ, **(environment or {})}
    with server_process(command, own, find_url) as started:
        yield Server(name, started.url, started.pid)


def vllmx(*flags: str) -> list[str]:
    """The command of our own server."""
    quiet = ("--port", "0", "--disable-access-log")
    return [sys.executable, "-m", "vllmx", "serve", *quiet, *flags]
