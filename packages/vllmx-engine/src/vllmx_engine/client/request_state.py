"""A request while it is answered: ids come in, text and outputs go out."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Literal

from vllmx_core.errors import VllmxError

from vllmx_engine.client.logprob_rows import LogprobRows
from vllmx_engine.client.request import Request
from vllmx_engine.text.output import SequenceText
from vllmx_engine.text.tokenizer import Tokenizer
from vllmx_engine.wire.messages import CoreOutput, FinishReason, TokenLogprobs
from vllmx_engine.wire.outputs import CompletionOutput, RequestMetrics, RequestOutput

MAX_DELTA_ROWS = 64
"""Positions with log-probabilities in one output of a stream, and fewer where each has many: what
is encoded in a few ms."""
_MAX_DELTA_LOGPROBS = 1344


def delta_rows(num_logprobs: int | None) -> int:
    """Positions in one output of a stream, by how many of the most likely each has."""
    return max(1, min(MAX_DELTA_ROWS, _MAX_DELTA_LOGPROBS // ((num_logprobs or 0) + 1)))


Shortcut = Callable[[CoreOutput, float], bool]
"""Takes an update and the time at which it came, or says that it does not."""
OutputKind = Literal["delta", "cumulative", "final"]


class ChoiceState:
    """One sequence of a request.

    `ids`, `pieces` and `logprobs` hold what was not handed out yet in a stream of deltas, and
    everything otherwise.
    """

    __slots__ = (
        "_hide_logprobs",
        "_most_rows",
        "_tokenizer",
        "cumulative_logprob",
        "finish_reason",
        "has_update",
        "ids",
        "index",
        "logprobs",
        "offsets_given",
        "pieces",
        "request",
        "shortcut",
        "stop_reason",
        "text",
        "vector",
    )

    def __init__(self, request: RequestState, index: int, tokenizer: Tokenizer) -> None:
        params, readers = request.request.params, request.request.readers
        self.request = request
        self.index = index
        self.text = SequenceText(
            tokenizer,
            request.request.prompt_ids if request.request.goes_on else (),
            params,
            stops=request.request.stops,
            keep_offsets=params.logprobs is not None,
            kept_ids=frozenset() if readers is None else readers.marker_ids,
        )
        self.ids: list[int] = []
        self.pieces: list[str] = []
        self.logprobs: list[TokenLogprobs | None] = []
        self.offsets_given = 0
        self.cumulative_logprob = 0.0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.has_update = False
        self.vector = b""
        self.shortcut: Shortcut | None = None
        """Takes an update to its consumer; see `RequestStream.divert`."""
        self._tokenizer = tokenizer
        self._hide_logprobs = params.logprobs is None
        self._most_rows = delta_rows(params.logprobs)

    def take(self, output: CoreOutput) -> bool:
        """Adds the update of one step; returns whether a stop string ended the sequence, of which
        the core knows nothing yet."""
        ids, stop = output.ids, None
        self.vector = output.vector
        if ids:
            before = self.text.num_tokens
            text, stop = self.text.push(ids, ends_with_stop_token=output.stop_id is not None)
            if stop is not None:
                ids = ids[: self.text.num_tokens - before]
            self.ids += ids
            if text:
                self.pieces.append(text)
            if output.logprobs is not None:
                self._take_logprobs(output.logprobs[: len(ids)])
            self.has_update = True
        if stop is not None:
            self.finish_reason, self.stop_reason = "stop", stop
        elif output.finish_reason is not None:
            self.end(output.finish_reason, output.stop_id)
        return stop is not None and output.finish_reason is None

    def end(self, reason: FinishReason, stop_id: int | None = None) -> None:
        """Ends the sequence, unless it has ended. After an error, which may be one of the text,
        what was held back of it stays so."""
        if self.finish_reason is not None:
            return
        rest = "" if reason == "error" else self.text.finish(reason)
        if rest:
            self.pieces.append(rest)
        self.finish_reason = reason
        if stop_id is not None and stop_id in self.request.request.params.stop_token_ids:
            self.stop_reason = stop_id
        self.has_update = True

    def _take_logprobs(self, rows: list[TokenLogprobs]) -> None:
        for row in rows:
            self.cumulative_logprob += row.logprob
            if not self._hide_logprobs:
                self.logprobs.append(row)

    def output(self, *, drop: bool) -> CompletionOutput:
        """Returns the tokens held so far; with `drop` they are released, so that the next output
        begins behind them. Many log-probabilities, which a slow client lets gather, are released in
        parts."""
        size = len(self.ids)
        if drop and len(self.logprobs) > self._most_rows:
            size = self._most_rows
        is_part = size < len(self.ids)
        output = CompletionOutput(
            index=self.index,
            text="".join(self.pieces),
            token_ids=self.ids[:size],
            finish_reason=None if is_part else self.finish_reason,
            stop_reason=None if is_part else self.stop_reason,
            vector=self.vector,
        )
        if not self._hide_logprobs:
            output.cumulative_logprob = self.cumulative_logprob
            output.logprobs = LogprobRows(self.logprobs[:size], self._tokenizer)
            output.text_offsets = self.text_offsets(drop, size)
        if drop:
            self.ids, self.pieces, self.logprobs = self.ids[size:], [], self.logprobs[size:]
        self.has_update = is_part
        return output

    def give(self) -> tuple[str, list[int]]:
        """Gives away the text and the tokens that are held, of a choice that has not ended and has
        no log-probabilities: what `output` would, without making one."""
        ids, pieces = self.ids, self.pieces
        self.ids, self.pieces, self.has_update = [], [], False
        return pieces[0] if len(pieces) == 1 else "".join(pieces), ids

    def text_offsets(self, drop: bool, size: int) -> list[int]:
        """The offsets of the first `size` tokens that are held."""
        start = self.offsets_given
        offsets = (self.text.token_offsets or [])[start : start + size]
        if drop:
            self.offsets_given += len(offsets)
        return offsets


class RequestState:
    """One request: its choices, and what is called when there is an update."""

    __slots__ = (
        "_in_parts",
        "_ranked",
        "choices",
        "error",
        "kind",
        "metrics",
        "notify",
        "num_cached_tokens",
        "num_unfinished",
        "prompt_logprobs",
        "request",
        "scored",
    )

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer,
        kind: OutputKind = "final",
        notify: Callable[[], None] | None = None,
    ) -> None:
        self.request = request
        self._ranked = len(request.core) > request.params.n
        self.kind: OutputKind = "final" if self._ranked else kind
        self.notify = notify
        self._in_parts = self.kind == "delta" and request.params.logprobs is not None
        self.choices = [ChoiceState(self, index, tokenizer) for index in range(len(request.core))]
        self.num_unfinished = len(self.choices)
        self.num_cached_tokens = 0
        self.prompt_logprobs: LogprobRows | None = None
        self.scored: list[TokenLogprobs] = []
        """The scored tokens of its prompt, as they come, until the first token is there."""
        self.metrics = RequestMetrics(request.arrival_s)
        self.error: VllmxError | None = None

    @property
    def finished(self) -> bool:
        """Nothing more will come."""
        return self.num_unfinished == 0

    def has_update(self) -> bool:
        """True if there is something to deliver."""
        return self.num_unfinished == 0 or any(choice.has_update for choice in self.choices)

    @property
    def wants_update(self) -> bool:
        """True if the callback is due."""
        return self.num_unfinished == 0 or self.kind != "final"

    def end(self, reason: FinishReason, error: VllmxError | None = None) -> None:
        """Ends every choice that has not ended."""
        self.error = self.error or error
        for choice in self.choices:
            choice.end(reason)
        self.num_unfinished = 0

    def tokens_came(self, count: int, now_s: float, held_s: float = 0.0) -> None:
        """Counts tokens and times for the metrics; `held_s` ago the first one was there."""
        metrics = self.metrics
        if metrics.first_token_s is None:
            metrics.first_token_s = now_s - held_s
        metrics.last_token_s = now_s
        metrics.num_generation_tokens += count

    def output(self) -> RequestOutput:
        """Returns the new part, or all so far for the kinds "cumulative" and "final"."""
        drop = self.kind == "delta"
        chosen = self._updated() if drop else self._best()
        prompt_logprobs = self.prompt_logprobs
        if drop:
            self.prompt_logprobs = None
        outputs = [choice.output(drop=drop) for choice in chosen]
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self.request.prompt,
            prompt_token_ids=self.request.prompt_ids,
            outputs=outputs,
            finished=self.num_unfinished == 0 and not self.has_rest,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=self.num_cached_tokens,
            metrics=self.metrics,
            error=None if self.error is None else self.error.message,
        )

    @property
    def has_rest(self) -> bool:
        """A stream's last output left something for another one."""
        return self._in_parts and any(choice.has_update for choice in self.choices)

    def _updated(self) -> list[ChoiceState]:
        """Choices with an update; where they have log-probabilities, as many as make one output."""
        chosen = [choice for choice in self.choices if choice.has_update]
        if not self._in_parts:
            return chosen
        most = delta_rows(self.request.params.logprobs)
        rows = accumulate(len(choice.logprobs) for choice in chosen)
        return [c for c, so_far in zip(chosen, rows, strict=True) if so_far <= most] or chosen[:1]

    def _best(self) -> list[ChoiceState]:
        """The n choices of greatest mean log-probability, numbered anew, best first."""
        if not self._ranked:
            return self.choices
        ranked = sorted(self.choices, key=_mean_logprob, reverse=True)
        best = ranked[: self.request.params.n]
        for index, choice in enumerate(best):
            choice.index = index
        return best


def _mean_logprob(choice: ChoiceState) -> float:
    return choice.cumulative_logprob / max(1, choice.text.num_tokens)
