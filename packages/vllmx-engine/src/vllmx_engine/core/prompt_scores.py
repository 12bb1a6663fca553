"""Log-probabilities of prompts, kept with the cached blocks of their tokens.

A request with `prompt_logprobs` may begin behind a cached prefix only if the log-probabilities of
its tokens are known. A block's record holds those of the tokens that follow each of its own, so
the last one is of the next block's first token: the record serves no prompt that goes on with
another token. It is forgotten with its block, and stays behind when the block moves to a lower
tier.
"""

from __future__ import annotations

from collections.abc import Sequence as List

import msgspec
from vllmx_core.plan import MAX_LISTED_LOGPROBS

from vllmx_engine.core.prefix_cache import BlockScores, PrefixCache
from vllmx_engine.core.sequence import Sequence
from vllmx_engine.wire.messages import TokenLogprobs

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(list[TokenLogprobs])


class PromptScores:
    """Finds and files the records of blocks of `size` tokens."""

    def __init__(self, cache: PrefixCache, size: int) -> None:
        self._cache, self._size = cache, size

    def is_known(self, sequence: Sequence, index: int, digest: bytes) -> bool:
        """True if the tokens behind those of a sequence's block need no logits."""
        found = self._cache.scores.get(digest)
        if found is None or found.num_logprobs < (sequence.request.params.prompt_logprobs or 0):
            return False
        return found.next_token == sequence.tokens[(index + 1) * self._size]

    def take(self, sequence: Sequence, num_blocks: int) -> None:
        """Gives a sequence that is admitted with a hit the log-probabilities of its tokens."""
        if sequence.all_scored or sequence.num_scored >= num_blocks * self._size:
            return
        count = sequence.request.params.prompt_logprobs or 0
        for digest in sequence.digests[:num_blocks]:
            for entry in _DECODER.decode(self._cache.scores[digest].entries):
                ids, values = entry.top_ids[:count], entry.top_logprobs[:count]
                cut = TokenLogprobs(entry.token, entry.logprob, entry.rank, ids, values)
                sequence.found_scores.append(cut)
        sequence.num_scored = num_blocks * self._size

    def file(self, sequence: Sequence, start: int, entries: List[TokenLogprobs]) -> None:
        """Keeps the log-probabilities of the tokens behind `start` and the next ones, for each
        block that is complete and cached."""
        count, rows, size = sequence.request.params.prompt_logprobs, sequence.new_scores, self._size
        if count is None or not 0 <= count <= MAX_LISTED_LOGPROBS:
            return  # with the whole vocabulary, a record would be larger than its block
        first = (start - len(rows)) // size
        rows += entries
        for index in range(first, first + len(rows) // size):
            part = rows[:size]
            del rows[:size]
            if index >= len(sequence.digests):
                continue  # it was preempted before its blocks were filed
            entry = sequence.entry_of(index, size)
            before = self._cache.scores.get(entry[0])
            if self._cache.find(*entry) is None or (before and before.num_logprobs > count):
                continue
            packed = _ENCODER.encode(part)
            self._cache.scores[entry[0]] = BlockScores(count, part[-1].token, packed)
