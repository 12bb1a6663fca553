"""Cuts a step's rows into tiles of queries and groups tiles into batches of one shape, for backends
whose attention gathers a batch's keys and multiplies matrices."""

from __future__ import annotations

import math

import numpy as np

from vllmx_core.ops.attention import first_seen
from vllmx_core.plan import I64, StepPlan
from vllmx_core.records import Record


class QueryTiles(Record):
    """Pieces of rows; every array is (tiles,)."""

    row: I64
    first_token: I64
    queries: I64
    first_key: I64
    """The first position that any of its queries sees, and the last one."""
    last_key: I64

    @classmethod
    def cut(
        cls,
        plan: StepPlan,
        reach: int,
        causal: bool,
        most_queries: int,
        *,
        spans: bool = False,
    ) -> QueryTiles:
        """Every query token of the step once, at most `most_queries` of a row together. `reach`:
        see `AttentionSpec.reach`. `spans`: tokens see up to `StepPlan.visible_to`."""
        start = plan.query_start.astype(np.int64)
        counts = -(-np.diff(start) // most_queries)  # (R,) tiles of each row
        row = np.repeat(np.arange(plan.num_rows), counts)
        index = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        first_token = start[row] + index * most_queries
        queries = np.minimum(most_queries, start[row + 1] - first_token)
        first_key = np.maximum(0, first_seen(plan.positions[first_token].astype(np.int64), reach))
        last_key = plan.context_len[row].astype(np.int64) - 1
        if causal:
            seen = plan.visible_to if spans else None
            seen = plan.positions if seen is None else seen
            last_key = seen[first_token + queries - 1].astype(np.int64)
        return cls(row, first_token, queries, first_key, last_key)

    def take(self, chosen: I64) -> QueryTiles:
        return QueryTiles(
            self.row[chosen],
            self.first_token[chosen],
            self.queries[chosen],
            self.first_key[chosen],
            self.last_key[chosen],
        )

    def __len__(self) -> int:
        return len(self.row)

    @property
    def longest(self) -> int:
        """Keys of the tile that has most."""
        return int((self.last_key - self.first_key).max()) + 1

    def tokens(self) -> I64:
        """All tokens of the first tile, then of the next one, as indices into the step's T."""
        ends = np.cumsum(self.queries)
        found: I64 = np.arange(ends[-1]) + np.repeat(
            self.first_token - ends + self.queries, self.queries
        )
        return found

    def groups(
        self, most_keys: int, *, padding: float = math.inf, slack: int = 0
    ) -> list[QueryTiles]:
        """Groups of tiles with equally many queries and about as many keys. The keys of a group,
        all its tiles padded to the longest, stay below `most_keys` unless it is a single tile, and
        below `padding` times its tiles' own keys plus `slack` for each tile."""
        lengths = self.last_key - self.first_key + 1
        order = np.lexsort((lengths, self.queries))
        groups: list[QueryTiles] = []
        start, keys = 0, 0
        for end, tile in enumerate(order):
            width, length = end + 1 - start, int(lengths[tile])
            same = self.queries[tile] == self.queries[order[start]]
            allowed = min(most_keys, padding * (keys + length) + slack * width)
            if end > start and not (same and width * length <= allowed):
                groups.append(self.take(np.sort(order[start:end])))
                start, keys = end, 0
            keys += length
        if len(order):
            groups.append(self.take(np.sort(order[start:])))
        return groups
