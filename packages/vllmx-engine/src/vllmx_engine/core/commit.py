"""Takes a finished step's results into the sequences and says what is new."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from itertools import compress

import numpy as np
from vllmx_core.errors import InvalidRequestError, NonFiniteLogitsError, VllmxError
from vllmx_core.plan import F32, I32, AnyArray, StepResult
from vllmx_core.system.private_traceback import private_traceback

from vllmx_engine.core.batch import Step
from vllmx_engine.core.drafters import Drafts
from vllmx_engine.core.grammar_masks import forbids_all
from vllmx_engine.core.logprobs import StepLogprobs
from vllmx_engine.core.sampling_rows import Scored
from vllmx_engine.core.scheduler import Scheduler
from vllmx_engine.core.sequence import Sequence
from vllmx_engine.wire.messages import CoreOutput, FinishReason, TokenLogprobs

logger = logging.getLogger("vllmx.commit")

MIN_FORCED_TOKENS = 3
"""The fewest forced tokens in a row that are computed at once: k of them save k - 1 steps of their
row, and make one step a mixed one for all."""
_PIECE_LOGPROBS = 1 << 14
"""Log-probabilities of a prompt in one output, or those of one token: a few ms to decode."""


class Committer:
    """Ends sequences in the scheduler as their results say. Its counters are for `CoreStats`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._table = scheduler.table
        self._size = scheduler.limits.block_size
        self.prompt_tokens = self.generation_tokens = 0
        self.paused: list[Sequence] = []
        """Sequences that sit out until their next mask is made; the owner takes them out."""

    @property
    def num_tokens(self) -> int:
        """Tokens of prompts that were read to their end, and of answers."""
        return self.prompt_tokens + self.generation_tokens

    def commit(self, step: Step, result: StepResult) -> list[CoreOutput]:
        """Results of sequences that ended since the launch are dropped; those of preempted ones
        count, because the step that computed them was sound. Pieces of prompts' log-probabilities
        come before all others."""
        if result.vectors is not None:
            return self._commit_vectors(step, result.vectors)
        table, owners = self._table, step.owners
        ids = result.ids[owners.logits]  # (S,)
        # rows of a later step keep their reference to it; a row's next owner has none yet to lose
        fed = table.sampled_in[owners.rows] == step.number
        table.last_token[owners.rows[fed]] = ids[fed]
        self._cache_full_blocks(step)
        details = StepLogprobs(result, owners.whole)
        outputs: list[CoreOutput] = []
        for scored in owners.scored:
            outputs += self._score(scored, result, details)
        sequences, logits = owners.sequences, owners.logits
        if step.batch.drafts is not None:
            outputs += self._verify(step, step.batch.drafts, details)
            is_plain = np.ones(logits.size, np.bool_)
            is_plain[step.batch.drafts.index] = False
            sequences = list(compress(sequences, is_plain.tolist()))
            ids, logits = ids[is_plain], logits[is_plain]
        num_tokens = 0
        # one conversion; indexing numpy costs more for each row
        for sequence, token, logit in zip(sequences, ids.tolist(), logits.tolist(), strict=True):
            if sequence.finished:
                continue
            try:
                if not sequence.is_plain or token < 0:
                    if sequence.skipped_step == step.number or sequence in step.late:
                        continue  # its token is one of those that were forced, or had no mask
                    if token < 0:
                        raise _no_token(step, sequence)
                    outputs += self._special(sequence, token, logit, details, step.number)
                    continue
                # Nearly all rows of a busy step get here: an id to append and a record to send.
                reason = sequence.accept(token)
                num_tokens += 1
                if reason is not None:
                    outputs.append(self._output(sequence, sequence.untold(1), reason))
                elif not sequence.request.at_end:
                    outputs.append(CoreOutput(request_id=sequence.request_id, ids=[token]))
                elif not sequence.hold(1):
                    outputs.append(self._output(sequence, sequence.untold(1), None))
            except Exception as error:  # one request's fault must not stop the others
                outputs.append(self.fail(sequence, error))
        self.generation_tokens += num_tokens
        return outputs

    def _commit_vectors(self, step: Step, vectors: F32) -> list[CoreOutput]:
        """Each prompt that was completed has all that it wanted, and its blocks are free."""
        self._cache_full_blocks(step)
        owners = step.owners
        outputs: list[CoreOutput] = []
        for sequence, logit in zip(owners.sequences, owners.logits.tolist(), strict=True):
            if sequence.finished:
                continue
            count = sequence.num_prompt if self._scheduler.limits.token_vectors else 1
            vector = vectors[logit + 1 - count : logit + 1]
            if np.isfinite(vector).all():
                self.prompt_tokens += sequence.num_prompt
                outputs.append(self._output(sequence, [], "stop", is_first=True, vector=vector))
            else:
                outputs.append(self.fail(sequence, _not_finite(sequence)))
        return outputs

    def fail(self, sequence: Sequence, error: Exception) -> CoreOutput:
        """Ends a sequence with an error. Its blocks leave the prefix cache where they can."""
        if not sequence.finished:
            self._scheduler.finish(sequence, forget=True)
        return error_output(sequence.request_id, error, sequence.request.shown)

    def end(self, sequence: Sequence) -> CoreOutput:
        """Ends a sequence with the tokens that it has."""
        return self._output(sequence, sequence.untold(0), "stop")

    def _cache_full_blocks(self, step: Step) -> None:
        """Files full blocks of the step's rows, with snapshots of their states, in the prefix
        cache. They are filed only now, so that no sequence finds them if the step fails. Blocks of
        a row with NaN are removed again when the row fails, a moment later. Then rows free the
        blocks that their windows no longer see."""
        full = step.context_len // self._size > self._table.num_cached[step.rows]
        full &= self._table.epoch[step.rows] == step.epochs
        drafts = step.batch.drafts
        if drafts is not None:  # not known yet, see `_verify`
            full[drafts.index] = False
        if np.count_nonzero(full):
            self._file(step.rows[full], step.context_len[full])
        if self._scheduler.states is not None:
            self._scheduler.states.file(step.number, step.rows, step.epochs, step.context_len)
        if self._scheduler.blocks.has_windows:
            settled = self._table.epoch[step.rows] == step.epochs
            if drafts is not None:
                settled[drafts.index] = False
            self._scheduler.blocks.slide(step.rows[settled])

    def _file(self, rows: AnyArray, lengths: AnyArray) -> None:
        owner, file = self._table.owner, self._scheduler.prefixes.file
        for row, length in zip(rows.tolist(), lengths.tolist(), strict=True):
            sequence = owner[row]
            if sequence is not None:
                file(sequence, length)

    def _special(
        self, sequence: Sequence, token: int, logit: int, details: StepLogprobs, number: int
    ) -> list[CoreOutput]:
        """A first token, or one with log-probabilities or a grammar."""
        is_first = len(sequence.tokens) == sequence.num_prompt
        begins = len(sequence.tokens) == sequence.num_given
        pieces = _pieces(sequence, [])
        reason = sequence.accept(token)
        logprobs = _logprobs(sequence, [token], logit, details)
        if begins:
            sequence.mark_started()
            self.prompt_tokens += sequence.num_prompt if is_first else 0
            self._scheduler.release_followers(sequence)
        return pieces + self._told(sequence, [token], reason, logprobs, number, is_first=is_first)

    def _verify(self, step: Step, drafts: Drafts, details: StepLogprobs) -> list[CoreOutput]:
        """Takes in the tokens that a step with drafts brought."""
        table, rows = self._table, drafts.rows
        first = step.owners.logits[drafts.index]  # (D,)
        drawn, num_new = _drawn(drafts, first, details.ids)
        # Nearly all drafts are of simple rows and end nothing: ids to append and a record to send.
        is_plain = table.is_simple[rows] & (table.epoch[rows] == step.epochs[drafts.index])
        is_plain &= (num_new > 0) & (drafts.lengths + num_new <= -table.feed_end[rows])
        is_plain &= ~table.stops(rows, drawn)
        new = drawn.tolist()
        for number in np.flatnonzero(num_new < drawn.shape[1]).tolist():
            del new[number][num_new[number] :]
        for sequence, ids in compress(zip(drafts.sequences, new, strict=True), is_plain):
            sequence.tokens.fromlist(ids)
        outputs: list[CoreOutput] = []
        reasons: dict[int, FinishReason | None] = {}
        for number in np.flatnonzero(~is_plain).tolist():
            sequence, ids = drafts.sequences[number], new[number]
            if sequence.finished or sequence in step.owners.lost:
                continue
            try:
                if not ids:
                    raise _no_token(step, sequence)
                reason = sequence.accept_all(ids)
                num_new[number] = len(ids)
                if reason is None and sequence.is_plain:
                    is_plain[number] = True
                else:
                    reasons[number] = reason
            except Exception as error:  # one request's fault must not stop the others
                outputs.append(self.fail(sequence, error))
        is_taken = is_plain.copy()
        is_taken[list(reasons)] = True
        self._resume(step, drafts, is_taken, drawn[np.arange(first.size), num_new - 1], num_new)
        num_missed = drafts.counts - num_new + 1
        plain = zip(drafts.sequences, new, (num_new - 1).tolist(), num_missed.tolist(), strict=True)
        outputs += self._tell_plain(compress(plain, is_plain))
        self.generation_tokens += int(num_new[is_plain].sum())
        for number, reason in reasons.items():
            sequence, ids = drafts.sequences[number], new[number]
            try:
                sequence.num_accepted += len(ids) - 1
                sequence.num_rejected += num_missed.item(number)
                logprobs = _logprobs(sequence, ids, first.item(number), details)
                outputs += self._told(sequence, ids, reason, logprobs, step.number)
            except Exception as error:  # one request's fault must not stop the others
                outputs.append(self.fail(sequence, error))
        return outputs

    def _tell_plain(self, rows: Iterable[tuple[Sequence, list[int], int, int]]) -> list[CoreOutput]:
        """Reports new ids, and how many draft tokens were kept and missed, of rows without anything
        else to tell."""
        outputs: list[CoreOutput] = []
        for sequence, ids, kept, missed in rows:
            if not sequence.request.at_end:
                output = CoreOutput(
                    request_id=sequence.request_id, ids=ids, num_accepted=kept, num_rejected=missed
                )
                outputs.append(output)
                continue
            sequence.num_accepted += kept
            sequence.num_rejected += missed
            if not sequence.hold(len(ids)):
                outputs.append(self._output(sequence, sequence.untold(len(ids)), None))
        return outputs

    def _resume(
        self, step: Step, drafts: Drafts, is_taken: AnyArray, last: I32, num_new: AnyArray
    ) -> None:
        """Lets rows decode again behind the `num_new` (D,) tokens, `last` (D,) the last of them,
        that a step with their drafts brought: keys and values of all others are valid. `is_taken`:
        (D,) False for drafts that nothing was taken in of."""
        scheduler, table = self._scheduler, self._table
        assert scheduler.speculator is not None, "drafts without a speculator"
        scheduler.speculator.observe(drafts, num_new - 1, is_taken)
        is_running = is_taken & (table.epoch[drafts.rows] == step.epochs[drafts.index])
        if not is_running.all():  # others ended or were preempted
            drafts, num_new, last = (
                drafts.part(np.flatnonzero(is_running)),
                num_new[is_running],
                last[is_running],
            )
        rows, computed = drafts.rows, drafts.lengths - 1 + num_new
        table.resume_all(rows, computed, last)
        full = table.num_cached[rows] < computed // self._size
        self._file(rows[full], computed[full])
        if scheduler.states is not None:
            for sequence, count in zip(drafts.sequences, num_new.tolist(), strict=True):
                scheduler.states.resume(sequence, count)
        scheduler.blocks.slide(rows)

    def _told(
        self,
        sequence: Sequence,
        ids: list[int],
        reason: FinishReason | None,
        logprobs: list[TokenLogprobs] | None,
        number: int,
        *,
        is_first: bool = False,
    ) -> list[CoreOutput]:
        """Reports the tokens that were taken in from step `number`, and those that a grammar forces
        behind them."""
        if reason is None and sequence.grammar is not None:
            if sequence.grammar.paused_step == number:
                self.paused.append(sequence)
            elif logprobs is None:
                forced, reason = self._forced(sequence, number)
                ids = ids + forced
        self.generation_tokens += len(ids)
        is_detailed = logprobs is not None or sequence.request.params.prompt_logprobs is not None
        if reason is None and not is_detailed and sequence.hold(len(ids)):
            if is_first:
                sequence.held_since_s = time.monotonic()
            return []
        told = sequence.untold(len(ids))
        return [self._output(sequence, told, reason, logprobs, is_first=is_first)]

    def _forced(self, sequence: Sequence, number: int) -> tuple[list[int], FinishReason | None]:
        """Takes in the tokens that the grammar leaves no choice about, behind those that step
        `number` sampled: they are computed as one chunk. Says whether the sequence ends with
        them."""
        assert sequence.grammar is not None, sequence.request_id
        room = sequence.limit - 1 - len(sequence.tokens)
        forced = sequence.grammar.forced_tokens()[: max(0, room)]
        if len(forced) < MIN_FORCED_TOKENS:
            return [], None
        rows, num_tokens = np.array([sequence.row]), np.array([len(sequence.tokens) + len(forced)])
        if sequence.row >= 0 and not self._scheduler.make_room(rows, num_tokens).all():
            return [], None  # a preempted one gets its blocks with its next admission
        for index, token in enumerate(forced, 1):
            reason = sequence.accept(token)
            if reason is not None:
                return forced[:index], reason
        self._scheduler.feed_known(sequence, number)
        return forced, None

    def _output(
        self,
        sequence: Sequence,
        ids: list[int],
        reason: FinishReason | None,
        logprobs: list[TokenLogprobs] | None = None,
        *,
        is_first: bool = False,
        vector: F32 | None = None,
    ) -> CoreOutput:
        stops = reason == "stop" and bool(ids) and ids[-1] in sequence.stop_ids
        accepted, rejected = sequence.num_accepted, sequence.num_rejected
        sequence.num_accepted = sequence.num_rejected = 0
        held_s = 0.0
        if sequence.held_since_s:
            is_first, held_s = True, time.monotonic() - sequence.held_since_s
            sequence.held_since_s = 0.0
        if reason is not None:
            self._scheduler.finish(sequence)
        return CoreOutput(
            request_id=sequence.request_id,
            ids=ids,
            finish_reason=reason,
            stop_id=ids[-1] if stops else None,
            logprobs=logprobs,
            prompt_logprobs=[]
            if is_first and sequence.request.params.prompt_logprobs is not None
            else None,
            num_cached_tokens=sequence.num_cached_tokens if is_first else 0,
            queue_s=sequence.queue_s if is_first else None,
            held_s=held_s,
            num_accepted=accepted,
            num_rejected=rejected,
            vector=b"" if vector is None else vector.tobytes(),
        )

    def _score(self, scored: Scored, result: StepResult, details: StepLogprobs) -> list[CoreOutput]:
        """Log-probabilities of prompt tokens, in pieces."""
        sequence = scored.sequence
        if sequence.finished:
            return []
        try:
            if bool((result.ids[scored.first : scored.first + scored.count] < 0).any()):
                raise NonFiniteLogitsError(
                    "the model's logits for this request's prompt are not finite: check the weights"
                )
            entries = [
                details.of(
                    scored.first + index,
                    sequence.tokens[scored.start + index + 1],
                    scored.num_logprobs,
                )
                for index in range(scored.count)
            ]
            self._scheduler.prefixes.scores.file(sequence, scored.start, entries)
            return _pieces(sequence, entries)
        except Exception as error:  # one request's fault must not stop the others
            return [self.fail(sequence, error)]


