"""A loaded model: a step is enqueued op by op and sampled on the device."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor
from vllmx_core.backend import LoadedInfo
from vllmx_core.backend_kit.in_flight import InFlight
from vllmx_core.interpreter import Interpreter
from vllmx_core.ops.op import OpList
from vllmx_core.plan import LogprobRows, SamplingRows, StepPlan, StepResult

from vllmx_torch.attention import Scratch
from vllmx_torch.kv_cache import LayerPages
from vllmx_torch.ops import OPS, TorchFrame
from vllmx_torch.sampler import sample
from vllmx_torch.step import TorchStep
from vllmx_torch.transfer import Download, StepClock
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
        weights: Mapping[str, TorchWeight],
        pages: tuple[LayerPages, ...],
        info: LoadedInfo,
        device: torch.device,
        sampling_device: torch.device,
    ) -> None:
        self._interpreter = Interpreter(steps, OPS.handler)
        self._weights, self._pages, self._scratch = weights, pages, Scratch()
        self._info = info
        self._device, self._sampling_device = device, sampling_device
        self._last_ids = torch.zeros(1, dtype=torch.int64, device=device)  # (L,) of the last step
        self._clock = StepClock(device)
        self._in_flight: InFlight[TorchStepHandle] = InFlight(info)

    @property
    def info(self) -> LoadedInfo:
        return self._info

    @torch.inference_mode()
    def step(self, plan: StepPlan, rows: SamplingRows) -> TorchStepHandle:
        """See `vllmx_core.backend.LoadedModel.step`. On the CPU the step has run when this
        returns."""
        self._in_flight.check_room(plan)
        started = self._clock.start()
        step = TorchStep.upload(plan, self._info.block_size, self._last_ids, self._device)
        results = self._sampled(step, rows)
        if plan.num_logit_rows:
            self._last_ids = results["ids"].long().to(self._device)
        download = Download(results, self._device, self._clock, started)
        handle = TorchStepHandle(self._in_flight, download)
        self._in_flight.add(handle)
        return handle

    def _sampled(self, step: TorchStep, rows: SamplingRows) -> dict[str, Tensor]:
        frame = TorchFrame(step, self._weights, self._pages, self._scratch)
        logits: Tensor = self._interpreter.run(frame)  # (L, V)
        fed_tokens = step.tokens[step.logit_rows]
        return sample(logits.to(self._sampling_device), rows, fed_tokens.to(self._sampling_device))

    def close(self) -> None:
        if not self._in_flight.close():
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._weights, self._pages, self._scratch = {}, (), Scratch()
        self._last_ids = torch.zeros(1, dtype=torch.int64)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


class TorchStepHandle:
    """`vllmx_core.backend.StepHandle`."""

    def __init__(self, queue: InFlight[TorchStepHandle], download: Download) -> None:
        self._queue, self._download = queue, download

    def result(self) -> StepResult:
        """See `vllmx_core.backend.StepHandle.result`."""
        self._queue.check_oldest(self)
        arrays, seconds = self._download.wait()
        self._queue.remove_oldest()
        ids = arrays.pop("ids")
        logprobs = LogprobRows(**arrays) if arrays else None
        return StepResult(ids.astype(np.int32, copy=False), logprobs, seconds)
