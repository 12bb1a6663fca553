"""JSON bodies to structs, with errors that name the field."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator
from typing import Any, Literal, TypeVar

import msgspec
from vllmx_core.config_values import nearest
from vllmx_core.errors import InvalidRequestError, listing, shown

from vllmx_server.schema.intervals import outside
from vllmx_server.schema.json_text import check_weight, misses_whole_number, with_whole_numbers

T = TypeVar("T")
MAX_DEPTH = 32
"""Nesting of the free-form parts of a request (tool schemas, template arguments)."""
_MANY_BYTES = 64 << 10
_LONGEST_NAME = 64
"""Longer names (in characters) are not compared with those of known fields."""
_UNKNOWN = re.compile(r"unknown field `([^`]*)`")
_UNKNOWN_WORD = re.compile(r"Invalid enum value '(.*)'", re.DOTALL)
_PATH = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`")


def decode(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """Parses a request body, where 3.0 counts as 3. Raises InvalidRequestError whose `param` is the
    field at fault."""
    if len(body) > _MANY_BYTES:
        check_weight(body)
    try:
        try:
            return decoder.decode(body)
        except msgspec.ValidationError as error:
            if not misses_whole_number(str(error)):
                raise
            body = with_whole_numbers(body)
            return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise outside(str(error), body, decoder.type) or _explain(
            str(error), decoder.type
        ) from None
    except msgspec.DecodeError as error:
        lone = lone_surrogate(body)
        if lone is not None:
            raise InvalidRequestError(
                f"the body has a lone surrogate, {body[lone : lone + 6].decode()} at byte {lone},"
                " which is not a Unicode character: remove it, or send the other half of its pair"
            ) from None
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from None
    except UnicodeDecodeError:
        raise InvalidRequestError("the body is not valid UTF-8: encode it as UTF-8") from None
    except RecursionError:
        raise InvalidRequestError(
            "the body is nested too deeply: flatten it to at most"
            f" {MAX_DEPTH} levels of objects and lists"
        ) from None


def check_shape(value: Any, kind: Any, name: str) -> None:
    """Raises InvalidRequestError when the field `name` is not of this type, with the path of what
    is at fault."""
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _explain(str(error), kind, name) from None


def _field_names(kind: Any) -> tuple[str, ...]:
    """The fields of a body."""
    is_struct = isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    return tuple(each.encode_name for each in msgspec.structs.fields(kind)) if is_struct else ()


def _explain(text: str, kind: Any, root: str = "") -> InvalidRequestError:
    """The error for msgspec's message about a value of type `kind`: a body, or its field `root`."""
    path = _PATH.search(text)
    inner = path[1] if path else ""
    field = f"{root}.{inner}" if root and inner and inner[0] != "[" else root + inner
    plain = _PATH.sub("", text)
    unknown = _UNKNOWN.search(plain)
    if unknown:
        name = f"{field}.{unknown[1]}" if field else unknown[1]
        is_short = len(name) <= _LONGEST_NAME  # comparing long ones is slow
        near = nearest(name, _field_names(kind)) if is_short and not field else ""
        return InvalidRequestError(
            f"unknown field {name!r}{near + ' Else' if near else ':'} remove it, or see"
            " docs/serving.md for the fields that are served and the ones that are accepted and"
            " ignored",
            param=name,
        )
    where = f"{field}: " if field else ""
    if (word := _UNKNOWN_WORD.fullmatch(plain)) and (words := words_of(kind, inner)):
        plain = f"{shown(word[1])} is none of {listing(words)}"
    return InvalidRequestError(f"{where}{plain[:1].lower()}{plain[1:]}", param=field or None)


def check_free_form(value: Any, name: str, limit: int = MAX_DEPTH) -> None:
    """Raises InvalidRequestError when free-form JSON is nested deeper than `limit`."""
    level = [msgspec.to_builtins(value)]
    for _ in range(limit + 1):
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inner.extend(item.values())
            elif isinstance(item, list):
                inner.extend(item)
        if not inner:
            return
        level = inner
    raise InvalidRequestError(f"{name} is nested more than {limit} levels deep", param=name)


def words_of(kind: Any, path: str) -> list[str]:
    """The words that a type allows at a path in msgspec's notation, such as `a.b[0].c`."""
    kinds = [kind]
    for name in path.split("."):
        field, *items = name.split("[")
        structs = [each for one in kinds for each in _plain(one) if field and _is_struct(each)]
        if field:
            kinds = [hint for each in structs if (hint := _hint(each, field)) is not None]
        for _ in items:
            kinds = [
                typing.get_args(each)[-1]
                for one in kinds
                for each in _plain(one)
                if typing.get_origin(each) in (list, dict)
            ]
    found = [each for one in kinds for each in _plain(one) if typing.get_origin(each) is Literal]
    return [str(word) for each in found for word in typing.get_args(each)]


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _hint(kind: Any, field: str) -> Any:
    return typing.get_type_hints(kind, include_extras=True).get(field)


def _plain(kind: Any) -> Iterator[Any]:
    """The members of a union, without annotations."""
    if typing.get_origin(kind) is typing.Annotated:
        yield from _plain(typing.get_args(kind)[0])
    elif typing.get_origin(kind) in (typing.Union, type(int | str)):
        for each in typing.get_args(kind):
            yield from _plain(each)
    else:
        yield kind


_ESCAPE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    rb"|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\.",
    re.DOTALL,
)
"""A pair of surrogates, half of one, or the beginning of another escape."""


def lone_surrogate(body: bytes) -> int | None:
    """The place of the first escaped surrogate without its other half, or None."""
    return next((found.start() for found in _ESCAPE.finditer(body) if found[1]), None)
