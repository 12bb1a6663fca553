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
from vllmx_engine.images.kinds import find_processor, find_video_processor, processor_of
from vllmx_engine.images.limits import ImageLimits
from vllmx_engine.images.processor import Fit, ImageProcessor, image_input
from vllmx_engine.images.source import ImageSource, check_source, read_source
from vllmx_engine.images.video import VideoFit, VideoProcessor
from vllmx_engine.text.messages import AUDIO_PARTS, IMAGE_PARTS, VIDEO_PARTS
from vllmx_engine.text.prompt_text import PromptText
from vllmx_engine.wire.images import PLURAL, SINGULAR, ImageRoom, Kind
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
AnyFit = Fit | AudioFit | VideoFit
Stopped = Callable[[], bool]


class Reader(Record):
    """Reads one kind of input."""

    processor: Processor
    limits: ImageLimits
    token_id: int
    """The id of the token that stands for them."""
    break_id: int = -1
    """The id of the token between lines of an image; -1: there is none."""


class Pictures:
    """The images, videos or audio of one conversation. With none of them all of this does nothing.

    Headers are read first: how many tokens an image takes is known by its size. A request that
    cannot be served is refused before any image is decoded. Audio is decoded to know its length,
    and its windows, like the frames of videos, are made at once: these are slices, and `placed` is
    not.

    Args:
        images: finds and prepares them.
    """

    def __init__(self, sources: Sequence[ImageSource], images: ChatImages) -> None:
        self._sources = sources
        self._readers, self._room = images.readers, images.room
        self._stored: dict[int, bytes] = {}
        self._fits: list[AnyFit | None] = [None] * len(sources)
        self._heard: dict[int, list[ImageInput]] = {}
        """The windows of audio and the frames of videos, as if the first token were at 0."""
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
        """Reads the headers of images, and all of audio and videos, if they are inline or were
        fetched. Raises InvalidRequestError."""
        for index, source in enumerate(self._sources):
            if self._fits[index] is None and (source.is_inline or index in self._stored):
                data = self._stored.get(index)
                if data is None:
                    data = read_source(source, self._limits(source))
                yield from self._measure(index, data)
                yield

    def fetch(self, index: int, deadline: Deadline | None = None) -> None:
        """Reads one from where it is. May wait long. Raises InvalidRequestError."""
        source = self._sources[index]
        self._stored[index] = read_source(source, self._limits(source), deadline)

    def _limits(self, source: ImageSource) -> ImageLimits:
        return self._readers[source.kind].limits

    def _measure(self, index: int, data: bytes) -> Sliced[None]:
        """Checks one with all whose size is known already."""
        source = self._sources[index]
        reader, where = self._readers[source.kind], source.where
        processor, limits = reader.processor, reader.limits
        if isinstance(processor, AudioProcessor):
            heard = yield from processor.measure(data, limits, where)
            self._keep(index, heard, processor.written(heard))
            self._heard[index] = yield from processor.inputs(0, heard)
        elif isinstance(processor, VideoProcessor):
            seen = yield from processor.measure(data, limits, where)
            self._keep(index, seen, processor.written(seen))
            self._heard[index] = yield from processor.inputs(seen, limits, where)
        else:
            fit = processor.fit(*size_of(data, limits, where), where)
            self._keep(index, fit, processor.written(fit))

    def _keep(self, index: int, fit: AnyFit, text: str) -> None:
        """Keeps what one takes. Raises what `ImageRoom.check` raises for all together."""
        self._fits[index], self._texts[index] = fit, text
        known = [fit for fit in self._fits if fit is not None]
        source = self._sources[index]
        room = replace(self._room, kind=source.kind)
        num_bytes = sum(fit.num_bytes for fit in known)
        room.check([fit.num_tokens for fit in known], num_bytes, source.where)

    def written(self, prompt: str) -> str:
        """The prompt with places for the images. Raises InvalidRequestError."""
        for kind, reader in self._readers.items():
            pairs = zip(self._sources, self._texts, strict=True)
            texts = [text for source, text in pairs if source.kind == kind]
            prompt = write_images(prompt, reader.processor, texts)
        return prompt

    def placed(self, request: Request, prompt: str, stopped: Stopped = lambda: False) -> Request:
        """The request that came of `written`, with the images in it, which are decoded now. May
        take a while. Raises InvalidRequestError."""
        starts: dict[Kind, Iterator[int]] = {}
        for kind, reader in self._readers.items():
            pairs = zip(self._sources, self._fits, strict=True)
            fits = [fit for source, fit in pairs if source.kind == kind and fit is not None]
            sizes = [size for fit in fits for size in fit.runs]
            ids = request.prompt_ids
            starts[kind] = iter(place_images(ids, reader.token_id, sizes, reader.break_id))
        if not self._sources:
            return request
        images = [one for index in range(len(self)) for one in self._inputs(index, starts, stopped)]
        images.sort(key=lambda one: one.start)
        core = [msgspec.structs.replace(one, images=images) for one in request.core]
        return replace(request, prompt=str(prompt), core=core)

    def _inputs(
        self, index: int, all_starts: Mapping[Kind, Iterator[int]], stopped: Stopped
    ) -> list[ImageInput]:
        if stopped():
            raise InvalidRequestError("nobody waits for the images any more")
        source, fit = self._sources[index], self._fits[index]
        reader, starts = self._readers[source.kind], all_starts[source.kind]
        assert fit is not None, "it was measured"
        if index in self._heard:
            # All of an audio is one run; each pair of a video's frames is its own.
            heard, places = self._heard[index], [next(starts) for _ in fit.runs]
            each = places if len(places) > 1 else places * len(heard)
            return [
                msgspec.structs.replace(one, start=start + one.start)
                for start, one in zip(each, heard, strict=True)
            ]
        processor = reader.processor
        assert isinstance(processor, ImageProcessor), "others were made before"
        assert isinstance(fit, Fit), "it is an image's"
        data = self._stored.pop(index, None)
        if data is None:
            data = read_source(source, reader.limits)
        pixels = decode(data, reader.limits, source.where)
        return [image_input(next(starts), one) for one in processor.prepare(pixels, fit)]


