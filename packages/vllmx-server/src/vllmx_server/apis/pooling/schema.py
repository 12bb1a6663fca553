"""Bodies of /v1/embeddings, /pooling, /score, /rerank, /classify,
and of TEI's /embed and /rerank."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from vllmx_core.errors import InvalidRequestError
from vllmx_engine.client.chat import ChatOptions
from vllmx_engine.client.pooling import PoolingText
from vllmx_engine.client.request_limits import id_outside

from vllmx_server.generating.chat_body import (
    MAX_MESSAGES,
    MAX_TEMPLATE,
    ChatMessage,
    generation_prompt,
)
from vllmx_server.generating.fields import field_error
from vllmx_server.schema import intervals as limits
from vllmx_server.schema.decode import check_free_form

MAX_INPUTS = 2048
Input = Annotated[list[str | limits.TokenId | list[limits.TokenId]], Meta(min_length=1)]
Texts = str | Annotated[list[str], Meta(min_length=1, max_length=MAX_INPUTS)]


class PoolingFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields of all routes but those of text-embeddings-inference (TEI)."""

    model: str | None = None
    truncate_prompt_tokens: limits.Truncation | None = None
    """-1: as many as the model takes."""
    priority: limits.Priority | None = None
    request_id: limits.Name | None = None
    cache_salt: limits.Name | None = None
    # Accepted and ignored.
    user: str | None = None

    def check(self) -> None:
        """Cross-field rules. Raises InvalidRequestError."""


class InputFields(PoolingFields, kw_only=True, forbid_unknown_fields=True):
    input: str | Input | None = None
    """A text, token ids, or a list of either."""
    add_special_tokens: bool | None = None
    """None: true for `input`, false for `messages`, whose template writes its own."""
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = (
        None
    )
    """A conversation instead of `input`: one input, as the chat template writes it."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Annotated[str, Meta(max_length=MAX_TEMPLATE)] | None = None
    """Only where the operator trusts clients with it."""
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self) -> None:
        """Cross-field rules. Raises InvalidRequestError."""
        if (self.input is None) == (self.messages is None):
            raise InvalidRequestError("give either input or messages", param="input")
        check_free_form(self.chat_template_kwargs, "chat_template_kwargs")

    def pooling_texts(self) -> list[PoolingText]:
        return [] if self.input is None else texts_of(self.input, "input")

    def conversation(self) -> list[dict[str, Any]]:
        """The messages as the template takes them. Raises InvalidRequestError for an image."""
        found = [each.for_template(index) for index, each in enumerate(self.messages or ())]
        for index, message in enumerate(found):
            content = message.get("content")
            parts = content if isinstance(content, list) else ()
            if any(part["type"] == "image_url" for part in parts):
                raise InvalidRequestError(
                    f"messages[{index}] has an image; this route takes conversations of text",
                    param=f"messages[{index}].content",
                )
        return found

    def chat_options(self) -> ChatOptions:
        """The options for rendering `messages`. Raises InvalidRequestError."""
        add = generation_prompt(bool(self.add_generation_prompt), self.continue_final_message)
        return ChatOptions(
            add_generation_prompt=add,
            continue_final_message=bool(self.continue_final_message),
            source=self.chat_template,
            template_kwargs=self.chat_template_kwargs or {},
        )


def texts_of(given: str | list[str | int | list[int]], name: str) -> list[PoolingText]:
    """The inputs of the field `name`. Raises InvalidRequestError."""
    if isinstance(given, str):
        return [PoolingText(given)]
    if all(isinstance(item, int) for item in given):
        return [_of_ids([item for item in given if isinstance(item, int)], name)]
    if len(given) > MAX_INPUTS:
        raise field_error(
            name, f"has {len(given)} entries, at most {MAX_INPUTS} are taken: split the call"
        )
    found = []
    for item in given:
        if isinstance(item, int):
            raise field_error(
                name,
                "mixes token ids with other items: give one list of ids, or a list of"
                " texts or lists of ids",
            )
        found.append(PoolingText(item) if isinstance(item, str) else _of_ids(item, name))
    return found


def _of_ids(ids: list[int], name: str) -> PoolingText:
    if not ids or id_outside(ids, 1 << 31) is not None:
        raise field_error(
            name, "has a list of token ids that is empty or has one outside of 31 bits"
        )
    return PoolingText(ids=ids)


class EmbeddingsRequest(InputFields, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's embeddings with vLLM's extensions."""

    encoding_format: Literal["float", "base64"] | None = None
    dimensions: limits.Dimensions | None = None
    normalize: bool | None = None

    @property
    def is_normalized(self) -> bool:
        return self.normalize is not False


class PoolingRequest(EmbeddingsRequest, kw_only=True, forbid_unknown_fields=True):
    """vLLM's pooling: what the model makes of each input."""

    task: Literal["embed", "token_embed", "classify"] | None = None


