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
from vllmx_testing.cuda.emulator import check_available

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
    """The one call ends at once without a GPU, with status 2 and the reason."""
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
    assert "run.sh [--second] OUT [WHEELS]" in done.stdout


def test_packages_that_are_missing_are_named(tmp_path: Path) -> None:
    """A machine like those that are lent: its Python has some packages, and no more come."""
    bare = [sys.executable, "-S", str(GPU / "check.py")]
    done = subprocess.run(bare, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 1
    assert re.search(r"missing here: .*msgspec.*pip download.*msgspec", done.stderr)


PYTHON = """#!/bin/bash
# stands for Python: keeps what it was asked, and leaves results as the parts would
echo "$@" >>"$CALLS"
case "$*" in
  *call.py*) echo "a table" >"$2/table.txt"; echo log >"$2/suite.log"; mkdir "$2/cache"; exit 3;;
esac
"""


def test_results_are_packed_whatever_failed(tmp_path: Path) -> None:
    """The status says how many parts failed; the second call asks for its own parts."""
    python, wheels = tmp_path / "python", tmp_path / "wheels"
    python.write_text(PYTHON)
    python.chmod(0o755)
    wheels.mkdir()
    more = {"PYTHON": str(python), "CALLS": str(tmp_path / "calls"), "SECONDS_IN_ALL": "7700"}
    done = run_sh("--second", "out", "wheels", cwd=tmp_path, **more)
    assert done.returncode == 3
    checkout, check, call = (tmp_path / "calls").read_text().splitlines()
    assert checkout.split()[-1] == str(wheels), "not below the repository"
    assert "check.py" in check
    words = call.split()
    assert "--second" in words
    assert 7000 < int(words[words.index("--seconds") + 1]) <= 7700, "less what was done before"
    with tarfile.open(tmp_path / "out" / "results.tar.gz") as packed:
        assert set(packed.getnames()) == {"environment.log", "suite.log", "table.txt"}


def test_what_the_sanitizer_has_no_time_for_is_skipped() -> None:
    """All cases are there, in their order; none is begun behind the limit."""
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
# stands for compute-sanitizer: knows the options that 12.9, 13.0 and 13.5 all have, and runs what
# it is given for the first of its tools
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
[ "$tool" != memcheck ] || "$@" || exit
echo "========= ERROR SUMMARY: 0 errors by $tool" >"$log"
"""


@pytest.mark.slow
@pytest.mark.parametrize("second", [False, True], ids=["first", "second"])
def test_everything_runs_on_the_emulator(tmp_path: Path, second: bool) -> None:
    """A whole call, each part with little work; a script stands for compute-sanitizer."""
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
    flags = ["--second"] if second else []
    done = run_sh(*flags, "out", cwd=tmp_path, PATH=path, REHEARSE="1", FIGURES="0.6b bf16")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "out" / "figures.json").read_text())
    assert {found["status"] for found in report.values()} == {"ok"}
    if not second:
        for part in ("warm", "golden", "ids", "wgmma", "ncu", "suite"):
            assert f"{part}: ok" in done.stdout
        assert re.search(r"ids: ok, .*: right: 32 of 32", done.stdout)
        assert report["0.6b bf16"]["decode 3 x 40"]["device_ms"] > 0
        with np.load(tmp_path / "out" / "golden.npz") as golden:
            assert any("wrapper" in key for key in golden)
        return
    assert re.search(r"^memcheck: ok, [0-9.]+ s: 2 passed, ", done.stdout, re.MULTILINE)
    for part in WATCHED:
        assert re.search(rf"^{part}: ok, ", done.stdout, re.MULTILINE)
        tool = part.removeprefix("wgmma-")
        assert f"{part}.reports.log:========= ERROR SUMMARY: 0 errors by {tool}" in done.stdout
    assert report["0.6b bf16, fp8 KV"]["decode 3 x 40"]["device_ms"] > 0


@pytest.mark.slow
def test_two_ranks_on_emulated_devices() -> None:
    try:
        check_available()
    except BackendUnavailableError as error:
        pytest.skip(str(error))
    done = subprocess.run(
        [sys.executable, str(GPU / "ranks.py"), "--rehearse"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ids of 2 ranks, small sums in one launch: agree" in done.stdout
    assert "ids of 2 ranks, NCCL alone: agree" in done.stdout
    assert "sum of 2 KiB over the ranks: " in done.stdout
    assert "not run: sums in one launch" in done.stdout
    assert done.stdout.splitlines()[-1] == "ranks: right"


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
        [*command, "-p", "no:cacheprovider", "test_it.py"],
        cwd=tmp_path,
        text=True,
        check=False,
        capture_output=True,
        env={**outer, "PYTHONPATH": path},
    )
    assert done.returncode in (1, 2)
    assert "the kernel that failed" in done.stderr, "told at once"
    if side_by_side:
        assert re.search(r"PASSED.*test_behind", done.stdout), done.stdout
        assert re.search(r"PASSED.*test_last", done.stdout)
    else:
        assert "context is lost" in done.stdout
        assert "test_behind" not in done.stdout
