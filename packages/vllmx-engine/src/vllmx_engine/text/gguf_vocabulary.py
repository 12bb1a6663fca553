"""Checked access to the tokenizer's part of a GGUF file's metadata."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

import numpy as np
from vllmx_core.errors import WeightFormatError, shown

logger = logging.getLogger("vllmx.text")

MAX_TOKENS = 1 << 22
PREFIX = "tokenizer.ggml."


class TokenType(IntEnum):
    """Values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class GGUFVocabulary:
    """Checked access to the tokenizer's metadata.

    Raises:
        WeightFormatError: a value is missing, of another type or length, or out of range.
    """

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.metadata = metadata
        self.tokens = self._tokens()
        self.types = self._numbers("token_type", "iu", TokenType.NORMAL).astype(np.int64)
        self.ids = {token: index for index, token in enumerate(self.tokens)}
        if len(self.ids) != len(self.tokens):
            raise WeightFormatError(
                f"the GGUF vocabulary names {len(self.tokens) - len(self.ids)} tokens twice:"
                " convert the model again"
            )

    @property
    def scores(self) -> Sequence[float]:
        """One for each token; the higher, the earlier it is made."""
        values = self._numbers("scores", "iuf", 0.0)
        if not np.isfinite(values).all():
            raise WeightFormatError(
                f"{PREFIX}scores of the GGUF file has values that are not finite: the file is"
                " damaged, download it again"
            )
        scores: list[float] = values.tolist()
        return scores

    @property
    def merges(self) -> list[tuple[str, str]]:
        """Pairs in the order in which they are made."""
        pairs = []
        for index, line in enumerate(self.strings("merges")):
            cut = line.find(" ", 1)
            if cut < 0 or not line[cut + 1 :]:
                raise WeightFormatError(
                    f"merge {index} of the GGUF vocabulary, {shown(line)}, is not a pair of tokens"
                )
            pairs.append((line[:cut], line[cut + 1 :]))
        return pairs

    def value(self, key: str) -> Any:
        """`tokenizer.ggml.KEY`, None where it is absent."""
        return self.metadata.get(PREFIX + key)

    def flag(self, key: str, default: bool) -> bool:
        value = self.value(key)
        if value is None:
            return default
        if type(value) is not bool:
            raise wrong_value(key, value, "a truth value")
        return value

    def text(self, key: str, default: str) -> str:
        value = self.value(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise wrong_value(key, value, "text")
        return value

    def token_id(self, key: str, default: int | None) -> int | None:
        """A token's id, or `default` where the file names none or one that does not exist."""
        value = self.value(key)
        if value is not None and type(value) is not int:
            raise wrong_value(key, value, "a token id")
        if value is not None and 0 <= value < len(self.tokens):
            return value
        if value is not None:
            logger.warning(
                "%s%s = %d is ignored: there are %d tokens", PREFIX, key, value, len(self.tokens)
            )
        return default if default is not None and default < len(self.tokens) else None

    def strings(self, key: str) -> list[str]:
        value = self.value(key)
        if value is None or isinstance(value, str) or not isinstance(value, Sequence):
            raise wrong_value(key, value, "an array of strings")
        found = list(value)
        if any(type(item) is not str for item in found):
            raise wrong_value(key, value, "an array of strings")
        return found

    def of_type(self, *types: TokenType) -> list[int]:
        """Ids of all tokens of these types."""
        ids: list[int] = np.flatnonzero(np.isin(self.types, types)).tolist()
        return ids

    def _tokens(self) -> list[str]:
        tokens = self.strings("tokens")
        if not 0 < len(tokens) <= MAX_TOKENS:
            raise WeightFormatError(
                f"the GGUF vocabulary has {len(tokens)} tokens, 1 to {MAX_TOKENS} are possible"
            )
        return [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens)]

    def _numbers(self, key: str, kinds: str, default: float) -> np.ndarray[Any, np.dtype[Any]]:
        value = self.value(key)
        if value is None:
            return np.full(len(self.tokens), default)
        if not isinstance(value, np.ndarray) or value.ndim != 1 or value.dtype.kind not in kinds:
            raise wrong_value(key, value, "an array of numbers")
        if len(value) < len(self.tokens):
            raise WeightFormatError(
                f"{PREFIX}{key} has {len(value)} entries for {len(self.tokens)} tokens: convert"
                " the model again"
            )
        return value[: len(self.tokens)]


def wrong_value(key: str, value: Any, wanted: str) -> WeightFormatError:
    """The error for a value of another kind than it should be, to be raised."""
    found = "(absent)" if value is None else f"{type(value).__name__} {shown(value)}"
    return WeightFormatError(
        f"{PREFIX}{key} of the GGUF file must be {wanted}, it is {found}: convert the model again"
    )
