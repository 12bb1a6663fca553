"""Every kernel in both 16-bit types and for every usual head size, compiled for all architectures.

`python -m tests.kernels.cuda_matrix [ARCH ...] [SOURCE ...]` (or `nox -s kernels`): none may use
stack or local memory or lack the instructions it was written for. Registers are not compared: the
committed budget is for what CI compiles. About 2,700 compilations; exit code 1 when something is
wrong.
"""

from __future__ import annotations

import functools
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from itertools import product

from vllmx_cuda.compiler.cubins import Unit
from vllmx_cuda.compiler.nvrtc import Nvrtc
from vllmx_cuda.device.arch import ARCHITECTURES
from vllmx_cuda.kernel_specs.attention import (
    KV_TYPES,
    decode_group,
    decode_vector,
    group_tile,
    prefill_keys,
    store_vector,
)

from .cuda_cubins import UNITS, Units, faults, units_of

DTYPES = (1, 2)
HEAD_SIZES = (64, 80, 96, 112, 128, 192, 256, 512)
WGMMA_HEAD_SIZES = (64, 128, 192, 256)


def matrix() -> Units:
    """KV caches of codes with head size 128 alone where their code is the same for all: not in
    paged_decode_mma."""
    found: list[tuple[str, dict[str, int]]] = [
        (entry, {**options, **({"VX_DTYPE": dtype} if "VX_DTYPE" in options else {})})
        for entry, options in UNITS
        for dtype in DTYPES
    ]
    for dtype, head, kv in product(DTYPES, HEAD_SIZES, KV_TYPES):
        common = {"VX_DTYPE": dtype, "VX_HEAD": head, "VX_KV": kv}
        for group in (4, 8, 16):
            if head > 256:
                break
            chosen = {**common, "VX_GROUP": decode_group(group, head)}
            found += [("paged_decode_mma", {**chosen, "VX_STORE": store}) for store in (0, 1)]
        if kv and head != 128:
            continue
        found.append(("kv_store", {**common, "VX_VEC": store_vector(head)}))
        for group in (1, 4):
            vector = {"VX_VEC": decode_vector(head), "VX_GROUP": group_tile(group, head)}
            found.append(("paged_decode", {**common, **vector}))
        for group, arch in product((1, 4, 8), (75, 80)):
            if prefill_keys(head, arch):
                keys = {"VX_GROUP": group, "VX_KEYS": prefill_keys(head, arch)}
                found.append(("paged_prefill", {**common, **keys}))
    for dtype, head, group in product(DTYPES, WGMMA_HEAD_SIZES, (1, 4, 8)):
        found.append(
            ("paged_prefill_wgmma", {"VX_DTYPE": dtype, "VX_HEAD": head, "VX_GROUP": group})
        )
    unique = {(entry, tuple(sorted(options.items()))): options for entry, options in found}
    return [(entry, options) for (entry, _), options in unique.items()]


@functools.cache
def _compiler() -> Nvrtc:
    return Nvrtc.open()


def _faults(job: tuple[str, Unit]) -> list[str]:
    arch, unit = job
    return faults(arch, unit, _compiler(), None)


def main() -> int:
    sources = {name for name in sys.argv[1:] if name.endswith(".cu")}
    jobs = [
        (arch, unit)
        for arch in [name for name in sys.argv[1:] if name not in sources] or ARCHITECTURES
        for unit in units_of(arch, matrix())
        if not sources or unit.source.name in sources
    ]
    wrong = 0
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for found in pool.map(_faults, jobs, chunksize=4):
            for line in found:
                print(line, flush=True)
            wrong += len(found)
    print(f"{len(jobs)} compilations, {wrong} faults")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
