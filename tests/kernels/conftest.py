"""The native CPU kernels, one op at a time, on every instruction set that this machine runs."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from vllmx_core.errors import BackendUnavailableError
from vllmx_cpu.native import Isa, Team, instruction_sets
from vllmx_cpu.structs import VxJob, VxRecord, VxStep
from vllmx_testing.cuda.emulator import ORDERS, Emulator, check_available
from vllmx_testing.cuda.emulator.build import KERNELS

from .cuda_mutations import FOLDER_VARIABLE

RunOp = Callable[[Isa, str, ctypes.Structure, VxStep, int], None]
"""(instruction set, op, arguments, step, threads)."""
THREADS = (1, 2, 5)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "isa" not in metafunc.fixturenames:
        return
    try:
        usable = [isa for isa in instruction_sets() if isa.supported]
        metafunc.parametrize("isa", usable, ids=[isa.name for isa in usable])
    except BackendUnavailableError as error:
        skipped = pytest.param(None, marks=pytest.mark.skip(reason=str(error)))
        metafunc.parametrize("isa", [skipped])


@pytest.fixture(scope="session")
def teams() -> Iterator[dict[int, Team]]:
    teams = {threads: Team(threads) for threads in THREADS}
    yield teams
    for team in teams.values():
        team.close()


@pytest.fixture
def run_op(teams: dict[int, Team]) -> RunOp:
    """Runs one op on a team of 1, 2 or 5 threads."""

    def run(isa: Isa, op: str, arguments: ctypes.Structure, step: VxStep, threads: int) -> None:
        record = VxRecord(isa.op(op, type(arguments)), ctypes.addressof(arguments))
        job = VxJob(records=ctypes.pointer(record), num_records=1, step=step, tokens=step.tokens)
        teams[threads].run(job)

    return run


@pytest.fixture(params=["forward", "reverse", "random"])
def emulator(request: pytest.FixtureRequest, emulators: dict[str, Emulator]) -> Emulator:
    """The CUDA emulator's checking build, in each order of threads."""
    return emulators[request.param]


@pytest.fixture(scope="session")
def emulators() -> dict[str, Emulator]:
    try:
        check_available()
    except BackendUnavailableError as error:
        pytest.skip(str(error))
    folder = Path(os.environ.get(FOLDER_VARIABLE, KERNELS))
    return {order: Emulator(check=True, order=order, folder=folder) for order in ORDERS}
