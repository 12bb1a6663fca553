"""Beam search: keeps the likeliest continuations of a prompt, token by token.

Beams share the prompt's cached prefix, as all requests do. Scores, ends and early stopping are
those of transformers' beam search.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from vllmx_core.bounds import BOUNDS, MAX_TOKENS_LIMIT
from vllmx_core.errors import EngineDeadError, InvalidRequestError, VllmxError, shown
from vllmx_core.records import MutableRecord, Record
from vllmx_core.sampling import SamplingParams

from vllmx_engine.client.request import Prompt, Request, RequestBuilder, RequestOptions
from vllmx_engine.text.output import SequenceText
from vllmx_engine.text.tokenizer import Tokenizer
from vllmx_engine.wire.outputs import CompletionOutput, Logprob, RequestOutput


class BeamSearchParams(Record):
    """Parameters of a beam search; names are vLLM's and transformers'."""

    beam_width: int
    """Beams that go on, and answers that come back."""
    max_tokens: int = 16
    ignore_eos: bool = False
    length_penalty: float = 1.0
    """A finished beam's score is its log-probability over its length to this power."""
    early_stopping: bool | Literal["never"] = False
    """True: stop at the first `beam_width` finished beams; False: when those that go on are not
    likely to beat them; "never": when they cannot, whatever their length."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end a beam, with the model's own ends of sequence."""

    def __post_init__(self) -> None:
        BOUNDS["n"].checked("beam_width", self.beam_width)
        BOUNDS["max_tokens"].checked("max_tokens", self.max_tokens)
        BOUNDS["length_penalty"].checked("length_penalty", self.length_penalty)


class Beam(MutableRecord):
    """A continuation."""

    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    """The log-probability of each of `ids`."""
    cumulative: float = 0.0
    """The sum of `logprobs`."""
    score: float = -math.inf
    """The order of finished beams, highest first."""
    has_ended: bool = False
    """The last id is an end of sequence."""

    def plus(self, token: int, logprob: float, *, has_ended: bool) -> Beam:
        """The beam with one more token."""
        logprobs, sum_ = (*self.logprobs, logprob), self.cumulative + logprob
        return Beam((*self.ids, token), logprobs, sum_, has_ended=has_ended)


class BeamSearch:
    """The search behind one prompt. Each step asks for the likeliest tokens after each beam.

    Args:
        eos_ids: the model's ends of sequence.
        room: tokens that the context holds behind the prompt.
    """

    def __init__(self, params: BeamSearchParams, eos_ids: Iterable[int], room: int) -> None:
        self._params = params
        self._ends = {*(() if params.ignore_eos else eos_ids), *params.stop_token_ids}
        self._most = min(params.max_tokens, room)
        self._finished: list[Beam] = []
        self.running = [Beam()]
        """The beams whose next tokens are wanted, likeliest first."""

    @property
    def step_params(self) -> SamplingParams:
        """Parameters of the requests for one token."""
        count = self._params.beam_width + len(self._ends)  # ends among them do not go on
        return SamplingParams(max_tokens=1, temperature=0.0, logprobs=count, ignore_eos=True)

    def take(self, rows: Sequence[dict[int, Logprob]]) -> None:
        """Takes the likeliest tokens after each of `running`, in their order."""
        width = self._params.beam_width
        found = [
            beam.plus(token, one.logprob, has_ended=token in self._ends)
            for beam, row in zip(self.running, rows, strict=True)
            for token, one in row.items()
        ]
        likeliest = sorted(found, key=lambda beam: -beam.cumulative)
        length = len(likeliest[0].ids)
        is_last = length >= self._most
        self.running = [one for one in likeliest if not one.has_ended][:width]
        if not (self._params.early_stopping is True and len(self._finished) >= width):
            ended = [one for one in likeliest[:width] if is_last or one.has_ended]
            for one in ended:
                one.score = one.cumulative / length**self._params.length_penalty
            self._finished = heapq.nlargest(
                width, self._finished + ended, key=lambda beam: beam.score
            )
        if is_last or not self._may_improve(length):
            self.running = []

    def _may_improve(self, length: int) -> bool:
        """True if a running beam may get a better score than a finished one."""
        if len(self._finished) < self._params.beam_width:
            return True
        if self._params.early_stopping is True:
            return False
        penalty = self._params.length_penalty
        if self._params.early_stopping == "never" and penalty > 0:
            length = self._most
        best = self.running[0].cumulative / length**penalty
        return bool(best > min(beam.score for beam in self._finished))

    @property
    def best(self) -> list[Beam]:
        """The finished beams, best first."""
        return self._finished


