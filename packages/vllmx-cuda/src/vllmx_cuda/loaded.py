"""A loaded model: steps are padded to sizes that repeat, enqueued, and replayed as graphs."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from vllmx_core.backend import LoadedInfo
from vllmx_core.plan import SamplingRows, StepPlan, StepResult

from vllmx_cuda.buckets import bucket_of
from vllmx_cuda.device import Device, Event, Graph, Memory
from vllmx_cuda.host_sampler import HostSampler
from vllmx_cuda.kernel_specs import Variant
from vllmx_cuda.layout import max_items
from vllmx_cuda.lower import Enqueue
from vllmx_cuda.planning import LoadPlan
from vllmx_cuda.staging import Layout, Staging, StepMemory, StepSizes
from vllmx_cuda.work import plan_items


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

    def sizes(self, plan: StepPlan) -> StepSizes:
        """A step of decode rows alone is padded to its bucket; any other runs as it is."""
        tokens, rows = plan.num_tokens, plan.num_logit_rows
        bucket = bucket_of(tokens, self.plan.buckets)
        if tokens == plan.num_rows and bucket is not None:
            tokens = rows = bucket
        processors = self.device.info.num_processors
        return StepSizes(tokens, rows, max_items(self.plan.nodes, tokens, processors))

    def run(self, plan: StepPlan) -> StepMemory:
        """Enqueues the copies of a step and its pass to the logits."""
        sizes = self.sizes(plan)
        layout = self.staging.layout(sizes)
        work = {
            seen: plan_items(plan, seen, sizes.tokens, sizes.items)
            for seen in self.plan.visibilities
        }
        self.staging.upload(plan, layout, work)
        if self.captures and sizes.tokens in self.plan.buckets and plan.num_rows == plan.num_tokens:
            return self._replay(sizes, layout)
        memory = self.staging.memory(layout)
        self._enqueue(sizes, memory)
        return memory

    def _replay(self, sizes: StepSizes, layout: Layout) -> StepMemory:
        """The first step of a size runs as it is, so that algorithms are chosen, and is captured
        behind that."""
        memory, graph = self.staging.memory(layout), self._graphs.get(sizes)
        if graph is not None:
            graph.launch()
            return memory
        with self.device.tuning():
            self._enqueue(sizes, memory)
        self._graphs[sizes] = self.device.capture(lambda: self._enqueue(sizes, memory))
        return memory

    def _enqueue(self, sizes: StepSizes, memory: StepMemory) -> None:
        arguments = (memory.tokens, self.last_ids, sizes.tokens)
        self.device.launch(self.resolve, {"count": sizes.tokens}, arguments)
        for op in self.ops:
            op(sizes, memory)


class CudaLoadedModel:
    """`vllmx_core.backend.LoadedModel`. At most two steps are in flight."""

    def __init__(self, info: LoadedInfo, program: Program, sampler: HostSampler) -> None:
        self._info = info
        self._device = program.device
        self._program: Program | None = program
        self._sampler: HostSampler | None = sampler
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
        result = sampler.sample(program.logits, memory, plan.logit_rows, rows)
        step = CudaStep(self._in_flight, result, begin, self._device.event())
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

    def __init__(
        self, queue: deque[CudaStep], result: StepResult, begin: Event, end: Event
    ) -> None:
        self._queue, self._result, self._begin, self._end = queue, result, begin, end

    def result(self) -> StepResult:
        """See `vllmx_core.backend.StepHandle.result`."""
        assert self._queue, "result() was called twice"
        assert self._queue[0] is self, "result() out of the order of the steps"
        self._end.wait()
        self._queue.popleft()
        self._result.elapsed_s = self._end.seconds_since(self._begin)
        return self._result
