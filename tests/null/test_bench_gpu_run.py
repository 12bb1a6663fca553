"""bench/gpu/run.sh without a GPU: what it says and survives, and a rehearsal on the emulator."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from vllmx_core.errors import BackendUnavailableError
from vllmx_cuda.emulator import check_available

GPU = Path(__file__).resolve().parents[2] / "bench" / "gpu"
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
WATCHED = (*TOOLS, *(f"wgmma-{tool}" for tool in TOOLS[:3]))


def run_sh(*arguments: str, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(GPU / "run.sh"), *arguments], capture_output=True, text=True, check=False,
        cwd=cwd, env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable, "HOME": str(cwd),
                      "CUDA_VISIBLE_DEVICES": "-1", **more},
    )  # fmt: skip


def test_run_says_what_a_machine_lacks(tmp_path: Path) -> None:
    """Without a GPU the one call ends at once, with status 2 and the reason."""
    done = run_sh("out", cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "the CUDA backend cannot run here" in done.stdout
    log = (tmp_path / "out" / "environment.log").read_text()
    assert "driver:" in log
    assert "the CUDA backend cannot run here" in log


@pytest.mark.parametrize("arguments", [[], ["out", "nowhere"]])
def test_run_says_how_it_is_called(tmp_path: Path, arguments: list[str]) -> None:
    done = run_sh(*arguments, cwd=tmp_path)
    assert done.returncode == 64
    assert "run.sh OUT [WHEELS]" in done.stdout


def test_packages_that_are_missing_are_named(tmp_path: Path) -> None:
    """A machine like those that are lent: its Python has some packages, and no more come."""
    bare = [sys.executable, "-S", str(GPU / "check.py")]
    done = subprocess.run(bare, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 1
    assert re.search(r"missing here: .*msgspec.*pip download.*msgspec", done.stderr)


PYTHON = """#!/bin/bash
# stands for Python, and does for each script what the test wants to see
case "$*" in
  *checkout.py*) echo "$@" >"$CALLS";;
  *golden.npz) exit 7;;
  *device_quantised.py) echo begun; exec sleep 30;;
  *figures.py*) mkdir -p "$2"; echo "a table" >"$2/table.txt";;
esac
"""


def test_a_part_that_fails_or_hangs_does_not_stop_the_others(tmp_path: Path) -> None:
    """Each leaves its log; all is packed; what is over the time is not begun."""
    python, wheels = tmp_path / "python", tmp_path / "wheels"
    python.write_text(PYTHON)
    python.chmod(0o755)
    wheels.mkdir()
    more = {"PYTHON": str(python), "CALLS": str(tmp_path / "calls"), "SUITE_SECONDS": "1"}
    done = run_sh("out", "wheels", cwd=tmp_path, **more)
    out, lines = tmp_path / "out", done.stdout.splitlines()
    assert (tmp_path / "calls").read_text().split()[-1] == str(wheels), "not below the repository"
    assert any(line.startswith("golden: FAILED, status 7") for line in lines)
    assert any(line.startswith("suite: FAILED, status 124") for line in lines)
    assert any(line.startswith("transformers: passed") for line in lines)
    for tool in WATCHED:
        assert any(line.startswith(f"{tool}: FAILED, status 127") for line in lines), "no such tool"
    assert any(line.startswith("figures: passed") for line in lines)
    assert "a table" in lines
    assert done.returncode == 2 + len(WATCHED)
    assert (out / "suite.log").read_text() == "begun\n"
    with tarfile.open(out / "results.tar.gz") as packed:
        names = set(packed.getnames())
    assert {"suite.log", "golden.log", "summary.txt", "figures/table.txt"} <= names
    late = run_sh("late", cwd=tmp_path, **more, SECONDS_IN_ALL="3")
    assert late.returncode == 5 + len(WATCHED)
    told = (tmp_path / "late" / "summary.txt").read_text()
    assert told.count("not started, no time left") == late.returncode


def test_what_the_sanitizer_has_no_time_for_is_skipped() -> None:
    """Its cases are all there, in their order; none is begun behind the limit."""
    path = os.pathsep.join([*sys.path, str(GPU)])
    names = ["device_suite.py", "device_quantised.py"]
    outer = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", "/dev/null", "--rootdir", GPU, "-p", "sanitized",
         "-p", "no:cacheprovider", "--import-mode=importlib", "-v", *names],
        cwd=GPU, text=True, check=False, capture_output=True,
        env={**outer, "PYTHONPATH": path, "REHEARSE": "1", "SANITIZED_SECONDS": "0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    skipped = re.findall(r"::(Test.*) SKIPPED", done.stdout)
    assert skipped[0] == "TestTensorCores::test_attention[everything-bf16]"
    assert len(skipped) > 40
    assert f"{len(skipped)} skipped, " in done.stdout.splitlines()[-1]


SANITIZER = """#!/bin/sh
# stands for compute-sanitizer: knows the options that 12.9, 13.0 and 13.5 all have
while [ "${1#--}" != "$1" ]; do
  case "$1" in
    --tool=*) tool=${1#*=};;
    --log-file=*) log=${1#*=};;
    --kernel-name=regex=^?*$|--error-exitcode=9|--target-processes=all|--port=[0-9]*) ;;
    --report-api-errors=no|--destroy-on-device-error=kernel|--padding=256) ;;
    *) echo "unrecognised option $1"; exit 64;;
  esac
  shift
