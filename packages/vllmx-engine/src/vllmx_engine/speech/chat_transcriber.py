"""Transcriptions by models that hear in chats and know a form for them: Voxtral, Qwen3-ASR."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from vllmx_core.errors import InvalidRequestError, shown
from vllmx_core.plan import F32
from vllmx_core.sampling import SamplingParams

from vllmx_engine.audio.processor import find_audio_processor
from vllmx_engine.audio.slices import Sliced
from vllmx_engine.client.request import Request, RequestBuilder, RequestOptions
from vllmx_engine.speech.transcriber import SpeechTask, Transcriber, Window
from vllmx_engine.text.prompt_text import PromptText
from vllmx_engine.wire.images import ImageRoom
from vllmx_engine.wire.messages import ImageInput
from vllmx_engine.wire.outputs import RequestOutput

_LANGUAGE = re.compile("[a-z]{2,3}")
_TRANSCRIBE = "[TRANSCRIBE]"
_TEXT = "<asr_text>"


def transcriber_for(builder: RequestBuilder) -> Transcriber:
    """The transcriber of a loaded model. Raises InvalidRequestError for a model that writes down no
    audio, and what `Transcriber` raises."""
    if builder.info.audio_rows:
        return Transcriber(builder)
    for token, kind in ((_TRANSCRIBE, ChatTranscriber), (_TEXT, AsrTranscriber)):
        if builder.info.takes_audio and builder.tokenizer.token_to_id(token) is not None:
            return kind(builder)
    raise InvalidRequestError(
        f"model {builder.info.model!r} writes down no audio: load one that does, such as Whisper",
        param="model",
    )


class ChatTranscriber(Transcriber):
    """One request hears all of an audio; its text has no times."""

    tokens_per_s = 17.0
    """Tokens of a second: up to 13 of the audio, and 4 of its text."""

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
        return (yield from self._processor.inputs(0, fit))

    def request(
        self,
        heard: Sequence[ImageInput],
        task: SpeechTask,
        language: str,
        options: RequestOptions,
    ) -> Request:
        """See `Transcriber`."""
        after = [self._token("[/INST]")]
        if task.language is not None:
            name = f"lang:{task.language}"
            after += self._builder.tokenizer.encode(name, add_special_tokens=False)
        params = SamplingParams(temperature=task.temperature, max_tokens=None)
        before = [self._token(one) for one in ("<s>", "[INST]", "[BEGIN_AUDIO]")]
        return self._around(heard, before, [*after, self._token(_TRANSCRIBE)], params, options)

    def _around(
        self,
        heard: Sequence[ImageInput],
        before: Sequence[int],
        after: Sequence[int],
        params: SamplingParams,
        options: RequestOptions,
    ) -> Request:
        """The request with the tokens of an audio between others."""
        moved = [msgspec.structs.replace(one, start=one.start + len(before)) for one in heard]
        count = sum(one.num_tokens for one in heard)
        ids = [*before, *[self._token(self._processor.token)] * count, *after]
        return self._built(ids, params, moved, None, options)

    def _text(self, ids: Sequence[int]) -> str:
        return self._builder.tokenizer.decode(ids)


class AsrTranscriber(ChatTranscriber):
    """Qwen3-ASR: the answer begins with the language, which a first request finds if none is
    named."""

    def __init__(self, builder: RequestBuilder) -> None:
        super().__init__(builder)
        self.languages = {code: number for number, code in enumerate(_LANGUAGES)}

    def checked(self, task: SpeechTask) -> SpeechTask:
        """See `Transcriber`."""
        if task.language is not None and task.language not in _LANGUAGES:
            raise InvalidRequestError(
                f"language is {shown(task.language)}: the model knows"
                f" {', '.join(sorted(_LANGUAGES))}",
                param="language",
            )
        super().checked(msgspec.structs.replace(task, prompt=""))
        return task

    def detection(self, heard: Sequence[ImageInput], options: RequestOptions) -> Request:
        """See `Transcriber`."""
        stop = (self._token(_TEXT),)
        params = SamplingParams(temperature=0, max_tokens=_NAME_TOKENS, stop_token_ids=stop)
        return self._asked(heard, "", (), params, options)

    def language_of(self, output: RequestOutput) -> str:
        """The code of the language, or its name if it has none here; None for silence."""
        found = _NAMED.match(self._text(output.outputs[0].token_ids))
        name = "None" if found is None else found[1]
        return next((code for code, one in _LANGUAGES.items() if one == name), name)

    def request(
        self,
        heard: Sequence[ImageInput],
        task: SpeechTask,
        language: str,
        options: RequestOptions,
    ) -> Request:
        """See `Transcriber`."""
        name = f"language {_LANGUAGES.get(language, language)}"
        named = self._builder.tokenizer.encode(name, add_special_tokens=False)
        params = SamplingParams(temperature=task.temperature, max_tokens=None)
        return self._asked(heard, task.prompt, (*named, self._token(_TEXT)), params, options)

    def _asked(
        self,
        heard: Sequence[ImageInput],
        prompt: str,
        answer: Sequence[int],
        params: SamplingParams,
        options: RequestOptions,
    ) -> Request:
        """A chat of the client's prompt, which no special token is read from, and the audio."""
        tokenizer = self._builder.tokenizer
        given = tokenizer.encode(
            PromptText(prompt, range(1, len(prompt))), add_special_tokens=False
        )
        system, user, end = (tokenizer.marker(one) for one in _CHAT)
        return self._around(heard, [*system, *given, *user], [*end, *answer], params, options)


_CHAT = (
    "<|im_start|>system\n",
    "<|im_end|>\n<|im_start|>user\n<|audio_start|>",
    "<|audio_end|><|im_end|>\n<|im_start|>assistant\n",
)
_NAME_TOKENS = 8
_NAMED = re.compile(r"\s*language (\w+)")
_LANGUAGES = {
    "ar": "Arabic", "cs": "Czech", "da": "Danish", "de": "German", "el": "Greek", "en": "English",
    "es": "Spanish", "fa": "Persian", "fi": "Finnish", "fil": "Filipino", "fr": "French",
    "hi": "Hindi", "hu": "Hungarian", "id": "Indonesian", "it": "Italian", "ja": "Japanese",
    "ko": "Korean", "mk": "Macedonian", "ms": "Malay", "nl": "Dutch", "pl": "Polish",
    "pt": "Portuguese", "ro": "Romanian", "ru": "Russian", "sv": "Swedish", "th": "Thai",
    "tr": "Turkish", "vi": "Vietnamese", "yue": "Cantonese", "zh": "Chinese",
}  # fmt: skip
"""The languages that Qwen3-ASR was trained on, as it names them."""
