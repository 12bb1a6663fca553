"""Arrays between host and device. On CUDA neither way waits: copies go through pinned memory, and
an event tells when a step is done. Elsewhere they are plain copies."""

from __future__ import annotations

import time
from collections.abc import Mapping

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


class Stopwatch:
    """Started where a step is enqueued; `Download` stops it."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))
        self._begin = time.perf_counter()

    def seconds(self, end: torch.cuda.Event | None) -> float:
        """Time on the device until `end`, which has happened, or on the host until now."""
        if self._event is not None and end is not None:
            return float(self._event.elapsed_time(end)) / 1000
        return time.perf_counter() - self._begin


class Download:
    """A step's results on their way to the host."""

    def __init__(
        self, tensors: Mapping[str, Tensor], device: torch.device, stopwatch: Stopwatch
    ) -> None:
        self._tensors, self._stopwatch = dict(tensors), stopwatch
        self._done: torch.cuda.Event | None = None
        self._seconds: float | None = None
        if device.type == "cuda":
            for name, tensor in tensors.items():
                pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                self._tensors[name] = pinned.copy_(tensor, non_blocking=True)
            self._done = torch.cuda.Event(enable_timing=True)
            self._done.record(torch.cuda.current_stream(device))
        elif device.type == "cpu":
            self._seconds = stopwatch.seconds(None)  # the step has run

    def wait(self) -> tuple[dict[str, AnyArray], float]:
        """The arrays, owned by the caller, and how long the step took in seconds."""
        if self._done is not None:
            self._done.synchronize()
        arrays = {name: np.array(tensor.cpu().numpy()) for name, tensor in self._tensors.items()}
        seconds = self._seconds
        return arrays, self._stopwatch.seconds(self._done) if seconds is None else seconds
