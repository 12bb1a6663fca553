"""The running sequences as a table of arrays, one row each, so that a step is prepared by numpy."""

from __future__ import annotations

import heapq
from array import array
from operator import attrgetter
from struct import Struct
from typing import Any

import numpy as np
from vllmx_core.plan import I32, MAX_LISTED_LOGPROBS, AnyArray

from vllmx_engine.core.adapters import AdapterPool
from vllmx_engine.core.limits import Limits
from vllmx_engine.core.sequence import Sequence

FLOAT_DEFAULTS = {
    "temperature": 0.0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
}
"""Parameters of a logit row that scores a prompt token: greedy, all else off."""
FLOAT_FIELDS = tuple(FLOAT_DEFAULTS)
"""Columns of `RowTable.floats`, by their names in SamplingParams and SamplingRows."""
_floats = attrgetter(*FLOAT_FIELDS)
_SAMPLING = np.dtype(
    [
        ("floats", np.float32, len(FLOAT_FIELDS)),
        ("top_k", np.int32),
        ("num_logprobs", np.int32),
        ("seed", np.uint64),
    ]
)
_write_sampling = Struct(f"={len(FLOAT_FIELDS)}fiiQ").pack_into
_MAX_STOPS = 4
"""Stop ids of a row that are looked for by numpy; few have more."""
_NEVER = np.int32(2**31 - 1)


