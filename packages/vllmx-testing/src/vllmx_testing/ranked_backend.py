"""Ranks of a backend as one backend, so that the suites run on them as on any other.

class TestTwoRanksOfMine(BackendSuite):
    def make_backend(self) -> Backend:
        return RankedBackend(MyBackend(), 2)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from vllmx_core.backend import Backend, ForwardStep, LoadedInfo, LoadedModel, LoadOptions
from vllmx_core.communicator import Communicator
from vllmx_core.model import Model
from vllmx_core.ops.op import Op
from vllmx_core.plan import SamplingRows, StepPlan, StepResult
from vllmx_core.sharding.model import sharded
from vllmx_core.weights.part import WeightSource

from vllmx_testing.ranks import RankThreads, ThreadCommunicator

Meeting = Callable[[ThreadCommunicator], Communicator]
"""Makes the communicator that a rank's backend uses out of its end among the threads."""


class RankedBackend:
    """A `Backend` whose models are shared by ranks, which are threads of this process; all must
    compute the same bits.

    Args:
        backend: of each rank.
        meet: makes, for one load, what the ranks of that load speak through; None: their ends
            among threads.
        how: keyword arguments of `sharded`.
    """

    def __init__(
        self,
        backend: Backend,
        num_ranks: int,
        meet: Callable[[int], Meeting] | None = None,
        **how: Any,
    ) -> None:
        self._backend, self._num_ranks, self._meet, self._how = backend, num_ranks, meet, how

    @property
    def name(self) -> str:
        return self._backend.name

    def supports(self, op: Op) -> bool:
        return self._backend.supports(op)

    def environment(self) -> dict[str, str]:
        return self._backend.environment()

    def load(self, model: Model, source: WeightSource, options: LoadOptions) -> RankedThreads:
        """See `Backend.load`. Each rank has one thread."""
        meet = None if self._meet is None else self._meet(self._num_ranks)

        def part(end: ThreadCommunicator) -> LoadedModel:
            length, ranks = options.max_model_len, end.num_ranks
            mine = sharded(model, source, length, end.rank, ranks, **self._how)
            communicator: Communicator = end if meet is None else meet(end)
            own = replace(options, communicator=communicator, num_threads=1)
            return self._backend.load(mine, source, own)

        return RankedThreads(RankThreads(self._num_ranks, part))


class RankedThreads:
    """A `LoadedModel` over the parts of all ranks."""

    def __init__(self, ranks: RankThreads[LoadedModel]) -> None:
        self._ranks = ranks
        self._closed = threading.Event()

    @property
    def info(self) -> LoadedInfo:
        """The facts of all ranks together."""
        infos = [one.info for one in self._ranks.ranks]
        return replace(
            infos[0],
            num_kv_blocks=min(one.num_kv_blocks for one in infos),
            weight_bytes=sum(one.weight_bytes for one in infos),
            kv_cache_bytes=sum(one.kv_cache_bytes for one in infos),
            state_slot_bytes=sum(one.state_slot_bytes for one in infos),
        )

    def step(self, plan: StepPlan, rows: SamplingRows) -> RankedHandle:
        handles = self._ranks.each(lambda one: one.step(plan, rows))
        return RankedHandle(self._ranks, [handle.result for handle in handles])

    def forward(self, plan: StepPlan) -> RankedForward:
        return RankedForward(self._ranks, self._ranks.each(lambda one: one.forward(plan)))

    def close(self) -> None:
        if not self._closed.is_set():
            self._closed.set()
            self._ranks.each(lambda one: one.close())
            self._ranks.close()


class RankedForward:
    """A `ForwardStep` of all ranks."""

    def __init__(self, ranks: RankThreads[LoadedModel], steps: Sequence[ForwardStep]) -> None:
        self._ranks, self._steps = ranks, steps

    def sample(self, rows: SamplingRows) -> RankedHandle:
        handles = self._ranks.all([partial(step.sample, rows) for step in self._steps])
        return RankedHandle(self._ranks, [handle.result for handle in handles])

    def result(self) -> StepResult:
        """Raises what those of the ranks do: it is too early."""
        steps: Sequence[Any] = self._steps
        first: StepResult = self._ranks.all([step.result for step in steps])[0]
        return first


class RankedHandle:
    """A `StepHandle` of all ranks."""

    def __init__(
        self, ranks: RankThreads[LoadedModel], results: Sequence[Callable[[], StepResult]]
    ) -> None:
        self._ranks, self._results = ranks, results

    def result(self) -> StepResult:
        """See `StepHandle.result`. Asserts that all ranks have the same bits."""
        first, *others = self._ranks.all(self._results)
        for other in others:
            for name in ("ids", "logits", "vectors"):
                np.testing.assert_array_equal(getattr(first, name), getattr(other, name), name)
            if first.logprobs is not None and other.logprobs is not None:
                for name in ("chosen", "top", "top_ids"):
                    mine, theirs = (getattr(one.logprobs, name) for one in (first, other))
                    np.testing.assert_array_equal(mine, theirs, name)
        return first
