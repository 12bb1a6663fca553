"""Chooses how many draft tokens each row's next step verifies.

A draft token is kept if and only if it is the token that the row's own draw at its place picks, so
drafts change how long an answer takes and never what it is. A row drafts as many tokens as pay:
those whose chance times their worth exceeds the time that they add to the step.
"""

from __future__ import annotations

import logging
from array import array
from itertools import chain, compress
from typing import Any

import numpy as np
from vllmx_core.config import MAX_DRAFT, EngineConfig
from vllmx_core.plan import I32, AnyArray
from vllmx_core.records import Record

from vllmx_engine.core.cost import StepCost, StepLoad
from vllmx_engine.core.drafters import (
    Drafter,
    Drafts,
    DraftsByModel,
    Guess,
    NgramDrafter,
    SuffixDrafter,
)
from vllmx_engine.core.rows import RowTable
from vllmx_engine.core.sequence import Sequence

logger = logging.getLogger("vllmx.draft")

_WEIGHT = 0.2
"""The weight of the newest step in a row's averages."""
_WEIGHTS = 1 - (1 - _WEIGHT) ** np.arange(MAX_DRAFT + 1)
"""The weight of so many draft tokens in the average share of right ones."""
_FIRST_CHANCE = 0.5
"""The chance of a draft token before any was verified."""
_LEAST_GAIN = 0.05
"""Tokens that each row must gain in a step before steps wait for their predecessors' tokens."""
_HOST_S = 1e-4
"""Seconds that the device then waits for the host, which must be gained as well."""
_MAX_LOOKS = 16
"""Rows whose guesses are compared with what comes while nothing is drafted."""
_COST_PERIOD = 16
"""Steps between two looks at the cost model, whose fit takes a tenth of a millisecond."""
_PROBE_PERIOD = 64
"""Steps without drafts after which a draft model tries again."""
_UNKNOWN_SHARE = 0.1
"""The share of a step that one more token takes while it was not measured."""


class Drafting(Record):
    """The source and the size of drafts."""

    drafter: Drafter | DraftsByModel | None = None
    """The drafter of all requests; None: only requests with a prediction draft."""
    num_tokens: int | None = None
    """Draft tokens of a row in each step; None: as many as pay."""


def drafting_of(config: EngineConfig) -> Drafting:
    """The drafting that a configuration asks for, but for a draft model."""
    tokens = config.speculate_tokens
    drafter: Drafter | None = None
    if config.speculate == "ngram":
        drafter = NgramDrafter()
    elif config.speculate in ("suffix", "auto"):
        drafter = SuffixDrafter()
    return Drafting(drafter, None if tokens == "auto" else int(tokens))


class _Guesses(Record):
    """Guesses for D rows, one behind the other."""

    sizes: I32  # (D,)
    ids: I32
    shares: AnyArray | None = None
    """`Guess.shares`, one for each of the ids."""


