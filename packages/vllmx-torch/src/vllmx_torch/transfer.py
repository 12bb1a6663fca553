"""Arrays between host and device. On CUDA neither way waits: copies go through pinned memory, and
an event tells when a step is done. Elsewhere they are plain copies."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from vllmx_core.plan import AnyArray


def upload(array: AnyArray, dtype: npt.DTypeLike, device: torch.device) -> Tensor:
    """A copy of the array on the device; the array may be reused at once."""
    host = torch.from_numpy(np.array(array, dtype, order="C"))
    if device.type == "cuda":
        # Pinned memory is handed out again only after the copies that read it.
        return host.pin_memory().to(device, non_blocking=True)
    return host.to(device)


@dataclass(frozen=True, slots=True)
class Started:
    """The time at which a step was enqueued."""

    host_s: float
    event: torch.cuda.Event | None


class StepClock:
    """Measures steps on a device. One for each model."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last_end_s = 0.0

    def start(self) -> Started:
        return Started(time.perf_counter(), self.event())

    def event(self) -> torch.cuda.Event | None:
        """Happens when what was enqueued so far has run; None where only the host's clock is."""
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, started: Started, end: torch.cuda.Event | None) -> float:
        """The seconds until `end`, which has happened, or else until now; a step that was enqueued
        behind another counts from that one's end."""
        if started.event is not None and end is not None:
            return float(started.event.elapsed_time(end)) / 1000
        now_s = time.perf_counter()
        begin_s, self._last_end_s = max(started.host_s, self._last_end_s), now_s
        return now_s - begin_s

    def pause(self, started: Started) -> Callable[[], float] | None:
        """The seconds spent until now, to be asked for once it has run; None where the device does
        not tell, so that waiting between the halves of a step counts."""
        if self._device.type == "cpu":
            spent_s = self.seconds(started, None)
            return lambda: spent_s
        end = self.event()
        return None if end is None else lambda: self.seconds(started, end)


class Download:
    """A step's results on their way to the host."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        device: torch.device,
        clock: StepClock,
        started: Started,
    ) -> None:
        self._tensors = dict(tensors)
        self._clock, self._started = clock, started
        self._seconds: float | None = None
        if device.type == "cuda":
            for name, tensor in tensors.items():
                pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                self._tensors[name] = pinned.copy_(tensor, non_blocking=True)
        elif device.type == "cpu":
            self._seconds = clock.seconds(started, None)  # the step has run
        self._done = clock.event()

    def wait(self) -> tuple[dict[str, AnyArray], float]:
        """The arrays, owned by the caller, and how long the step took in seconds."""
        if self._done is not None:
            self._done.synchronize()
        arrays = {name: np.array(tensor.cpu().numpy()) for name, tensor in self._tensors.items()}
        if self._seconds is None:
            self._seconds = self._clock.seconds(self._started, self._done)
        return arrays, self._seconds
