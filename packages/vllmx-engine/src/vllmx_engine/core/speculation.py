"""Chooses how many draft tokens each row's next step verifies.

A draft token is kept if and only if it is the token that the row's own draw at its place picks, so
drafts change how long an answer takes and never what it is. A row drafts as many tokens as pay:
those whose chance times their worth exceeds the time that they add to the step.
"""

from __future__ import annotations

import logging
from array import array
from typing import Any

from vllmx_core.config import MAX_DRAFT, EngineConfig
from vllmx_core.plan import AnyArray
from vllmx_core.records import Record

from vllmx_engine.core.cost import StepCost, StepLoad
from vllmx_engine.core.drafters import (
    Draft,
    Drafter,
    DraftsByModel,
    Guess,
    NgramDrafter,
    SuffixDrafter,
)
from vllmx_engine.core.rows import RowTable
from vllmx_engine.core.sequence import RowDrafts, Sequence

logger = logging.getLogger("vllmx.draft")

_WEIGHT = 0.2
"""The weight of the newest step in a row's averages."""
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

    drafter: Drafter | None = None
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
        self.accepted_at = [0] * MAX_DRAFT
        """Accepted tokens by their place in the draft."""
        self.use(drafting or Drafting())

    def use(self, drafting: Drafting) -> None:
        """Replaces the drafter of later sequences."""
        self._drafter = drafting.drafter
        self._model = drafting.drafter if isinstance(drafting.drafter, DraftsByModel) else None
        self._num_tokens = drafting.num_tokens
        self._has_failed = False
        self._chance, self._gain = _FIRST_CHANCE, 0.0 if self._model is None else 1.0
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
            sequence.drafts = RowDrafts(chance=1.0, gain=1.0)
            self.wants_tokens = True
        elif self._drafter is not None:
            sequence.drafts = RowDrafts(chance=self._chance, gain=self._gain)

    def finish(self, sequence: Sequence) -> None:
        """Forgets a sequence that ended, and learns from it."""
        drafts, sequence.drafts = sequence.drafts, None
        if sequence.request.prediction:
            self._num_predicted -= 1
            self.wants_tokens = self.wants_tokens and self.is_on
        elif drafts is not None:
            self._chance += _WEIGHT * (drafts.chance - self._chance)
            self._gain += _WEIGHT * (drafts.gain - self._gain)
        if self._drafter is not None:
            try:
                self._drafter.ended(sequence)
            except Exception:  # anybody may write a drafter
                self._log_failure()

    # --- a step -----------------------------------------------------------------------------------
    def drafts(self, decodes: AnyArray, context: int, room: int) -> list[Draft]:
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
            return []
        found: list[Draft] = []
        rows = decodes.tolist()
        known = self._table.last_token[decodes] >= 0
        self._look(decodes[~known].tolist(), worth)
        gains = 0.0
        for index, (row, is_known) in enumerate(zip(rows, known.tolist(), strict=True)):
            sequence = self._table.owner[row]
            assert sequence is not None, row
            if sequence.drafts is None:
                continue
            gains += sequence.drafts.gain
            if is_known and (draft := self._draft(index, sequence)):
                found.append(draft)
        self.wants_tokens = self._num_tokens is not None or gains >= self._least_gain * len(rows)
        self._num_idle = 0 if self.wants_tokens else self._num_idle + 1
        if self._model is not None and self._num_idle >= _PROBE_PERIOD:
            self.wants_tokens = True  # once, to see whether the text has become easier
        return self._paying(found, decodes.size, room)

    def filled(self, drafts: list[Draft]) -> list[Draft]:
        """Returns drafts with the tokens of the draft model, if there is one, and without those
        that cannot be kept."""
        reserved = [draft for draft in drafts if draft.ids[0] < 0]
        if self._model is not None and reserved:
            self._model.fill(reserved)
            if self._model.has_failed:
                self.use(Drafting(None, self._num_tokens))
        for draft in drafts:
            sequence = draft.sequence
            stops = [place for place, token in enumerate(draft.ids) if token in sequence.stop_ids]
            if stops:  # nothing comes behind it
                del draft.ids[stops[0] :]
            if sequence.grammar is not None:
                del draft.ids[sequence.grammar.num_draftable(draft.ids) :]
        return [draft for draft in drafts if draft.ids]

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

    def _guess(self, sequence: Sequence, most: int) -> Guess:
        """The guess of the drafter, if it is one; else of no tokens."""
        try:
            if self._model is None:
                drafter = self._drafter or self._predictions
                return _checked(drafter.guess(sequence, most), most, self._vocab_size)
            if sequence.request.prediction:
                guess = self._predictions.guess(sequence, most)
                if guess.ids:
                    return _checked(guess, most, self._vocab_size)
            return self._model.guess(sequence, most)
        except Exception:  # anybody may write a drafter
            self._log_failure()
            return Guess([])

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
            drafts = None if sequence is None else sequence.drafts
            if sequence is None or drafts is None:
                continue
            known = len(sequence.tokens)
            if 0 <= drafts.looked_at < known:
                right = sequence.tokens[drafts.looked_at] == drafts.looked_for
                guessed = drafts.looked_for >= 0
                if guessed:
                    drafts.chance += _WEIGHT * (right - drafts.chance)
                pays = guessed and drafts.chance > worth
                drafts.gain += _WEIGHT * ((right - worth if pays else 0.0) - drafts.gain)
            ids = self._guess(sequence, 1).ids
            drafts.looked_at, drafts.looked_for = known, ids[0] if ids else -1

    def _draft(self, index: int, sequence: Sequence) -> Draft | None:
        most = min(self._num_tokens or MAX_DRAFT, sequence.limit - len(sequence.tokens) - 1)
        drafts = sequence.drafts
        assert drafts is not None, sequence.request_id
        ids, shares = self._guess(sequence, most) if most > 0 else Guess([])
        if not ids:
            drafts.gain -= _WEIGHT * drafts.gain
            return None
        chances = [drafts.chance ** (place + 1) for place in range(len(ids))]
        if shares is not None:
            chances = [chance * share for chance, share in zip(chances, shares, strict=False)]
        drafts.looked_at = -1
        return Draft(index=index, sequence=sequence, ids=ids, chances=chances)

    def _paying(self, found: list[Draft], num_rows: int, room: int) -> list[Draft]:
        """Cuts drafts to the tokens that pay: the best ones first, until the next would add less
        than the step makes in the same time."""
        tokens = sum(len(draft.ids) for draft in found)
        if self._num_tokens is None or tokens > room:
            chances = sorted((chance for one in found for chance in one.chances), reverse=True)
            made, taken, least = float(num_rows), 0, 2.0
            for chance in chances[:room]:
                is_worth = chance * (1.0 + taken * self._share) > made * self._share
                if self._num_tokens is None and not is_worth:
                    break
                made, taken, least = made + chance, taken + 1, chance
            for draft in found:
                kept = sum(chance >= least for chance in draft.chances)
                kept = min(kept, max(0, room))
                room -= kept
                del draft.ids[kept:], draft.chances[kept:]
        return [draft for draft in found if draft.ids]

    def counts(self) -> dict[str, Any]:
        """The counters of `CoreStats`."""
        return {
            "num_drafts": self.num_drafts,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "accepted_at": tuple(self.accepted_at),
        }

    def observe(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Learns how many of the first draft tokens of a row were kept."""
        self.num_drafts += 1
        self.num_draft_tokens += num_drafted
        self.num_accepted_tokens += num_accepted
        for place in range(num_accepted):
            self.accepted_at[place] += 1
        sequence.num_accepted += num_accepted
        sequence.num_rejected += num_drafted - num_accepted
        if self._model is not None:
            self._model.verified(sequence)
        drafts = sequence.drafts
        if drafts is not None:
            tried = min(num_accepted + 1, num_drafted)
            weight = 1 - (1 - _WEIGHT) ** tried
            drafts.chance += weight * (num_accepted / tried - drafts.chance)
            gained = num_accepted - num_drafted * self._share
            drafts.gain += _WEIGHT * (gained - drafts.gain)


def _checked(guess: Guess, most: int, vocab_size: int) -> Guess:
    """A guess of at most `most` tokens. Raises where it is none."""
    ids = array("i", guess.ids[:most]).tolist()
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise ValueError(f"the guess of a drafter has ids that are not from 0 to {vocab_size - 1}")
    if guess.shares is None:
        return Guess(ids)
    return Guess(ids[: len(guess.shares)], array("d", guess.shares).tolist())
