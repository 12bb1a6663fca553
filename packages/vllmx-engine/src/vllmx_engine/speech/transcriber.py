"""Requests for transcriptions by Whisper, and the segments of what comes back."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from vllmx_core.errors import InvalidRequestError, UnsupportedModelError, shown
from vllmx_core.plan import F32
from vllmx_core.records import Record, field
from vllmx_core.sampling import SamplingParams

from vllmx_engine.audio.features import LogMel
from vllmx_engine.audio.slices import Sliced
from vllmx_engine.client.request import Request, RequestBuilder, RequestOptions
from vllmx_engine.text.model_files import read_json_object
from vllmx_engine.wire.grammars import Grammar, SpeechRules
from vllmx_engine.wire.messages import ImageInput
from vllmx_engine.wire.outputs import RequestOutput

STAMP_S = 0.02
_SEARCHED = 6
"""A long audio is cut at the quietest place of the last sixth of a window."""
_QUIET_S = 0.1
_LANGUAGE = re.compile(r"<\|([a-z]{2,3})\|>")


class SpeechTask(Record):
    """The wishes of a client for an audio."""

    language: str | None = None
    """The code of the spoken language, such as en; None: the model finds it."""
    translates: bool = False
    """The text shall be English."""
    prompt: str = ""
    """Text that came before, for names and style."""
    timestamps: bool = False
    temperature: float = 0.0


class Segment(Record):
    """A part of a transcription."""

    start: float
    """Seconds."""
    end: float
    text: str
    tokens: list[int]
    temperature: float = 0.0
    avg_logprob: float = 0.0
    """Mean log-probability of the tokens of its window."""
    compression_ratio: float = 0.0
    """The ratio by which zlib compresses the window's text: large if a model repeats itself."""


class Transcription(Record):
    """The text of an audio."""

    text: str
    language: str
    duration: float
    """Seconds."""
    segments: list[Segment] = field(default_factory=list)
    """Empty without `SpeechTask.timestamps`."""


class Window(Record):
    """A piece of an audio that the model hears at once."""

    start_s: float
    samples: F32


