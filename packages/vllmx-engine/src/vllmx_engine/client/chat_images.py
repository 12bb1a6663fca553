"""Images or audio of a conversation: taken out of its messages, read, prepared, and written into
its prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from vllmx_core.config import EngineConfig
from vllmx_core.errors import ConfigError, InvalidRequestError, shown
from vllmx_core.records import Record
from vllmx_core.system.deadline import Deadline

from vllmx_engine.audio.processor import AudioFit, AudioProcessor, find_audio_processor
from vllmx_engine.audio.slices import Sliced
from vllmx_engine.client.chat_options import ChatMessage, Message
from vllmx_engine.client.request import Request, RequestBuilder
from vllmx_engine.images.decode import check_pillow, decode, size_of
from vllmx_engine.images.kinds import find_processor, processor_of
from vllmx_engine.images.limits import ImageLimits
from vllmx_engine.images.processor import Fit, ImageProcessor
from vllmx_engine.images.source import ImageSource, check_source, read_source
from vllmx_engine.text.messages import AUDIO_PARTS, IMAGE_PARTS
from vllmx_engine.text.prompt_text import PromptText
from vllmx_engine.wire.images import PLURAL, ImageRoom, Kind, PreparedImage
from vllmx_engine.wire.messages import CoreInfo, ImageInput


def write_images(prompt: str, processor: Processor, written: Sequence[str]) -> str:
    """The prompt with a place for each token of each image. `written`: the texts of the images.

    Raises:
        InvalidRequestError: the template wrote more or fewer marks than there are images: it knows
            none, or a text of the conversation holds the mark.
    """
    marked = prompt.marked if isinstance(prompt, PromptText) else prompt
    texts = marked.split(processor.mark)
    if len(texts) != len(written) + 1:
        raise InvalidRequestError(
            f"the prompt has {len(texts) - 1} marks {processor.mark!r} for {len(written)}"
            f" {PLURAL[processor.kind]}: leave the mark out of texts, and use a chat template that"
            f" knows {PLURAL[processor.kind]}",
            param="messages",
        )
    pieces = [texts[0]]
    for own, text in zip(written, texts[1:], strict=True):
        pieces += (own, text)
    text = "".join(pieces)
    return PromptText.of_marked(text) if isinstance(prompt, PromptText) else text


def place_images(
    ids: Sequence[int], token_id: int, sizes: Sequence[int], break_id: int = -1
) -> list[int]:
    """The place of the first token of each run among the ids of a prompt of `write_images`.
    `sizes`: tokens of the runs, which are images or pieces of them, with those between lines,
    `break_id`.

    Raises InvalidRequestError where a text of the conversation holds the token of images.
    """
    at = np.flatnonzero(np.isin(np.asarray(ids, np.int64), (token_id, break_id)))
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
        "a text of the conversation holds the token that stands for images or audio: leave it out",
        param="messages",
    )


AUDIO_FORMATS = ("wav", "mp3", "flac", "ogg")
Processor = ImageProcessor | AudioProcessor
Stopped = Callable[[], bool]


class Pictures:
    """The images or audio of one conversation. With none of them everything here does nothing.

    Headers are read first: how many tokens an image takes is known by its size. A request that
    cannot be served is refused before any image is decoded. Audio is decoded to know its length,
    and its windows are made at once: these are slices, and `placed` is not.

    Args:
        images: finds and prepares them.
    """

    def __init__(self, sources: Sequence[ImageSource], images: ChatImages) -> None:
        self._sources = sources
        self._limits, self._processor = images.limits, images.processor
        self._token_id, self._break_id = images.token_id, images.break_id
        self._room = images.room
        self._stored: dict[int, bytes] = {}
        self._fits: list[Fit | AudioFit | None] = [None] * len(sources)
        self._heard: dict[int, list[ImageInput]] = {}
        """The windows of audio, as if its first token were at 0."""
        self._texts = [""] * len(sources)
        """The texts that stand for them in the prompt."""

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
        return self._sources[index]

    def measure(self) -> Sliced[None]:
        """Reads the headers of images, and all of audio, that is inline or was fetched. Raises
        InvalidRequestError."""
        for index, source in enumerate(self._sources):
            if self._fits[index] is None and (source.is_inline or index in self._stored):
                data = self._stored.get(index)
                if data is None:
                    data = read_source(source, self._limits)
                yield from self._measure(index, data)
                yield

    def fetch(self, index: int, deadline: Deadline | None = None) -> None:
        """Reads one from where it is. May wait long. Raises InvalidRequestError."""
        self._stored[index] = read_source(self._sources[index], self._limits, deadline)

    def _measure(self, index: int, data: bytes) -> Sliced[None]:
        """Checks one with all whose size is known already."""
        processor, where = self._processor, self._sources[index].where
        assert processor is not None, "others were refused"
        if isinstance(processor, AudioProcessor):
            heard = yield from processor.measure(data, self._limits, where)
            self._fits[index], self._texts[index] = heard, processor.written(heard)
            self._check(where)
            self._heard[index] = yield from processor.inputs(0, heard)
        else:
            fit = processor.fit(*size_of(data, self._limits, where), where)
            self._fits[index], self._texts[index] = fit, processor.written(fit)
            self._check(where)

    def _check(self, where: str) -> None:
        known = [fit for fit in self._fits if fit is not None]
        self._room.check(
            [fit.num_tokens for fit in known], sum(fit.num_bytes for fit in known), where
        )

    def written(self, prompt: str) -> str:
        """The prompt with places for the images. Raises InvalidRequestError."""
        if self._processor is None:
            return prompt
        return write_images(prompt, self._processor, self._texts)

    def placed(self, request: Request, prompt: str, stopped: Stopped = lambda: False) -> Request:
        """The request that came of `written`, with the images in it, which are decoded now. May
        take a while. Raises InvalidRequestError."""
        if self._processor is None:
            return request
        sizes = [size for fit in self._fits if fit is not None for size in fit.runs]
        starts = iter(place_images(request.prompt_ids, self._token_id, sizes, self._break_id))
        if not sizes:
            return request
        images = [one for index in range(len(self)) for one in self._inputs(index, starts, stopped)]
        core = [msgspec.structs.replace(one, images=images) for one in request.core]
        return replace(request, prompt=str(prompt), core=core)

    def _inputs(self, index: int, starts: Iterator[int], stopped: Stopped) -> list[ImageInput]:
        if stopped():
            raise InvalidRequestError("nobody waits for the images any more")
        source, processor, fit = self._sources[index], self._processor, self._fits[index]
        if index in self._heard:
            start = next(starts)
            heard = self._heard[index]
            return [msgspec.structs.replace(one, start=start + one.start) for one in heard]
        assert isinstance(processor, ImageProcessor), "others were refused"
        assert isinstance(fit, Fit), "it was measured"
        data = self._stored.pop(index, None)
        if data is None:
            data = read_source(source, self._limits)
        pixels = decode(data, self._limits, source.where)
        return [image_input(next(starts), one) for one in processor.prepare(pixels, fit)]


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
    """Finds images or audio in conversations."""

    limits: ImageLimits
    model: str
    processor: Processor | None = None
    """Prepares them; None: the model reads text alone."""
    token_id: int = -1
    """The id of the token that stands for them."""
    room: ImageRoom = ImageRoom()
    """The size of what the model takes."""
    break_id: int = -1
    """The id of the token between lines of an image; -1: there is none."""

    def take(
        self, messages: Sequence[ChatMessage | Message]
    ) -> tuple[Sequence[ChatMessage | Message], Pictures]:
        """The conversation with plain marks where its images or audio were, as templates read
        them, and these.

        Raises:
            InvalidRequestError: the model does not take them, there are too many, or one comes from
                where none may.
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
        if not isinstance(content, list) or not any(map(_kind_of, content)):
            return message
        assert isinstance(message, Mapping)
        parts = []
        for number, part in enumerate(content):
            kind = _kind_of(part)
            if kind is None:
                parts.append(part)
                continue
            where = f"messages[{index}].content[{number}]"
            taken = None if self.processor is None else self.processor.kind
            if taken != kind:
                reads = "text alone" if taken is None else f"text and {PLURAL[taken]}"
                raise InvalidRequestError(
                    f"{where} is an {kind}, but {self.model} reads {reads} here: leave it out,"
                    f" or ask a model that takes {PLURAL[kind]}",
                    param=where,
                )
            url = _image_url(part, where) if kind == "image" else _audio_url(part, where)
            sources.append(ImageSource(url, where, kind))
            self.limits.check_count(len(sources))
            parts.append({"type": kind})
        return {**message, "content": parts}


