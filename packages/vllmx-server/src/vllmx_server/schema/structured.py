"""Fields that say what an answer must look like: OpenAI's, vLLM's two generations, llama.cpp's."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
from vllmx_core.errors import InvalidRequestError, shown
from vllmx_core.structured import StructuredOutputsParams

from vllmx_server.schema.whole_numbers import with_whole_numbers

if TYPE_CHECKING:
    from vllmx_server.schema.generating import StructuredFields


class JSONSchemaFormat(msgspec.Struct, forbid_unknown_fields=True):
    """OpenAI's wrapper of a schema. Answers follow it whatever `strict` says."""

    name: str | None = None
    schema: dict[str, Any] | bool | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """What the whole answer is; "text" leaves it free."""

    type: str = "text"
    json_schema: JSONSchemaFormat | None = None
    schema: dict[str, Any] | None = None
    """llama.cpp's way to bring a schema with "json_object" or "json_schema"."""
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None
    format: dict[str, Any] | None = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's form; null fields are not given."""

    json: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None
    # There is one library, so there is nothing to fall back to; and a schema says what it allows.
    disable_fallback: bool | None = None
    disable_additional_properties: bool | None = None


class GuidedFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's fields, old and new, of every route that generates."""

    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: str | None = None
    """Accepted and ignored: there is one."""


def structured_outputs(body: StructuredFields) -> StructuredOutputsParams | None:
    """What the answer must look like; None where it is free. Raises InvalidRequestError."""
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
    if wanted.type == "json_object" and wanted.schema is None:
        return StructuredOutputsParams(json_object=True, field=field)
    if wanted.type in ("json_schema", "json_object"):
        inner = wanted.json_schema.schema if wanted.json_schema else None
        schema = wanted.schema if inner is None else inner
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
