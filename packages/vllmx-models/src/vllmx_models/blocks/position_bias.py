"""Biases of attention scores by the distance between query and key (`SegmentAttention.bias`).

n tokens of the longest text, H heads.
"""

from __future__ import annotations

import math
from itertools import groupby

import numpy as np
from vllmx_core.plan import F32
from vllmx_core.records import Record
from vllmx_core.weights.spec import PartSpec, RowRuns, WeightSpec


class Alibi(Record):
    """ALiBi (arXiv:2108.12409) in both directions: minus the distance times the head's slope."""

    num_heads: int  # H

    def table(self, positions: int) -> F32:
        """((2n - 1) * H,) with n = `positions`."""
        distances = np.abs(np.arange(1 - positions, positions))
        return np.outer(-distances, _slopes(self.num_heads)).astype(np.float32).reshape(-1)


def _slopes(heads: int) -> list[float]:
    """A geometric sequence that ends with 2**-8. If `heads` is not a power of two: the sequence of
    the next lower power, then every other slope of twice that power."""
    power = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * (head + 1) / power) for head in range(power)]
    return slopes + (_slopes(2 * power)[::2][: heads - power] if power < heads else [])


class LearnedBias(Record):
    """A row of H numbers for each bucket of distances, as in T5 (arXiv:1910.10683)."""

    source: str
    """The tensor (buckets, H)."""
    positions: int  # n
    buckets: int = 32
    """Half of them for keys before the query. Half of those have one distance each, the others grow
    up to `farthest`."""
    farthest: int = 128
    causal: bool = False
    """True if all buckets are for keys before the query, and later ones are not seen."""

    def weights(self, name: str, num_heads: int) -> WeightSpec:
        """((2n - 1) * H,) the row of each distance."""
        runs = groupby(map(self._bucket, range(1 - self.positions, self.positions)))
        parts = tuple(
            PartSpec(self.source, len(list(run)) * num_heads, runs=RowRuns(bucket, 1, 0))
            for bucket, run in runs
        )
        return WeightSpec(name, "vector", parts, shape=(self.buckets, num_heads))

    def _bucket(self, distance: int) -> int:
        half = self.buckets if self.causal else self.buckets // 2
        near, first = half // 2, half if distance > 0 else 0
        if self.causal and distance > 0:
            return 0
        if (away := abs(distance)) < near:
            return first + away
        share = math.log(away / near) / math.log(self.farthest / near)
        return first + min(near + int(share * (half - near)), half - 1)
