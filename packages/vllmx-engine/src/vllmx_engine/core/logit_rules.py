"""A request's changes to its logits besides temperature: bans, biases, masks, penalties."""

from __future__ import annotations

import copy
from array import array
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from vllmx_core.errors import InvalidRequestError
from vllmx_core.plan import I32, U32

from vllmx_engine.wire.messages import CoreRequest

_BANNED = float("-inf")
_PIECE = 1 << 13
_ZERO = array("i", [0])


class LogitRules:
    """Edits, mask and token counts of one sequence; made only for requests that need them.

    Raises (constructor): InvalidRequestError when none of the allowed tokens can come first.
    """

    __slots__ = (
        "_counts",
        "_fixed",
        "_fixed_arrays",
        "_prompt",
        "has_edits",
        "mask",
        "min_tokens",
        "phrases",
        "stop_ids",
    )

    def __init__(self, request: CoreRequest, vocab_size: int) -> None:
        params = request.params
        words = [
            word
            for word in request.bad_words_ids
            if word and min(word) >= 0 and max(word) < vocab_size
        ]
        self._fixed = dict(params.logit_bias) | {word[0]: _BANNED for word in words if not word[1:]}
        self._fixed_arrays = _edit_arrays(self._fixed)
        self.phrases: dict[int, list[tuple[array[int], int]]] = {}
        """Bad words of several tokens, by the last but one: after all but the last one, the last
        is banned."""
        for *prefix, last in words:
            if prefix:
                self.phrases.setdefault(prefix[-1], []).append((array("i", prefix), last))
        self.min_tokens = params.min_tokens
        self.stop_ids = [token for token in request.stop_ids if 0 <= token < vocab_size]
        self.mask = _bitset(params.allowed_token_ids, vocab_size)
        self._prompt = PromptIds(request, vocab_size) if params.needs_counts else None
        self._counts: Counts | None = None
        _check_allowed(params.allowed_token_ids, dict(zip(*self.edits(array("i"), 0), strict=True)))
        bans_stops = self.min_tokens > 0 and bool(self.stop_ids)
        self.has_edits = bool(self._fixed) or bool(self.phrases) or bans_stops

    def of_another_choice(self) -> LogitRules:
        """The rules of a request with the same prompt and parameters: only the counts are its
        own."""
        other = copy.copy(self)
        other._counts = None
        return other

    @property
    def counts(self) -> Counts | None:
        """The counts of tokens for penalties. They are made as the first token is drawn, since a
        long prompt takes a while, and by then the device has more to do than the host."""
        if self._counts is None and self._prompt is not None:
            self._counts = Counts(self._prompt.distinct())
        return self._counts

    def edits(
        self, tokens: array[int], num_generated: int, draft: Sequence[int] = ()
    ) -> tuple[array[int], array[float]]:
        """Ids, each once, and additions to their logits, for token number `num_generated` of the
        output. Where there are phrases, `tokens` and then `draft` are all tokens before it."""
        more: dict[int, float] = {}
        if num_generated < self.min_tokens:
            more = dict.fromkeys(self.stop_ids, _BANNED)
        if self.phrases and draft:
            longest = max(len(prefix) for found in self.phrases.values() for prefix, _ in found)
            tokens = tokens[-longest:] + array("i", draft)
        if self.phrases and num_generated:
            for prefix, last in self.phrases.get(tokens[-1], ()):
                size = len(prefix)
                if size <= num_generated and tokens[-size:] == prefix:
                    more[last] = _BANNED
        return _edit_arrays(self._fixed | more) if more else self._fixed_arrays


class PromptIds:
    """The ids of a prompt, each once, for all choices of a call."""

    __slots__ = ("_distinct", "_request", "_vocab_size")

    def __init__(self, request: CoreRequest, vocab_size: int) -> None:
        self._request = request
        self._vocab_size = vocab_size
        self._distinct: array[int] | None = None

    def distinct(self) -> array[int]:
        """Ascending; found when first asked for."""
        if self._distinct is None:
            self._distinct = _distinct(self._request.prompt_ids, self._vocab_size)
        return self._distinct


class Counts:
    """The count of each id, for the penalties; grows by one token at a time.

    Args:
        in_prompt: ids of the prompt, ascending, each once; copied.
    """

    __slots__ = ("_index", "_num_in_prompt", "ids", "output_counts")

    def __init__(self, in_prompt: array[int]) -> None:
        self._num_in_prompt = len(in_prompt)
        self._index: dict[int, int] = {}
        """The places of generated ids in `ids`."""
        self.ids = in_prompt[:]
        self.output_counts = _ZERO * len(in_prompt)
        """The count of each of `ids` in the output (0: in the prompt alone)."""

    def copy(self) -> Counts:
        """A copy, which counts on its own."""
        other = Counts.__new__(Counts)  # copy.copy takes longer than all else here
        other._num_in_prompt, other._index = self._num_in_prompt, dict(self._index)
        other.ids, other.output_counts = self.ids[:], self.output_counts[:]
        return other

    def add(self, token: int) -> None:
        """Counts a generated token."""
        index = self._index.get(token)
        if index is None:
            index = self._index[token] = self._place(token)
        self.output_counts[index] += 1

    def _place(self, token: int) -> int:
        """The place of an id that was not generated before."""
        place = bisect_left(self.ids, token, 0, self._num_in_prompt)
        if place < self._num_in_prompt and self.ids[place] == token:
            return place
        self.ids.append(token)
        self.output_counts.append(0)
        return len(self.ids) - 1


def _distinct(ids: I32, vocab_size: int) -> array[int]:
    """Each of the ids once, ascending."""
    seen = np.zeros(vocab_size, np.bool_)
    for start in range(0, ids.size, _PIECE):  # a copy of all as indices would cost more than this
        seen[ids[start : start + _PIECE].astype(np.intp)] = True
    return array("i", np.flatnonzero(seen).astype(np.int32).tobytes())


def make_rules(request: CoreRequest, vocab_size: int) -> LogitRules | None:
    """None for the usual request, which leaves its logits alone."""
    params = request.params
    if (
        params.logit_bias
        or request.bad_words_ids
        or params.min_tokens
        or params.allowed_token_ids is not None
        or params.needs_counts
    ):
        return LogitRules(request, vocab_size)
    return None


def _edit_arrays(edits: dict[int, float]) -> tuple[array[int], array[float]]:
    """ids and values of one row."""
    return array("i", edits.keys()), array("f", edits.values())


def _check_allowed(allowed: tuple[int, ...] | None, edits: dict[int, float]) -> None:
    """`edits` of the first token."""
    if allowed is not None and all(edits.get(token) == _BANNED for token in allowed):
        raise InvalidRequestError(
            "nothing can be generated: all allowed_token_ids are bad_words or, with min_tokens, end"
            " the sequence; allow at least one other id",
            param="allowed_token_ids",
        )


def _bitset(ids: tuple[int, ...] | None, vocab_size: int) -> U32 | None:
    """(W,) words with bit (id & 31) of word id >> 5 set."""
    if ids is None:
        return None
    bits = np.zeros((vocab_size + 31) // 32 * 32, np.bool_)
    bits[list(ids)] = True
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)
