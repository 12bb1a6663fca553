"""Cores and memory that are really there: affinity and cgroups, version 1 and 2."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from vllmx_core.system.memory import free_bytes
from vllmx_core.system.processors import available_processors, neighbours

MIB = 1 << 20


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    return tmp_path


def process(root: Path, *lines: str) -> Path:
    write(root / "cgroup", "\n".join(lines) + "\n")
    return root / "cgroup"


def test_without_a_quota_the_affinity_counts(root: Path) -> None:
    assert available_processors(root, root / "missing") == 8
    write(root / "pod" / "cpu.max", "max 100000")
    assert available_processors(root, process(root, "0::/pod")) == 8


@pytest.mark.parametrize(
    ("limit", "cores"),
    [("200000 100000", 2), ("250000 100000", 3), ("50000 100000", 1), ("1600000 100000", 8)],
)
def test_quota_of_version_2(root: Path, limit: str, cores: int) -> None:
    write(root / "pod" / "cpu.max", limit)
    assert available_processors(root, process(root, "0::/pod")) == cores


def test_the_tightest_quota_above_counts(root: Path) -> None:
    write(root / "pod" / "cpu.max", "300000 100000")
    write(root / "pod" / "inner" / "cpu.max", "600000 100000")
    assert available_processors(root, process(root, "0::/pod/inner")) == 3


def test_a_path_of_the_host_that_is_not_mounted_leads_to_the_root(root: Path) -> None:
    write(root / "cpu.max", "400000 100000")
    assert available_processors(root, process(root, "0::/../kubepods/pod17")) == 4


def test_quota_of_version_1(root: Path) -> None:
    write(root / "cpu,cpuacct" / "docker" / "cpu.cfs_quota_us", "150000")
    write(root / "cpu,cpuacct" / "docker" / "cpu.cfs_period_us", "100000")
    lines = ("5:memory:/docker", "4:cpu,cpuacct:/docker")
    assert available_processors(root, process(root, *lines)) == 2
    write(root / "cpu,cpuacct" / "docker" / "cpu.cfs_quota_us", "-1")
    assert available_processors(root, process(root, *lines)) == 8


def test_memory_limit_of_version_2(root: Path) -> None:
    write(root / "pod" / "memory.max", str(300 * MIB))
    write(root / "pod" / "memory.current", str(120 * MIB))
    write(root / "pod" / "memory.stat", f"anon {100 * MIB}\ninactive_file {20 * MIB}\n")
    assert free_bytes(root, process(root, "0::/pod")) == 200 * MIB


def test_memory_limit_of_version_1(root: Path) -> None:
    write(root / "memory" / "docker" / "memory.limit_in_bytes", str(64 * MIB))
    write(root / "memory" / "docker" / "memory.usage_in_bytes", str(24 * MIB))
    assert free_bytes(root, process(root, "9:memory:/docker")) == 40 * MIB


@pytest.mark.parametrize("name", ["memory.max", "memory.high"])
def test_a_limit_names_its_remedy(root: Path, name: str) -> None:
    write(root / "pod" / name, str(300 * MIB))
    write(root / "pod" / "memory.current", str(100 * MIB))
    free = free_bytes(root, process(root, "0::/pod"))
    assert free == 200 * MIB
    assert free.remedy == f"raise the container's memory limit ({name}, now 300.0 MiB)"


@pytest.mark.parametrize(
    ("limit", "left"),
    [(100 * MIB, 0), (1124 * MIB, 768 * MIB), (8292 * MIB, (8192 - 512) * MIB)],
)
def test_limits_of_the_process(
    root: Path, monkeypatch: pytest.MonkeyPatch, limit: int, left: int
) -> None:
    """A part of the address space is for stacks and the heap: a quarter, 512 MiB at the most."""
    monkeypatch.setattr("vllmx_core.system.memory._system_free", lambda: 1 << 40)
    write(root / "status", f"Name:\tpython\nVmSize:\t  {100 * 1024} kB\nVmData:\t 7 kB\n")

    def only_address_space(which: int) -> tuple[int, int]:
        return (limit if which == resource.RLIMIT_AS else resource.RLIM_INFINITY,) * 2

    monkeypatch.setattr(resource, "getrlimit", only_address_space)
    free = free_bytes(root, root / "missing", root / "status")
    assert free == left
    assert free.remedy.startswith("raise `ulimit -v` (now ")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not count address space")
def test_the_shells_limit_bounds_what_is_free() -> None:
    program = (
        "from vllmx_core.system.memory import free_bytes as f; print(f() < 1 << 31, f().remedy)"
    )
    command = ["sh", "-c", 'ulimit -v 2000000 && exec "$@"', "sh", sys.executable, "-c", program]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "True raise `ulimit -v` (now 1.91 GiB)\n"


def test_without_a_limit_the_system_counts(root: Path) -> None:
    write(root / "pod" / "memory.max", "max")
    write(root / "pod" / "memory.current", "1")
    unlimited = free_bytes(root, root / "missing")
    assert unlimited > 64 * MIB
    limited = free_bytes(root, process(root, "0::/pod"))
    assert abs(limited - unlimited) < unlimited // 2


@pytest.mark.parametrize(
    ("sockets", "expected", "half"),
    [
        ([0, 0, 1, 1], [0, 4, 1, 5, 2, 6, 3, 7], [0, 1, 2, 3]),  # socket by socket
        ([0, 1, 0, 1], [0, 4, 2, 6, 1, 5, 3, 7], [0, 2, 1, 3]),  # sockets in turn
    ],
)
def test_neighbours(
    tmp_path: Path, sockets: list[int], expected: list[int], half: list[int]
) -> None:
    """Two sockets of two cores of two threads, the second of which have the numbers from 4 on."""
    for number in range(8):
        core = number % 4
        folder = tmp_path / f"cpu{number}"
        write(folder / "topology" / "physical_package_id", f"{sockets[core]}\n")
        write(folder / "topology" / "thread_siblings_list", f"{core},{core + 4}\n")
        (folder / f"node{sockets[core]}").mkdir()
    assert neighbours(set(range(8)), 8, tmp_path) == expected
    assert neighbours(set(range(8)), 4, tmp_path) == half, "a core gives one thread first"


def test_neighbours_where_the_system_does_not_tell(tmp_path: Path) -> None:
    assert neighbours({9, 3, 5}, 3, tmp_path) == [3, 5, 9]
    assert neighbours({9, 3, 5}, 2, tmp_path) == [3, 5]
