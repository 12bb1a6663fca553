"""`LLM.transcribe`: the text of an audio without a server."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice

import msgspec
import numpy as np
from vllmx_core.errors import InvalidRequestError
from vllmx_core.plan import F32

from vllmx_engine.audio.decode import AudioLimits, decode
from vllmx_engine.audio.slices import finished
from vllmx_engine.client.inline import InlineEngine
from vllmx_engine.client.request import Request, RequestOptions
from vllmx_engine.speech.chat_transcriber import transcriber_for
from vllmx_engine.speech.transcriber import SpeechTask, Transcription
from vllmx_engine.wire.messages import ImageInput
from vllmx_engine.wire.outputs import RequestOutput

_TOGETHER = 16
"""Windows whose frames are in memory at a time."""


def transcribe(engine: InlineEngine, audio: bytes | F32, task: SpeechTask) -> Transcription:
    """Raises InvalidRequestError, and the error of the first window that has one."""
    transcriber = transcriber_for(engine.builder)
    task, rate = transcriber.checked(task), transcriber.frames.rate
    if isinstance(audio, bytes):
        config = engine.config
        limits = AudioLimits(config.max_audio_bytes, config.max_audio_seconds)
        samples = finished(decode(audio, rate, limits, "audio"))
    else:
        samples = np.asarray(audio, np.float32)
        if samples.ndim != 1 or not samples.size or not np.isfinite(samples).all():
            raise InvalidRequestError("audio must be mono samples, finite numbers", param="audio")
    windows, options = list(transcriber.windows(samples)), RequestOptions()
    language = task.language or "en"
    heard: Iterator[list[ImageInput]] = (finished(transcriber.heard(one)) for one in windows)
    if task.language is None and transcriber.languages:
        first = next(heard)
        heard = chain([first], heard)
        detection = transcriber.detection(first, options)
        language = transcriber.language_of(answers(engine, [detection])[0])
    found = Transcription("", language, samples.size / rate)
    texts: list[str] = []
    for begin in range(0, len(windows), _TOGETHER):
        some = windows[begin : begin + _TOGETHER]
        requests = [
            transcriber.request(one, task, language, options) for one in islice(heard, _TOGETHER)
        ]
        for window, output in zip(some, answers(engine, requests), strict=True):
            texts.append(transcriber.text_of(output))
            if task.timestamps:
                found.segments.extend(transcriber.segments(output, window, task))
    return msgspec.structs.replace(found, text="".join(texts).strip())


def answers(engine: InlineEngine, requests: list[Request]) -> list[RequestOutput]:
    """Runs requests together; their last outputs. Raises the error of the first that has one."""
    states = [engine.submit(request) for request in requests]
    engine.run(states)
    return [engine.next_output(state) for state in states]