def row_of(output: RequestOutput) -> dict[int, Logprob]:
    """The likeliest tokens after one beam. Raises VllmxError for a request that failed, and
    EngineDeadError for one that was ended."""
    choice = output.outputs[0]
    if choice.finish_reason == "abort":
        raise EngineDeadError("a step of the beam search was aborted: send the request again")
    if not choice.logprobs:
        raise VllmxError(f"a step of the beam search failed: {output.error}")
    return choice.logprobs[0]


def choices_of(
    search: BeamSearch, request: Request, tokenizer: Tokenizer
) -> list[CompletionOutput]:
    """The finished beams as the choices of a request."""
    return [
        CompletionOutput(
            index=index,
            text=_text_of(beam, request, tokenizer),
            token_ids=list(beam.ids),
            cumulative_logprob=beam.cumulative,
            finish_reason="stop" if beam.has_ended else "length",
        )
        for index, beam in enumerate(search.best)
    ]


def _text_of(beam: Beam, request: Request, tokenizer: Tokenizer) -> str:
    """The text that any answer of these ids has, which depends on what it continues."""
    kept = frozenset[int]() if request.readers is None else request.readers.marker_ids
    text = SequenceText(tokenizer, request.prompt_ids, request.params, kept_ids=kept)
    begun, _ = text.push(beam.ids, ends_with_stop_token=beam.has_ended)
    return begun + text.finish("stop")


class BeamSearchSequence(Record):
    """A beam of `LLM.beam_search`; names are vLLM's."""

    tokens: list[int]
    """The ids of the prompt and of the continuation."""
    text: str
    """The text of `tokens`."""
    cum_logprob: float
    logprobs: list[float]
    """The log-probability of each token behind the prompt."""
    finish_reason: Literal["stop", "length"]


class BeamSearchOutput(Record):
    """The beams of one prompt, best first."""

    sequences: list[BeamSearchSequence]


def search_beams(
    builder: RequestBuilder,
    prompts: Sequence[Prompt],
    params: BeamSearchParams,
    options: Sequence[RequestOptions],
    run: Callable[[list[Request]], list[RequestOutput]],
) -> list[BeamSearchOutput]:
    """Searches behind all prompts together, each with its options. `run` answers requests, in
    order."""
    builder.check_beams()
    starts, searches = [], []
    for prompt in prompts:
        ids = builder.build(prompt, SamplingParams(max_tokens=1)).prompt_ids
        starts.append(ids)
        room = builder.info.max_model_len - len(ids)
        searches.append(BeamSearch(params, builder.eos_ids, room))
    while any(search.running for search in searches):
        requests = [
            builder.build([*ids, *beam.ids], search.step_params, options=own)
            for ids, search, own in zip(starts, searches, options, strict=True)
            for beam in search.running
        ]
        rows = iter([row_of(output) for output in run(requests)])
        for search in searches:
            if search.running:
                search.take([next(rows) for _ in search.running])
    decode = builder.tokenizer.decode
    return [
        BeamSearchOutput(
            [
                BeamSearchSequence(
                    [*ids, *beam.ids],
                    decode([*ids, *beam.ids]),
                    beam.cumulative,
                    list(beam.logprobs),
                    "stop" if beam.has_ended else "length",
                )
                for beam in search.best
            ]
        )
        for ids, search in zip(starts, searches, strict=True)
    ]


_REFUSED: dict[str, object] = {
    "best_of": None,
    "stop": (),
    "min_tokens": 0,
    "logprobs": None,
    "prompt_logprobs": None,
    "logprob_token_ids": (),
    "logit_bias": {},
    "allowed_token_ids": None,
    "bad_words": (),
    "structured_outputs": None,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
"""Parameters that a search has no place for, with their values that change nothing."""


def beams_of(
    params: SamplingParams,
    length_penalty: float | None = None,
    early_stopping: bool | Literal["never"] | None = None,
) -> BeamSearchParams:
    """The search that a request with these parameters asks for; `n` is the number of beams, and
    what only sampling has a use for is passed over. Raises InvalidRequestError for parameters that
    would change an answer and cannot."""
    for name, harmless in _REFUSED.items():
        value = getattr(params, name)
        if value != harmless:
            raise InvalidRequestError(
                f"{name} = {shown(value)} cannot be kept in a beam search: leave it or"
                " use_beam_search out",
                param=name,
            )
    return BeamSearchParams(
        params.n,
        max_tokens=MAX_TOKENS_LIMIT if params.max_tokens is None else params.max_tokens,
        ignore_eos=params.ignore_eos,
        length_penalty=1.0 if length_penalty is None else length_penalty,
        early_stopping=early_stopping or False,
        stop_token_ids=params.stop_token_ids,
    )
