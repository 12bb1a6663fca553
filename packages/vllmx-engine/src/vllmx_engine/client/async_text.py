"""Prompts and answers of an asyncio program as text: what is long is worked on by threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from vllmx_core.errors import InvalidRequestError, QueueFullError
from vllmx_core.output_format import OutputFormat
from vllmx_core.sampling import SamplingParams
from vllmx_core.system.deadline import Deadline

from vllmx_engine.audio.slices import Sliced, SliceThreads
from vllmx_engine.client.chat import ChatMessage, ChatOptions, ChatRenderer, Message
from vllmx_engine.client.chat_images import ChatImages, Pictures
from vllmx_engine.client.request import Prompt
from vllmx_engine.formats.named import Origin
from vllmx_engine.images.source import FETCH_S
from vllmx_engine.text.text_threads import Stopped, TextLimits, TextThreads
from vllmx_engine.text.tokenizer import Tokenizer, TooManyTokensError

_THREADS = 64
_TOGETHER = 4
"""Images that one client fetches from one host at a time."""


class Fetches:
    """Fetches images of conversations on threads. A client's images from one host wait only for
    each other."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, "vllmx-images")
        self._turns: WeakValueDictionary[tuple[str, str], asyncio.Semaphore]
        self._turns = WeakValueDictionary()
        """The turns of each client at each host; kept while any of their fetches goes on."""

    async def fetch(self, pictures: Pictures, client: str) -> None:
        """Fetches the images that are not inline, within `FETCH_S` in all. May be cancelled. Raises
        the first error: InvalidRequestError, or QueueFullError if an image never had its turn."""
        gone = threading.Event()
        deadline = Deadline(FETCH_S, gone.is_set)
        tasks = [
            asyncio.create_task(self._fetch(pictures, index, client, deadline))
            for index in pictures.far
        ]
        try:
            await asyncio.gather(*tasks)
        finally:
            gone.set()
            for task in tasks:
                task.cancel()

    async def _fetch(self, pictures: Pictures, index: int, client: str, deadline: Deadline) -> None:
        host = pictures.source(index).host
        turns = self._turns.setdefault((client, host), asyncio.Semaphore(_TOGETHER))
        await _enter(turns, host, deadline)
        try:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._threads, pictures.fetch, index, deadline)
        finally:
            turns.release()

    def close(self) -> None:
        """Drops the fetches that wait for a thread."""
        self._threads.shutdown(wait=False, cancel_futures=True)


async def _enter(turns: asyncio.Semaphore, host: str, deadline: Deadline) -> None:
    try:
        async with asyncio.timeout(deadline.left_s(deadline.seconds)):
            await turns.acquire()
    except TimeoutError:
        raise QueueFullError(
            f"{_TOGETHER} images of {host or 'this machine'} are being fetched already, and none"
            f" came within {deadline.seconds:g} s: send the request again in a moment"
        ) from None


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
    """Returns the size of a conversation's texts, in characters. A value that is not a conversation
    has size 0: rendering refuses it."""
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
        slices: threads for audio and for the headers of images.
    """

    def __init__(self, tokenizer: Tokenizer, renderer: ChatRenderer, images: ChatImages) -> None:
        self.tokenizer = tokenizer
        self.text = TextThreads()
        self.slices = SliceThreads()
        self._renderer = renderer
        self._images = images
        self._fetches = Fetches()

    @property
    def calls_origin(self) -> Origin:
        """The origin of the format of calls in answers; found out by the first chat."""
        return self._renderer.format.tools_origin

    @property
    def answer_format(self) -> OutputFormat:
        """The format of calls and thoughts in answers; found out by the first chat."""
        return self._renderer.format.format

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
            raise InvalidRequestError(
                f"the text has {error.count} tokens, and at most {limit} are listed or counted at a"
                " time: split it",
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
        conversation, pictures = await self.slices.run(client, self._taken(messages))
        if pictures.far:
            await self._fetches.fetch(pictures, client)
            await self.slices.run(client, pictures.measure())
        return conversation, pictures

    def _taken(
        self, messages: Sequence[ChatMessage | Message]
    ) -> Sliced[tuple[Sequence[ChatMessage | Message], Pictures]]:
        conversation, pictures = self._images.take(messages)
        yield from pictures.measure()
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
        self.slices.close()
        self._fetches.close()

    async def convert(self, client: str, size: int, function: Callable[[], T]) -> T:
        """Returns the result of `function` for so many bytes of text or ids. Runs on a thread if it
        would hold up the event loop noticeably. Raises QueueFullError and the errors of
        `function`."""
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