done
[ "$SANITIZED" = 1 ] || exit 65
"$@" || exit
echo "========= ERROR SUMMARY: 0 errors by $tool" >"$log"
"""


@pytest.mark.slow
def test_everything_runs_on_the_emulator(tmp_path: Path) -> None:
    """The whole call, each part with little work; a script stands for compute-sanitizer."""
    try:
        check_available()
    except BackendUnavailableError as error:
        pytest.skip(str(error))
    pytest.importorskip("transformers")
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "compute-sanitizer").write_text(SANITIZER)
    (tools / "compute-sanitizer").chmod(0o755)
    path = f"{os.environ['PATH']}:{tools}"
    done = run_sh("out", cwd=tmp_path, PATH=path, REHEARSE="1", FIGURES="0.6b bf16")
    assert done.returncode == 0, done.stdout + done.stderr
    for part in ("golden", "suite", "transformers", *WATCHED, "figures", "wgmma"):
        assert f"{part}: passed" in done.stdout
    for tool in TOOLS:
        assert re.search(rf"^{tool}: passed in \d+ s: 2 passed, ", done.stdout, re.MULTILINE)
    for part in WATCHED:
        tool = part.removeprefix("wgmma-")
        assert f"{part}.reports.log:========= ERROR SUMMARY: 0 errors by {tool}" in done.stdout
    report = json.loads((tmp_path / "out" / "figures" / "figures.json").read_text())
    assert {found["status"] for found in report.values()} == {"ok"}
    assert report["0.6b bf16, fp8 KV"]["decode 3 x 40"]["device_ms"] > 0
    with np.load(tmp_path / "out" / "golden.npz") as golden:
        assert any("wrapper" in key for key in golden)


CUPY = """
lost = False
class runtime:
    def deviceSynchronize():
        if lost:
            raise RuntimeError("cudaErrorIllegalAddress")
class cuda:
    runtime = runtime
"""
TESTS = """
import cupy
def test_before(): pass
def test_kills():
    cupy.lost = True
    assert False, "the kernel that failed"
def test_behind(): assert not cupy.lost
def test_last(): assert not cupy.lost
"""


@pytest.mark.parametrize("side_by_side", [["-n", "1"], []], ids=["xdist", "alone"])
def test_a_lost_gpu_costs_one_test(tmp_path: Path, side_by_side: list[str]) -> None:
    """Tests behind it run in another process where there is one; else the run ends and says so."""
    if side_by_side:
        pytest.importorskip("xdist")
    (tmp_path / "cupy.py").write_text(CUPY)
    (tmp_path / "test_it.py").write_text(TESTS)
    path = os.pathsep.join([str(tmp_path), str(GPU)])
    command = [sys.executable, "-m", "pytest", "-c", "/dev/null", "-p", "live", "-v", *side_by_side]
    # This test may itself be run by a worker of xdist, whose variables the run in it must not see.
    outer = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", "test_it.py"], cwd=tmp_path, text=True, check=False,
        capture_output=True, env={**outer, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode in (1, 2)
    assert "the kernel that failed" in done.stderr, "told at once"
    if side_by_side:
        assert re.search(r"PASSED.*test_behind", done.stdout), done.stdout
        assert re.search(r"PASSED.*test_last", done.stdout)
    else:
        assert "context is lost" in done.stdout
        assert "test_behind" not in done.stdout