class Speculator:
    """Owned by the core's thread."""

    def __init__(
        self,
        table: RowTable,
        cost: StepCost,
        vocab_size: int,
        drafting: Drafting | None = None,
    ) -> None:
        self._table = table
        self._cost = cost
        self._vocab_size = vocab_size
        self._predictions = NgramDrafter()
        self._num_predicted = 0
        """Live sequences with a prediction."""
        self._share = _UNKNOWN_SHARE
        """The time of one more token in a step, as a share of the step."""
        self._least_gain = _LEAST_GAIN
        self._num_steps = self._num_idle = self._next_look = 0
        self.num_drafts = self.num_draft_tokens = self.num_accepted_tokens = 0
        self._accepted_at = np.zeros(MAX_DRAFT, np.int64)
        """Accepted tokens by their place in the draft."""
        num_rows = len(table.owner)
        self._is_drafting = np.zeros(num_rows, np.bool_)
        self._chance = np.zeros(num_rows)
        """The average share of draft tokens of each row that were right, up to the first wrong
        one."""
        self._gain = np.zeros(num_rows)
        """The average number of tokens that each row gained in a step, less what drafts cost."""
        self._looked_at = np.full(num_rows, -1)
        """The number of tokens known when a guess was last made without drafting; -1: none was."""
        self._looked_for = np.full(num_rows, -1)
        """The token that was guessed then; -1: none."""
        self.use(drafting or Drafting())

    def use(self, drafting: Drafting) -> None:
        """Replaces the drafter of later sequences."""
        self._drafter = drafter = drafting.drafter
        self._guesser: Drafter = self._predictions
        self._model: DraftsByModel | None = None
        if isinstance(drafter, DraftsByModel):
            self._model = drafter
        elif drafter is not None:
            self._guesser = drafter
        self._num_tokens = drafting.num_tokens
        self._has_failed = False
        self._first_chance, self._first_gain = _FIRST_CHANCE, 0.0 if self._model is None else 1.0
        """Averages over ended sequences, which new ones begin with."""
        self.wants_tokens = self._drafter is not None and self._num_tokens is not None
        """Drafts gain so much that the next step should wait for all tokens before it."""

    # --- sequences --------------------------------------------------------------------------------
    @property
    def is_on(self) -> bool:
        """True if some running or waiting sequence may draft."""
        return self._drafter is not None or self._num_predicted > 0

    def add(self, sequence: Sequence) -> None:
        """Takes a new sequence in."""
        if sequence.request.prediction:
            self._num_predicted += 1
            self.wants_tokens = True

    def admit(self, sequence: Sequence) -> None:
        """Takes in that a sequence was given its row."""
        row, is_predicted = sequence.row, bool(sequence.request.prediction)
        self._is_drafting[row] = is_predicted or self._drafter is not None
        self._chance[row] = 1.0 if is_predicted else self._first_chance
        self._gain[row] = 1.0 if is_predicted else self._first_gain
        self._looked_at[row] = -1

    def finish(self, sequence: Sequence) -> None:
        """Forgets a sequence that ended, and learns from it."""
        row = sequence.row
        if sequence.request.prediction:
            self._num_predicted -= 1
            self.wants_tokens = self.wants_tokens and self.is_on
        elif row >= 0 and self._is_drafting[row]:
            self._first_chance += _WEIGHT * (self._chance.item(row) - self._first_chance)
            self._first_gain += _WEIGHT * (self._gain.item(row) - self._first_gain)
        if self._drafter is not None:
            try:
                self._drafter.ended(sequence)
            except Exception:  # anybody may write a drafter
                self._log_failure()

    # --- a step -----------------------------------------------------------------------------------
    def drafts(self, decodes: AnyArray, context: int, room: int) -> Drafts | None:
        """Returns the drafts that pay, of at most `room` tokens together.

        Args:
            decodes: (D,) the rows of the step that decode.
            context: tokens that they attend to.
        """
        self._measure(decodes.size, context)
        worth = decodes.size * self._share
        """Tokens that a step computes in the time of one more."""
        if self._num_tokens is None and worth >= 1.0:
            self.wants_tokens = False
            return None
        is_known = self._table.last_token[decodes] >= 0
        is_drafting = self._is_drafting[decodes]
        self._look(decodes[~is_known].tolist(), worth)
        gains = self._gain[decodes[is_drafting]].sum()
        found, shares = self._guessed(decodes, np.flatnonzero(is_known & is_drafting))
        self.wants_tokens = self._num_tokens is not None or gains >= self._least_gain * decodes.size
        self._num_idle = 0 if self.wants_tokens else self._num_idle + 1
        if self._model is not None and self._num_idle >= _PROBE_PERIOD:
            self.wants_tokens = True  # once, to see whether the text has become easier
        self._cut_to_paying(found, shares, decodes.size, max(0, room))
        return found.without_empty()

    def filled(self, drafts: Drafts) -> Drafts:
        """Returns drafts with the tokens of the draft model, if there is one, and without those
        that cannot be kept."""
        if self._model is not None and drafts.sequences:
            reserved = np.flatnonzero(drafts.ids[:, 0] < 0)
            if reserved.size:
                part = drafts.part(reserved)
                self._model.fill(part)
                drafts.put_back(reserved, part)
            if self._model.has_failed:
                self.use(Drafting(None, self._num_tokens))
        table, rows = self._table, drafts.rows
        is_plain = table.is_simple[rows] & ~table.stops(rows, drafts.ids)
        for number in np.flatnonzero(~is_plain).tolist():
            sequence, ids = drafts.sequences[number], drafts.ids_of(number)
            if sequence.grammar is None and sequence.stop_ids.isdisjoint(ids):
                continue
            count = len(ids)
            for place in range(count):
                if ids[place] in sequence.stop_ids:  # nothing comes behind it
                    count = place
                    break
            if sequence.grammar is not None:
                count = sequence.grammar.num_draftable(ids[:count])
            drafts.counts[number] = count
        return drafts.without_empty()

    def _measure(self, num_decodes: int, context: int) -> None:
        if self._num_steps % _COST_PERIOD == 0:
            load = StepLoad(num_decodes, context)
            share = self._cost.row_share(load)
            self._share = _UNKNOWN_SHARE if share is None else share
            seconds = self._cost.predict(load)
            self._least_gain = _LEAST_GAIN + (_HOST_S / seconds if seconds else 0.0)
            if self._model is not None and seconds:  # all rows share its steps
                self._share += self._model.step_s / seconds / num_decodes
        self._num_steps += 1

    def _guesses(self, sequences: list[Sequence], most: list[int]) -> _Guesses:
        """The guesses of the drafter, at most so many tokens each: none where it raises, or guesses
        anything but tokens."""
        guesses = []
        for sequence, count in zip(sequences, most, strict=True):
            try:
                guesses.append(self._guesser.guess(sequence, count) if count else Guess([]))
            except Exception:  # anybody may write a drafter
                self._log_failure()
                guesses.append(Guess([]))
        try:
            return _gathered(guesses, most, self._vocab_size)
        except Exception:  # which guesses are none?
            logger.debug("guesses are checked one by one", exc_info=True)
        checked = [self._checked(guess, count) for guess, count in zip(guesses, most, strict=True)]
        return _gathered(checked, most, self._vocab_size)

    def _checked(self, guess: Guess, most: int) -> Guess:
        try:
            ids = array("i", guess.ids[:most]).tolist()
            shares = None if guess.shares is None else array("d", guess.shares[:most]).tolist()
            checked = Guess(ids if shares is None else ids[: len(shares)], shares)
            _gathered([checked], [most], self._vocab_size)
        except Exception:
            self._log_failure()
            return Guess([])
        return checked

    def _log_failure(self) -> None:
        if not self._has_failed:
            self._has_failed = True
            logger.exception("the drafter failed, which is logged once: its drafts are lost")

    def _look(self, rows: list[int], worth: float) -> None:
        """Compares the guesses of rows that do not draft with what came: a few of them in turn."""
        if self._model is not None:
            return
        first = self._next_look % max(1, len(rows))
        self._next_look += _MAX_LOOKS
        for row in (rows[first:] + rows[:first])[:_MAX_LOOKS]:
            sequence = self._table.owner[row]
            if sequence is None or not self._is_drafting[row]:
                continue
            known, looked_at = len(sequence.tokens), self._looked_at.item(row)
            if 0 <= looked_at < known:
                guess = self._looked_for.item(row)
                right = sequence.tokens[looked_at] == guess
                if guess >= 0:
                    self._chance[row] += _WEIGHT * (right - self._chance[row])
                pays = guess >= 0 and self._chance[row] > worth
                gained = right - worth if pays else 0.0
                self._gain[row] += _WEIGHT * (gained - self._gain[row])
            ids = self._guesses([sequence], [1]).ids
            self._looked_at[row], self._looked_for[row] = known, ids[0] if ids.size else -1

    def _guessed(self, decodes: AnyArray, index: AnyArray) -> tuple[Drafts, AnyArray | None]:
        """Guesses for the rows `decodes[index]`, whose last tokens are known; and the shares (D, K)
        of their tokens, where they are not 1."""
        table, rows = self._table, decodes[index]
        sequences = table.owners(rows)
        lengths = table.computed[rows] + np.int32(1)
        most = np.clip(table.feed_end[rows] - lengths, 0, self._num_tokens or MAX_DRAFT)
        width = int(most.max(initial=0))
        ids = np.full((rows.size, width), -1, np.int32)
        shares: AnyArray | None = None
        counts, guessed = np.zeros_like(most), most
        if self._model is not None:
            counts = np.minimum(most, self._model.longest(lengths))
            guessed = np.zeros_like(most)
            if self._num_predicted:
                guessed = most * np.array([bool(one.request.prediction) for one in sequences])
        if guessed.any():
            guesses = self._guesses(sequences, guessed.tolist())
            place = np.arange(width) < guesses.sizes[:, None]
            ids[place] = guesses.ids
            counts = np.where(guesses.sizes > 0, guesses.sizes, counts)
            if guesses.shares is not None:
                shares = np.ones(ids.shape)
                shares[place] = guesses.shares
        self._gain[rows[counts == 0]] *= 1 - _WEIGHT
        self._looked_at[rows[counts > 0]] = -1
        return Drafts(sequences, index, rows, lengths, counts, ids), shares

    def _cut_to_paying(
        self, found: Drafts, shares: AnyArray | None, num_rows: int, room: int
    ) -> None:
        """Cuts drafts to the tokens that pay: the best ones first, until the next would add less
        than the step makes in the same time."""
        if self._num_tokens is not None and found.num_tokens <= room:
            return
        is_draft = found.is_draft
        kept = self._chance[found.rows, None] ** np.arange(1, found.ids.shape[1] + 1)  # (D, K)
        if shares is not None:
            kept *= shares
        chances = np.sort(kept[is_draft])[::-1][:room]
        if self._num_tokens is None:
            made = num_rows + np.cumsum(chances) - chances
            is_worth = chances * (1.0 + np.arange(chances.size) * self._share) > made * self._share
            chances = chances[: chances.size if is_worth.all() else is_worth.argmin()]
        least = chances[-1] if chances.size else np.inf
        counts = ((kept >= least) & is_draft).sum(1)
        found.cut(np.diff(np.minimum(np.cumsum(counts), room), prepend=0))

    def counts(self) -> dict[str, Any]:
        """The counters of `CoreStats`."""
        return {
            "num_drafts": self.num_drafts,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "accepted_at": tuple(self._accepted_at.tolist()),
        }

    def observe(self, drafts: Drafts, num_accepted: AnyArray, is_taken: AnyArray) -> None:
        """Learns how many of the first draft tokens of rows were kept, as far as they were taken
        in. Rows whose masks could not be made have no draft any more."""
        is_tried = is_taken & (drafts.counts > 0)
        drafted, accepted = drafts.counts[is_tried], num_accepted[is_tried]
        self.num_drafts += drafted.size
        self.num_draft_tokens += int(drafted.sum())
        self.num_accepted_tokens += int(accepted.sum())
        lengths = np.bincount(accepted, minlength=MAX_DRAFT + 1)
        self._accepted_at += lengths[:0:-1].cumsum()[::-1]
        if self._model is not None:
            self._model.verified(list(compress(drafts.sequences, is_taken)))
        rows = drafts.rows[is_tried]
        tried = np.minimum(accepted + 1, drafted)
        self._chance[rows] += _WEIGHTS[tried] * (accepted / tried - self._chance[rows])
        gained = accepted - drafted * self._share
        self._gain[rows] += _WEIGHT * (gained - self._gain[rows])


def _gathered(guesses: list[Guess], most: list[int], vocab_size: int) -> _Guesses:
    """Raises where a guess is too long, or has ids that are not from the vocabulary."""
    lists = [guess.ids for guess in guesses]
    sizes = np.fromiter(map(len, lists), np.int32)
    found = array("i")
    for part in lists:
        found.fromlist(part)
    ids = np.array(found, np.int32)
    if (sizes > most).any() or (ids.size and not 0 <= ids.min() <= ids.max() < vocab_size):
        raise ValueError(f"a guess has too many ids, or others than 0 to {vocab_size - 1}")
    shares = [guess.shares for guess in guesses]
    if shares.count(None) == len(shares):
        return _Guesses(sizes, ids)
    known = [
        [1.0] * len(part) if share is None else share
        for part, share in zip(lists, shares, strict=True)
    ]
    if list(map(len, known)) != sizes.tolist():
        raise ValueError("a guess has another number of shares than of ids")
    flat = np.array(array("d", chain.from_iterable(known)))
    return _Guesses(sizes, ids, np.nan_to_num(flat))
