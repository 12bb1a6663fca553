"""Processors that this process may use, and which of them are neighbours."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")
PROCESSOR_ROOT = Path("/sys/devices/system/cpu")


def available_processors(
    cgroup_root: Path = CGROUP_ROOT, process: Path = Path("/proc/self/cgroup")
) -> int:
    """Processors of the affinity mask, or fewer when a cgroup (v1 or v2) sets a CPU quota."""
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    else:
        count = os.cpu_count() or 1
    for quota in _quotas(cgroup_root, process):
        count = min(count, max(1, math.ceil(quota)))
    return count


def neighbours(processors: Collection[int], count: int, root: Path = PROCESSOR_ROOT) -> list[int]:
    """`count` of these processors, those of a socket, a memory node and a core side by side.
    Numbers alone do not tell: Linux counts the second threads of all cores behind the first ones,
    and some machines count sockets in turn. A core gives a second one when all have given one."""
    places = {number: _place(root / f"cpu{number}") for number in sorted(processors)}
    threads = Counter[tuple[int, ...]]()
    turns: list[tuple[int, tuple[int, ...], int]] = []
    for number, place in places.items():
        core = place if place[-1] >= 0 else (*place, number)  # the system does not tell
        turns.append((threads[core], core, number))
        threads[core] += 1
    chosen = sorted(turns)[:count]
    return [number for _, _, number in sorted(chosen, key=lambda turn: turn[1:])]


def divided_processors(parts: int) -> list[tuple[int, ...]]:
    """The processors of each of some processes, neighbours together; empty where the system does
    not tell, and where there are fewer."""
    count = available_processors()
    if not hasattr(os, "sched_getaffinity") or parts > count:
        return [()] * parts
    cores = neighbours(os.sched_getaffinity(0), count)
    ends = [len(cores) * part // parts for part in range(parts + 1)]
    return [tuple(cores[ends[part] : ends[part + 1]]) for part in range(parts)]


def _place(folder: Path) -> tuple[int, int, int]:
    """The socket, the memory node and the first processor of the core; -1: unknown."""
    nodes = [int(path.name[4:]) for path in folder.glob("node[0-9]*")]
    package, siblings = (
        re.match(r"-?\d+", _read(folder / "topology" / name))
        for name in ("physical_package_id", "thread_siblings_list")
    )
    return (
        int(package[0]) if package else -1,
        min(nodes, default=-1),
        int(siblings[0]) if siblings else -1,
    )


def _quotas(root: Path, process: Path) -> Iterator[float]:
    for folder in cgroup_folders(root, process, "cpu"):
        limit = _read(folder / "cpu.max").split()  # v2: "200000 100000" or "max 100000"
        if len(limit) == 2 and limit[0] != "max":
            yield int(limit[0]) / int(limit[1])
        quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
        if quota and period and int(quota) > 0:  # v1: -1 = no limit
            yield int(quota) / int(period)


def cgroup_folders(root: Path, process: Path, controller: str) -> Iterator[Path]:
    """Folders of this process's cgroup and all above it, where `controller` has its files."""
    for line in _read(process).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base = root
        elif controller in controllers.split(","):
            base = root / controllers if (root / controllers).is_dir() else root / controller
        else:
            continue
        folder = base / path.lstrip("/")
        # In a container the path may name a folder of the host that is not mounted here.
        while folder != base and not folder.is_dir():
            folder = folder.parent
        while True:
            yield folder
            if folder == base:
                break
            folder = folder.parent


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # a file that this kernel or container does not have
        return ""
