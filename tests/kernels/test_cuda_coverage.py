"""Checks that no kernel goes unchecked: each has a case on the emulator, a budget, a planted bug
and its place in the documentation. Lists that rot are worse than none."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllmx_cuda.compiler.cubins import Unit
from vllmx_cuda.device.arch import ARCHITECTURES
from vllmx_cuda.kernel_specs import KERNELS, Kernel
from vllmx_cuda.kernel_specs.gguf import block_values
from vllmx_testing.cuda.emulator.build import KERNELS as FOLDER

from .cuda_bugs.bug import Bug
from .cuda_cubins import BUDGET, UNITS, key, units_of
from .cuda_mutations import BUGS, TESTS

DOCS = Path(__file__).resolve().parents[2] / "docs" / "kernels.md"


def test_every_source_has_its_kernels_and_every_kernel_its_source() -> None:
    assert {kernel.source for kernel in KERNELS.values()} == {p.name for p in FOLDER.glob("*.cu")}
    for entry, kernel in KERNELS.items():
        text = (FOLDER / kernel.source).read_text()
        assert f"VX_EXPORT({entry})" in text, entry


@pytest.mark.parametrize("entry", KERNELS)
def test_every_kernel_is_run_by_a_test(entry: str) -> None:
    """Kernels are found by name: test files launch what they take from `KERNELS`."""
    files = [*TESTS.glob("test_cuda_*.py"), *TESTS.glob("cuda_[ap]*.py")]
    texts = [path.read_text() for path in files if path.name != Path(__file__).name]
    assert any(re.search(rf"[\"']{entry}[\"']", text) for text in texts)


COUNTED = ("rows", "tokens", "width", "count", "outputs", "vocab", "patches", "k")
"""Sizes that may be anything; those of attention (items, tiles, heads) are planned on the host."""
WHOLE = {
    ("linear_mma", "width"): 32, ("experts_mma", "width"): 32,
    ("experts_w4", "width"): 32, ("experts_w4", "outputs"): 16, ("experts_codes8", "width"): 16,
    ("quantize_q8", "width"): 32, ("w4_linear", "width"): 32,
    ("w4_dequantize", "width"): 32, ("w4_gather", "width"): 32, ("codes8_dequantize", "width"): 16,
    ("codes8_mma", "width"): 16, ("codes8_blocks", "width"): 16, ("codes8_gemv", "k"): 16,
    ("w4_repack_blocks", "outputs"): 16, ("w4_repack_words", "outputs"): 16,
    ("w4_repack_words", "width"): 32,
}  # fmt: skip
"""What a size is a multiple of, where that is not 1 or the block of a GGUF type."""
NOT_MET = {
    "VX_HEAD": "a sample of those that four divides",
    "VX_GROUP": "a sample of 1 to 16",
    "paged_decode VX_VEC": "heads of a multiple of four have 4 or 8",
    "paged_combine VX_VEC": "the same",
    "paged_combine tokens": "there is a token for padding",
    "begin_step VX_VEC": "it moves no elements",
    "turn VX_VEC": "it moves no elements",
    "codes8_dequantize VX_TOKENS": "of gemv in the same source",
    "codes8_dequantize VX_OUT": "of gemv in the same source",
    "codes8_rescale VX_TOKENS": "of gemv in the same source",
    "experts_order VX_DTYPE": "it moves no elements",
    "experts_order VX_VEC": "it moves no elements",
    "experts_gemv VX_VEC": "of linear_gemv in the same source",
    "experts_gguf VX_BLOCK": "of gguf_gemv in the same source",
    "experts_gguf VX_TOKENS": "of gguf_gemv in the same source",
    "heads_gemv VX_VEC": "of linear_gemv in the same source",
    "paged_prefill_wgmma k_scales?": "it has the arguments of paged_prefill",
    "paged_prefill_wgmma v_scales?": "it has the arguments of paged_prefill",
}
"""What the rules below would want of a kernel, and why it has none."""
TYPELESS = ("wrappers", "wgmma_wrappers")  # without sizes, in files of their own


def launched(out: Path) -> list[dict[str, Any]]:
    """What all tests of the kernels launch, in one of the three orders of threads."""
    outer = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-O", "-m", "pytest", "-q", "-p", "tests.kernels.cuda_launches",
               "-p", "no:cacheprovider", "-p", "no:schemathesis",  # which -O breaks
               "--assert=plain", "-W", "ignore",
               "-k", "forward"]  # fmt: skip
    files = map(str, sorted(TESTS.glob("test_cuda_*.py")))
    done = subprocess.run(
        [*command, *files],
        cwd=TESTS.parents[1],
        text=True,
        capture_output=True,
        check=False,
        env={**outer, "LAUNCHES": str(out)},
    )
    # where a test wants an error of what was computed it fails, behind its launch
    assert done.returncode in (0, 1), done.stdout[-2000:] + done.stderr[-2000:]
    found: list[dict[str, Any]] = json.loads(out.read_text())
    return found


def test_every_kernel_meets_every_type_and_size(tmp_path: Path) -> None:
    """Each type and option that it is compiled for; in each type the least of each size, and one
    that no vector or tile divides; with and without each argument that may be absent."""
    launches = launched(tmp_path / "launches.json")
    missing = {}
    for entry, kernel in KERNELS.items():
        found = holes(kernel, [one for one in launches if one["entry"] == entry])
        lacks = [hole for hole in found if not ignored(entry, hole.partition(":")[0])]
        if lacks and entry not in TYPELESS:
            missing[entry] = lacks
    assert not missing


def test_a_size_that_no_test_has_is_missed() -> None:
    whole = [
        {"options": {"VX_DTYPE": dtype, "VX_VEC": vec}, "values": {**sizes, "bias?": biased}}
        for dtype in (0, 1, 2)
        for biased in (0, 1)
        for vec, sizes in (
            (1, {"rows": 1, "width": 1}),
            (1, {"rows": 3, "width": 33}),
            (2, {"rows": 3, "width": 130}),
            (4, {"rows": 3, "width": 36}),
            (8, {"rows": 3, "width": 1032}),
        )
    ]

    def found(some: Callable[[dict[str, int]], bool]) -> set[str]:
        left = [one for one in whole if some({**one["values"], **one["options"]})]
        return set(holes(KERNELS["layer_norm"], left))

    assert not found(lambda one: True)
    assert "never launched" in found(lambda one: False)
    assert "width: not the least in type 1" in found(lambda one: one["width"] > 1)
    assert found(lambda one: one["VX_DTYPE"] != 0 or one["width"] != 33) == {
        "width: no odd one in type 0"
    }
    assert found(lambda one: one["VX_DTYPE"] != 1) == {"VX_DTYPE: [1]"}
    assert found(lambda one: one["VX_VEC"] != 4) == {"VX_VEC: [4]"}
    assert found(lambda one: one["bias?"] == 1) == {"bias?: always or never"}


def ignored(entry: str, name: str) -> bool:
    return name in NOT_MET or f"{entry} {name}" in NOT_MET


def holes(kernel: Kernel, found: list[dict[str, Any]]) -> Iterator[str]:
    if not found:
        yield "never launched"
    typed = any(argument.ctype in ("elem", "out") for argument in kernel.arguments)
    for option, values in kernel.options.items():
        lacking = set(values) - {one["options"][option] for one in found}
        if lacking and (typed or option != "VX_DTYPE"):
            yield f"{option}: {sorted(lacking)}"
    names = {name for one in found for name in one["values"]}
    for name in sorted(name for name in names if name.endswith("?")):
        if len({one["values"][name] for one in found}) < 2:
            yield f"{name}: always or never"
    types = sorted({one["options"].get("VX_DTYPE", 0) for one in found}) if typed else [None]
    for dtype in types:
        some = [one for one in found if dtype is None or one["options"]["VX_DTYPE"] == dtype]
        for name in sorted(names & set(COUNTED)):
            units = {one["values"][name] // whole(kernel.entry, name, one) for one in some}
            if 1 not in units:
                yield f"{name}: not the least in type {dtype}"
            if not any(unit % 2 and unit > 1 for unit in units):
                yield f"{name}: no odd one in type {dtype}"


def whole(entry: str, name: str, launch: dict[str, Any]) -> int:
    if name in ("width", "k") and "VX_BLOCK" in launch["options"]:
        return block_values(launch["options"]["VX_BLOCK"])
    return WHOLE.get((entry, "width" if name == "k" and (entry, "k") not in WHOLE else name), 1)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_kernel_is_held_to_a_budget(arch: str) -> None:
    """All entries of a source are compiled together; what an architecture runs has its figure."""
    budget, units = json.loads(BUDGET.read_text()), units_of(arch, UNITS)
    for entry, kernel in KERNELS.items():
        compiled = [unit for unit in units if unit.source.name == kernel.source]
        assert compiled or kernel.tensor_cores, f"{kernel.source} is in no unit"
        assert compiled or arch == "sm_75" or kernel.architectures
        figures = [budget[key(entry, unit)][arch] for unit in compiled if has_entry(kernel, unit)]
        assert min(figures, default=1) > 0
        known = [unit for unit in compiled if key(entry, unit) in budget]
        assert known or not compiled, f"{entry} has no figure"


def has_entry(kernel: Kernel, unit: Unit) -> bool:
    """Whether a compiled source has this kernel for certain: it may leave it out with options that
    the kernel does not take."""
    chosen = dict(define.split("=") for define in unit.defines)
    return all(int(value) in kernel.options.get(name, ()) for name, value in chosen.items())


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
