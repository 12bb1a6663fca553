"""Drafters that guess a row's next tokens from texts that it has seen, without a model."""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol, runtime_checkable

import numpy as np
from vllmx_core.plan import I32, AnyArray
from vllmx_core.records import MutableRecord, Record

from vllmx_engine.core.sequence import Sequence

_LEAST_MATCH = 2
"""Tokens that must agree."""
_LONGEST_MATCH = 16
"""Tokens of a match; longer ones do not predict better."""
_MAX_CANDIDATES = 64
"""Earlier places that vote on what follows, the latest ones."""
_KEPT_TOKENS = 1 << 15
"""Tokens of ended answers that are kept for each key."""
_MAX_KEYS = 64
_GAP = np.array([-1], np.int32)
"""Separates texts: no match reaches across it, and no draft."""


class Guess(Record, gc=False):
    """Tokens that may come next."""

    ids: list[int]
    shares: list[float] | None = None
    """The share of the candidates that agree with the guess up to each token; None: 1."""


class Drafter(Protocol):
    """Guesses tokens on the core's thread, in microseconds."""

    def guess(self, sequence: Sequence, most: int) -> Guess:
        """Returns at most `most` tokens that may follow the known tokens of a sequence."""
        ...

    def ended(self, sequence: Sequence) -> None:
        """Learns from an answer that is complete."""
        ...


class Drafts(MutableRecord):
    """Draft tokens of a step: D rows with at most K each."""

    sequences: list[Sequence]  # D of them
    index: AnyArray  # (D,) places of the rows among the decodes of the step, ascending
    rows: AnyArray  # (D,) rows of the table
    lengths: I32  # (D,) known tokens of the sequences
    counts: AnyArray  # (D,) draft tokens
    ids: I32  # (D, K), negative where a model has still to draw it

    @property
    def is_draft(self) -> AnyArray:
        """(D, K) True for entries that are draft tokens."""
        return np.arange(self.ids.shape[1]) < self.counts[:, None]

    @property
    def num_tokens(self) -> int:
        return int(self.counts.sum())

    def ids_of(self, number: int) -> list[int]:
        """The draft tokens of one row."""
        ids: list[int] = self.ids[number, : self.counts[number]].tolist()
        return ids

    def cut(self, counts: AnyArray) -> None:
        """Keeps at most so many tokens of each draft."""
        self.counts = np.minimum(self.counts, counts)

    def part(self, numbers: AnyArray) -> Drafts:
        """A copy of some drafts, in this order."""
        arrays = (self.index, self.rows, self.lengths, self.counts, self.ids)
        sequences = [self.sequences[number] for number in numbers.tolist()]
        return Drafts(sequences, *(array[numbers] for array in arrays))

    def put_back(self, numbers: AnyArray, part: Drafts) -> None:
        """Takes the tokens over of what `part` returned."""
        self.ids[numbers], self.counts[numbers] = part.ids, part.counts

    def without_empty(self) -> Drafts:
        """Drafts that have a token."""
        return self if self.counts.all() else self.part(np.flatnonzero(self.counts))


@runtime_checkable
class DraftsByModel(Protocol):
    """A drafter that fills the drafts of all rows of a step at once."""

    def longest(self, lengths: I32) -> AnyArray:
        """(D,) the most tokens that it drafts behind so many known ones."""
        ...

    def ended(self, sequence: Sequence) -> None: ...

    @property
    def step_s(self) -> float:
        """Seconds of a step that drafts one token for each row."""
        ...

    @property
    def has_failed(self) -> bool:
        """True once it failed too often to be asked again."""
        ...

    def fill(self, drafts: Drafts) -> None:
        """Sets the ids of drafts; there may be fewer."""
        ...

    def verified(self, sequences: list[Sequence]) -> None:
        """Learns that sequences have the draft tokens that were kept."""
        ...


class NgramDrafter:
    """Copies what followed the latest of the longest earlier matches of the last tokens, in the
    prompt, the answer and the request's prediction (prompt look-up decoding, Saxena 2023)."""

    def guess(self, sequence: Sequence, most: int) -> Guess:
        """See `Drafter`."""
        context = _context(sequence)
        starts = match_ends(context, _LEAST_MATCH)
        if starts.size:
            return Guess(_following(context, int(starts[-1]), most))
        return Guess(_begun_prediction(sequence, most))

    def ended(self, sequence: Sequence) -> None:
        """See `Drafter`."""