class ChatImages(Record):
    """Finds images, videos or audio in conversations."""

    model: str
    readers: Mapping[Kind, Reader] = {}
    """Empty: the model reads text alone."""
    room: ImageRoom = ImageRoom()
    """The size of what the model takes."""

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
            check_source(source, self.readers[source.kind].limits)
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
            if kind not in self.readers:
                taken = [PLURAL[one] for one in self.readers]
                reads = ", ".join(["text", *taken[:-1]]) + f" and {taken[-1]}" if taken else ""
                reads = reads or "text alone"
                raise InvalidRequestError(
                    f"{where} is {SINGULAR[kind]}, but {self.model} reads {reads} here: leave it"
                    f" out, or ask a model that takes {PLURAL[kind]}",
                    param=where,
                )
            sources.append(ImageSource(_URLS[kind](part, where), where, kind))
            self.readers[kind].limits.check_count(len(sources))
            parts.append({"type": kind})
        return {**message, "content": parts}


def chat_images(config: EngineConfig, builder: RequestBuilder) -> ChatImages:
    """The reader of images or audio for a loaded model. Raises ConfigError for options of these
    that cannot be used."""
    info, readers = builder.info, dict[Kind, Reader]()
    ImageLimits.of(config)  # which checks the options, whatever the model reads
    for processor in _processors(info):
        line_break = processor.line_break if isinstance(processor, ImageProcessor) else ""
        token_id, break_id = (
            _id_of(token, processor, builder) for token in (processor.token, line_break)
        )
        limits = ImageLimits.of(config, processor.kind)
        readers[processor.kind] = Reader(processor, limits, token_id, break_id)
    return ChatImages(info.model, readers, info.image_room or ImageRoom(info.max_model_len - 1))


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


def _processors(info: CoreInfo) -> list[Processor]:
    """Returns the processors that the model's format describes, or its folder; none for a model
    that reads text alone."""
    if info.takes_audio:
        return [find_audio_processor(Path(info.path))]
    if not info.takes_images:
        return []
    check_pillow()
    if info.image_processor:
        return [processor_of(info.image_processor, info.path)]
    found = (find_processor(Path(info.path)), find_video_processor(Path(info.path)))
    return [one for one in found if one is not None]


def _kind_of(part: Any) -> Kind | None:
    """The kind of a part; None: text, or unknown."""
    found = part.get("type") if isinstance(part, Mapping) else None
    if found in IMAGE_PARTS:
        return "image"
    if found in VIDEO_PARTS:
        return "video"
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


def _video_url(part: Mapping[str, Any], where: str) -> str:
    """The URL of {"video_url": {"url": ...}}, {"video_url": ...} or {"video": ...}."""
    return _url(
        part.get("video_url", part.get("video")),
        where,
        'a video without a URL: give {"type": "video_url", "video_url":'
        ' {"url": "data:video/mp4;base64,..."}}',
    )


_URLS: Mapping[Kind, Callable[[Mapping[str, Any], str], str]] = {
    "image": _image_url,
    "audio": _audio_url,
    "video": _video_url,
}


def _url(found: Any, where: str, fault: str) -> str:
    """`found`, or its "url". Raises InvalidRequestError, which says that `where` is the fault."""
    if isinstance(found, Mapping):
        found = found.get("url")
    if not isinstance(found, str):
        raise InvalidRequestError(f"{where} is {fault}", param=where)
    return found