class ClassifyRequest(InputFields, kw_only=True, forbid_unknown_fields=True):
    """vLLM's classification."""

    activation: bool | None = None
    use_activation: bool | None = None
    """vLLM's newer name of it."""

    @property
    def is_normalized(self) -> bool:
        return self.activation is not False and self.use_activation is not False


class ScoringFields(PoolingFields, kw_only=True, forbid_unknown_fields=True):
    activation: bool | None = None
    use_activation: bool | None = None
    """vLLM's newer name of it."""

    @property
    def is_normalized(self) -> bool:
        return self.activation is not False and self.use_activation is not False


class ScoreRequest(ScoringFields, kw_only=True, forbid_unknown_fields=True):
    """vLLM's scores: one text with each of several, or pairs."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    """`queries` is a newer name of `text_1`, `documents` one of `text_2`."""
    documents: Texts | None = None

    def pooling_texts(self) -> list[PoolingText]:
        first = self.text_1 if self.queries is None else self.queries
        second = self.text_2 if self.documents is None else self.documents
        if first is None or second is None:
            raise InvalidRequestError("give text_1 and text_2", param="text_1")
        ones = [first] if isinstance(first, str) else first
        others = [second] if isinstance(second, str) else second
        if len(ones) not in (1, len(others)):
            raise field_error(
                "text_1",
                f"has {len(ones)} texts and text_2 has {len(others)}: give one text_1, or as"
                " many as there are in text_2",
            )
        ones = ones * (len(others) // len(ones))
        return [PoolingText(a, pair=b) for a, b in zip(ones, others, strict=True)]


class Document(msgspec.Struct):
    """A text; other keys are ignored."""

    text: str


class RerankRequest(ScoringFields, kw_only=True, forbid_unknown_fields=True):
    """Jina's and Cohere's reranking."""

    query: str
    documents: Annotated[list[str | Document], Meta(min_length=1, max_length=MAX_INPUTS)]
    top_n: limits.TopN | None = None
    """0: all documents come back."""
    return_documents: bool | None = None
    """None: yes, as in vLLM."""
    # Accepted and ignored.
    max_chunks_per_doc: Any = None

    def texts(self) -> list[str]:
        """The texts of the documents."""
        return [each if isinstance(each, str) else each.text for each in self.documents]

    def pooling_texts(self) -> list[PoolingText]:
        return [PoolingText(self.query, pair=text) for text in self.texts()]


class TEIFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields of TEI's routes."""

    model: str | None = None
    """vllmx's own, for servers with several models."""
    truncate: bool | None = None
    """Cut inputs that are too long for the model instead of refusing them."""
    truncation_direction: Literal["right", "left", "Right", "Left"] | None = None

    @property
    def truncate_prompt_tokens(self) -> int | None:
        return -1 if self.truncate else None

    priority = cache_salt = None  # TEI has neither

    def check(self) -> None:
        """Cross-field rules. Raises InvalidRequestError."""
        if self.truncate and (self.truncation_direction or "").lower() == "left":
            raise field_error(
                "truncation_direction", '= "left" is not served: inputs lose their end; use "right"'
            )


class EmbedRequest(TEIFields, kw_only=True, forbid_unknown_fields=True):
    inputs: str | Input
    """A text, token ids, or a list of either."""
    normalize: bool | None = None
    """None: yes."""
    prompt_name: Annotated[str, Meta(max_length=256)] | None = None
    """The model's prompt that is written before each input; None: its default, if it has one."""
    dimensions: limits.Dimensions | None = None

    @property
    def is_normalized(self) -> bool:
        return self.normalize is not False

    def pooling_texts(self) -> list[PoolingText]:
        return texts_of(self.inputs, "inputs")


class RankTextsRequest(TEIFields, kw_only=True, forbid_unknown_fields=True):
    query: str
    texts: Annotated[list[str], Meta(min_length=1, max_length=MAX_INPUTS)]
    raw_scores: bool | None = None
    """Scores as the model gives them, without its activation."""
    return_text: bool | None = None
    """True if the answer repeats the texts; None: no."""

    @property
    def is_normalized(self) -> bool:
        return not self.raw_scores

    def pooling_texts(self) -> list[PoolingText]:
        return [PoolingText(self.query, pair=text) for text in self.texts]


PoolingBody = (
    EmbeddingsRequest
    | ClassifyRequest
    | ScoreRequest
    | RerankRequest
    | EmbedRequest
    | RankTextsRequest
)
"""All have `pooling_texts`, which makes the inputs of the model, none for a conversation, and
`is_normalized`: vectors have length 1, scores go through the model's activation."""
EMBEDDINGS = msgspec.json.Decoder(EmbeddingsRequest)
POOLING = msgspec.json.Decoder(PoolingRequest)
CLASSIFY = msgspec.json.Decoder(ClassifyRequest)
SCORE = msgspec.json.Decoder(ScoreRequest)
RERANK = msgspec.json.Decoder(RerankRequest)
EMBED = msgspec.json.Decoder(EmbedRequest)
RANK_TEXTS = msgspec.json.Decoder(RankTextsRequest)
