"""What one request does to its logits besides scaling them: bans, biases, masks, penalties."""

from __future__ import annotations

from array import array

import numpy as np
from vllmx_core.plan import F32, I32, U32

from vllmx_engine.messages import CoreRequest

_BANNED = float("-inf")


class LogitRules:
    """Edits, mask and token counts of one sequence; made only for requests that need them."""

    __slots__ = ("counts", "fixed", "mask", "min_tokens", "phrases", "stop_ids")

    def __init__(self, request: CoreRequest, vocab_size: int) -> None:
        params = request.params
        words = [word for word in request.bad_words_ids if word and max(word) < vocab_size]
        edits = dict(params.logit_bias) | {word[0]: _BANNED for word in words if len(word) == 1}
        self.fixed: dict[int, float] = edits
        self.phrases = [(array("i", word[:-1]), word[-1]) for word in words if len(word) > 1]
        """Bad words of several tokens: after the first ones the last is banned."""
        self.min_tokens = params.min_tokens
        self.stop_ids = [token for token in request.stop_ids if token < vocab_size]
        self.mask = _bitset(params.allowed_token_ids, vocab_size)
        self.counts = Counts(request.prompt_ids) if params.needs_counts else None

    @property
    def has_edits(self) -> bool:
        return bool(self.fixed or self.phrases or (self.min_tokens and self.stop_ids))

    @property
    def tail(self) -> int:
        """Newest output tokens that `edits` must see."""
        return max((len(prefix) for prefix, _ in self.phrases), default=0)

    def edits(self, output: array[int], num_generated: int) -> dict[int, float]:
        """Additions to the logits of token number `num_generated` of the output; `output` ends with
        the `tail` tokens before it."""
        edits = self.fixed
        if num_generated < self.min_tokens:
            edits = edits | dict.fromkeys(self.stop_ids, _BANNED)
        for prefix, last in self.phrases:
            if output[-len(prefix) :] == prefix:
                edits = edits | {last: _BANNED}
        return edits


class Counts:
    """How often each id occurred, for the penalties; grows by one token at a time."""

    __slots__ = ("_counts", "_ids", "_index")

    def __init__(self, prompt_ids: list[int]) -> None:
        self._index = {token: i for i, token in enumerate(dict.fromkeys(prompt_ids))}
        self._ids = np.zeros(len(self._index) + 64, np.int32)
        self._ids[: len(self._index)] = list(self._index)
        self._counts = np.zeros(self._ids.size, np.int32)

    def add(self, token: int) -> None:
        """Counts a generated token."""
        index = self._index.setdefault(token, len(self._index))
        if index == self._ids.size:
            room = np.zeros(index, np.int32)
            self._ids = np.concatenate([self._ids, room])
            self._counts = np.concatenate([self._counts, room])
        self._ids[index] = token
        self._counts[index] += 1

    def arrays(self) -> tuple[I32, I32]:
        """Views of the ids and of how often each was generated (0: in the prompt alone)."""
        size = len(self._index)
        return self._ids[:size], self._counts[:size]


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


def edit_arrays(edits: dict[int, float]) -> tuple[I32, F32]:
    """ids and values of one row."""
    return (
        np.fromiter(edits.keys(), np.int32, len(edits)),
        np.fromiter(edits.values(), np.float32, len(edits)),
    )


def _bitset(ids: tuple[int, ...] | None, vocab_size: int) -> U32 | None:
    """(W,) words with bit (id & 31) of word id >> 5 set."""
    if ids is None:
        return None
    bits = np.zeros((vocab_size + 31) // 32 * 32, np.bool_)
    bits[list(ids)] = True
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)
