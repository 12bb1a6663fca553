"""Spans of device memory, and the types that the kernels compute in, by the names of
`vllmx_core.weights.part`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
ITEM_BYTES = {"bf16": 2, "f16": 2, "f32": 4}


def automatic(checkpoint: str, capability: tuple[int, int]) -> str:
    """Resolves dtype auto: the checkpoint's dtype, but f16 instead of bf16 before 8.0 (Ampere),
    whose tensor cores lack bf16."""
    return "f16" if checkpoint == "bf16" and capability < (8, 0) else checkpoint


@dataclass(frozen=True, slots=True)
class Memory:
    """A span of device memory. `owner` keeps it alive; freed with the last span over it."""

    address: int
    num_bytes: int
    owner: Any

    def at(self, offset: int, num_bytes: int | None = None) -> Memory:
        """A part: `num_bytes` from `offset` on, to the end by default."""
        size = self.num_bytes - offset if num_bytes is None else num_bytes
        assert 0 <= offset <= offset + size <= self.num_bytes, (offset, size, self.num_bytes)
        return Memory(self.address + offset, size, self.owner)
