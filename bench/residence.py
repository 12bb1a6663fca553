"""The memory of a server's processes over time, for benchmarks that run for long."""

from __future__ import annotations

import asyncio
import os
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

_PAGE = os.sysconf("SC_PAGE_SIZE")
_NAMES = {"vllmx_engine.link.process": "core", "vllmx_server.host.worker": "worker"}


class Residence:
    """Resident memory of a server and its children, in MB, looked at again and again."""

    def __init__(self, pid: int) -> None:
        self._pid, self._started = pid, time.monotonic()
        self.samples: list[tuple[float, dict[str, float]]] = []
        """(seconds since the start, MB of each process by its name)"""

    async def watch(self, seconds: float) -> None:
        """Looks every so many seconds until it is cancelled, or the server has ended."""
        with suppress(FileNotFoundError, ProcessLookupError):
            while True:
                self.look()
                await asyncio.sleep(seconds)

    def look(self) -> None:
        now_s = time.monotonic() - self._started
        self.samples.append((now_s, {name: _mb(pid) for name, pid in self._processes()}))

    def newest(self) -> dict[str, float]:
        return {name: round(mb, 1) for name, mb in self.samples[-1][1].items()}

    def thirds(self) -> list[dict[str, Any]]:
        """The memory of each process on average in the first and in the last third."""
        if not self.samples:
            return []
        count = max(1, len(self.samples) // 3)
        first, last = self.samples[:count], self.samples[-count:]
        names = dict.fromkeys(name for _, each in self.samples for name in each)
        return [
            {
                "process": name,
                "minutes": round(self.samples[-1][0] / 60, 1),
                "first third MB": (one := _mean(first, name)),
                "last third MB": (two := _mean(last, name)),
                "ratio": round(two / one, 3) if one else None,
                "greatest MB": max(round(each.get(name, 0.0), 1) for _, each in self.samples),
            }
            for name in names
        ]

    def log_bytes(self) -> int | None:
        """What the server has written to its standard output, where that is a file."""
        with suppress(OSError):
            return Path(f"/proc/{self._pid}/fd/1").stat().st_size
        return None

    def _processes(self) -> list[tuple[str, int]]:
        children = Path(f"/proc/{self._pid}/task/{self._pid}/children").read_text().split()
        found = [("server", self._pid)]
        for child in map(int, children):
            with suppress(FileNotFoundError, ProcessLookupError):
                name = _name(Path(f"/proc/{child}/cmdline").read_bytes().decode())
                same = sum(other.split()[0] == name for other, _ in found)
                found.append((f"{name} {same + 1}" if same else name, child))
        return found


def _name(command: str) -> str:
    """A process by the first of our modules that its command names."""
    module = re.search(r"vllmx_\w+(\.\w+)+", command)
    return _NAMES.get(module[0], module[0]) if module else "other"


def _mb(pid: int) -> float:
    with suppress(FileNotFoundError, ProcessLookupError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE / 1e6
    return 0.0


def _mean(samples: list[tuple[float, dict[str, float]]], name: str) -> float:
    values = [each[name] for _, each in samples if name in each]
    return round(sum(values) / len(values), 1) if values else 0.0