class Transcriber:
    """Knows a model's special tokens and frames. Raises (constructor) UnsupportedModelError for a
    tokenizer without these, ConfigError for frames that cannot be made."""

    tokens_per_s = 0.0
    """A guess at the tokens of a second of audio, if windows have no fixed length."""

    def __init__(self, builder: RequestBuilder) -> None:
        self._builder, info = builder, builder.info
        place = Path(info.path) / "preprocessor_config.json"
        self.frames = LogMel.of(read_json_object(place), str(place))
        self._rows = info.audio_rows
        self._config: Mapping[str, Any] = info.generation_config
        self._start = self._token("<|startoftranscript|>")
        self._end = self._token("<|endoftext|>")
        self._no_stamps = self._token("<|notimestamps|>")
        self._tasks = [builder.tokenizer.token_to_id(f"<|{one}|>") for one in _TASKS]
        self.languages = self._languages()
        """Ids by code; empty: the model knows English alone."""

    def _token(self, name: str) -> int:
        found = self._builder.tokenizer.token_to_id(name)
        if found is None:
            raise UnsupportedModelError(
                f"the tokenizer of {self._builder.info.path} has no token {name}: take the one of"
                " the original model by --tokenizer"
            )
        return found

    def _languages(self) -> dict[str, int]:
        if not self._config.get("is_multilingual", None not in self._tasks):
            return {}
        named = self._config.get("lang_to_id")
        if not isinstance(named, Mapping):  # the tokens between the start and the tasks
            ids = range(self._start + 1, min(one for one in self._tasks if one is not None))
            named = {str(self._builder.tokenizer.id_to_token(one)): one for one in ids}
        found = {_LANGUAGE.fullmatch(str(name)): one for name, one in named.items()}
        return {name[1]: one for name, one in found.items() if name and isinstance(one, int)}

    # --- audio ------------------------------------------------------------------------------------
    def windows(self, samples: F32) -> Iterator[Window]:
        """The audio in pieces of at most what the model hears at once."""
        size, rate, begin = self.frames.num_samples, self.frames.rate, 0
        while samples.size - begin > size:
            end = begin + size
            end -= _quietest(samples[end - size // _SEARCHED : end], int(_QUIET_S * rate))
            yield Window(begin / rate, samples[begin:end])
            begin = end
        yield Window(begin / rate, samples[begin:])

    def heard(self, window: Window) -> Sliced[list[ImageInput]]:
        """The window as the core takes it."""
        return self.frames.audio_inputs(window.samples, self._rows, 0)

    # --- requests ---------------------------------------------------------------------------------
    def checked(self, task: SpeechTask) -> SpeechTask:
        """The task itself. Raises InvalidRequestError for what the model cannot do."""
        if task.language is not None and task.language not in (self.languages or ("en",)):
            raise InvalidRequestError(
                f"language is {shown(task.language)}: the model knows"
                f" {', '.join(sorted(self.languages)) or 'en'}",
                param="language",
            )
        if task.translates and not self.languages:
            raise InvalidRequestError(
                "this model knows English alone and translates nothing: transcribe instead",
                param="model",
            )
        return task

    def detection(self, heard: Sequence[ImageInput], options: RequestOptions) -> Request:
        """A request whose only token is the language of the audio, see `language_of`."""
        allowed = tuple(self.languages.values())
        params = SamplingParams(temperature=0, max_tokens=1, allowed_token_ids=allowed)
        return self._built([self._start], params, heard, None, options)

    def language_of(self, output: RequestOutput) -> str:
        """The code that `detection` found."""
        (token,) = output.outputs[0].token_ids
        return next(code for code, one in self.languages.items() if one == token)

    def request(
        self,
        heard: Sequence[ImageInput],
        task: SpeechTask,
        language: str,
        options: RequestOptions,
    ) -> Request:
        """The request for the text of a window. Raises InvalidRequestError."""
        logprobs = 0 if task.timestamps else None
        params = SamplingParams(temperature=task.temperature, max_tokens=None, logprobs=logprobs)
        ids = self._prompt_ids(task, language)
        return self._built(ids, params, heard, self._rules(task), options)

    def _prompt_ids(self, task: SpeechTask, language: str) -> list[int]:
        ids: list[int] = []
        if task.prompt:
            most = self._builder.info.max_model_len // 2 - 1
            tokenizer = self._builder.tokenizer
            text = tokenizer.part_with(f" {task.prompt.strip()}", most, from_end=True)
            before = tokenizer.encode(text, add_special_tokens=False)
            before = [one for one in before if one < self._end]  # spelled by the client
            ids = [self._token("<|startofprev|>"), *before[-most:]]
        ids.append(self._start)
        if self.languages:
            ids += self.languages[language], self._token(_task_token(task.translates))
        return ids if task.timestamps else [*ids, self._no_stamps]

    def _rules(self, task: SpeechTask) -> SpeechRules:
        never = [one for one in self._config.get("suppress_tokens") or () if one >= 0]
        first = self._config.get("begin_suppress_tokens") or ()
        if not task.timestamps:
            return SpeechRules(tuple(never), tuple(first), self._end)
        initial = self._config.get("max_initial_timestamp_index")
        return SpeechRules(
            (*never, self._no_stamps),
            tuple(first),
            self._end,
            self._no_stamps + 1,
            50 if initial is None else int(initial),
        )

    def _built(
        self,
        ids: list[int],
        params: SamplingParams,
        heard: Sequence[ImageInput],
        rules: SpeechRules | None,
        options: RequestOptions,
    ) -> Request:
        built = self._builder.build({"prompt_token_ids": ids}, params, options=options)
        grammar = None if rules is None else Grammar("", speech=rules)
        core = [
            msgspec.structs.replace(one, images=list(heard), grammar=grammar) for one in built.core
        ]
        return msgspec.structs.replace(built, core=core)

    # --- answers ----------------------------------------------------------------------------------
    def text_of(self, output: RequestOutput) -> str:
        """The text of a window, which begins with a blank in most languages."""
        return self._text(output.outputs[0].token_ids)

    def _text(self, ids: Sequence[int]) -> str:
        return self._builder.tokenizer.decode([one for one in ids if one < self._end])

    def segments(self, output: RequestOutput, window: Window, task: SpeechTask) -> list[Segment]:
        """The segments of a window, by the timestamps in its text."""
        choice, first = output.outputs[0], self._no_stamps + 1
        length_s = window.samples.size / self.frames.rate
        text = self.text_of(output).encode()
        common = {
            "temperature": task.temperature,
            "avg_logprob": (choice.cumulative_logprob or 0.0) / max(1, len(choice.token_ids)),
            "compression_ratio": len(text) / len(zlib.compress(text)),
        }
        found: list[Segment] = []
        start_s, ids = 0.0, list[int]()
        for token in [*choice.token_ids, first + round(length_s / STAMP_S)]:
            if token < first:
                ids += [token] if token < self._end else []
                continue
            stamp_s = min((token - first) * STAMP_S, length_s)
            if ids:
                begin, end = (round(window.start_s + one, 3) for one in (start_s, stamp_s))
                found.append(Segment(begin, max(begin, end), self._text(ids), ids, **common))
            start_s, ids = stamp_s, []
        return found


_TASKS = ("translate", "transcribe")


def _task_token(translates: bool) -> str:
    return f"<|{_TASKS[0 if translates else 1]}|>"


def _quietest(samples: F32, size: int) -> int:
    """Samples from the middle of the quietest piece of `size` to the end."""
    count = samples.size // size
    energy = np.square(samples[: count * size]).reshape(count, size).sum(axis=1)
    return samples.size - int(energy.argmin()) * size - size // 2
