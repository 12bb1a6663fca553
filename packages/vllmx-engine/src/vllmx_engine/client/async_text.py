"""Prompts and answers of an asyncio program as text: what is long is worked on by threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from vllmx_core.errors import InvalidRequestError

from vllmx_engine.client.chat import ChatMessage, ChatOptions, ChatRenderer, Message
from vllmx_engine.client.chat_images import ChatImages, Pictures
from vllmx_engine.client.fetches import Fetches
from vllmx_engine.client.request_size import chat_cost, chat_size, prompt_size
from vllmx_engine.formats.named import Origin
from vllmx_engine.text.text_threads import Stopped, TextThreads
from vllmx_engine.text.tokenizer import Tokenizer, TooManyTokensError

T = TypeVar("T")

_INLINE_MESSAGES = 64
"""More of them are looked through for images on a thread."""
INLINE_BYTES = 4096
"""Longer texts and lists of ids are converted on a thread; the event loop goes on meanwhile."""


class AsyncText:
    """The part of `AsyncLLM` that needs no engine core.

    Attributes:
        tokenizer: of the model.
        text: threads for texts that are too long for the event loop.
    """

    def __init__(self, tokenizer: Tokenizer, renderer: ChatRenderer, images: ChatImages) -> None:
        self.tokenizer = tokenizer
        self.text = TextThreads()
        self._renderer = renderer
        self._images = images
        self._fetches = Fetches()

    @property
    def calls_origin(self) -> Origin:
        """How well the form of calls in answers is known; found out by the first chat."""
        return self._renderer.format.tools_origin

    @property
    def chat_template(self) -> str | None:
        """The Jinja source that renders conversations; None: the model has none."""
        return self._renderer.source

    def render_chat(
        self,
        messages: Sequence[ChatMessage | Message],
        chat: ChatOptions | None = None,
        stopped: Stopped | None = None,
    ) -> str:
        """The text that the chat template makes of a conversation. May take a while: call it on a
        thread. Raises TemplateError, InvalidRequestError; the former too once `stopped` is true."""
        return self._renderer.render(messages, chat, stopped)

    async def encode(
        self,
        text: str,
        add_special_tokens: bool = True,
        *,
        client: str = "",
        limit: int | None = None,
    ) -> list[int]:
        """Token ids of a text, `limit` at the most. Raises InvalidRequestError, QueueFullError."""
        encode = partial(self._encode, text, add_special_tokens, limit)
        return await self.convert(client, len(text), encode)

    async def encode_chat(
        self,
        messages: Sequence[ChatMessage | Message],
        chat: ChatOptions | None = None,
        add_special_tokens: bool = False,
        client: str = "",
        num_bytes: int = 0,
        limit: int | None = None,
    ) -> list[int]:
        """Token ids of a conversation, `limit` at the most; `num_bytes` as in `submit_chat`. Raises
        TemplateError and what `encode` raises."""

        conversation, pictures = await self.take_images(messages, client)

        def encode(stopped: Stopped) -> list[int]:
            prompt = pictures.written(self.render_chat(conversation, chat, stopped))
            return self._encode(prompt, add_special_tokens, limit)

        size = chat_cost(num_bytes or chat_size(conversation), pictures)
        return await self.text.run(client, size, encode)

    def _encode(self, text: str, add_special_tokens: bool, limit: int | None) -> list[int]:
        try:
            return self.tokenizer.encode(text, add_special_tokens, limit=limit)
        except TooManyTokensError as error:
            at_least = "" if error.exact else "at least "
            raise InvalidRequestError(
                f"the text has {at_least}{error.num_tokens} tokens, and at most {limit} are listed"
                " or counted at a time: split it",
                param="prompt",
            ) from None

    async def take_images(
        self, messages: Sequence[ChatMessage | Message], client: str
    ) -> tuple[Sequence[ChatMessage | Message], Pictures]:
        """The conversation without its images, and those, fetched and measured. Cancelling ends the
        fetching. Raises InvalidRequestError, CapacityError, QueueFullError."""
        if _is_text_alone(messages):
            return self._images.take(messages)
        # On a thread, for a message may have a hundred thousand parts.
        conversation, pictures = await asyncio.to_thread(self._taken, messages)
        if pictures.far:
            await self._fetches.fetch(pictures, client)
        return conversation, pictures

    def _taken(
        self, messages: Sequence[ChatMessage | Message]
    ) -> tuple[Sequence[ChatMessage | Message], Pictures]:
        conversation, pictures = self._images.take(messages)
        pictures.measure()
        return conversation, pictures

    async def decode(
        self, ids: Sequence[int], skip_special_tokens: bool = False, *, client: str = ""
    ) -> str:
        """The text of token ids. Raises InvalidRequestError, QueueFullError."""
        decode = partial(self.tokenizer.decode, ids, skip_special_tokens)
        return await self.convert(client, prompt_size(ids), decode)

    def close_text(self) -> None:
        """Drops what waits for a thread."""
        self.text.close()
        self._fetches.close()

    async def convert(self, client: str, size: int, function: Callable[[], T]) -> T:
        """What `function` makes of so many bytes of text or ids, on a thread where the event loop
        would be held up noticeably. Raises QueueFullError and what `function` raises."""
        if size <= INLINE_BYTES:
            return function()
        return await self.text.run(client, size, lambda _: function())


def _is_text_alone(messages: object) -> bool:
    """A few messages without parts, in which no image can be: found out sooner than a thread is
    woken."""
    return (
        isinstance(messages, list)
        and len(messages) <= _INLINE_MESSAGES
        and all(
            isinstance(message, dict) and isinstance(message.get("content"), str)
            for message in messages
        )
    )
