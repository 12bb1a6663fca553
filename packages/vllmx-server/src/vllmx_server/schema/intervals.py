"""Types of fields with bounds, and the errors for values outside of them."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from vllmx_core.bounds import BOUNDS, Bounds
from vllmx_core.errors import InvalidRequestError, shown
from vllmx_core.sampling import (
    MAX_ALLOWED_IDS,
    MAX_BAD_WORDS,
    MAX_BIAS_ENTRIES,
    MAX_LOGPROB_IDS,
    MAX_STOP_IDS,
    MAX_STOP_LENGTH,
    MAX_STOPS,
)


def _meta(name: str) -> Meta:
    """The bounds of a field, which decoding checks and the API's document shows."""
    bounds = BOUNDS[name]
    return Meta(ge=bounds.low, le=bounds.high)


def _documented(name: str) -> Meta:
    """Bounds for the API's document only. Others check them: those of msgspec have at most 63 bits,
    and its message would not quote the number of a list that is wrong."""
    bounds = BOUNDS[name]
    return Meta(extra_json_schema={"minimum": bounds.low, "maximum": bounds.high})


Choices = Annotated[int, _meta("n")]
Temperature = Annotated[float, _meta("temperature")]
TopP = Annotated[float, _meta("top_p")]
TopK = Annotated[int, _meta("top_k")]
MinP = Annotated[float, _meta("min_p")]
Penalty = Annotated[float, _meta("presence_penalty")]
Factor = Annotated[float, _meta("repetition_penalty")]
LengthPenalty = Annotated[float, _meta("length_penalty")]
MinTokens = Annotated[int, _meta("min_tokens")]
MaxTokens = Annotated[int, _meta("max_tokens")]
Likeliest = Annotated[int, _meta("logprobs")]
ThinkingBudget = Annotated[int, _meta("thinking_token_budget")]
BudgetTokens = Annotated[int, _meta("budget_tokens")]
Truncation = Annotated[int, _meta("truncate_prompt_tokens")]
Priority = Annotated[int, _meta("priority")]
ToolCalls = Annotated[int, _meta("max_tool_calls")]
Dimensions = Annotated[int, _meta("dimensions")]
TopN = Annotated[int, _meta("top_n")]
Lifetime = Annotated[int, _meta("lifetime_s")]
Seed = Annotated[int, _documented("seed")]
TokenId = Annotated[int, _documented("token_id")]
Name = Annotated[str, Meta(min_length=1, max_length=128)]
Word = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_LENGTH)]
Stops = Annotated[list[Word], Meta(max_length=MAX_STOPS)]
StopIds = Annotated[list[TokenId], Meta(max_length=MAX_STOP_IDS)]
LogprobIds = Annotated[list[TokenId], Meta(max_length=MAX_LOGPROB_IDS)]
BadWords = Annotated[list[Word], Meta(max_length=MAX_BAD_WORDS)]
AllowedIds = Annotated[
    list[TokenId], Meta(max_length=MAX_ALLOWED_IDS, extra_json_schema={"minItems": 1})
]
Biases = Annotated[
    dict[
        Annotated[str, Meta(extra_json_schema={"pattern": "^[0-9]{1,10}$"})],
        Annotated[float, _documented("logit_bias")],
    ],
    Meta(max_length=MAX_BIAS_ENTRIES),
]

_OUTSIDE = re.compile(r"Expected `(?:int|float)` [<>]=? .* - at `\$\.(\w+)`$")
_SIZE = re.compile(r"Expected `(\w+)` of length ([<>]=) (\d+) - at `\$\.(\w+)`$")
_SIZED = msgspec.json.Decoder(str | list[Any] | dict[str, Any])
_RAW = msgspec.json.Decoder(dict[str, msgspec.Raw])


def outside(text: str, body: bytes, kind: Any) -> InvalidRequestError | None:
    """The error for a body whose decoding as `kind` failed with `text`, if that is a number or a
    size outside of its field's interval; else None."""
    size = _SIZE.search(text)
    if size is not None:
        return _wrong_size(size, body)
    found = _OUTSIDE.search(text)
    meta = found and next(_metas(typing.get_type_hints(kind, include_extras=True)[found[1]]), None)
    if not found or meta is None:
        return None
    name, value = found[1], bytes(_RAW.decode(body)[found[1]]).decode("utf-8", "replace")
    low, high = meta.ge, meta.le
    assert low is not None
    assert high is not None, "bounds are closed"
    return Bounds(low, high).refusal(name, shown(value)[1:-1])


def _wrong_size(found: re.Match[str], body: bytes) -> InvalidRequestError:
    kind, sign, limit, name = found.groups()
    value = _SIZED.decode(_RAW.decode(body)[name])
    what = "characters" if kind == "str" else "entries"
    bound = "at most" if sign == "<=" else "at least"
    return InvalidRequestError(
        f"{name} has {len(value)} {what}, {bound} {limit} are allowed", param=name
    )


def _metas(hint: Any) -> Iterator[Meta]:
    """The bounds of a field's number, which may be a part of a union."""
    for each in (hint, *typing.get_args(hint)):
        for meta in getattr(each, "__metadata__", ()):
            if isinstance(meta, Meta) and meta.ge is not None:
                yield meta


Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=16),
]
"""OpenAI's limits."""