class SuffixDrafter:
    """Lets all longest earlier matches vote on each next token. They are looked for in the prompt,
    the answer, the prediction and recent answers to the same client and cache salt (as suffix
    decoding does with trees, Oliaro et al. 2024)."""

    def __init__(self) -> None:
        self._answers: OrderedDict[tuple[str, str], I32] = OrderedDict()

    def guess(self, sequence: Sequence, most: int) -> Guess:
        """See `Drafter`."""
        context = _context(sequence)
        past = self._answers.get(_key(sequence))
        if past is not None:
            context = np.concatenate([past, context])
        starts = match_ends(context, _LEAST_MATCH)
        if starts.size:
            return _vote(context, starts[-_MAX_CANDIDATES:], most)
        return Guess(_begun_prediction(sequence, most))

    def ended(self, sequence: Sequence) -> None:
        """See `Drafter`."""
        answer = np.array(sequence.tokens[sequence.num_prompt :], np.int32)
        if not answer.size:
            return
        key = _key(sequence)
        past = self._answers.pop(key, _GAP)
        self._answers[key] = np.concatenate([past, answer, _GAP])[-_KEPT_TOKENS:]
        if len(self._answers) > _MAX_KEYS:
            self._answers.popitem(last=False)


def _key(sequence: Sequence) -> tuple[str, str]:
    return sequence.request.client, sequence.request.cache_salt


def _context(sequence: Sequence) -> I32:
    """(n,) the prediction, a gap, then all known tokens."""
    known = np.array(sequence.tokens, np.int32)
    prediction = sequence.request.prediction
    if not prediction:
        return known
    return np.concatenate([np.frombuffer(prediction, np.int32), _GAP, known])


def match_ends(context: I32, least: int) -> AnyArray:
    """The places behind the longest earlier matches of the last tokens of `context` (n,),
    ascending; none where fewer than `least` tokens agree."""
    last = context.size - 1
    ends = np.flatnonzero(context[:last] == context[last])
    for back in range(1, _LONGEST_MATCH):
        kept = ends[ends >= back]
        if back <= last and context[last - back] >= 0:
            kept = kept[context[kept - back] == context[last - back]]
        else:
            kept = kept[:0]
        if not kept.size:
            return ends + 1 if back >= least else ends[:0]
        ends = kept
    return ends + 1


def _following(context: I32, start: int, most: int) -> list[int]:
    """The tokens from `start` on. Where they reach the end of the context, the text repeats
    itself, and so does the guess."""
    found = context[start : start + most]
    gaps = np.flatnonzero(found < 0)
    if gaps.size:
        found = found[: gaps[0]]
    elif found.size < most:
        found = np.resize(context[start:], most)
    ids: list[int] = found.tolist()
    return ids


def _begun_prediction(sequence: Sequence, most: int) -> list[int]:
    """The next tokens of the prediction, if it begins with the answer so far."""
    prediction = np.frombuffer(sequence.request.prediction, np.int32)
    answer = sequence.tokens[sequence.num_prompt :]
    if not prediction.size or prediction[: len(answer)].tolist() != answer.tolist():
        return []
    ids: list[int] = prediction[len(answer) :][:most].tolist()
    return ids


def _vote(context: I32, places: AnyArray, most: int) -> Guess:
    """Takes the most frequent token at the places, then goes on with those that have it."""
    ids: list[int] = []
    shares: list[float] = []
    total = places.size
    while len(ids) < most:
        if places.size == 1:
            rest = _following(context, int(places[0]), most - len(ids))
            return Guess(ids + rest, shares + [1 / total] * len(rest))
        options, counts = np.unique(context[places], return_counts=True)
        best = int(counts.argmax())
        if options[best] < 0:
            break
        ids.append(int(options[best]))
        shares.append(int(counts[best]) / total)
        places = places[context[places] == options[best]] + 1
        places = places[places < context.size]
        if not places.size:
            break
    return Guess(ids, shares)
