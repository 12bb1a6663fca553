"""A loaded model: each step is a graph that is built while the one before it runs."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any

import mlx.core as mx
import numpy as np
from vllmx_core.adapters import Adapter, AdapterSlots
from vllmx_core.backend import LoadedInfo, MovableCache
from vllmx_core.backend_kit.hidden import Hidden
from vllmx_core.backend_kit.in_flight import InFlight
from vllmx_core.backend_kit.sampler import sample
from vllmx_core.errors import RankLostError
from vllmx_core.ops.op import OpList
from vllmx_core.plan import AnyArray, LogprobRows, SamplingRows, StepPlan, StepResult
from vllmx_core.recorded.interpreter import Interpreter

from vllmx_metal.arrays import METAL
from vllmx_metal.device import Device, release
from vllmx_metal.frame import MetalFrame
from vllmx_metal.kernel_choice import OwnKernels
from vllmx_metal.kv_cache import LayerPages
from vllmx_metal.moving import MetalRows, block_places
from vllmx_metal.ops import OPS
from vllmx_metal.owner import Owner
from vllmx_metal.ranks import MetalRanks
from vllmx_metal.recurrent import States
from vllmx_metal.step import MetalStep, detached
from vllmx_metal.weights import MetalWeight

_LOOK_S = 0.2


class MetalHidden(Hidden):
    """Hidden states that a drafter reads, which runs in the thread of its target."""

    owner: Owner


class MetalLoadedModel:
    """`vllmx_core.backend.LoadedModel`. Everything that touches MLX happens in the owner's thread,
    in the order build, wait for the step before, submit: an array is written in place only once
    nothing that still runs holds it, so a step that was submitted earlier would copy every page."""

    def __init__(
        self,
        steps: OpList,
        weights: Mapping[str, MetalWeight],
        pages: tuple[LayerPages, ...],
        states: tuple[States, ...],
        dtype: mx.Dtype,
        info: LoadedInfo,
        owner: Owner,
        device: Device,
        kernels: OwnKernels,
        tower: OpList | None = None,
        features: Sequence[mx.array] = (),
        ranks: MetalRanks | None = None,
        hidden: MetalHidden | None = None,
        *,
        owns_thread: bool = True,
        adapters: AdapterSlots[mx.array] | None = None,
    ) -> None:
        self._hidden, self._owns_thread = hidden, owns_thread
        self._adapters = adapters or AdapterSlots(None, (), ())  # the owner's
        self._tower = None if tower is None else Interpreter(tower, OPS.handler)
        self._features = list(features)  # the owner's
        self._ranks = ranks
        self._failure: BaseException | None = None  # of the tower, for the next step; the owner's
        self._interpreter, self._samples = Interpreter(steps, OPS.handler), steps.samples
        self._weights, self._pages, self._dtype = weights, pages, dtype
        self._states = states
        self._info, self._owner, self._device, self._kernels = info, owner, device, kernels
        self._last_ids: mx.array | None = None  # (L,) of the last step; the owner's
        self._running: MetalStepHandle | None = None  # submitted and not waited for; the owner's
        self._last_rows = 0  # L of the last step that had any
        self._last_end_s = 0.0
        self._in_flight: InFlight[MetalStepHandle] = InFlight(info, samples=steps.samples)

    @property
    def hidden(self) -> MetalHidden | None:
        """See `vllmx_core.backend.HasHidden`."""
        return self._hidden

    @property
    def info(self) -> LoadedInfo:
        return self._info

    @property
    def movable_cache(self) -> MovableCache:
        """See `vllmx_core.backend.HasMovableCache`."""
        places = block_places(self._pages, self._info.num_kv_blocks)
        slots = [(one, "data", 1) for one in self._states]
        blocks, states = (
            MetalRows(some, self._owner, self._finish_running) for some in (places, slots)
        )
        return MovableCache(blocks, states if slots else None, in_host_memory=False)

    def step(self, plan: StepPlan, rows: SamplingRows) -> MetalStepHandle:
        """See `vllmx_core.backend.LoadedModel.step`. What a step raises, its result() raises."""
        handle = self._begin(plan)
        plan, rows = detached(plan), copy.deepcopy(rows)
        self._in_flight.add(handle)
        self._owner.submit(lambda: self._run(handle, plan, rows))
        return handle

    def forward(self, plan: StepPlan) -> MetalStepHandle:
        """See `vllmx_core.backend.LoadedModel.forward`. The time between the halves of a step is
        part of its `elapsed_s`: there is the host's clock alone."""
        handle = self._begin(plan)
        plan = detached(plan)
        self._in_flight.add_unsampled(handle, plan)
        self._owner.submit(lambda: self._run_forward(handle, plan))
        return handle

    def encode(self, plan: StepPlan) -> None:
        """See `vllmx_core.backend.SeeingModel.encode`. What it raises, the next step raises."""
        assert self._tower is not None, "the model sees no images"
        plan = detached(plan)
        self._owner.submit(lambda: self._run_tower(plan))

    def set_adapter(self, slot: int, adapter: Adapter | None) -> None:
        """See `vllmx_core.backend.HasAdapters`."""
        self._owner.call(lambda: self._adapters.put(slot, adapter, mx.array))

    def _begin(self, plan: StepPlan) -> MetalStepHandle:
        self._in_flight.check_room(plan)
        lowest = int(plan.tokens.min())  # MLX checks no index: a wrong one would read anything
        assert -lowest <= self._last_rows, f"reference {lowest} to {self._last_rows} sampled rows"
        self._last_rows = plan.num_logit_rows or self._last_rows
        return MetalStepHandle(self)

    def _sample(self, handle: MetalStepHandle, rows: SamplingRows) -> None:
        with self._in_flight.sampling(handle, rows):
            rows = copy.deepcopy(rows)
            self._owner.submit(lambda: self._run_sampler(handle, rows))

    def close(self) -> None:
        if not self._in_flight.close() or (self._ranks is not None and self._ranks.ended):
            return
        self._owner.call(self._free)
        if self._owns_thread:
            self._owner.close()

    # In the owner's thread

    def _run(self, handle: MetalStepHandle, plan: StepPlan, rows: SamplingRows) -> None:
        """Builds the step, waits for the one before it, submits."""
        try:
            handle.arrays = self._sampled(*self._logits(plan), rows)
            self._submit(handle, handle.arrays)
        except BaseException as error:  # whatever it is, the thread that waits gets it
            self._fail(handle, error)

    def _run_tower(self, plan: StepPlan) -> None:
        """The store is written in place, so nothing that reads it may still run."""
        assert self._tower is not None, "the model sees no images"
        try:
            self._finish_running()
            last_ids = mx.zeros(1, mx.int32)
            step = MetalStep.build(plan, self._info.block_size, last_ids, self._kernels)
            frame = MetalFrame(step, self._weights, (), (), self._dtype, self._features)
            self._tower.run(frame)
            mx.async_eval(self._features)
        except BaseException as error:  # whatever it is, the thread that waits gets it
            self._failure = error

    def _run_forward(self, handle: MetalStepHandle, plan: StepPlan) -> None:
        """`_run` as far as the logits."""
        try:
            handle.logits = self._logits(plan)
            self._submit(handle, handle.logits)
        except BaseException as error:
            self._fail(handle, error)

    def _run_sampler(self, handle: MetalStepHandle, rows: SamplingRows) -> None:
        """The rest of the step, which is the one that runs."""
        if handle.logits is None:
            return  # its forward pass has failed
        try:
            handle.arrays = self._sampled(*handle.logits, rows)
            handle.logits = None
            mx.async_eval(handle.arrays)
        except BaseException as error:
            self._running = None
            self._fail(handle, error)

    def _submit(self, handle: MetalStepHandle, arrays: Any) -> None:
        self._finish_running()
        handle.started_s = time.perf_counter()
        kept = [page.arrays for page in self._pages], [one.data for one in self._states]
        parts = [] if self._hidden is None else list(self._hidden.parts)
        mx.async_eval(arrays, *kept, parts)
        self._running = handle

    def _logits(self, plan: StepPlan) -> tuple[mx.array, mx.array]:
        """(L, V) logits and the (L,) tokens that they come after."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        if self._ranks is not None and not self._ranks.runs_ahead:
            self._finish_running()  # calls between ranks compute what was built until then
        last_ids = mx.zeros(1, mx.int32) if self._last_ids is None else self._last_ids
        step = MetalStep.build(plan, self._info.block_size, last_ids, self._kernels)
        frame = MetalFrame(
            step,
            self._weights,
            self._pages,
            self._states,
            self._dtype,
            self._features,
            self._ranks,
        )
        frame.adapters = self._adapters.filled
        logits: mx.array = self._interpreter.run(frame)
        return logits, step.tokens[step.logit_rows]

    def _sampled(self, logits: mx.array, fed: mx.array, rows: SamplingRows) -> dict[str, mx.array]:
        if not self._samples:
            return {"ids": mx.zeros(0, mx.int32), "vectors": logits.astype(mx.float32)}
        if not rows.num_rows:
            return {"ids": mx.zeros(0, mx.int32)}
        results = sample(METAL, logits, rows, fed)
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
            self._fail(handle, error)

    def _fail(self, handle: MetalStepHandle, error: BaseException) -> None:
        handle.done.set_exception(error if self._ranks is None else self._ranks.failure(error))

    def _free(self) -> None:
        self._finish_running()
        self._weights, self._pages, self._states, self._last_ids = {}, (), (), None
        self._features, self._hidden = [], None
        release(self._device)

    # In the engine's thread

    def _result(self, handle: MetalStepHandle) -> StepResult:
        self._in_flight.check_oldest(handle)
        if len(self._in_flight) == 1:  # no later step will wait for this one
            self._owner.submit(self._finish_running)
        self._in_flight.remove_oldest()
        arrays, seconds = self._awaited(handle)
        ids, logits, vectors = (arrays.pop(name, None) for name in ("ids", "logits", "vectors"))
        assert ids is not None, "every step has ids, if none at all"
        logprobs = LogprobRows(**arrays) if arrays else None
        return StepResult(ids, logprobs, logits, seconds, vectors)

    def _awaited(self, handle: MetalStepHandle) -> tuple[dict[str, AnyArray], float]:
        """The arrays and seconds of a step. Raises RankLostError if other ranks are gone."""
        while self._ranks is not None and not wait([handle.done], _LOOK_S).done:
            if self._ranks.ended:
                raise RankLostError("the other ranks have ended")
        return handle.done.result()


class MetalStepHandle:
    """`vllmx_core.backend.ForwardStep` and its `StepHandle`."""

    def __init__(self, model: MetalLoadedModel) -> None:
        self._model = model
        self.logits: tuple[mx.array, mx.array] | None = None  # until they are sampled
        self.arrays: dict[str, mx.array] = {}
        self.started_s = 0.0
        self.done: Future[tuple[dict[str, AnyArray], float]] = Future()

    def sample(self, rows: SamplingRows) -> MetalStepHandle:
        self._model._sample(self, rows)
        return self

    def result(self) -> StepResult:
        return self._model._result(self)
