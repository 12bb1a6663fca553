"""Constraints on an answer's form, as the user gives them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllmx_core.errors import InvalidRequestError, shown

MAX_GRAMMAR_CHARS = 1 << 18
"""The longest regular expression, grammar, or sum of all choices."""
MAX_GRAMMAR_CHOICES = 4096
MAX_AFTER_IDS = 64
KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """The form of an answer: exactly one of the first six. Names and meanings are vLLM's.

    Construction raises `InvalidRequestError`; the grammar itself is checked with the first request.
    """

    json: Any = None
    """A JSON schema: a mapping, true, or the text of either."""
    json_object: bool = False
    """Any JSON object."""
    regex: str | None = None
    """The whole answer matches it."""
    choice: Sequence[str] | None = None
    """The answer is one of these texts."""
    grammar: str | None = None
    """The grammar in llguidance's form of Lark, or in llama.cpp's GBNF."""
    structural_tag: Any = None
    """Free text with parts that follow schemas: a mapping, or its JSON text."""

    disable_any_whitespace: bool = False
    """JSON without any blank between its tokens."""
    whitespace_pattern: str | None = None
    """A regular expression for blanks between JSON tokens, instead of the bounded usual one."""
    after_ids: tuple[int, ...] = ()
    """Token ids, in order, after which the form applies: the answer is free until then. For
    example, the end of a model's reasoning."""
    field: str = "structured_outputs"
    """The request's field with these values, for messages."""

    def __post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name) is not None]
        if not self.json_object:
            given.remove("json_object")
        if len(given) != 1:
            raise InvalidRequestError(
                f"an answer has one form, but {' and '.join(given) or 'none'} was given: give"
                f" exactly one of {', '.join(KINDS)}",
                param=self.field,
            )
        for name in ("regex", "grammar", "whitespace_pattern"):
            value = getattr(self, name)
            if value is not None:
                self._check_text(name, value)
        if self.choice is not None:
            self._check_choices(self.choice)
        if len(self.after_ids) > MAX_AFTER_IDS:
            raise InvalidRequestError(
                f"after_ids has {len(self.after_ids)} entries, at most {MAX_AFTER_IDS} are allowed",
                param=self.field,
            )

    def _check_text(self, name: str, value: object) -> None:
        if not isinstance(value, str) or not 0 < len(value) <= MAX_GRAMMAR_CHARS:
            size = f"{len(value)} characters" if isinstance(value, str) else shown(value)
            raise InvalidRequestError(
                f"{name} must be a text of 1 to {MAX_GRAMMAR_CHARS} characters, got {size}",
                param=self.field,
            )

    def _check_choices(self, choices: object) -> None:
        if isinstance(choices, str | Mapping) or not isinstance(choices, Sequence) or not choices:
            raise InvalidRequestError(
                "choice must be a list of at least one text", param=self.field
            )
        if len(choices) > MAX_GRAMMAR_CHOICES:
            raise InvalidRequestError(
                f"choice has {len(choices)} entries, at most {MAX_GRAMMAR_CHOICES} are allowed",
                param=self.field,
            )
        if not all(isinstance(text, str) and text for text in choices):
            raise InvalidRequestError("choice must hold texts that are not empty", param=self.field)
        total = sum(map(len, choices))
        if total > MAX_GRAMMAR_CHARS:
            raise InvalidRequestError(
                f"choice has {total} characters in all, at most {MAX_GRAMMAR_CHARS} are allowed",
                param=self.field,
            )
