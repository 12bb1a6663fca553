"""Two ranks of a model on two GPUs: whether they are right, and what they and their calls take.

    python bench/gpu/ranks.py [--ranks 2] [--rehearse]

What it runs has never run: no machine with two GPUs was at hand. The ranks are processes that share
memory as those of `vllmx serve --tensor-parallel-size 2` do. A model of Qwen3-0.6B's shape with
random weights, by one rank and by all: all must choose the same ids, whose logits by one rank alone
are the greatest but for what bf16 rounds; once with small sums in one launch over memory that the
GPUs share, once with NCCL alone. Then milliseconds of a decode step, and microseconds of sums over
the ranks in a captured graph, both ways. At the end it says what did not run, as the launches where
a GPU cannot read the other's memory. Exit status: 1 when something differs, 2 without the GPUs.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from checkpoints import SHAPES
from devices import opener
from ids import OPTIONS, PAGE, PROMPT, TOLERANCE, greedy_ids, weights
from vllmx_core.backend import LoadedModel
from vllmx_core.model import Model
from vllmx_core.plan import F32
from vllmx_core.sharding.model import sharded
from vllmx_cuda.backend import CudaBackend
from vllmx_cuda.device import driver
from vllmx_cuda.device.device import Device
from vllmx_cuda.device.memory import Memory
from vllmx_cuda.device.peers import SWITCH
from vllmx_cuda.device.ranks import Ties
from vllmx_cuda.program.one_shot import OneShot
from vllmx_models.families.qwen3 import qwen3
from vllmx_testing.plans import Row, make_plan, sampling_rows
from vllmx_testing.synthetic import ArraySource
from vllmx_tp.communicator import SharedMemoryCommunicator
from vllmx_tp.region import Region

SUMS_BYTES = (2 << 10, 8 << 10, 64 << 10, 256 << 10, 510 << 10, 4 << 20, 32 << 20)
WIDTH = 1024
"""The features of the rows that are summed."""
CALLS = 20
"""The calls in one graph."""
STEPS = 64


@dataclass(frozen=True)
class Task:
    """What every process is given."""

    config: dict[str, Any]
    arrays: dict[str, Any]
    prompt: list[int]
    rehearse: bool
    one_shot: bool = True
    """Whether small sums may go through memory that the GPUs share."""


@dataclass
class Found:
    """What a rank came to."""

    ids: list[int]
    step_ms: float
    sums_us: dict[int, float]
    """What sums of so many bytes take by NCCL."""
    launches_us: dict[int, float]
    """What they take in one launch; empty where the GPUs share no memory."""


def device_of(rank: int, rehearse: bool) -> Device:
    if rehearse:
        return opener(rehearse=True)()
    from vllmx_cuda.device.cupy_device import CupyDevice

    return CupyDevice.open(rank)


def rank_process(task: Task, region: Region, rank: int, out: Connection) -> None:
    """One of the ranks."""
    os.environ[SWITCH] = str(int(task.one_shot))
    out.send(found_by(task, SharedMemoryCommunicator(region, rank)))


def found_by(task: Task, end: SharedMemoryCommunicator) -> Found:
    model: Model = qwen3(dict(task.config))
    ranks = end.num_ranks
    if ranks > 1:
        model = sharded(model, ArraySource(task.arrays), OPTIONS.max_model_len, end.rank, ranks)
    options = replace(OPTIONS, communicator=end if ranks > 1 else None)
    backend = CudaBackend(lambda: device_of(end.rank, task.rehearse))
    loaded = backend.load(model, ArraySource(task.arrays), options)
    found = Found(greedy_ids(loaded, task.prompt), step_ms(loaded, task.rehearse), {}, {})
    loaded.close()
    if ranks > 1 and task.one_shot:
        measure_sums(found, device_of(end.rank, task.rehearse), end, task.rehearse)
    return found


def step_ms(loaded: LoadedModel, rehearse: bool) -> float:
    """The time of decoding one row behind 64 tokens."""
    rows, blocks = sampling_rows(1, temperature=0.0), list(range(8))
    plan, steps = make_plan([Row([5], 64, blocks)], PAGE), 2 if rehearse else STEPS
    loaded.step(plan, rows).result()
    begin = time.perf_counter()
    for _ in range(steps):
        loaded.step(plan, rows).result()
    return (time.perf_counter() - begin) / steps * 1e3


def measure_sums(
    found: Found, device: Device, end: SharedMemoryCommunicator, rehearse: bool
) -> None:
    """The time of one sum of so many bytes of bf16, both ways."""
    ranks = device.join(end, Ties(sums=WIDTH, item=2))
    one_shot = None if ranks.peers is None else OneShot(device, ranks.peers, "bf16")
    for size in SUMS_BYTES[:1] if rehearse else SUMS_BYTES:
        x, y, count = device.zeros(size), device.empty(size), size // 2
        rows = count // WIDTH

        def by_nccl(x: Memory = x, y: Memory = y, count: int = count) -> None:
            ranks.all_reduce(x, y, count, "bf16")

        found.sums_us[size] = call_us(device, by_nccl)
        if one_shot is not None and one_shot.takes(rows):
            found.launches_us[size] = call_us(device, partial(one_shot.sum, rows, x, y))
    device.close()


def call_us(device: Device, call: Callable[[], None]) -> float:
    def enqueue() -> None:
        for _ in range(CALLS):
            call()

    enqueue()
    graph = device.capture(enqueue)
    graph.launch()
    device.synchronize()
    begin = device.event()
    graph.launch()
    last = device.event()
    last.wait()
    begin.wait()
    return last.seconds_since(begin) / CALLS * 1e6


def by_all(task: Task, ranks: int) -> list[Found]:
    """Runs a task in the processes of a group of its own, one for each rank. Raises EOFError where
    a rank has failed."""
    fork, region = multiprocessing.get_context("fork"), Region.create(ranks)
    pipes = [fork.Pipe(duplex=False) for _ in range(ranks)]
    processes = [
        fork.Process(target=rank_process, args=(task, region, rank, out))
        for rank, (_, out) in enumerate(pipes)
    ]
    for process, (_, out) in zip(processes, pipes, strict=True):
        process.start()
        out.close()
    try:
        return [answers.recv() for answers, _ in pipes]
    finally:
        region.aborted[0] = 1
        for process in processes:
            process.join()


def gap(task: Task, ids: list[int]) -> float:
    """How far below the greatest logits those of `ids` lie by numpy, in parts of their spread."""
    from vllmx_core.reference.backend import ReferenceBackend

    options = replace(OPTIONS, dtype="f32", kv_cache_dtype="auto")
    model = qwen3(dict(task.config))
    loaded = ReferenceBackend().load(model, ArraySource(task.arrays), options)
    text = [*task.prompt, *ids[:-1]]
    logits: F32 = loaded.logits(make_plan([Row(text, 0, list(range(8)), "all")], PAGE))
    behind = logits[len(task.prompt) - 1 :]
    taken = behind[np.arange(len(ids)), ids]
    return float(((behind.max(1) - taken) / behind.std(1)).max())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rehearse", action="store_true", help="tiny, on the emulator")
    chosen = parser.parse_args()
    if not chosen.rehearse:
        try:
            driver.choose_device(driver.query(), chosen.ranks - 1)
        except Exception as error:
            print(f"ranks: {error}")
            return 2
    config = SHAPES["tiny" if chosen.rehearse else "0.6b"]
    prompt = np.random.default_rng(3).integers(0, config["vocab_size"], PROMPT).tolist()
    task = Task(config, weights(config), prompt, chosen.rehearse)
    (alone,), together = by_all(task, 1), by_all(task, chosen.ranks)
    by_nccl = by_all(replace(task, one_shot=False), chosen.ranks)
    right = is_right(task, together, "small sums in one launch")
    right &= is_right(task, by_nccl, "NCCL alone")
    print(f"decode of one row: {alone.step_ms:.3f} ms alone, {together[0].step_ms:.3f} ms together")
    print(f"the same by NCCL alone: {by_nccl[0].step_ms:.3f} ms")
    for size, us in together[0].sums_us.items():
        launch = together[0].launches_us.get(size)
        beside = "" if launch is None else f", {launch:.1f} us in one launch"
        print(f"sum of {size >> 10} KiB over the ranks: {us:.1f} us by NCCL{beside}")
    if not together[0].launches_us:
        print("not run: sums in one launch, for these ranks share no memory (see the log)")
    if chosen.rehearse:
        print("not run: NCCL, CUDA's peer memory, anything on a GPU")
    print(f"ranks: {'right' if right else 'WRONG'}")
    return 0 if right else 1


def is_right(task: Task, found: list[Found], how: str) -> bool:
    """Whether all ranks chose the same ids, and those that numpy would choose."""
    agree = all(one.ids == found[0].ids for one in found)
    off = gap(task, found[0].ids)
    said = "agree" if agree else "DIFFER"
    print(f"ids of {len(found)} ranks, {how}: {said}, off by {off:.2g}")
    return agree and off < TOLERANCE


if __name__ == "__main__":
    sys.exit(main())
