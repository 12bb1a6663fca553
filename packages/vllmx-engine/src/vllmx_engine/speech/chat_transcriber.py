"""Transcriptions by a model that hears in chats and knows a form for them: Voxtral."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from vllmx_core.errors import InvalidRequestError, shown
from vllmx_core.plan import F32
from vllmx_core.sampling import SamplingParams

from vllmx_engine.audio.processor import find_audio_processor
from vllmx_engine.audio.slices import Sliced
from vllmx_engine.client.request import Request, RequestBuilder, RequestOptions
from vllmx_engine.speech.transcriber import SpeechTask, Transcriber, Window
from vllmx_engine.wire.images import ImageRoom
from vllmx_engine.wire.messages import ImageInput

_LANGUAGE = re.compile("[a-z]{2,3}")
_TRANSCRIBE = "[TRANSCRIBE]"


def transcriber_for(builder: RequestBuilder) -> Transcriber:
    """The transcriber of a loaded model. Raises InvalidRequestError for a model that writes down no
    audio, and what `Transcriber` raises."""
    if builder.info.audio_rows:
        return Transcriber(builder)
    if builder.info.takes_audio and builder.tokenizer.token_to_id(_TRANSCRIBE) is not None:
        return ChatTranscriber(builder)
    raise InvalidRequestError(
        f"model {builder.info.model!r} writes down no audio: load one that does, such as Whisper",
        param="model",
    )


class ChatTranscriber(Transcriber):
    """One request hears all of an audio; its text has no times."""

    def __init__(self, builder: RequestBuilder) -> None:
        self._builder = builder
        self._processor = find_audio_processor(Path(builder.info.path))
        self.frames = self._processor.frames
        self.languages = {}

    def checked(self, task: SpeechTask) -> SpeechTask:
        """See `Transcriber`."""
        if task.language is not None and not _LANGUAGE.fullmatch(task.language):
            raise InvalidRequestError(
                f"language is {shown(task.language)}: give a code such as en", param="language"
            )
        for param, wanted, remedy in (
            ("model", task.translates, "translates nothing: transcribe, or ask in a chat"),
            ("response_format", task.timestamps, "gives no times: use json or text"),
            ("prompt", task.prompt, "takes no prompt here: leave it out, or ask in a chat"),
        ):
            if wanted:
                raise InvalidRequestError(f"this model {remedy}", param=param)
        return task

    def windows(self, samples: F32) -> Iterator[Window]:
        """See `Transcriber`."""
        yield Window(0.0, samples)

    def heard(self, window: Window) -> Sliced[list[ImageInput]]:
        """See `Transcriber`."""
        fit = self._processor.fit(window.samples, "file")
        room = self._builder.info.image_room or ImageRoom()
        room.check(fit.runs, fit.num_bytes, "file")
        return self._processor.inputs(len(self._before), fit)

    def request(
        self,
        heard: Sequence[ImageInput],
        task: SpeechTask,
        language: str,
        options: RequestOptions,
    ) -> Request:
        """See `Transcriber`."""
        count = sum(one.num_tokens for one in heard)
        ids = [*self._before, *[self._token(self._processor.token)] * count, self._token("[/INST]")]
        if task.language is not None:
            name = f"lang:{task.language}"
            ids += self._builder.tokenizer.encode(name, add_special_tokens=False)
        params = SamplingParams(temperature=task.temperature, max_tokens=None)
        return self._built([*ids, self._token(_TRANSCRIBE)], params, heard, None, options)

    @property
    def _before(self) -> list[int]:
        return [self._token(one) for one in ("<s>", "[INST]", "[BEGIN_AUDIO]")]

    def _text(self, ids: Sequence[int]) -> str:
        return self._builder.tokenizer.decode(ids)
