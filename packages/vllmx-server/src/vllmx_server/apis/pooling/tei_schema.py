"""POST /embed and /rerank in the shapes of text-embeddings-inference (TEI)."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from vllmx_core.errors import InvalidRequestError
from vllmx_engine.client.pooling import PoolingText

from vllmx_server.apis.pooling.schema import MAX_INPUTS, Input, texts_of
from vllmx_server.schema import intervals as limits


class TEIFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields of both routes."""

    model: str | None = None
    """vllmx's own, for servers with several models."""
    truncate: bool | None = None
    """Cut inputs that are too long for the model instead of refusing them."""
    truncation_direction: Literal["right", "left", "Right", "Left"] | None = None

    @property
    def truncate_prompt_tokens(self) -> int | None:
        return -1 if self.truncate else None

    @property
    def priority(self) -> None:
        """TEI has no priorities."""

    @property
    def cache_salt(self) -> None:
        """TEI has no salts."""

    @property
    def request_id(self) -> None:
        """TEI does not name requests."""

    def check(self) -> None:
        """Cross-field rules. Raises InvalidRequestError."""
        if self.truncate and (self.truncation_direction or "").lower() == "left":
            raise InvalidRequestError(
                'truncation_direction = "left" is not served: inputs lose their end; use "right"',
                param="truncation_direction",
            )


class EmbedRequest(TEIFields, kw_only=True, forbid_unknown_fields=True):
    inputs: str | Input
    """A text, token ids, or a list of either."""
    normalize: bool | None = None
    """None: yes."""
    prompt_name: Annotated[str, Meta(max_length=256)] | None = None
    """The model's prompt that is written before each input; None: its default, if it has one."""
    dimensions: limits.Dimensions | None = None

    def texts(self) -> list[PoolingText]:
        """Raises InvalidRequestError."""
        return texts_of(self.inputs, "inputs")


class RankTextsRequest(TEIFields, kw_only=True, forbid_unknown_fields=True):
    query: str
    texts: Annotated[list[str], Meta(min_length=1, max_length=MAX_INPUTS)]
    raw_scores: bool | None = None
    """Scores as the model gives them, without its activation."""
    return_text: bool | None = None
    """Whether the answer repeats the texts; None: no."""

    def pairs(self) -> list[PoolingText]:
        return [PoolingText(self.query, pair=text) for text in self.texts]


EMBED = msgspec.json.Decoder(EmbedRequest)
RANK_TEXTS = msgspec.json.Decoder(RankTextsRequest)
