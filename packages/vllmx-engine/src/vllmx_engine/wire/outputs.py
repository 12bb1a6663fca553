"""Results for users. Names are vLLM's."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from vllmx_engine.wire.messages import FinishReason


class Logprob(msgspec.Struct, frozen=True):
    """Log-probability of one token at one position."""

    logprob: float
    """Natural logarithm, of the logits as the model computed them."""
    rank: int | None
    """1 = the most likely token."""
    decoded_token: str | None


class ToolCall(msgspec.Struct):
    """A call that a model makes."""

    id: str
    name: str
    arguments: str
    """JSON text of an object; a part of it where the answer was cut."""


class CompletionOutput(msgspec.Struct, kw_only=True):
    """One choice of a request: all of it, or what is new of it (see `RequestOutput`)."""

    index: int
    text: str
    token_ids: list[int]
    """The end-of-sequence id included, where one was generated."""
    cumulative_logprob: float | None = None
    """Sum over all tokens so far, also in a delta; None without logprobs."""
    logprobs: Sequence[dict[int, Logprob]] | None = None
    """The log-probabilities for each of `token_ids`: the token itself first, then the most likely
    ones."""
    text_offsets: list[int] | None = None
    """The offset of each of `token_ids`, with logprobs: where its text begins in the whole output,
    in characters."""
    finish_reason: FinishReason | None = None
    """None while more follows."""
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended an answer with "stop"; None for the model's own
    end of sequence."""
    reasoning: str | None = None
    """The thoughts, in answers of `LLM.chat` whose thoughts can be separated from the text."""
    content: str | None = None
    """The text of an answer of `LLM.chat` without thoughts and calls."""
    tool_calls: list[ToolCall] | None = None
    """The calls that the model makes, in answers of `LLM.chat` with tools."""
    vector: bytes = b""
    """The vector of a request that pools: what the model gave, float32."""


class PoolingOutput(msgspec.Struct, frozen=True):
    """A model's result for a text, or for a pair of texts."""

    data: npt.NDArray[np.float32]
    """(dimensions,) of a vector, (tokens, dimensions) of those of tokens, (1,) of a score,
    (classes,) of probabilities."""

    @property
    def embedding(self) -> list[float]:
        """The vector, as `LLM.embed` gives it."""
        return [float(value) for value in self.data]

    @property
    def score(self) -> float:
        """The score, as `LLM.score` gives it."""
        return float(self.data[0])

    @property
    def probs(self) -> list[float]:
        """The probability of each class, from `LLM.classify`."""
        return [float(value) for value in self.data]


class RequestMetrics(msgspec.Struct):
    """Times of one request, in seconds of `time.monotonic`, and the number of its tokens."""

    arrival_s: float
    first_token_s: float | None = None
    last_token_s: float | None = None
    num_generation_tokens: int = 0
    """Tokens that were generated, in all choices together."""
    queue_s: float = 0.0
    """Seconds that the first choice to answer waited in the core before it ran."""
    num_accepted: int = 0
    """Draft tokens that became part of an answer, in all choices together."""
    num_rejected: int = 0
    """Draft tokens that did not."""


class PoolingRequestOutput(msgspec.Struct, kw_only=True, frozen=True):
    """The answer to one text of `LLM.embed`, `score` or `classify`."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: PoolingOutput
    """The output, without data where there is an error."""
    error: str | None = None
    """The error message."""
    finished: bool = True
    metrics: RequestMetrics | None = None
    text_s: float = 0.0
    """Seconds of tokenising before `metrics.arrival_s`, including the wait for a thread."""


class RequestOutput(msgspec.Struct, kw_only=True):
    """An update of a request.

    With output kind "delta" (streams) it holds the choices that have something new and of each only
    that; with "cumulative" and "final" every choice and all of it.
    """

    request_id: str
    prompt: str | None
    """None when the prompt came as token ids."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: Sequence[dict[int, Logprob] | None] | None = None
    """One for each prompt token, None for the first; in a stream with the first output only."""
    num_cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache."""
    metrics: RequestMetrics | None = None
    error: str | None = None
    """The error message, with finish reason "error"."""
