"""Fields that say what an answer must look like: OpenAI's, vLLM's two generations, llama.cpp's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from vllmx_core.errors import InvalidRequestError, shown
from vllmx_core.structured import StructuredOutputsParams

from vllmx_server.generating.fields import ResponseFormat, StructuredFields, StructuredOutputs
from vllmx_server.schema.json_text import with_whole_numbers


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
