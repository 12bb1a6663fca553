"""The end of a step without sampling: its vectors are copied to the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from vllmx_core.plan import F32, StepResult
from vllmx_core.weights.tensor import bf16_to_f32

from vllmx_cuda.device.device import Device
from vllmx_cuda.device.memory import ITEM_BYTES, Bytes, Memory
from vllmx_cuda.kernel_specs import Variant
from vllmx_cuda.program.staging import SLOTS


@dataclass(frozen=True, slots=True)
class Vectors:
    """The memory that the vectors of one step are copied to."""

    raw: Bytes
    width: int
    dtype: str

    def read(self) -> StepResult:
        """Reads the vectors, after the copy has run."""
        return StepResult(np.zeros(0, np.int32), vectors=self._values().reshape(-1, self.width))

    def _values(self) -> F32:
        if self.dtype == "bf16":
            return bf16_to_f32(self.raw.view(np.uint16))
        kind = np.float16 if self.dtype == "f16" else np.float32
        return np.array(self.raw.view(kind), np.float32)


class DeviceVectors:
    """Copies each step's vectors to the host before the next step overwrites them.

    Args:
        vectors: (L, width) of the model's dtype.
    """

    def __init__(
        self, device: Device, vectors: Memory, max_rows: int, width: int, dtype: str
    ) -> None:
        self._device, self._vectors = device, vectors
        self._width, self._dtype = width, dtype
        self._row_bytes = width * ITEM_BYTES[dtype]
        self._pinned = [device.pinned(max_rows * self._row_bytes) for _ in range(SLOTS)]
        self._slot = 0

    @property
    def variants(self) -> Sequence[Variant]:
        """No kernels."""
        return ()

    def take(self, count: int) -> Vectors:
        """Enqueues the copy of `count` of them."""
        self._slot = (self._slot + 1) % SLOTS
        raw = self._pinned[self._slot][: count * self._row_bytes]
        if count:
            self._device.download(raw, self._vectors)
        return Vectors(raw, self._width, self._dtype)
