"""How much text a request brings, in bytes, before anything is done with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from typing import Any

from vllmx_core.sampling import SamplingParams

from vllmx_engine.client.chat import ChatMessage, Message
from vllmx_engine.client.chat_images import Pictures
from vllmx_engine.client.request import Prompt
from vllmx_engine.text.text_threads import TextLimits

_BYTES_PER_ID = 4
_BYTES_PER_MESSAGE = 64


def prompt_size(prompt: Prompt) -> int:
    """The size of a text, token ids, or a mapping of either."""
    parts = prompt.values() if isinstance(prompt, Mapping) else (prompt,)
    return sum(
        len(part) if isinstance(part, str) else _BYTES_PER_ID * len(part)
        for part in parts
        if isinstance(part, Sized)
    )


def rules_size(params: SamplingParams) -> int:
    """The size of stop strings, which are compiled, bad words, which are tokenised, and allowed
    ids, of which there may be a vocabulary's worth to check."""
    texts = sum(map(len, params.stop)) + sum(map(len, params.bad_words))
    return texts + _BYTES_PER_ID * len(params.allowed_token_ids or ())


def chat_size(messages: Sequence[ChatMessage | Message]) -> int:
    """The size of the texts of a conversation, in characters. What is no conversation has none: it
    is refused where it is rendered."""
    if not isinstance(messages, Sequence):
        return 0
    size = _BYTES_PER_MESSAGE * len(messages)
    for message in messages:
        content = message.content if isinstance(message, Message) else None
        if isinstance(message, Mapping):
            content = message.get("content")
        if isinstance(content, str):
            size += len(content)
        elif isinstance(content, Sequence):
            size += sum(map(_part_size, content))
    return size


def chat_cost(size: int, pictures: Pictures) -> int:
    """The cost of a conversation of so many bytes; with images it never passes for a small one, for
    decoding them takes long."""
    return size if not pictures else max(size + pictures.num_bytes, TextLimits().small_bytes + 1)


def _part_size(part: Any) -> int:
    text = part.get("text") if isinstance(part, Mapping) else part
    return len(text) if isinstance(text, str) else 0
