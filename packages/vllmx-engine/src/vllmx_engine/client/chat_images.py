"""Images of a conversation: taken out of its messages, read, prepared, written into its prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from vllmx_core.config import EngineConfig
from vllmx_core.errors import ConfigError, InvalidRequestError
from vllmx_core.records import Record
from vllmx_core.system.deadline import Deadline

from vllmx_engine.client.chat_options import ChatMessage, Message
from vllmx_engine.client.request import Request, RequestBuilder
from vllmx_engine.images.decode import check_pillow, decode, size_of
from vllmx_engine.images.limits import ImageLimits
from vllmx_engine.images.processor import Fit, ImageProcessor, find_processor, processor_of
from vllmx_engine.images.source import ImageSource, check_source, read_source
from vllmx_engine.text.messages import IMAGE_PARTS
from vllmx_engine.text.prompt_text import PromptText
from vllmx_engine.wire.images import ImageRoom, PreparedImage
from vllmx_engine.wire.messages import CoreInfo, ImageInput


def write_images(prompt: str, processor: ImageProcessor, sizes: Sequence[int]) -> str:
    """The prompt with a place for each token of each image. `sizes`: tokens of the images.

    Raises:
        InvalidRequestError: the template wrote more or fewer marks than there are images: it knows
            none, or a text of the conversation holds the mark.
    """
    marked = prompt.marked if isinstance(prompt, PromptText) else prompt
    texts = marked.split(processor.mark)
    if len(texts) != len(sizes) + 1:
        raise InvalidRequestError(
            f"the prompt has {len(texts) - 1} marks {processor.mark!r} for {len(sizes)} images:"
            " leave the mark out of texts, and use a chat template that knows images",
            param="messages",
        )
    pieces = [texts[0]]
    for num_tokens, text in zip(sizes, texts[1:], strict=True):
        pieces += (processor.written(num_tokens), text)
    text = "".join(pieces)
    return PromptText.of_marked(text) if isinstance(prompt, PromptText) else text


def place_images(ids: Sequence[int], token_id: int, sizes: Sequence[int]) -> list[int]:
    """The place of each image's first token among the ids of a prompt of `write_images`.

    Raises InvalidRequestError where a text of the conversation holds the token of images.
    """
    at = np.flatnonzero(np.asarray(ids, np.int64) == token_id)
    starts: list[int] = []
    taken = 0
    for num_tokens in sizes:
        own = at[taken : taken + num_tokens]
        if own.size != num_tokens or own[-1] - own[0] != own.size - 1:
            raise _token_in_text()
        starts.append(int(own[0]))
        taken += own.size
    if taken != at.size:
        raise _token_in_text()
    return starts


def _token_in_text() -> InvalidRequestError:
    return InvalidRequestError(
        "a text of the conversation holds the token that stands for images: leave it out",
        param="messages",
    )


Stopped = Callable[[], bool]


class Pictures:
    """The images of one conversation. With none of them everything here does nothing.

    Headers are read first: how many tokens an image takes is known by its size. A request that
    cannot be served is refused before any image is decoded.

    Args:
        images: finds and prepares them.
    """

    def __init__(self, sources: Sequence[ImageSource], images: ChatImages) -> None:
        self._sources = sources
        self._limits, self._processor = images.limits, images.processor
        self._token_id, self._room = images.token_id, images.room
        self._stored: dict[int, bytes] = {}
        self._fits: list[Fit | None] = [None] * len(sources)

    def __len__(self) -> int:
        return len(self._sources)

    @property
    def num_bytes(self) -> int:
        """Bytes of the images as they are stored, as far as they were read."""
        return sum(len(each.url) for each in self._sources) + sum(map(len, self._stored.values()))

    @property
    def far(self) -> list[int]:
        """Numbers of the images that must be fetched."""
        return [index for index, each in enumerate(self._sources) if not each.is_inline]

    def source(self, index: int) -> ImageSource:
        """The source of an image."""
        return self._sources[index]

    def measure(self) -> None:
        """Reads the headers of the images that need not be fetched. Raises InvalidRequestError."""
        for index, source in enumerate(self._sources):
            if source.is_inline:
                self._measure(index, read_source(source, self._limits))

    def fetch(self, index: int, deadline: Deadline | None = None) -> None:
        """Reads one from where it is. May wait long. Raises InvalidRequestError."""
        data = read_source(self._sources[index], self._limits, deadline)
        self._measure(index, data)
        self._stored[index] = data

    def _measure(self, index: int, data: bytes) -> None:
        """Checks one with all whose size is known already."""
        assert self._processor is not None, "others were refused"
        where = self._sources[index].where
        height, width = size_of(data, self._limits, where)
        self._fits[index] = self._processor.fit(height, width, where)
        known = [fit for fit in self._fits if fit is not None]
        self._room.check(
            [fit.num_tokens for fit in known], sum(fit.num_bytes for fit in known), where
        )

    def written(self, prompt: str) -> str:
        """The prompt with places for the images. Raises InvalidRequestError."""
        if self._processor is None:
            return prompt
        return write_images(prompt, self._processor, self._sizes)

    @property
    def _sizes(self) -> list[int]:
        return [fit.num_tokens for fit in self._fits if fit is not None]

    def placed(self, request: Request, prompt: str, stopped: Stopped = lambda: False) -> Request:
        """The request that came of `written`, with the images in it, which are decoded now. May
        take a while. Raises InvalidRequestError."""
        if self._processor is None:
            return request
        starts = place_images(request.prompt_ids, self._token_id, self._sizes)
        if not starts:
            return request
        images = [
            image_input(start, self._prepared(index, stopped)) for index, start in enumerate(starts)
        ]
        core = [msgspec.structs.replace(one, images=images) for one in request.core]
        return replace(request, prompt=str(prompt), core=core)

    def _prepared(self, index: int, stopped: Stopped) -> PreparedImage:
        if stopped():
            raise InvalidRequestError("nobody waits for the images any more")
        source, fit = self._sources[index], self._fits[index]
        assert self._processor is not None, "others were refused"
        assert fit is not None, "it was measured"
        data = self._stored.pop(index, None)
        if data is None:
            data = read_source(source, self._limits)
        return self._processor.prepare(decode(data, self._limits, source.where), fit)


def image_input(start: int, image: PreparedImage) -> ImageInput:
    """An image whose tokens begin at `start`, as it travels to the core."""
    return ImageInput(
        start,
        image.num_tokens,
        image.digest,
        image.grid,
        image.patches.tobytes(),
        image.levels.tobytes(),
    )


class ChatImages(Record):
    """Finds images in conversations."""

    limits: ImageLimits
    model: str
    processor: ImageProcessor | None = None
    """Prepares them; None: the model reads text alone."""
    token_id: int = -1
    """The id of the token that stands for images."""
    room: ImageRoom = ImageRoom()
    """The size of what the model takes."""

    def take(
        self, messages: Sequence[ChatMessage | Message]
    ) -> tuple[Sequence[ChatMessage | Message], Pictures]:
        """The conversation with plain marks where its images were, as templates read them, and the
        images.

        Raises:
            InvalidRequestError: the model reads text alone, there are too many images, or one comes
                from where none may.
        """
        sources: list[ImageSource] = []
        if isinstance(messages, Sequence) and not isinstance(messages, (str, bytes)):
            messages = [
                self._without_images(message, index, sources)
                for index, message in enumerate(messages)
            ]
        for source in sources:
            check_source(source, self.limits)
        return messages, Pictures(sources, self)

    def _without_images(
        self, message: ChatMessage | Message, index: int, sources: list[ImageSource]
    ) -> ChatMessage | Message:
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list) or not any(map(_is_image, content)):
            return message
        assert isinstance(message, Mapping)
        parts = []
        for number, part in enumerate(content):
            if not _is_image(part):
                parts.append(part)
                continue
            where = f"messages[{index}].content[{number}]"
            if self.processor is None:
                raise InvalidRequestError(
                    f"{where} is an image, but {self.model} reads text alone here: leave it out,"
                    " or ask a model that takes images",
                    param=where,
                )
            sources.append(ImageSource(_url(part, where), where))
            self.limits.check_count(len(sources))
            parts.append({"type": "image"})
        return {**message, "content": parts}


def chat_images(config: EngineConfig, builder: RequestBuilder) -> ChatImages:
    """The reader of images for a loaded model. Raises ConfigError for options of images that
    cannot be used."""
    info, limits = builder.info, ImageLimits.of(config)
    processor = _processor(info) if info.takes_images else None
    if processor is None:
        return ChatImages(limits, info.model)
    check_pillow()
    token_id = builder.tokenizer.token_to_id(processor.token)
    if token_id is None:
        raise ConfigError(
            f"the tokenizer of {info.path} has no token {processor.token!r}, which stands for"
            " images: take the one of the original model by --tokenizer, or leave the images out by"
            " --limit-images 0"
        )
    room = info.image_room or ImageRoom(info.max_model_len - 1)
    return ChatImages(limits, info.model, processor, token_id, room)


def _processor(info: CoreInfo) -> ImageProcessor | None:
    """Returns the processor that the model's format describes, or its folder."""
    if info.image_processor:
        return processor_of(info.image_processor, info.path)
    return find_processor(Path(info.path))


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in IMAGE_PARTS


def _url(part: Mapping[str, Any], where: str) -> str:
    """The URL of {"image_url": {"url": ...}}, {"image_url": ...} or {"image": ...}."""
    found = part.get("image_url", part.get("image"))
    if isinstance(found, Mapping):
        found = found.get("url")
    if not isinstance(found, str):
        raise InvalidRequestError(
            f'{where} is an image without a URL: give {{"type": "image_url", "image_url":'
            ' {"url": "data:image/png;base64,..."}}',
            param=where,
        )
    return found