def chat_images(config: EngineConfig, builder: RequestBuilder) -> ChatImages:
    """The reader of images or audio for a loaded model. Raises ConfigError for options of these
    that cannot be used."""
    info = builder.info
    limits = ImageLimits.of(config, "audio" if info.takes_audio else "image")
    processor = _processor(info)
    if processor is None:
        return ChatImages(limits, info.model)
    line_break = processor.line_break if isinstance(processor, ImageProcessor) else ""
    token_id, break_id = (
        _id_of(token, processor, builder) for token in (processor.token, line_break)
    )
    room = info.image_room or ImageRoom(info.max_model_len - 1)
    return ChatImages(limits, info.model, processor, token_id, room, break_id)


def _id_of(token: str, processor: Processor, builder: RequestBuilder) -> int:
    """Returns the id of a token of images; -1 for none. Raises ConfigError."""
    found = builder.tokenizer.token_to_id(token) if token else -1
    if found is None:
        raise ConfigError(
            f"the tokenizer of {builder.info.path} has no token {token!r}, which stands for"
            f" {PLURAL[processor.kind]}: take the one of the original model by --tokenizer, or"
            f" leave the {PLURAL[processor.kind]} out by --limit-images 0"
        )
    return found


def _processor(info: CoreInfo) -> Processor | None:
    """Returns the processor that the model's format describes, or its folder; None for a model that
    reads text alone."""
    if info.takes_audio:
        return find_audio_processor(Path(info.path))
    if not info.takes_images:
        return None
    check_pillow()
    if info.image_processor:
        return processor_of(info.image_processor, info.path)
    return find_processor(Path(info.path))


