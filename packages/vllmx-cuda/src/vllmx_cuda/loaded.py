"""A loaded model: the next step is enqueued before the current one is read."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from vllmx_core.backend import LoadedInfo, MovableCache
from vllmx_core.backend_kit.hidden import Hidden
from vllmx_core.backend_kit.in_flight import InFlight
from vllmx_core.errors import VllmxError
from vllmx_core.plan import SamplingRows, StepPlan, StepResult

from vllmx_cuda.device.device import Event
from vllmx_cuda.program.kv_cache import LayerPages, LayerStates
from vllmx_cuda.program.moving import CudaRows, block_spans, slot_spans
from vllmx_cuda.program.program import PlacedStep, Program
from vllmx_cuda.program.sampler import Sampled
from vllmx_cuda.program.tower import Tower
from vllmx_cuda.program.vectors import Vectors

Span = tuple[Event, Event]
"""Two events around enqueued work."""


class CudaLoadedModel:
    """`vllmx_core.backend.SeeingModel`. At most two steps are in flight.

    Args:
        cache: pages and states of the program.
        tower: the image encoder, if the model has one.
    """

    def __init__(
        self,
        info: LoadedInfo,
        program: Program,
        cache: tuple[Sequence[LayerPages], Sequence[LayerStates]],
        tower: Tower | None = None,
        hidden: Hidden | None = None,
    ) -> None:
        self._hidden = hidden
        self._info = info
        self._cache = cache
        self._tower = tower
        self._passes: list[Span] = []
        """Passes of the tower, or parts of them, since the last step."""
        self._device = program.device
        self._program: Program | None = program
        self._in_flight: InFlight[CudaStep] = InFlight(info, samples=program.recorded.steps.samples)

    @property
    def hidden(self) -> Hidden | None:
        """See `vllmx_core.backend.HasHidden`."""
        return self._hidden

    @property
    def info(self) -> LoadedInfo:
        return self._info

    @property
    def movable_cache(self) -> MovableCache:
        """See `vllmx_core.backend.HasMovableCache`."""
        pages, states = self._cache
        blocks = CudaRows(block_spans(pages, self._info.num_kv_blocks), self._device)
        slots = CudaRows(slot_spans(states), self._device) if states else None
        return MovableCache(blocks, slots, in_host_memory=False)

    def capture(self, limit_s: float, *, progress: bool = False) -> None:
        """See `Program.capture_buckets`."""
        assert self._program is not None, "the model is closed"
        self._program.capture_buckets(limit_s, progress=progress)

    def step(self, plan: StepPlan, rows: SamplingRows) -> CudaStep:
        """See `vllmx_core.backend.LoadedModel.step`."""
        program = self._program
        assert program is not None, "the model is closed"
        self._in_flight.check_room(plan)
        with self._device.faults():
            self._device.activate()
            begin = self._device.event()
            sampled = program.run(plan, rows)
            end = self._device.event()
        step = CudaStep(self, self._spans(begin, end), sampled)
        self._in_flight.add(step)
        return step

    def encode(self, plan: StepPlan, begin: float = 0.0, end: float = 1.0) -> None:
        assert self._tower is not None, "the model sees no images"
        with self._device.faults():
            self._device.activate()
            started = self._device.event()
            self._tower.encode(plan, begin, end)
            self._passes.append((started, self._device.event()))

    def _spans(self, begin: Event, end: Event) -> list[Span]:
        """Returns the spans of a step and of the passes before it."""
        spans, self._passes = [*self._passes, (begin, end)], []
        return spans

    def forward(self, plan: StepPlan) -> CudaStep:
        """See `vllmx_core.backend.LoadedModel.forward`."""
        program = self._program
        assert program is not None, "the model is closed"
        self._in_flight.check_room(plan)
        with self._device.faults():
            self._device.activate()
            begin = self._device.event()
            placed = program.forward(plan)
            end = self._device.event()
        step = CudaStep(self, self._spans(begin, end))
        step.placed = placed
        self._in_flight.add_unsampled(step, plan)
        return step

    def sample(self, step: CudaStep, rows: SamplingRows) -> None:
        """The second half of a step."""
        with self._in_flight.sampling(step, rows), self._device.faults():
            program, placed = self._program, step.placed
            assert program is not None, "the model is closed"
            assert placed is not None, "the step waits for its sampler"
            self._device.activate()
            try:
                begin = self._device.event()
                sampled = program.sample(placed, rows)
                step.finish_sampling(sampled, begin, self._device.event())
            except BaseException:
                with suppress(VllmxError):
                    self._device.synchronize()  # its pinned memory may be reused from here on
                raise

    def read(self, step: CudaStep) -> StepResult:
        """Waits for the oldest step in flight."""
        self._in_flight.check_oldest(step)
        try:
            with self._device.faults():
                elapsed_s = step.wait()
            result = step.read()
        finally:  # until here the step owns its pinned memory, whichever thread enqueues the next
            self._in_flight.remove_oldest()
        result.elapsed_s = elapsed_s
        return result

    def close(self) -> None:
        if self._program is None:
            return
        with suppress(VllmxError), self._device.faults():
            self._device.activate()
            self._device.synchronize()
        self._in_flight.close()
        self._program = self._tower = None
        self._hidden = None
        self._cache = (), ()
        self._passes.clear()
        self._device.close()


class CudaStep:
    """`vllmx_core.backend.ForwardStep` and its `StepHandle`.

    Args:
        spans: of the work enqueued for it.
        sampled: None until the step is sampled.
    """

    def __init__(
        self,
        owner: CudaLoadedModel,
        spans: list[Span],
        sampled: Sampled | Vectors | None = None,
    ) -> None:
        self._owner, self._spans, self._sampled = owner, spans, sampled
        self.placed: PlacedStep | None = None

    def finish_sampling(self, sampled: Sampled | Vectors, begin: Event, end: Event) -> None:
        """Records the sampler's launches, enqueued between these events."""
        self._sampled = sampled
        self._spans.append((begin, end))

    def wait(self) -> float:
        """Waits until the device has run it all. Returns its device time in seconds."""
        self._spans[-1][1].wait()
        return sum(end.seconds_since(begin) for begin, end in self._spans)

    def read(self) -> StepResult:
        """Reads the result of the step."""
        assert self._sampled is not None, "a step in flight was sampled"
        return self._sampled.read()

    def sample(self, rows: SamplingRows) -> CudaStep:
        self._owner.sample(self, rows)
        return self

    def result(self) -> StepResult:
        return self._owner.read(self)
