"""The rules of a transcription: tokens that never come, and timestamps in pairs that never fall."""

from __future__ import annotations

from collections.abc import Generator

import numpy as np
from vllmx_core.plan import U32

from vllmx_engine.core.grammar_rows import MaskFill
from vllmx_engine.wire.grammars import SpeechRules

_ALL = np.uint32(0xFFFFFFFF)


class SpeechRow:
    """A row under Whisper's rules (arXiv 2212.04356, section 3.8), in place of a `GrammarRow`."""

    __slots__ = ("_bits", "_first", "_last", "_num_tokens", "_rules", "_stamps", "paused_step")

    is_slow = is_free = has_ended = False
    """See `GrammarRow`."""

    def __init__(self, rules: SpeechRules, vocab_size: int) -> None:
        self._rules = rules
        self._bits = np.ones((vocab_size + 31) // 32 * 32, np.bool_)
        self._bits[vocab_size:] = False
        self._bits[[one for one in rules.never if one < vocab_size]] = False
        self._first = [one for one in rules.not_first if one < vocab_size]
        self._num_tokens = 0
        self._last = -1
        """The last timestamp."""
        self._stamps = (True, False)
        """The last two tokens are timestamps, the last but one first."""
        self.paused_step = -1

    @property
    def group_from(self) -> int:
        """See `SamplingRows.group_from`."""
        return self._rules.first_timestamp

    def accept(self, token: int) -> bool:
        is_stamp = 0 <= self._rules.first_timestamp <= token
        self._num_tokens += 1
        self._stamps = (self._stamps[1] if self._num_tokens > 1 else True, is_stamp)
        if is_stamp:
            self._last = token
        return False

    def forced_tokens(self) -> list[int]:
        return []

    def num_draftable(self, ids: list[int]) -> int:
        """See `GrammarRow`: each mask depends on the token before it."""
        return 0

    def next_fill(self) -> MaskFill | None:
        return None

    def masks_behind(self, draft: list[int], masks: list[U32]) -> Generator[U32]:
        for mask in masks[:1]:
            self.fill_mask(mask)
            yield mask

    def fill_mask(self, mask: U32) -> None:
        bits = self._bits.copy()
        if not self._num_tokens:
            bits[self._first] = False
        if self._rules.first_timestamp >= 0:
            self._allow_stamps(bits)
        mask[:] = np.packbits(bits, bitorder="little").view("<u4")

    def _allow_stamps(self, bits: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> None:
        rules, first = self._rules, self._rules.first_timestamp
        if not self._num_tokens:
            bits[:first] = False
            bits[first + rules.most_initial + 1 :] = False
            return
        last_but_one, last = self._stamps
        if last and last_but_one:
            bits[first:] = False  # a pair is followed by text
        elif last:
            bits[: rules.end_id] = False  # one that ends a segment, by another one or the end
        if self._last >= 0:  # a segment may begin where the last one ended, but not end there
            begins = last and not last_but_one
            bits[first : self._last + (0 if begins else 1)] = False
