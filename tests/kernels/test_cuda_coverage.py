"""That no kernel goes unchecked: each has a case on the emulator, a budget, a planted bug and its
place in the documentation. Lists that rot are worse than none."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from vllmx_cuda.arch import ARCHITECTURES
from vllmx_cuda.emulator.build import KERNELS as FOLDER
from vllmx_cuda.kernel_specs import KERNELS

from .cuda_cubins import BUDGET, UNITS, key, units_of
from .cuda_mutations import BUGS, TESTS, Bug

DOCS = Path(__file__).resolve().parents[2] / "docs" / "kernels.md"


def test_every_source_has_its_kernels_and_every_kernel_its_source() -> None:
    assert {kernel.source for kernel in KERNELS.values()} == {p.name for p in FOLDER.glob("*.cu")}
    for entry, kernel in KERNELS.items():
        text = (FOLDER / kernel.source).read_text()
        assert f"VX_EXPORT({entry})" in text, entry


@pytest.mark.parametrize("entry", KERNELS)
def test_every_kernel_is_run_by_a_test(entry: str) -> None:
    """By its name: test files launch what they take from `KERNELS`."""
    files = [*TESTS.glob("test_cuda_*.py"), *TESTS.glob("cuda_a*.py")]
    texts = [path.read_text() for path in files if path.name != Path(__file__).name]
    assert any(re.search(rf"[\"']{entry}[\"']", text) for text in texts)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_kernel_is_held_to_a_budget(arch: str) -> None:
    """All entries of a source are compiled together; what an architecture runs has its figure."""
    budget, units = json.loads(BUDGET.read_text()), units_of(arch, UNITS)
    for entry, kernel in KERNELS.items():
        compiled = [unit for unit in units if unit.source.name == kernel.source]
        assert compiled or kernel.tensor_cores, f"{kernel.source} is in no unit"
        assert compiled or arch == "sm_75" or kernel.architectures
        for unit in compiled:
            assert budget[key(entry, unit)][arch] > 0


def test_every_source_has_a_planted_bug() -> None:
    planted = {bug.source for bug in BUGS}
    assert {kernel.source for kernel in KERNELS.values()} <= planted


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: f"{bug.source}: {bug.what}")
def test_a_planted_bug_still_has_its_place(bug: Bug) -> None:
    assert bug.old in (FOLDER / bug.source).read_text()
    assert bug.old != bug.new
    assert (TESTS / bug.test.partition(":")[0]).exists()


def test_every_kernel_is_documented() -> None:
    text = DOCS.read_text()
    missing = [name for k in KERNELS.values() for name in (k.entry, k.source) if name not in text]
    assert not missing
