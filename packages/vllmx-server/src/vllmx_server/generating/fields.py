"""The fields of every route that generates text, and those that name what is not built."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, TypeVar, cast

import msgspec
from vllmx_core.errors import InvalidRequestError, shown

from vllmx_server.schema import intervals as limits

T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)


def field_error(param: str, text: str) -> InvalidRequestError:
    """The error for a field of a request; the field's name is the subject of `text`."""
    return InvalidRequestError(f"{param} {text}", param=param)


def needed(value: T | None, where: str, name: str) -> T:
    """The value of the field `name` of `where`. Raises InvalidRequestError if it is missing."""
    if value is None:
        raise InvalidRequestError(f"{where} lacks its {name}", param=f"{where}.{name}")
    return value


_MAPPINGS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("allOf", "anyOf", "oneOf")
_SCHEMAS = ("items", "prefixItems", "additionalProperties", *_LISTS)
_JOINED = ("properties", "$ref", "anyOf", "oneOf", "if", "dependentSchemas")


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema, changed in place so that objects have no properties but those that it names, as
    llama.cpp and Ollama read one. Objects that several schemas describe together stay open, for
    each of these names properties of its own."""
    objects: list[dict[str, Any]] = []
    together: list[dict[str, Any]] = []
    waiting: list[Any] = [schema]
    while waiting:
        found = waiting.pop()
        if isinstance(found, list):
            waiting += found
        elif isinstance(found, dict):
            if "properties" in found:
                objects.append(found)
            every = found.get("allOf")
            count = len(every) if isinstance(every, list) else 0
            if count + sum(name in found for name in _JOINED) > 1:
                together.append(found)
            waiting += (found[name] for name in _SCHEMAS if name in found)
            mappings = (found[name] for name in _MAPPINGS if name in found)
            waiting += (each for one in mappings if isinstance(one, dict) for each in one.values())
    left_open: set[int] = set()
    while together:
        found = together.pop()
        if id(found) not in left_open:
            left_open.add(id(found))
            together += _described_by(found, schema)
    for found in objects:
        if id(found) not in left_open:
            found.setdefault("additionalProperties", False)
    return schema


def _described_by(found: dict[str, Any], schema: dict[str, Any]) -> list[dict[str, Any]]:
    """Other schemas of what `found` describes; `schema` has the definitions."""
    others = [each for name in _LISTS if isinstance(one := found.get(name), list) for each in one]
    kind, _, name = str(found.get("$ref")).removeprefix("#/").partition("/")
    if isinstance(definitions := schema.get(kind), dict):
        others.append(definitions.get(name))
    return [each for each in others if isinstance(each, dict)]


class JSONSchemaFormat(msgspec.Struct, forbid_unknown_fields=True):
    """OpenAI's wrapper of a schema. Answers follow it whatever `strict` says."""

    name: str | None = None
    schema: dict[str, Any] | bool | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """The form of the whole answer; "text" leaves it free."""

    type: str = "text"
    json_schema: JSONSchemaFormat | None = None
    schema: dict[str, Any] | None = None
    """llama.cpp's way to bring a schema with "json_object" or "json_schema"."""
    value: dict[str, Any] | None = None
    """Hugging Face's clients bring a schema so, with "json_object"."""
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


class GeneratingFields(GuidedFields, kw_only=True, forbid_unknown_fields=True):
    """The fields that chats, completions, Responses and Messages share; None means not given.
    `MessagesRequest` has another base, so it repeats them, and a test compares both."""

    temperature: limits.Temperature | None = None
    top_p: limits.TopP | None = None
    top_k: limits.TopK | None = None
    min_p: limits.MinP | None = None
    frequency_penalty: limits.Penalty | None = None
    presence_penalty: limits.Penalty | None = None
    repetition_penalty: limits.Factor | None = None
    logit_bias: limits.Biases | None = None
    allowed_token_ids: limits.AllowedIds | None = None
    bad_words: limits.BadWords | None = None
    seed: limits.Seed | None = None
    min_tokens: limits.MinTokens | None = None
    stop_token_ids: limits.StopIds | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: limits.Truncation | None = None
    priority: limits.Priority | None = None
    request_id: limits.Name | None = None
    cache_salt: limits.Name | None = None
    session_id: limits.Name | None = None


GENERATING = GeneratingFields.__struct_fields__


class StructuredFields(GeneratingFields, kw_only=True, forbid_unknown_fields=True):
    """Formats of chats and completions; a request gives at most one."""

    response_format: ResponseFormat | None = None
    grammar: str | None = None
    """llama.cpp's field for GBNF; it also takes Lark."""
    json_schema: dict[str, Any] | None = None
    """llama.cpp's field."""


class UnservedFields(StructuredFields, kw_only=True, forbid_unknown_fields=True):
    """vLLM's fields of both completions of which only harmless values are served."""

    truncation_side: Any = None
    logits_processors: Any = None
    mm_processor_kwargs: Any = None
    kv_transfer_params: Any = None
    cache_prompt: Any = None
    vllm_xargs: Any = None
    repetition_detection: Any = None


UNSERVED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "truncation_side": (("left",), 'prompts lose their beginning: use "left" or leave it out'),
    "logits_processors": (([],), "no code of clients is run: use logit_bias or bad_words"),
    "mm_processor_kwargs": (({},), "prompts are text: leave it out"),
    "kv_transfer_params": (({},), "one process prefills and decodes: leave it out"),
    "cache_prompt": ((True,), "equal prefixes are shared, which changes no answer: leave it out"),
    "vllm_xargs": (({},), "there are no such extensions: leave it out"),
    "repetition_detection": (({},), "use repetition_penalty or frequency_penalty"),
    # of chats
    "modalities": ((["text"],), 'answers are text: use ["text"] or leave it out'),
    "audio": ((), "answers are text: leave it out"),
    "verbosity": (("medium",), 'say in the prompt how long the answer may be; use "medium"'),
    "web_search_options": ((), "nothing is searched: leave it out"),
    "functions": (([],), "give tools instead"),
    "function_call": (("none", "auto"), "its functions are not served: leave it out"),
    "media_io_kwargs": (({},), "prompts are text: leave it out"),
    # of texts
    "prompt_embeds": (([],), "give prompt as text or token ids"),
}


@cache
def _unserved(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    return tuple(name for name in kind.__struct_fields__ if name in UNSERVED)


def check_unserved(body: msgspec.Struct) -> None:
    """Raises InvalidRequestError for a field whose value would change the answer."""
    check_harmless(body, _unserved(type(body)), UNSERVED)


def check_harmless(
    body: msgspec.Struct,
    names: Iterable[str],
    known: Mapping[str, tuple[tuple[Any, ...], str]],
    prefix: str = "",
) -> None:
    """Raises InvalidRequestError for a field of these whose value is none of the harmless ones,
    with the remedy. `prefix`: before the names in messages."""
    for name in names:
        value = getattr(body, name)
        if value is None or value is False:
            continue
        harmless, remedy = known[name]
        if value not in harmless:
            raise field_error(f"{prefix}{name}", f"= {shown(value)} is not served: {remedy}")


def accepting(base: type[S], *names: str) -> type[S]:
    """A subclass that takes any value for the fields of these names, too."""
    fields = [(name, Any, None) for name in names]
    made = msgspec.defstruct(
        base.__name__, fields, bases=(base,), kw_only=True, forbid_unknown_fields=True
    )
    return cast(type[S], made)
