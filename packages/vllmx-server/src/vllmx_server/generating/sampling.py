"""The fields of chats and completions about sampling and about the form of the answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec
from vllmx_core.errors import InvalidRequestError, listing, shown
from vllmx_core.sampling import SamplingParams
from vllmx_core.structured import StructuredOutputsParams
from vllmx_engine.client.beams import BeamSearchParams, beams_of
from vllmx_engine.core.generation_config import SAMPLING

from vllmx_server.generating.fields import (
    ResponseFormat,
    StructuredFields,
    StructuredOutputs,
    UnservedFields,
    check_unserved,
    field_error,
)
from vllmx_server.schema import intervals as limits
from vllmx_server.schema.json_text import with_whole_numbers

MAX_STREAMED_LOGPROBS = 1000
"""The most log-probabilities for each token; a chunk is encoded at once."""

_SAME = (
    *SAMPLING, "n", "best_of", "seed", "stop", "min_tokens", "stop_token_ids", "ignore_eos",
    "include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens",
    "prompt_logprobs", "logprob_token_ids", "allowed_token_ids", "bad_words",
    "truncate_prompt_tokens", "thinking_token_budget",
)  # fmt: skip
"""Fields that `SamplingParams` has under the same names."""


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    """Send a last chunk with the usage and no choices. Not said: as `continuous_usage_stats`."""
    continuous_usage_stats: bool | None = None
    """Send the usage so far with every chunk, unless `include_usage` is false."""
    include_obfuscation: bool | None = None
    """Accepted and ignored: nothing is padded."""

    @property
    def has_usage(self) -> bool:
        """True if the stream has the usage, at its end or in each chunk."""
        asked = self.include_usage
        return bool(self.continuous_usage_stats if asked is None else asked)


def stream_options(asked: StreamOptions | None, has_usage: bool) -> StreamOptions | None:
    """The stream options of a request; with `has_usage` (`--enable-force-include-usage`), every
    chunk has the usage."""
    if not has_usage:
        return asked
    return StreamOptions(include_usage=True, continuous_usage_stats=True)


class SamplingFields(UnservedFields, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's fields first, then vLLM's extensions; None always means: not given."""

    model: str | None = None
    n: limits.Choices | None = None
    stop: str | limits.Stops | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    best_of: limits.Choices | None = None
    logprob_token_ids: limits.LogprobIds | None = None
    """Token ids whose log-probabilities replace those of the likeliest tokens."""
    prompt_logprobs: limits.Likeliest | None = None
    use_beam_search: bool | None = None
    """Return the `n` best of so many beams, in place of samples."""
    length_penalty: limits.LengthPenalty | None = None
    """The power of its length by which a beam's log-probability is divided."""
    early_stopping: bool | Literal["never"] | None = None
    """See `vllmx_engine.client.beams.BeamSearchParams`."""
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None

    # Accepted and ignored, because clients send them by default and they change no token.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    stream_interval: int | None = None
    id_slot: Any = None
    timings_per_token: bool | None = None
    return_progress: bool | None = None

    def check(self) -> None:
        """Cross-field rules. Raises InvalidRequestError."""
        if self.stream_options is not None and not self.stream:
            raise field_error(
                "stream_options", "is only for stream = true: set stream or leave it out"
            )
        if self.stream and self.best_of is not None and self.best_of > (self.n or 1):
            raise field_error(
                "best_of",
                f"= {self.best_of} cannot be streamed, because the best choices are known"
                " only at the end: leave out stream or best_of",
            )
        if self.stream and self.prompt_logprobs is not None:
            raise field_error("prompt_logprobs", "cannot be streamed: leave out stream")
        if self.use_beam_search and self.stream:
            raise field_error(
                "use_beam_search", "knows its answers only at the end: leave out stream"
            )
        for name in ("length_penalty", "early_stopping"):
            if getattr(self, name) not in (None, 1, False) and not self.use_beam_search:
                raise field_error(name, "belongs to a beam search: set use_beam_search, too")
        check_unserved(self)

    def beams(self, params: SamplingParams) -> BeamSearchParams | None:
        """The beam search that is asked for; None: tokens are drawn. Raises InvalidRequestError."""
        if not self.use_beam_search:
            return None
        return beams_of(params, self.length_penalty, self.early_stopping)

    def check_streamed(self, name: str, num_logprobs: int | None) -> None:
        """Raises InvalidRequestError for more log-probabilities than one chunk should hold."""
        if not self.stream or num_logprobs is None or 0 <= num_logprobs <= MAX_STREAMED_LOGPROBS:
            return
        raise field_error(
            name,
            f"= {num_logprobs} cannot be streamed, at most {MAX_STREAMED_LOGPROBS} for each"
            " token can: leave out stream",
        )

    def check_named(self, has_logprobs: bool) -> None:
        """Raises InvalidRequestError for `logprob_token_ids` without log-probabilities."""
        if self.logprob_token_ids and not has_logprobs:
            raise field_error(
                "logprob_token_ids", "selects the log-probabilities of an answer: set logprobs, too"
            )

    def sampling_params(
        self, defaults: Mapping[str, Any], *, max_tokens: int | None, logprobs: int | None
    ) -> SamplingParams:
        """The request's parameters over the model's defaults. Raises InvalidRequestError."""
        values: dict[str, Any] = {k: v for k, v in defaults.items() if k in SAMPLING}
        for name in _SAME:
            value = getattr(self, name, None)
            if value is not None:
                values[name] = value
        if self.logit_bias:
            values["logit_bias"] = _logit_bias(self.logit_bias)
        values["structured_outputs"] = structured_outputs(self)
        return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, **values)