def _drawn(drafts: Drafts, first: I32, ids: I32) -> tuple[I32, AnyArray]:
    """The ids (D, K + 1) that were drawn behind the last known token of each row and behind each
    token of its draft, from its logit row `first` (D,) on; and how many of them are new (D,): those
    up to the first that the draft did not have."""
    at = first[:, None] + np.arange(drafts.ids.shape[1] + 1)
    drawn: I32 = ids[np.minimum(at, ids.size - 1)]
    is_wrong = np.ones(drawn.shape, np.bool_)
    is_wrong[:, :-1] = (drawn[:, :-1] != drafts.ids) | ~drafts.is_draft
    num_kept = is_wrong.argmax(1)
    has_token = drawn[np.arange(first.size), num_kept] >= 0  # else the next step fails
    return drawn, num_kept + has_token


def _logprobs(
    sequence: Sequence, ids: list[int], logit: int, details: StepLogprobs
) -> list[TokenLogprobs] | None:
    """Log-probabilities of tokens that were drawn from logit rows from `logit` on; None where
    nobody asked."""
    wanted, named = sequence.request.params.logprobs, sequence.request.params.logprob_token_ids
    if wanted is None:
        return None
    return [details.of(place, token, wanted, named) for place, token in enumerate(ids, logit)]


