"""Errors of chats in the words of the API that a client spoke to."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from vllmx_core.errors import InvalidRequestError

_END = r"(?![\w-])"


class FieldNames:
    """An API's names for fields of a chat completion.

    Args:
        names: of chats, as regular expressions, to the API's own, as their replacements; the first
            that fits is taken.
    """

    def __init__(self, names: dict[str, str]) -> None:
        self._names = [(re.compile(f"{name}{_END}"), own) for name, own in names.items()]

    @contextmanager
    def told(self) -> Iterator[None]:
        """Makes errors that are raised within name the API's own field, in the message as well."""
        try:
            yield
        except InvalidRequestError as error:
            raise self._renamed(error) from None

    def _renamed(self, error: InvalidRequestError) -> InvalidRequestError:
        """A copy: who else waits for the same grammar may speak to another API."""
        for name, own in self._names:
            if error.param is not None and name.match(error.param):
                copy = type(error).__new__(type(error), *error.args)
                copy.__dict__.update(error.__dict__)
                copy.param = name.sub(own, error.param, 1)
                copy.message = re.sub(rf"(?<![\w.-]){name.pattern}", own, error.message)
                return copy
        return error


RESPONSES_FIELDS = FieldNames(
    {
        r"response_format(\.json_schema)?(\.schema)?": "text.format",
        r"max_tokens|max_completion_tokens": "max_output_tokens",
        r"reasoning_effort": "reasoning.effort",
        r"tools\[(\d+)\]\.function": r"tools[\1]",
        r"messages": "input",
        r"tool_choice\.allowed_tools": "tool_choice",
    }
)
MESSAGES_FIELDS = FieldNames(
    {
        r"response_format(\.json_schema)?(\.schema)?": "output_config.format",
        r"stop": "stop_sequences",
        r"reasoning_effort": "output_config.effort",
        r"thinking_token_budget": "thinking.budget_tokens",
        r"tools\[(\d+)\]\.function\.parameters": r"tools[\1].input_schema",
        r"tools\[(\d+)\]\.function": r"tools[\1]",
    }
)
