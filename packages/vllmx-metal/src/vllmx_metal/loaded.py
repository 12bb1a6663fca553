"""A loaded model: each step is a graph that is built while the one before it runs."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from concurrent.futures import Future

import mlx.core as mx
import numpy as np
from vllmx_core.backend import LoadedInfo
from vllmx_core.backend_kit.in_flight import InFlight
from vllmx_core.interpreter import Interpreter
from vllmx_core.ops.op import OpList
from vllmx_core.plan import AnyArray, LogprobRows, SamplingRows, StepPlan, StepResult

from vllmx_metal.device import Device, release
from vllmx_metal.kernel_choice import PagedKernels
from vllmx_metal.kv_cache import LayerPages
from vllmx_metal.ops import OPS, MetalFrame
from vllmx_metal.owner import Owner
from vllmx_metal.sampler import sample
from vllmx_metal.step import MetalStep, detached
from vllmx_metal.weights import MetalWeight


class MetalLoadedModel:
    """`vllmx_core.backend.LoadedModel`. Everything that touches MLX happens in the owner's thread,
    in the order build, wait for the step before, submit: an array is written in place only once
    nothing that still runs holds it, so a step that was submitted earlier would copy every page."""

    def __init__(
        self,
        steps: OpList,
        weights: Mapping[str, MetalWeight],
        pages: tuple[LayerPages, ...],
        dtype: mx.Dtype,
        info: LoadedInfo,
        owner: Owner,
        device: Device,
        kernels: PagedKernels,
    ) -> None:
        self._interpreter = Interpreter(steps, OPS.handler)
        self._weights, self._pages, self._dtype = weights, pages, dtype
        self._info, self._owner, self._device, self._kernels = info, owner, device, kernels
        self._last_ids: mx.array | None = None  # (L,) of the last step; the owner's
        self._running: MetalStepHandle | None = None  # submitted and not waited for; the owner's
        self._last_rows = 0  # L of the last step that had any
        self._last_end_s = 0.0
        self._in_flight: InFlight[MetalStepHandle] = InFlight(info)

    @property
    def info(self) -> LoadedInfo:
        return self._info

    def step(self, plan: StepPlan, rows: SamplingRows) -> MetalStepHandle:
        """See `vllmx_core.backend.LoadedModel.step`. What a step raises, its result() raises."""
        self._in_flight.check_room(plan)
        lowest = int(plan.tokens.min())  # MLX checks no index: a wrong one would read anything
        assert -lowest <= self._last_rows, f"reference {lowest} to {self._last_rows} sampled rows"
        self._last_rows = plan.num_logit_rows or self._last_rows
        handle = MetalStepHandle(self)
        plan, rows = detached(plan), copy.deepcopy(rows)
        self._in_flight.add(handle)
        self._owner.submit(lambda: self._run(handle, plan, rows))
        return handle

    def close(self) -> None:
        """See `vllmx_core.backend.LoadedModel.close`."""
        if not self._in_flight.close():
            return
        self._owner.call(self._free)
        self._owner.close()

    # In the owner's thread

    def _run(self, handle: MetalStepHandle, plan: StepPlan, rows: SamplingRows) -> None:
        """Builds the step, waits for the one before it, submits."""
        try:
            handle.arrays = self._graph(plan, rows)
            self._finish_running()
            handle.started_s = time.perf_counter()
            mx.async_eval(handle.arrays, [page.arrays for page in self._pages])
            self._running = handle
        except BaseException as error:  # whatever it is, the thread that waits gets it
            handle.done.set_exception(error)

    def _graph(self, plan: StepPlan, rows: SamplingRows) -> dict[str, mx.array]:
        last_ids = mx.zeros(1, mx.int32) if self._last_ids is None else self._last_ids
        step = MetalStep.build(plan, self._info.block_size, last_ids, self._kernels)
        frame = MetalFrame(step, self._weights, self._pages, self._dtype)
        logits: mx.array = self._interpreter.run(frame)  # (L, V)
        if not plan.num_logit_rows:
            return {"ids": mx.zeros(0, mx.int32)}
        results = sample(logits, rows, step.tokens[step.logit_rows])
        self._last_ids = results["ids"]
        return results

    def _finish_running(self) -> None:
        """Waits for the step that runs and hands its result over."""
        handle, self._running = self._running, None
        if handle is None:
            return
        try:
            mx.eval(handle.arrays)
            arrays = {name: np.array(array) for name, array in handle.arrays.items()}
            handle.arrays = {}
            end_s = time.perf_counter()
            begin_s, self._last_end_s = max(handle.started_s, self._last_end_s), end_s
            handle.done.set_result((arrays, end_s - begin_s))
        except BaseException as error:
            handle.done.set_exception(error)

    def _free(self) -> None:
        self._finish_running()
        self._weights, self._pages, self._last_ids = {}, (), None
        release(self._device)

    # In the engine's thread

    def _result(self, handle: MetalStepHandle) -> StepResult:
        self._in_flight.check_oldest(handle)
        if len(self._in_flight) == 1:  # no later step will wait for this one
            self._owner.submit(self._finish_running)
        self._in_flight.remove_oldest()
        arrays, seconds = handle.done.result()
        ids = arrays.pop("ids")
        return StepResult(ids, LogprobRows(**arrays) if arrays else None, seconds)


class MetalStepHandle:
    """`vllmx_core.backend.StepHandle`."""

    def __init__(self, model: MetalLoadedModel) -> None:
        self._model = model
        self.arrays: dict[str, mx.array] = {}
        self.started_s = 0.0
        self.done: Future[tuple[dict[str, AnyArray], float]] = Future()

    def result(self) -> StepResult:
        """See `vllmx_core.backend.StepHandle.result`."""
        return self._model._result(self)
