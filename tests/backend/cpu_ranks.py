"""Ranks of the CPU backend in one process: a thread each, which share memory as processes do."""

from __future__ import annotations

from typing import Any

import numpy as np
from vllmx_core.backend import LoadedModel, LoadOptions
from vllmx_core.model import Model
from vllmx_core.plan import F32, StepResult
from vllmx_core.sharding.model import sharded
from vllmx_core.weights.part import WeightSource
from vllmx_cpu.backend import CpuBackend
from vllmx_testing.plans import Row, make_plan, sampling_rows
from vllmx_testing.ranks import RankThreads, ThreadCommunicator
from vllmx_tp.communicator import SharedMemoryCommunicator
from vllmx_tp.region import Region

BLOCKS = 4
"""Of 16 tokens, of the only row."""


def options(dtype: str, **more: Any) -> LoadOptions:
    return LoadOptions(
        dtype=dtype,
        max_model_len=16 * BLOCKS,
        num_kv_blocks=BLOCKS,
        max_num_seqs=1,
        max_num_batched_tokens=64,
        num_threads=1,
        **more,
    )


def cpu_ranks(
    model: Model, source: WeightSource, ranks: int, dtype: str, **how: bool
) -> RankThreads[LoadedModel]:
    """The parts of a model, each loaded; `how` is for `sharded`."""
    region = Region.create(ranks)

    def load(end: ThreadCommunicator) -> LoadedModel:
        length = 16 * BLOCKS
        mine = sharded(model, source, length, end.rank, ranks, **how)
        meeting = SharedMemoryCommunicator(region, end.rank)
        return CpuBackend().load(mine, source, options(dtype, communicator=meeting))

    threads = RankThreads(ranks, load)
    region.close()  # views stay
    return threads


def logits(model: LoadedModel, text: list[int], cuts: tuple[int, ...]) -> F32:
    """(T, V + 1) of a text, and behind them the logprob of the drawn id, in chunks that end at
    `cuts` and with the text."""
    found: list[F32] = []
    state = 1 if model.info.num_state_slots else None
    for begin, end in zip((0, *cuts), (*cuts, len(text)), strict=True):
        row = Row(text[begin:end], begin, list(range(BLOCKS)), "all", state)
        whole = np.arange(end - begin, dtype=np.int32)
        rows = sampling_rows(end - begin, num_logprobs=[0] * (end - begin), whole=whole)
        result: StepResult = model.step(make_plan([row], 16), rows).result()
        assert result.logits is not None
        assert result.logprobs is not None
        found.append(np.column_stack((result.logits, result.logprobs.chosen)))
    return np.concatenate(found)