def _pieces(sequence: Sequence, entries: list[TokenLogprobs]) -> list[CoreOutput]:
    """Outputs with those of a sequence's cached prefix, once, and then with `entries`."""
    if sequence.found_scores:
        entries = sequence.found_scores + entries
        sequence.found_scores = []
    size = max(1, _PIECE_LOGPROBS // ((sequence.request.params.prompt_logprobs or 0) + 1))
    return [
        CoreOutput(
            request_id=sequence.request_id,
            ids=[],
            prompt_logprobs=entries[start : start + size],
        )
        for start in range(0, len(entries), size)
    ]


def _no_token(step: Step, sequence: Sequence) -> VllmxError:
    """Why the sampler found no token for a row: what its request forbids, or the model."""
    owners = step.owners
    drafted = [group[0] for _, group in owners.drafted]
    if forbids_all(sequence, [*owners.constrained, *drafted]):
        place = len(sequence.tokens) - sequence.num_prompt
        return InvalidRequestError(
            f"every token is forbidden at position {place} of the answer:"
            " bad_words and min_tokens exclude all that the grammar or allowed_token_ids allow;"
            " forbid less, or allow other tokens",
            param="bad_words",
        )
    return NonFiniteLogitsError(
        f"the model's logits for token {len(sequence.tokens)} of this request are not finite: check"
        " the weights"
    )


def _not_finite(sequence: Sequence) -> NonFiniteLogitsError:
    return NonFiniteLogitsError(
        f"what the model made of the {sequence.num_prompt} tokens of this text is not finite: check"
        " the weights, or load them with --dtype float32"
    )


def error_output(request_id: str, error: Exception, shown: str = "") -> CoreOutput:
    """The end of a request that failed, in logs `shown`. Only texts of ours reach the user."""
    shown = shown or request_id
    if isinstance(error, VllmxError):
        logger.info("request %s ends with an error: %s", shown, error)
        text, code = error.message, error.code
    else:
        where = private_traceback(error)
        logger.error("request %s ends with an unexpected error\n%s", shown, where)
        text, code = "internal error; the server's log has the details", VllmxError.code
    return CoreOutput(
        request_id=request_id, ids=[], finish_reason="error", error=text, error_code=code
    )