def _kind_of(part: Any) -> Kind | None:
    """The kind of a part; None: text, or unknown."""
    found = part.get("type") if isinstance(part, Mapping) else None
    if found in IMAGE_PARTS:
        return "image"
    return "audio" if found in AUDIO_PARTS else None


def _audio_url(part: Mapping[str, Any], where: str) -> str:
    """The URL of {"audio_url": {"url": ...}}, {"audio_url": ...} or {"audio": ...}, or a data URL
    made of {"input_audio": {"data": ..., "format": ...}}."""
    inline = part.get("input_audio")
    if isinstance(inline, Mapping) and isinstance(inline.get("data"), str):
        form = inline.get("format", "wav")
        if form not in AUDIO_FORMATS:
            raise InvalidRequestError(
                f"{where}.input_audio.format is {shown(form)}: use {', '.join(AUDIO_FORMATS)}",
                param=where,
            )
        return f"data:audio/{form};base64,{inline['data']}"
    return _url(
        part.get("audio_url", part.get("audio")),
        where,
        'an audio without its data: give {"type": "input_audio", "input_audio":'
        ' {"data": "...", "format": "wav"}}',
    )


def _image_url(part: Mapping[str, Any], where: str) -> str:
    """The URL of {"image_url": {"url": ...}}, {"image_url": ...} or {"image": ...}."""
    return _url(
        part.get("image_url", part.get("image")),
        where,
        'an image without a URL: give {"type": "image_url", "image_url":'
        ' {"url": "data:image/png;base64,..."}}',
    )


def _url(found: Any, where: str, fault: str) -> str:
    """`found`, or its "url". Raises InvalidRequestError, which says that `where` is the fault."""
    if isinstance(found, Mapping):
        found = found.get("url")
    if not isinstance(found, str):
        raise InvalidRequestError(f"{where} is {fault}", param=where)
    return found