def _logit_bias(entries: dict[str, float]) -> dict[int, float]:
    bad = [key for key in entries if not (key.isascii() and key.isdigit() and len(key) < 11)]
    if bad:
        raise field_error("logit_bias", f"keys must be token ids, got {listing(bad)}")
    return {int(token): value for token, value in entries.items()}


def structured_outputs(body: StructuredFields) -> StructuredOutputsParams | None:
    """The form that the answer must have; None if it is free. Raises InvalidRequestError."""
    found: dict[str, Callable[[], StructuredOutputsParams]] = {}
    wanted, outer = body.response_format, body.structured_outputs
    if wanted is not None and wanted.type != "text":
        found["response_format"] = lambda: _response_format(wanted)
    if outer is not None and outer != StructuredOutputs():
        found["structured_outputs"] = lambda: _structured(outer)
    for field, kind in _SINGLE.items():
        value = getattr(body, field)
        if value not in (None, []) and value != "":
            found[field] = _single(body, field, kind, value)
    if not found:
        return None
    if len(found) > 1:
        # other routes have their own names for the first, and know it by param
        param = "response_format" if "response_format" in found else list(found)[1]
        raise InvalidRequestError(
            f"{' and '.join(found)} each say what the answer looks like: give one of them",
            param=param,
        )
    ((_, make),) = found.items()
    return make()


_SINGLE = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "grammar": "grammar",
    "json_schema": "json",
}


def _single(
    body: StructuredFields, field: str, kind: str, value: Any
) -> Callable[[], StructuredOutputsParams]:
    def make() -> StructuredOutputsParams:
        is_json = kind == "json"
        pattern = body.guided_whitespace_pattern if is_json else None
        form: dict[str, Any] = {kind: _text(value) if is_json else value}
        return StructuredOutputsParams(**form, whitespace_pattern=pattern, field=field)

    return make


def _structured(given: StructuredOutputs) -> StructuredOutputsParams:
    return StructuredOutputsParams(
        json=_text(given.json),
        regex=given.regex,
        choice=given.choice,
        grammar=given.grammar,
        json_object=bool(given.json_object),
        structural_tag=_text(given.structural_tag),
        disable_any_whitespace=bool(given.disable_any_whitespace),
        whitespace_pattern=given.whitespace_pattern,
    )


def _response_format(wanted: ResponseFormat) -> StructuredOutputsParams:
    field = "response_format"
    outer = wanted.value if wanted.schema is None else wanted.schema
    if wanted.type == "json_object" and outer is None:
        return StructuredOutputsParams(json_object=True, field=field)
    if wanted.type in ("json_schema", "json_object"):
        inner = wanted.json_schema.schema if wanted.json_schema else None
        schema = outer if inner is None else inner
        if schema is None:
            raise InvalidRequestError(
                'response_format of type "json_schema" has no schema: give'
                " response_format.json_schema.schema",
                param=f"{field}.json_schema",
            )
        return StructuredOutputsParams(json=_text(schema), field=field)
    if wanted.type == "structural_tag":
        tag = {name: getattr(wanted, name) for name in ("structures", "triggers", "format")}
        given = {name: value for name, value in tag.items() if value is not None}
        return StructuredOutputsParams(structural_tag=_text(given), field=field)
    raise InvalidRequestError(
        f'response_format type {shown(wanted.type)} is not known: use "text", "json_object",'
        ' "json_schema" or "structural_tag"',
        param=field,
    )


def _text(value: Any) -> str | None:
    """JSON text, whose length tells whoever takes it how much work it is. Bounds such as `minItems`
    may be whole floats."""
    if value is None or isinstance(value, str):
        return value
    return with_whole_numbers(msgspec.json.encode(value)).decode()
