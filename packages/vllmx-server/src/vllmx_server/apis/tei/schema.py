"""Bodies of TEI's API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from vllmx_engine.client.pooling import PoolingText

from vllmx_server.generating.fields import field_error
from vllmx_server.schema import intervals as limits

MAX_INPUTS = 2048
Inputs = Annotated[list[str | list[str]], Meta(min_length=1, max_length=MAX_INPUTS)]


class ModelFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    """vllmx's own, for servers with several models."""

    def check(self) -> None:
        """Cross-field rules. Raises InvalidRequestError."""


class PredictRequest(ModelFields, kw_only=True, forbid_unknown_fields=True):
    inputs: str | Inputs
    """A text, two that are a pair, or a list of lists of one text or two."""
    truncate: bool | None = None
    """Cut inputs that are too long for the model instead of refusing them."""
    truncation_direction: Literal["right", "Right"] | None = None
    raw_scores: bool | None = None
    """Scores as the model gives them, without its activation."""

    priority = cache_salt = None  # TEI has neither

    @property
    def truncate_prompt_tokens(self) -> int | None:
        return -1 if self.truncate else None

    @property
    def is_normalized(self) -> bool:
        return not self.raw_scores

    @property
    def is_batch(self) -> bool:
        return isinstance(self.inputs, list) and isinstance(self.inputs[0], list)

    def pooling_texts(self) -> list[PoolingText]:
        """Raises InvalidRequestError for what is neither a text nor a pair."""
        if self.is_batch:
            return [_text_or_pair(each) for each in self.inputs]
        return [_text_or_pair(self.inputs)]


def _text_or_pair(given: Any) -> PoolingText:
    texts = [given] if isinstance(given, str) else given
    if len(texts) not in (1, 2) or not all(isinstance(each, str) for each in texts):
        raise field_error("inputs", "must be a text, a pair of texts, or a list of lists of these")
    return PoolingText(texts[0], pair=texts[1] if len(texts) == 2 else None)


class TokenizeRequest(ModelFields, kw_only=True, forbid_unknown_fields=True):
    inputs: str | Annotated[list[str], Meta(min_length=1, max_length=MAX_INPUTS)]
    add_special_tokens: bool = True


class DecodeRequest(ModelFields, kw_only=True, forbid_unknown_fields=True):
    ids: Annotated[list[limits.TokenId | list[limits.TokenId]], Meta(min_length=1)]
    """Token ids, or lists of them."""
    skip_special_tokens: bool = True

    def texts(self) -> list[list[int]]:
        """The ids of each text. Raises InvalidRequestError."""
        lists = [each for each in self.ids if isinstance(each, list)]
        if lists and len(lists) == len(self.ids) <= MAX_INPUTS:
            return lists
        if lists:
            raise field_error("ids", f"must be ids, or at most {MAX_INPUTS} lists of ids")
        return [[each for each in self.ids if isinstance(each, int)]]


PREDICT = msgspec.json.Decoder(PredictRequest)
TOKENIZE = msgspec.json.Decoder(TokenizeRequest)
DECODE = msgspec.json.Decoder(DecodeRequest)
