"""A loaded model: steps are padded to sizes that repeat, enqueued, and replayed as graphs."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from vllmx_core.backend import LoadedInfo
from vllmx_core.plan import I32, SamplingRows, StepPlan, StepResult

from vllmx_cuda.buckets import bucket_of
from vllmx_cuda.device import Device, Event, Graph, Memory
from vllmx_cuda.kernel_specs import Variant
from vllmx_cuda.layout import max_items
from vllmx_cuda.lower import Enqueue
from vllmx_cuda.planning import LoadPlan
from vllmx_cuda.sampler import DeviceSampler, Sampled
from vllmx_cuda.staging import Staging, StepMemory, StepSizes
from vllmx_cuda.work import StepWork, Visibility, WorkItems, plan_items, plan_tiles


@dataclass
class Program:
    """The lowered step on its device: enqueues any size, captures the sizes that repeat."""

    device: Device
    plan: LoadPlan
    ops: Sequence[Enqueue]
    resolve: Variant
    logits: Memory
    last_ids: Memory
    staging: Staging
    captures: bool
    _graphs: dict[StepSizes, Graph] = field(default_factory=dict)

    def run(self, plan: StepPlan) -> StepMemory:
        """Enqueues the copies of a step and its pass to the logits. A step of decode rows alone is
        padded to its bucket; any other runs as it is."""
        bucket = None
        if plan.num_tokens == plan.num_rows:
            bucket = bucket_of(plan.num_tokens, self.plan.buckets)
        tiles = tuple(plan_tiles(plan, tokens) for tokens in self.plan.work.tile_tokens)
        sizes = self._sizes(plan, bucket, tiles)
        layout = self.staging.layout(sizes)
        self.staging.upload(plan, layout, StepWork(self._items(plan, sizes), tiles))
        memory = self.staging.memory(layout)
        if bucket is not None and self.captures:
            self._replay(sizes, memory)
        else:
            self._enqueue(sizes, memory)
        return memory

    def _sizes(self, plan: StepPlan, bucket: int | None, tiles: tuple[I32, ...]) -> StepSizes:
        processors, num_tiles = self.device.info.num_processors, tuple(map(len, tiles))
        if bucket is not None:
            items = max_items(self.plan.nodes, bucket, processors)
            return StepSizes(bucket, bucket, bucket, items, num_tiles)
        by_items = plan.num_tokens
        if tiles:
            by_items = int((np.diff(plan.query_start) == 1).sum())
        items = max_items(self.plan.nodes, by_items, processors) if by_items else 0
        return StepSizes(plan.num_tokens, plan.num_logit_rows, plan.num_rows, items, num_tiles)

    def _items(self, plan: StepPlan, sizes: StepSizes) -> dict[Visibility, WorkItems]:
        kinds = self.plan.work
        return {
            seen: plan_items(
                plan, seen, sizes.tokens, sizes.items, single_rows_only=bool(kinds.tile_tokens)
            )
            for seen in kinds.visibilities
        }

    def _replay(self, sizes: StepSizes, memory: StepMemory) -> None:
        """The first step of a size runs as it is, so that algorithms are chosen, and is captured
        behind that."""
        graph = self._graphs.get(sizes)
        if graph is not None:
            graph.launch()
            return
        with self.device.tuning():
            self._enqueue(sizes, memory)
        self._graphs[sizes] = self.device.capture(lambda: self._enqueue(sizes, memory))

    def _enqueue(self, sizes: StepSizes, memory: StepMemory) -> None:
        arguments = (memory.tokens, self.last_ids, sizes.tokens)
        self.device.launch(self.resolve, {"count": sizes.tokens}, arguments)
        for op in self.ops:
            op(sizes, memory)


class CudaLoadedModel:
    """`vllmx_core.backend.LoadedModel`. At most two steps are in flight."""

    def __init__(self, info: LoadedInfo, program: Program, sampler: DeviceSampler) -> None:
        self._info = info
        self._device = program.device
        self._program: Program | None = program
        self._sampler: DeviceSampler | None = sampler
        self._in_flight: deque[CudaStep] = deque()

    @property
    def info(self) -> LoadedInfo:
        return self._info

    def step(self, plan: StepPlan, rows: SamplingRows) -> CudaStep:
        """See `vllmx_core.backend.LoadedModel.step`."""
        program, sampler = self._program, self._sampler
        assert program is not None, "the model is closed"
        assert sampler is not None, "the model is closed"
        assert len(self._in_flight) < 2, "a third step in flight: call result() of the first"
        assert 0 < plan.num_tokens <= self._info.max_num_batched_tokens, plan.num_tokens
        assert plan.num_logit_rows <= self._info.max_logit_rows, plan.num_logit_rows
        self._device.activate()
        begin = self._device.event()
        memory = program.run(plan)
        sampled = sampler.sample(program.logits, memory, rows)
        step = CudaStep(self._in_flight, sampled, begin, self._device.event())
        self._in_flight.append(step)
        return step

    def close(self) -> None:
        if self._program is None:
            return
        self._device.activate()
        self._device.synchronize()
        self._in_flight.clear()
        self._program = self._sampler = None
        self._device.close()


class CudaStep:
    """`vllmx_core.backend.StepHandle`."""

    def __init__(self, queue: deque[CudaStep], sampled: Sampled, begin: Event, end: Event) -> None:
        self._queue, self._sampled, self._begin, self._end = queue, sampled, begin, end

    def result(self) -> StepResult:
        """See `vllmx_core.backend.StepHandle.result`."""
        assert self._queue, "result() was called twice"
        assert self._queue[0] is self, "result() out of the order of the steps"
        self._end.wait()
        self._queue.popleft()
        result = self._sampled.read()
        result.elapsed_s = self._end.seconds_since(self._begin)
        return result
