"""Measures vllmx's backend below the engine: step plans made by hand, greedy sampling included.

Steps follow each other as in the engine's overlapped loop: the next one is enqueued before the ids
of the last one are read. Its tokens are random, as those of llama-batched-bench are: rows that say
what the model says soon agree, and with experts agree on those too. Rows start at their context
without a prefill: what the KV cache holds does not change the work, as long as its pages are real
memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from vllmx_core.backend import LoadedModel, LoadOptions, StepHandle
from vllmx_core.plan import I32, SamplingRows, StepPlan
from vllmx_core.plugins.checkpoint import build_model, open_checkpoint
from vllmx_core.plugins.registry import load_registry

from cpu_peers.cases import Case, Job
from cpu_peers.worker import job_from_argv, rate, record

BLOCK_SIZE = 16
_NUM_IDS = 1000
WARM_UP_STEPS = 2
_PREFILL_REPEATS = 2


def row_blocks(case: Case) -> int:
    """Blocks that one row needs up to the last timed step."""
    num_tokens = case.num_prompt_tokens
    if case.kind == "decode":
        num_tokens += case.num_steps
    return -(-num_tokens // BLOCK_SIZE)


def load(job: Job, kv_cache_dtype: str = "auto") -> LoadedModel:
    registry = load_registry()
    checkpoint = open_checkpoint(registry, Path(job.model))
    spec, _ = registry.choose_backend("cpu")
    options = options_for(job.cases, kv_cache_dtype, job.threads)
    loaded: LoadedModel = spec.load()().load(
        build_model(registry, checkpoint), checkpoint.weights, options
    )
    return loaded


def options_for(
    cases: Sequence[Case], kv_cache_dtype: str = "auto", threads: int | None = None
) -> LoadOptions:
    """What holds each of the cases."""
    return LoadOptions(
        kv_cache_dtype=kv_cache_dtype,
        max_model_len=max(row_blocks(case) for case in cases) * BLOCK_SIZE,
        max_num_seqs=max(case.batch for case in cases),
        max_num_batched_tokens=max(2048, *(case.context for case in cases)),
        block_size=BLOCK_SIZE,
        num_kv_blocks=max(case.batch * row_blocks(case) for case in cases),
        num_threads=threads,
    )


def touch_pages(model: LoadedModel) -> None:
    """Writes one token into every KV block. Pages that nobody wrote are all the same page of zeros,
    which reads faster than memory can: figures over them would flatter."""
    write_pages(model)
    require_resident(model.info.kv_cache_bytes)


def write_pages(model: LoadedModel) -> None:
    """The same, for models whose cache other processes have a part of."""
    rows, most = greedy_rows(1), model.info.max_num_seqs
    for first in range(0, model.info.num_kv_blocks, most):
        blocks = np.arange(first, min(first + most, model.info.num_kv_blocks), dtype=np.int32)
        plan = StepPlan(
            tokens=blocks % _NUM_IDS,
            positions=np.zeros_like(blocks),
            slots=(blocks * BLOCK_SIZE,),
            query_start=np.arange(len(blocks) + 1, dtype=np.int32),
            context_len=np.ones_like(blocks),
            block_tables=(blocks[:, None],),
            logit_rows=np.zeros(1, np.int32),
        )
        model.step(with_slots(plan, model), rows).result()


def require_resident(num_bytes: int) -> None:
    """RuntimeError if the process holds less memory of its own than its KV cache takes."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    resident_kib = sum(int(status[name].split()[0]) for name in ("RssAnon", "RssShmem"))
    if resident_kib * 1024 < num_bytes:
        raise RuntimeError(
            f"the KV cache takes {num_bytes} bytes, but the process has only {resident_kib} KiB in"
            " memory, so its pages are not real: the backend must write to them when it loads"
        )


def with_slots(plan: StepPlan, model: LoadedModel) -> StepPlan:
    """Each row with a slot of its own, where the model keeps states."""
    if not model.info.num_state_slots:
        return plan
    slots = np.arange(plan.num_rows, dtype=np.int32)
    begins = plan.positions[plan.query_start[:-1]] == 0
    return replace(plan, state_from=np.where(begins, np.int32(-1), slots), state_to=slots)