class RowTable:
    """State of each running sequence. N rows; free ones are never ready.

    Between steps, row r has `computed[r]` tokens in the KV cache (or on their way there). While it
    decodes, `last_token[r]` is the token to feed next, at position `computed[r]`: its id, or the
    reference -(i + 1) when logit row i of step `sampled_in[r]` has still to bring it.

    A row has a block table in each of G cache groups. In a group without a window it owns blocks
    0 ... num_blocks - 1, in one with a window first ... num_blocks - num_ahead - 1.
    """

    def __init__(
        self,
        num_rows: int,
        max_blocks: int,
        block_size: int,
        windows: tuple[int | None, ...] = (None,),
        num_stages: int = 1,
    ) -> None:
        self.block_size = block_size
        self.num_stages = num_stages
        self.last_collected = -1
        """Number of the last step whose results are known, or that failed."""
        self.windows = windows
        self.blocks = np.zeros((len(windows), num_rows, max_blocks), np.int32)  # (G, N, B)
        self.num_blocks = np.zeros(num_rows, np.int32)
        self.first = np.zeros((len(windows), num_rows), np.int32)
        """The first block that a row owns in each group; those before it fell out of the window."""
        self.num_ahead = np.zeros(num_rows, np.int32)
        """The last so many blocks of a prompt have no memory yet in groups with a window."""
        self.has_gaps = np.zeros(num_rows, np.bool_)
        """A window let blocks go that were not filed."""
        self.computed = np.zeros(num_rows, np.int32)
        self.feed_end = np.zeros(num_rows, np.int32)
        """Decoding goes on while computed < feed_end; 0 for rows that do not decode, and free
        ones; negative while a draft is verified."""
        self.last_token = np.zeros(num_rows, np.int32)
        self.sampled_in = np.zeros(num_rows, np.int64)
        self.num_cached = np.zeros(num_rows, np.int32)
        """Blocks that are in the prefix cache."""
        self.waits = np.zeros(num_rows, np.bool_)
        """True if the row's next token depends on the tokens before it: the host must know the last
        one before it sends the row's parameters, but not before its forward pass begins."""
        self.is_simple = np.zeros(num_rows, np.bool_)
        """True for rows without rules, a grammar or log-probabilities, and with few stop ids."""
        self.stop_ids = np.full((_MAX_STOPS, num_rows), -1, np.int32)
        """The stop ids of simple rows; -1: a row has fewer."""
        self.epoch = np.zeros(num_rows, np.int64)
        """Grows with each release, so that late results do not meet a row's next owner."""
        self.turn = np.zeros(num_rows, np.int32)
        """The offset that rotations add to the position of each decoded token."""
        self.turn_axes = 0
        self.num_turned = 0
        """Rows whose rotations do not follow positions."""
        self.cross = np.zeros((num_rows, 2), np.int32)
        """The rows of the feature store that each row's cross-attention reads, see `StepPlan`."""
        self.adapters: AdapterPool | None = None
        """Set where rows may use adapters."""
        self.adapter = np.full(num_rows, -1, np.int32)
        """The slot of each row's adapter; -1: it has none."""
        self.num_adapted = 0
        """Rows that have one."""
        self.client = np.zeros(num_rows, np.int32)
        self.rank = np.zeros(num_rows, np.int32)
        """The priority that was asked for; a smaller one is served first."""
        self._sampling = bytearray(num_rows * _SAMPLING.itemsize)
        """The sampling parameters of a row lie side by side, so that one call writes them."""
        sampling = np.frombuffer(self._sampling, _SAMPLING)
        self.floats = sampling["floats"]  # (N, fields)
        self.top_k = sampling["top_k"]
        self.seed = sampling["seed"]
        self.num_logprobs = sampling["num_logprobs"]
        self.owner: list[Sequence | None] = [None] * num_rows
        self.version = 0
        """Grows with each admission and release."""
        self._free = list(range(num_rows))
        self._high = 0
        self._num_waits = 0

    @classmethod
    def of(cls, limits: Limits) -> RowTable:
        """A table for all rows that may run."""
        size = limits.block_size
        blocks = -(-limits.max_tokens // size)
        return cls(limits.max_rows, blocks, size, limits.windows, limits.num_stages)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def owners(self, rows: AnyArray) -> list[Sequence]:
        """The sequences of rows that are in use."""
        owner: list[Any] = self.owner
        return [owner[row] for row in rows.tolist()]

    def stops(self, rows: AnyArray, ids: I32) -> AnyArray:
        """(R,) True for simple rows with a stop id among their `ids` (R, any)."""
        hits = self.stop_ids[:, None, rows] == ids.T  # (stop ids, any, R)
        found: AnyArray = hits.any((0, 1))
        return found

    def ready(self) -> AnyArray:
        """Rows that can decode one token now, ascending."""
        high = self._high
        rows = (self.computed[:high] < self.feed_end[:high]).nonzero()[0]
        return rows if self.num_stages == 1 else self._of_one_stage(rows)

    def _of_one_stage(self, rows: AnyArray) -> AnyArray:
        """Returns one stage's share of the decoding rows with a known last token: as many as each
        stage gets when all get equally many, the longest waiting first."""
        known = rows[self.last_token[rows] >= 0]
        most = -(-rows.size // self.num_stages)
        if known.size > most:
            oldest = np.argsort(self.sampled_in[known], kind="stable")[:most]
            known = np.sort(known[oldest])
        return known

    def must_wait(self, sequence: Sequence) -> bool:
        """True if a step in flight still brings a token of a sequence that has lost its row, or if
        there is no slot for its adapter."""
        if sequence.awaited_step > self.last_collected:
            return True
        return self.adapters is not None and not self.adapters.has_slot(sequence.adapter)

    def wait_for_ids(self, rows: AnyArray) -> bool:
        """True if one of these rows waits for an id of a step in flight."""
        if not self._num_waits:
            return False
        return bool((self.waits[rows] & (self.last_token[rows] < 0)).any())

    def admit(self, sequence: Sequence, client: int, num_cached_blocks: int) -> None:
        """Gives a sequence the lowest free row, of which so many first blocks are cached ones;
        the caller fills in the blocks."""
        row = heapq.heappop(self._free)
        self._high = max(self._high, row + 1)
        self.version += 1
        self.owner[row] = sequence
        sequence.row = row
        self.computed[row] = num_cached_blocks * self.block_size
        self.num_cached[row] = num_cached_blocks
        self.client[row] = client
        self.waits[row] = waits = sequence.needs_last_token
        self._num_waits += waits
        if sequence.images is not None and sequence.images.turns is not None:
            self.turn[row] = sequence.images.turns.offset
            self.turn_axes = sequence.images.turns.known.shape[0]
            self.num_turned += 1
        if self.adapters is not None and sequence.adapter is not None:
            self.adapter[row] = self.adapters.take(sequence.adapter)
            self.num_adapted += 1
        request, params = sequence.request, sequence.request.params
        num_logprobs = -1 if params.logprobs is None else params.logprobs
        if params.logprob_token_ids:
            num_logprobs = MAX_LISTED_LOGPROBS + 1  # so that its logits come back whole
        at, values = row * _SAMPLING.itemsize, _floats(params)
        _write_sampling(self._sampling, at, *values, params.top_k, num_logprobs, request.seed)
        stops, is_ruled = list(sequence.stop_ids), sequence.rules or request.grammar
        is_simple = not is_ruled and params.logprobs is None and len(stops) <= _MAX_STOPS
        self.is_simple[row] = is_simple
        if is_simple:
            self.stop_ids[:, row] = stops + [-1] * (_MAX_STOPS - len(stops))

    def release(self, sequence: Sequence) -> I32:
        """Takes the row back; returns the blocks it owned, in order."""
        row = sequence.row
        if self.last_token[row] < 0:
            sequence.awaited_step = int(self.sampled_in[row])
            self.last_token[row] = 0
        blocks = self.owned(row)
        heapq.heappush(self._free, row)
        self.version += 1
        self.epoch[row] += 1
        self.owner[row] = None
        self.feed_end[row] = 0
        self.num_blocks[row] = self.num_ahead[row] = self.first[:, row] = 0
        self.has_gaps[row] = False
        self._num_waits -= int(self.waits[row])
        if sequence.images is not None and sequence.images.turns is not None:
            self.turn[row] = 0
            self.num_turned -= 1
        if self.adapters is not None and sequence.adapter is not None:
            self.adapters.leave(int(self.adapter[row]))
            self.adapter[row] = -1
            self.num_adapted -= 1
        while self._high and self.owner[self._high - 1] is None:
            self._high -= 1
        sequence.row = -1
        return blocks

    def start_decoding(self, sequence: Sequence) -> None:
        """Feeds a sequence from now on what it samples: its last known token was scheduled."""
        self.feed_end[sequence.row] = sequence.limit - 1

    def pause(self, row: int) -> None:
        """It does not decode until `start_decoding`."""
        self.feed_end[row] = 0

    def feed_known(self, row: int) -> None:
        """Feeds a row its known next tokens: it does not decode until the last of them is
        scheduled."""
        self.feed_end[row] = 0
        self.sampled_in[row] = -1

    def await_draft(self, rows: AnyArray, computed: AnyArray) -> None:
        """Rows that verify drafts in the step that was just built: what it computes of them is not
        known, so they do not decode until `resume_all`."""
        self.computed[rows] = computed
        self.feed_end[rows] *= -1

    def resume_all(self, rows: AnyArray, computed: AnyArray, tokens: AnyArray) -> None:
        """Rows decode again after `await_draft`. Sets the numbers of their computed tokens and the
        tokens to feed next."""
        self.computed[rows] = computed
        self.last_token[rows] = tokens
        self.sampled_in[rows] = -1
        self.feed_end[rows] *= -1

    def give_up_draft(self, row: int, token: int) -> None:
        """Takes back all that a step with a draft brings of a row: it is fed its last known token
        again after `start_decoding`."""
        self.last_token[row] = token
        self.sampled_in[row] = -1
        self.feed_end[row] = 0

    def take_back(self, row: int, token: int) -> None:
        """Takes the step's token back that a row's last known one brings: it is fed that one again
        after `start_decoding`."""
        self.computed[row] -= 1
        self.last_token[row] = token
        self.sampled_in[row] = -1
        self.feed_end[row] = 0

    def skip_caching(self, row: int) -> None:
        """Leaves the row's blocks out of the prefix cache."""
        self.num_cached[row] = _NEVER

    def owned(self, row: int) -> I32:
        """The blocks of a row by the tokens that they hold, those of all groups side by side."""
        end = int(self.num_blocks[row])
        if self.windows == (None,):
            return self.blocks[0, row, :end].copy()
        index = np.arange(end, dtype=np.int32)[:, None]  # (B, 1)
        has_window = np.array([window is not None for window in self.windows])
        ends = np.where(has_window, end - self.num_ahead[row], end)
        held = (index >= self.first[:, row]) & (index < ends)  # (B, G)
        blocks: I32 = self.blocks[:, row, :end].T[held]
        return blocks

    def num_owned(self, rows: AnyArray | list[int]) -> int:
        """Returns the number of blocks that `owned` lists for all these rows; shared ones count for
        each."""
        num_windows = sum(window is not None for window in self.windows)
        total = len(self.windows) * int(self.num_blocks[rows].sum())
        if num_windows:
            total -= num_windows * int(self.num_ahead[rows].sum())
            total -= int(self.first[:, rows].sum())
        return total


def known_tokens(sequence: Sequence, start: int, end: int) -> I32:
    """(end - start,) ids of a part of a sequence that the host has seen."""
    part: array[int] = sequence.tokens[start:end]
    return np.frombuffer(part, np.int32)
