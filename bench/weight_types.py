"""How fast the CPU backend reads weights of each type when one token is multiplied.

    python bench/weight_types.py [--types Q4_K,Q6_K] [--rounds 5] [--tokens 1]

28 matrices of 6,144 by 1,024 a type, in one native call, types in turn in every round; beside them
the same number of bytes read by as many threads, which is the bound. GB/s are of the file's bytes.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from cpu_peers.host_load import available_processors
from vllmx_core.plan import AnyArray
from vllmx_core.weights.part import WeightPart
from vllmx_core.weights.spec import PartSpec, WeightSpec
from vllmx_cpu.native import Team, instruction_sets
from vllmx_cpu.packing import load_weights, matrix_shapes
from vllmx_cpu.structs import BLOCK_KINDS, NO_ACTIVATION, VxJob, VxLinear, VxRecord, VxStep
from vllmx_models.formats.gguf.blocks import TENSOR_TYPES, weight_part

MATRICES, ROWS, COLS = 28, 6144, 1024
TYPES = {kind.name: kind for kind in TENSOR_TYPES.values() if kind.name in BLOCK_KINDS}


class Parts:
    """A weight source of parts in memory."""

    def __init__(self, parts: dict[str, WeightPart]) -> None:
        self.parts = parts

    def names(self) -> list[str]:
        return list(self.parts)

    def part(self, name: str) -> WeightPart:
        return self.parts[name]

    def close(self) -> None: ...


def random_part(type_name: str, seed: int) -> WeightPart:
    """Random codes and scales; what they say does not change the time."""
    kind = TYPES[type_name]
    blocks = np.random.default_rng(seed).integers(
        0, 64, ROWS * COLS // kind.values * kind.num_bytes, dtype=np.uint8
    )
    return weight_part(f"w{seed}", kind, (ROWS, COLS), blocks)


def products(type_name: str, tokens: int, team: Team) -> tuple[Callable[[], None], int]:
    """Multiplies by all matrices, and the bytes of them."""
    parts = {part.name: part for part in (random_part(type_name, i) for i in range(MATRICES))}
    specs = [WeightSpec(name, "linear", (PartSpec(name, ROWS),), COLS) for name in parts]
    source = Parts(parts)
    shapes = matrix_shapes(specs, "bf16", (), source)
    loaded = load_weights(specs, {}, source, shapes, num_threads=1, progress=False)
    x = np.random.default_rng(0).standard_normal((tokens, COLS)).astype(np.float32)
    y, panels = np.empty((tokens, ROWS), np.float32), np.empty(tokens * COLS * 2, np.float32)
    isa = next(isa for isa in reversed(instruction_sets()) if isa.supported)
    arguments = [
        VxLinear(
            loaded.matrices[name].struct(),
            x.ctypes.data,
            y.ctypes.data,
            panels.ctypes.data,
            NO_ACTIVATION,
            0,
            0.0,
            0,
        )
        for name in parts
    ]
    op = isa.op("linear", VxLinear)
    records = (VxRecord * MATRICES)(*(VxRecord(op, ctypes.addressof(each)) for each in arguments))
    job = VxJob(records=records, num_records=MATRICES, step=VxStep(T=tokens))
    kept = (loaded, x, y, panels, arguments, records)

    def run(_kept: object = kept) -> None:
        team.run(job)

    return run, MATRICES * ROWS * COLS // TYPES[type_name].values * TYPES[type_name].num_bytes


def reading(num_bytes: int, threads: int) -> Callable[[], None]:
    """Adds up as many bytes, each thread a share of them."""
    words: AnyArray = np.ones(num_bytes // 8, np.uint64)
    shares, pool = np.array_split(words, threads), ThreadPoolExecutor(threads)

    def run() -> None:
        list(pool.map(np.add.reduce, shares))

    return run


def rate(run: Callable[[], None], num_bytes: int, seconds: float = 0.4) -> float:
    """The median GB/s of runs."""
    run()
    found, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end:
        started = time.perf_counter()
        run()
        found.append(num_bytes / (time.perf_counter() - started) / 1e9)
    return statistics.median(found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--types", default=",".join(TYPES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=1)
    options = parser.parse_args()
    threads = available_processors()
    team = Team(threads)
    cases = {name: products(name, options.tokens, team) for name in options.types.split(",")}
    bounds = {name: reading(size, threads) for name, (_, size) in cases.items()}
    shares: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
    for _ in range(options.rounds):
        for name, (run, size) in cases.items():
            shares[name].append((rate(run, size), rate(bounds[name], size)))
    print(f"{'type':8}{'GB/s':>8}{'reading':>9}{'share':>7}  (range)")
    for name, row in shares.items():
        part = sorted(got / bound for got, bound in row)
        got, bound = (statistics.median(each) for each in zip(*row, strict=True))
        middle = statistics.median(part)
        print(f"{name:8}{got:8.1f}{bound:9.1f}{middle:7.2f}  ({part[0]:.2f}-{part[-1]:.2f})")
    team.close()


if __name__ == "__main__":
    main()
