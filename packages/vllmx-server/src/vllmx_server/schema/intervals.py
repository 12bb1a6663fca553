"""Intervals that stand in the types of fields, and what is said of a number outside of one."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from vllmx_core.errors import InvalidRequestError, shown
from vllmx_core.sampling import (
    MAX_ALLOWED_IDS,
    MAX_BAD_WORDS,
    MAX_BIAS_ENTRIES,
    MAX_CHOICES,
    MAX_STOP_IDS,
    MAX_STOP_LENGTH,
    MAX_STOPS,
    MAX_TOKENS_LIMIT,
)

from vllmx_server.schema.decode_apart import decode_apart

Choices = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
Temperature = Annotated[float, Meta(ge=0, le=100)]
TopP = Annotated[float, Meta(gt=0, le=1)]
TopK = Annotated[int, Meta(ge=-1, le=1 << 30)]
MinP = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Factor = Annotated[float, Meta(gt=0, le=100)]
MinTokens = Annotated[int, Meta(ge=0, le=MAX_TOKENS_LIMIT)]
MaxTokens = Annotated[int, Meta(ge=1, le=MAX_TOKENS_LIMIT)]
Likeliest = Annotated[int, Meta(ge=-1, le=1 << 30)]
ThinkingBudget = Annotated[int, Meta(ge=-1, le=MAX_TOKENS_LIMIT)]
Truncation = Annotated[int, Meta(ge=-1, le=MAX_TOKENS_LIMIT)]
Priority = Annotated[int, Meta(ge=-(1 << 31), le=(1 << 31) - 1)]
Name = Annotated[str, Meta(min_length=1, max_length=128)]
Word = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_LENGTH)]
Stops = Annotated[list[Word], Meta(max_length=MAX_STOPS)]
StopIds = Annotated[list[int], Meta(max_length=MAX_STOP_IDS)]
BadWords = Annotated[list[Word], Meta(max_length=MAX_BAD_WORDS)]
AllowedIds = Annotated[list[int], Meta(max_length=MAX_ALLOWED_IDS)]
Biases = Annotated[dict[str, float], Meta(max_length=MAX_BIAS_ENTRIES)]

_OUTSIDE = re.compile(r"Expected `(?:int|float)` [<>]=? .* - at `\$\.(\w+)`$")
_SIZE = re.compile(r"Expected `(\w+)` of length ([<>]=) (\d+) - at `\$\.(\w+)`$")
_SIZED = msgspec.json.Decoder(str | list[Any] | dict[str, Any])
_RAW = msgspec.json.Decoder(dict[str, msgspec.Raw])


def outside(text: str, body: bytes, kind: Any) -> InvalidRequestError | None:
    """What to say of a body whose decoding as `kind` failed with `text`, where that is a number or
    a size outside of its field's interval; else None."""
    size = _SIZE.search(text)
    if size is not None:
        return _wrong_size(size, body)
    found = _OUTSIDE.search(text)
    meta = found and next(_metas(typing.get_type_hints(kind, include_extras=True)[found[1]]), None)
    if not found or meta is None:
        return None
    name, value = found[1], bytes(_RAW.decode(body)[found[1]]).decode("utf-8", "replace")
    high = meta.le if meta.le is not None else meta.lt
    if meta.gt is not None:
        limits = f"above {meta.gt:g} and at most {high:g}"
    else:
        limits = f"between {meta.ge} and {high}"
    return InvalidRequestError(f"{name} must be {limits}, got {shown(value)[1:-1]}", param=name)


def _wrong_size(found: re.Match[str], body: bytes) -> InvalidRequestError:
    kind, sign, limit, name = found.groups()
    value = decode_apart(bytes(_RAW.decode(body)[name]), _SIZED)
    what = "characters" if kind == "str" else "entries"
    bound = "at most" if sign == "<=" else "at least"
    return InvalidRequestError(
        f"{name} has {len(value)} {what}, {bound} {limit} are allowed", param=name
    )


def _metas(hint: Any) -> Iterator[Meta]:
    """The limits of a field's number, whatever else the field may be."""
    for each in (hint, *typing.get_args(hint)):
        for meta in getattr(each, "__metadata__", ()):
            if isinstance(meta, Meta) and (meta.ge is not None or meta.gt is not None):
                yield meta
