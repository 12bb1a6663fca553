"""A loaded model: steps are enqueued one ahead, and read in their order."""

from __future__ import annotations

from contextlib import suppress

from vllmx_core.backend import LoadedInfo
from vllmx_core.backend_kit.in_flight import InFlight
from vllmx_core.errors import VllmxError
from vllmx_core.plan import SamplingRows, StepPlan, StepResult

from vllmx_cuda.device import Device, Event
from vllmx_cuda.program import Program
from vllmx_cuda.sampler import Sampled


class CudaLoadedModel:
    """`vllmx_core.backend.LoadedModel`. At most two steps are in flight."""

    def __init__(self, info: LoadedInfo, program: Program) -> None:
        self._info = info
        self._device = program.device
        self._program: Program | None = program
        self._in_flight: InFlight[CudaStep] = InFlight(info)

    @property
    def info(self) -> LoadedInfo:
        return self._info

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
        step = CudaStep(self._device, self._in_flight, sampled, begin, end)
        self._in_flight.add(step)
        return step

    def close(self) -> None:
        if self._program is None:
            return
        with suppress(VllmxError), self._device.faults():
            self._device.activate()
            self._device.synchronize()
        self._in_flight.close()
        self._program = None
        self._device.close()


class CudaStep:
    """`vllmx_core.backend.StepHandle`."""

    def __init__(
        self,
        device: Device,
        queue: InFlight[CudaStep],
        sampled: Sampled,
        begin: Event,
        end: Event,
    ) -> None:
        self._device, self._queue = device, queue
        self._sampled, self._begin, self._end = sampled, begin, end

    def result(self) -> StepResult:
        """See `vllmx_core.backend.StepHandle.result`."""
        self._queue.check_oldest(self)
        try:
            with self._device.faults():
                self._end.wait()
                elapsed_s = self._end.seconds_since(self._begin)
            result = self._sampled.read()
        finally:  # until here the step owns its pinned memory, whatever thread enqueues the next
            self._queue.remove_oldest()
        result.elapsed_s = elapsed_s
        return result