def prefill_plan(case: Case) -> StepPlan:
    positions = np.arange(case.context, dtype=np.int32)
    return StepPlan(
        tokens=np.random.default_rng(0).integers(_NUM_IDS, size=case.context, dtype=np.int32),
        positions=positions,
        slots=(positions.copy(),),
        query_start=np.array([0, case.context], np.int32),
        context_len=np.array([case.context], np.int32),
        block_tables=(np.arange(row_blocks(case), dtype=np.int32)[None],),
        logit_rows=np.array([case.context - 1], np.int32),
    )


class DecodePlan:
    """The plan of a batch whose rows all stand at the same position, moved on step by step."""

    def __init__(self, case: Case) -> None:
        start = case.num_prompt_tokens - WARM_UP_STEPS
        rows = np.arange(case.batch, dtype=np.int32)
        blocks = np.arange(case.batch * row_blocks(case), dtype=np.int32)
        self._table: I32 = blocks.reshape(case.batch, -1)  # (R, B)
        self._random = np.random.default_rng(0)
        self.plan = StepPlan(
            tokens=rows.copy(),
            positions=np.full(case.batch, start - 1, np.int32),
            slots=(np.empty(case.batch, np.int32),),
            query_start=np.arange(case.batch + 1, dtype=np.int32),
            context_len=np.full(case.batch, start, np.int32),
            block_tables=(self._table,),
            logit_rows=rows.copy(),
        )

    def advance(self) -> StepPlan:
        """The plan of the next token of every row."""
        plan = self.plan
        plan.tokens[:] = self._random.integers(_NUM_IDS, size=plan.num_rows)
        plan.positions += 1
        plan.context_len += 1
        position = int(plan.positions[0])
        blocks = self._table[:, position // BLOCK_SIZE]
        plan.slots[0][:] = blocks * BLOCK_SIZE + position % BLOCK_SIZE
        return plan


def greedy_rows(num_rows: int) -> SamplingRows:
    def full(value: float) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        return np.full(num_rows, value, np.float32)

    return SamplingRows(
        temperature=full(0),
        top_k=np.zeros(num_rows, np.int32),
        top_p=full(1),
        min_p=full(0),
        repetition_penalty=full(1),
        frequency_penalty=full(0),
        presence_penalty=full(0),
        seed=np.zeros(num_rows, np.uint64),
        position=np.zeros(num_rows, np.int32),
        target=np.full(num_rows, -1, np.int32),
        num_logprobs=np.full(num_rows, -1, np.int32),
    )


def measure_prefill(model: LoadedModel, case: Case) -> float:
    plan, rows = with_slots(prefill_plan(case), model), greedy_rows(1)
    model.step(plan, rows).result()

    def run() -> None:
        for _ in range(_PREFILL_REPEATS):
            model.step(plan, rows).result()

    return rate(case.context * _PREFILL_REPEATS, run)


def measure_decode(model: LoadedModel, case: Case) -> float:
    decode, rows = DecodePlan(case), greedy_rows(case.batch)
    decode.plan = with_slots(decode.plan, model)

    def run(num_steps: int, before: StepHandle) -> StepHandle:
        for _ in range(num_steps):
            after = model.step(decode.advance(), rows)
            before.result()
            before = after
        return before

    warm = run(WARM_UP_STEPS - 1, model.step(decode.advance(), rows))
    last: list[StepHandle] = []
    speed = rate(case.batch * case.num_steps, lambda: last.append(run(case.num_steps, warm)))
    last[0].result()
    return speed


def main() -> None:
    job = job_from_argv()
    model = load(job)
    touch_pages(model)
    for case in job.cases:
        measure = measure_prefill if case.kind == "prefill" else measure_decode
        record(job, case, partial(measure, model, case))
    model.close()


if __name__ == "__main__":
    main()
