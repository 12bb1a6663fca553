"""How much of the machine other processes take while we measure, and a core kept busy on purpose.

Read from /proc; elsewhere than on Linux the share is unknown (None). Standard library only.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

QUIET_CORES = 0.15
_POLL_S = 0.2
_STAT = Path("/proc/stat")


def available_processors() -> int:
    """Cores that this process may run on."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _ticks_per_s() -> int:
    return os.sysconf("SC_CLK_TCK")


def _machine_busy_s() -> float:
    """CPU seconds that the machine has worked since boot, time stolen by a hypervisor included."""
    ticks = [int(word) for word in _STAT.read_text().split("\n", 1)[0].split()[1:9]]
    idle = ticks[3] + ticks[4]
    return (sum(ticks) - idle) / _ticks_per_s()


def _process_s(pid: int) -> float:
    """CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _ticks_per_s()


class ForeignLoad:
    """Context manager; afterwards `cores` holds the cores that others used while the body ran.

    Others are all processes but this one, its children that have ended within the body, and
    `busy_pid`.
    """

    def __init__(self, busy_pid: int | None = None) -> None:
        self.cores: float | None = None
        self._busy_pid = busy_pid
        self._start = (0.0, 0.0)

    def _now(self) -> tuple[float, float]:
        times = os.times()
        own = times.user + times.system + times.children_user + times.children_system
        own += _process_s(self._busy_pid) if self._busy_pid else 0.0
        return time.monotonic(), _machine_busy_s() - own

    def __enter__(self) -> ForeignLoad:
        if _STAT.exists():
            self._start = self._now()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if _STAT.exists():
            now = self._now()
            self.cores = max(0.0, (now[1] - self._start[1]) / (now[0] - self._start[0]))


def wait_until_quiet(limit_s: float, busy_pid: int | None = None) -> None:
    """Returns once others use next to nothing of the machine, at the latest after `limit_s`."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        with ForeignLoad(busy_pid) as load:
            time.sleep(_POLL_S)
        if load.cores is None or load.cores < QUIET_CORES:
            return


@contextmanager
def busy_core() -> Iterator[int]:
    """Keeps the last core that we may use busy with a process pinned to it; yields its id."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        if sys.platform == "linux":
            os.sched_setaffinity(process.pid, {max(os.sched_getaffinity(0))})
        yield process.pid
    finally:
        process.kill()
        process.wait()
