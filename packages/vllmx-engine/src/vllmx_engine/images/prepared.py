"""What the model's tower is given of an image."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt
from vllmx_core.plan import F32
from vllmx_core.records import Record

Pixels = npt.NDArray[np.uint8]
"""Levels of grey: images are (height, width, 3) in RGB."""


class PreparedImage(Record):
    """An image as rows of patches."""

    digest: bytes
    """The digest of the patches, their levels and their grid: equal ones have equal features."""
    patches: Pixels
    """(N, D) levels of grey; a row is (C, frames, height, width) of one patch, flattened. Rows that
    the tower merges into one token lie one after the other."""
    levels: F32
    """(3, 256) what each level of each colour is to the tower."""
    grid: tuple[int, int, int]
    """(frames, rows, columns) of patches; their product is N."""
    num_tokens: int
    """Places that it takes in the prompt."""

    @classmethod
    def of(
        cls, patches: Pixels, levels: F32, grid: tuple[int, int, int], num_tokens: int
    ) -> PreparedImage:
        """Makes an image with its digest."""
        digest = hashlib.blake2b(np.array(grid, np.int32).tobytes(), digest_size=32)
        digest.update(np.ascontiguousarray(levels).data)
        digest.update(np.ascontiguousarray(patches).data)
        return cls(digest.digest(), patches, levels, grid, num_tokens)


def normalised(patches: Pixels, levels: F32) -> F32:
    """(N, D) what the tower is given, of levels (N, D) and what each of them is."""
    rows = patches.reshape(len(patches), 3, -1)
    found: F32 = np.stack([levels[colour][rows[:, colour]] for colour in range(3)], axis=1)
    return found.reshape(len(rows), -1)
