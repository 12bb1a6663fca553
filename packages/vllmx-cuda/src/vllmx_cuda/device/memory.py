"""Spans of device memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


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
