"""A loaded model: a step is enqueued op by op and sampled on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor
from vllmx_core.adapters import Adapter, AdapterSlots
from vllmx_core.backend import LoadedInfo, MovableCache
from vllmx_core.backend_kit.hidden import Hidden
from vllmx_core.backend_kit.in_flight import InFlight
from vllmx_core.backend_kit.sampler import sample
from vllmx_core.communicator import RowRanks
from vllmx_core.ops.op import OpList
from vllmx_core.plan import AnyArray, LogprobRows, SamplingRows, StepPlan, StepResult
from vllmx_core.recorded.interpreter import Interpreter

from vllmx_torch.arrays import TORCH
from vllmx_torch.attention import Scratch
from vllmx_torch.foreign.op import ForeignModule
from vllmx_torch.frame import TorchFrame
from vllmx_torch.kv_cache import LayerPages
from vllmx_torch.moving import TorchRows, block_views
from vllmx_torch.ops import OPS
from vllmx_torch.step import TorchStep
from vllmx_torch.transfer import Download, Started, StepClock, upload
from vllmx_torch.weights import TorchWeight


class TorchLoadedModel:
    """`vllmx_core.backend.LoadedModel`.

    Args:
        sampling_device: where the sampler runs; the host for a device without float64, whose draws
            would differ.
    """

    def __init__(
        self,
        steps: OpList,
        weights: Mapping[str, TorchWeight | ForeignModule],
        pages: tuple[LayerPages, ...],
        states: tuple[Tensor, ...],
        info: LoadedInfo,
        device: torch.device,
        sampling_device: torch.device,
        tower: OpList | None = None,
        features: tuple[Tensor, ...] = (),
        ranks: RowRanks[Tensor] | None = None,
        hidden: Hidden | None = None,
        adapters: AdapterSlots[Tensor] | None = None,
    ) -> None:
        self._hidden = hidden
        self._adapters = adapters or AdapterSlots(None, (), ())
        self._tower = None if tower is None else Interpreter(tower, OPS.handler)
        self._features, self._ranks = features, ranks
        self._pass: TorchFrame | None = None
        self._tower_started: Started | None = None
        """The start of the passes that were enqueued before the next step."""
        self._interpreter = Interpreter(steps, OPS.handler)
        self._weights, self._pages, self._states = weights, pages, states
        self._scratch = Scratch()
        self._info, self._samples = info, steps.samples
        self._device, self._sampling_device = device, sampling_device
        self._last_ids = torch.zeros(1, dtype=torch.int64, device=device)  # (L,) of the last step
        self._clock = StepClock(device)
        self._in_flight: InFlight[TorchStepHandle] = InFlight(info, samples=steps.samples)

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
        blocks = TorchRows(block_views(self._pages, self._info.num_kv_blocks))
        states = TorchRows([(one, 0) for one in self._states]) if self._states else None
        return MovableCache(blocks, states, in_host_memory=False)

    @torch.inference_mode()
    def step(self, plan: StepPlan, rows: SamplingRows) -> TorchStepHandle:
        """See `vllmx_core.backend.LoadedModel.step`. On the CPU the step has run when this
        returns."""
        self._in_flight.check_room(plan)
        handle = self._forward(plan)
        self._sample(handle, rows)
        self._in_flight.add(handle)
        return handle

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> TorchStepHandle:
        """See `vllmx_core.backend.LoadedModel.forward`."""
        self._in_flight.check_room(plan)
        handle = self._forward(plan)
        handle.spent_s = self._clock.pause(handle.started)
        self._in_flight.add_unsampled(handle, plan)
        return handle

    @torch.inference_mode()
    def sample(self, handle: TorchStepHandle, rows: SamplingRows) -> None:
        """The second half of a step."""
        with self._in_flight.sampling(handle, rows):
            if handle.spent_s is not None:
                handle.started = self._clock.start()
            self._sample(handle, rows)

    def finish(self, handle: TorchStepHandle) -> tuple[dict[str, AnyArray], float]:
        """Waits for the oldest step in flight: its arrays and seconds."""
        self._in_flight.check_oldest(handle)
        assert handle.download is not None, "a step in flight was sampled"
        arrays, seconds = handle.download.wait()
        self._in_flight.remove_oldest()
        return arrays, seconds if handle.spent_s is None else seconds + handle.spent_s()

    @torch.inference_mode()
    def encode(self, plan: StepPlan, begin: float = 0.0, end: float = 1.0) -> None:
        """See `vllmx_core.backend.SeeingModel.encode`."""
        assert self._tower is not None, "the model sees no images"
        self._tower_started = self._tower_started or self._clock.start()
        if begin == 0.0:
            step = TorchStep.upload(plan, self._info.block_size, self._last_ids, self._device)
            self._pass = TorchFrame(step, self._weights, (), (), self._scratch, self._features)
        assert self._pass is not None, "a pass begins with its first part"
        self._tower.run_part(self._pass, begin, end)
        if end >= 1.0:
            self._pass = None

    @torch.inference_mode()
    def set_adapter(self, slot: int, adapter: Adapter | None) -> None:
        """See `vllmx_core.backend.HasAdapters`."""
        self._adapters.put(slot, adapter, lambda array: upload(array, np.float32, self._device))

    def _forward(self, plan: StepPlan) -> TorchStepHandle:
        started, self._tower_started = self._tower_started or self._clock.start(), None
        step = TorchStep.upload(plan, self._info.block_size, self._last_ids, self._device)
        frame = TorchFrame(
            step,
            self._weights,
            self._pages,
            self._states,
            self._scratch,
            self._features,
            self._ranks,
        )
        frame.adapters = self._adapters.filled
        logits: Tensor = self._interpreter.run(frame)  # (L, V)
        return TorchStepHandle(self, started, logits, step.tokens[step.logit_rows])

    def _sample(self, handle: TorchStepHandle, rows: SamplingRows) -> None:
        logits, fed = (tensor.to(self._sampling_device) for tensor in handle.take_logits())
        if not self._samples:
            ids = torch.zeros(0, dtype=torch.int64)
            results = {"ids": ids.to(logits.device), "vectors": logits.float()}
            handle.download = Download(results, self._device, self._clock, handle.started)
            return
        results = sample(TORCH, logits, rows, fed)
        if rows.num_rows:
            self._last_ids = results["ids"].long().to(self._device)
        handle.download = Download(results, self._device, self._clock, handle.started)

    def close(self) -> None:
        if not self._in_flight.close():
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._weights, self._pages, self._states, self._scratch = {}, (), (), Scratch()
        self._features, self._hidden, self._pass, self._ranks = (), None, None, None
        self._last_ids = torch.zeros(1, dtype=torch.int64)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


class TorchStepHandle:
    """`vllmx_core.backend.ForwardStep` and its `StepHandle`.

    Args:
        logits: (L, V)
        fed: (L,) tokens that they come after.
    """

    def __init__(
        self, owner: TorchLoadedModel, started: Started, logits: Tensor, fed: Tensor
    ) -> None:
        self._owner, self.started = owner, started
        self._logits: tuple[Tensor, Tensor] | None = (logits, fed)
        self.spent_s: Callable[[], float] | None = None
        """The seconds of the forward pass, where the sampler came late."""
        self.download: Download | None = None

    def take_logits(self) -> tuple[Tensor, Tensor]:
        """Logits and tokens, which are not kept."""
        assert self._logits is not None, "logits are sampled once"
        logits, self._logits = self._logits, None
        return logits

    def sample(self, rows: SamplingRows) -> TorchStepHandle:
        """See `vllmx_core.backend.ForwardStep.sample`."""
        self._owner.sample(self, rows)
        return self

    def result(self) -> StepResult:
        """See `vllmx_core.backend.StepHandle.result`."""
        arrays, seconds = self._owner.finish(self)
        ids = arrays.pop("ids")
        logits, vectors = arrays.pop("logits", None), arrays.pop("vectors", None)
        logprobs = LogprobRows(**arrays) if arrays else None
        return StepResult(ids.astype(np.int32, copy=False), logprobs, logits, seconds, vectors)
