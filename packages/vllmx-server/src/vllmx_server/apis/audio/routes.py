"""POST /v1/audio/transcriptions and /v1/audio/translations."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from vllmx_core.errors import VllmxError
from vllmx_engine.audio.decode import AudioLimits, decode
from vllmx_engine.client.request import RequestOptions
from vllmx_engine.client.request_state import OutputKind
from vllmx_engine.client.request_stream import RequestStream
from vllmx_engine.speech.transcriber import Segment, SpeechTask, Transcription, Window
from vllmx_engine.wire.messages import ImageInput
from vllmx_engine.wire.outputs import RequestOutput

from vllmx_server.apis.audio.answers import (
    DurationUsage,
    PlainTranscription,
    TranscriptDelta,
    TranscriptDone,
    VerboseTranscription,
    subtitles,
    verbose,
)
from vllmx_server.apis.audio.form import TRANSCRIPTION, TRANSLATION, SpeechForm, read_form
from vllmx_server.generating.api import Api, keyed
from vllmx_server.generating.generation import Generation, Usage
from vllmx_server.generating.reading import caller_of
from vllmx_server.generating.served import Served, served_of
from vllmx_server.http.client import client_of
from vllmx_server.http.deadline import Deadline, deadline_of
from vllmx_server.http.disconnect import while_there
from vllmx_server.http.event_stream import DONE, OPENAI
from vllmx_server.http.hosts import check_origin
from vllmx_server.http.operation import GENERATES, GENERATING, Endpoint, Events, Form
from vllmx_server.http.route import Route
from vllmx_server.limits.admission import BodyBudget
from vllmx_server.limits.admitted import Admitted

_AHEAD = 8
"""Windows of an audio that the engine has at a time."""
_STAMP = re.compile(r"<\|\d+\.\d\d\|>")
"""A timestamp, which a model may write without being asked for it."""
_TOKENS_OF_WINDOW = 128
"""A guess at the tokens of a window, for limits of keys; the end corrects it."""


class Speech:
    """The transcription of one audio. `text` and `segments` grow with `texts`."""

    def __init__(
        self,
        served: Served,
        samples: list[Window],
        task: SpeechTask,
        options: RequestOptions,
        deadline: Deadline,
    ) -> None:
        self._served, self._windows, self._task = served, samples, task
        self._options, self._deadline = options, deadline
        self._transcriber = served.llm.transcriber
        self._started_s = time.monotonic()
        self.usage = Usage(0)
        self._first: list[ImageInput] | None = None
        """The first window, prepared to find the language."""
        last, rate = samples[-1], self._transcriber.frames.rate
        self.found = Transcription("", task.language or "", last.start_s + last.samples.size / rate)

    async def whole(self) -> Transcription:
        """All of it."""
        async with aclosing(self.texts("final")) as texts:
            pieces = [text async for text in texts]
        return msgspec.structs.replace(self.found, text="".join(pieces).strip())

    async def texts(self, kind: OutputKind) -> AsyncGenerator[str, None]:
        """The text in pieces, in order: those of the engine ("delta"), or of windows ("final").
        Some windows are computed ahead. Raises VllmxError."""
        language = await self._language()
        self.found = msgspec.structs.replace(self.found, language=language)
        ahead: list[asyncio.Task[Generation]] = []
        waiting = iter(self._windows)
        try:
            for window in self._windows:
                while len(ahead) < _AHEAD and (after := next(waiting, None)) is not None:
                    ahead.append(asyncio.ensure_future(self._start(after, language, kind)))
                generation = await ahead[0]
                async with aclosing(generation.outputs()) as outputs:
                    async for _, output in outputs:
                        yield self._taken(output, window, kind)
                generation.close()
                del ahead[0]
        finally:
            for task in ahead:
                if task.done() and not task.cancelled() and task.exception() is None:
                    task.result().close()
                task.cancel()

    def _taken(self, output: RequestOutput, window: Window, kind: OutputKind) -> str:
        if self._task.timestamps:
            segments: list[Segment] = self.found.segments
            segments += self._transcriber.segments(output, window, self._task)
        if kind == "delta":
            return _STAMP.sub("", output.outputs[0].text)
        return self._transcriber.text_of(output)

    async def _hear(self, window: Window) -> list[ImageInput]:
        llm, client = self._served.llm, self._options.client
        return await llm.slices.run(client, self._transcriber.heard(window))

    async def _start(self, window: Window, language: str, kind: OutputKind) -> Generation:
        heard, self._first = self._first or await self._hear(window), None
        request = self._transcriber.request(heard, self._task, language, self._options)
        stream = self._served.llm.submit_built(request, kind)
        return self._generation([stream])

    def _generation(self, streams: list[RequestStream]) -> Generation:
        return Generation(
            streams, self._served.metrics, self._started_s, self._deadline, self.usage
        )

    async def _language(self) -> str:
        """The language that was named, or that of the first window."""
        if self._task.language is not None or not self._transcriber.languages:
            return self._task.language or "en"
        self._first = await self._hear(self._windows[0])
        request = self._transcriber.detection(self._first, self._options)
        generation = self._generation([self._served.llm.submit_built(request, "final")])
        try:
            (output,) = await generation.finals()
        finally:
            generation.close()
        return self._transcriber.language_of(output)


async def transcriptions(request: Request) -> Response:
    """The text of an audio in its own language."""
    return await _answered(request, translates=False)


async def translations(request: Request) -> Response:
    """The text of an audio in English."""
    return await _answered(request, translates=True)


async def _answered(request: Request, *, translates: bool) -> Response:
    served = served_of(request)
    check_origin(request, served.config.allowed_origins)
    served.check_admission()
    config = served.llm.config
    timeout_s, most = served.config.body_timeout_s, config.max_audio_bytes
    budget = served.stores.setdefault(BodyBudget, BodyBudget(most))
    with budget.hold(client_of(request)) as held:
        form = await read_form(request, most, timeout_s, held, translates=translates)
        if served.models is not None:
            served = await served.models.served(served.models.name_of(form.model))
        served.check_model(form.model)
        transcriber = served.llm.transcriber
        task, deadline = transcriber.checked(form.task), deadline_of(request, served.config)
        limits, rate = AudioLimits(most, config.max_audio_seconds), transcriber.frames.rate
        options, work = caller_of(request, form), decode(form.data, rate, limits, "file")
        decoding = served.llm.slices.run(options.client, work)
        samples = await while_there(request.receive, decoding, deadline)
    windows = list(transcriber.windows(samples))
    most_tokens = _TOKENS_OF_WINDOW * len(windows)
    most_tokens += round(transcriber.tokens_per_s * samples.size / rate)
    release = await served.admit(request, most_tokens)
    try:
        speech = Speech(served, windows, task, options, deadline)
        release.usage = speech.usage
        if form.stream:
            return StreamingResponse(_events(speech, release), media_type="text/event-stream")
        found = await while_there(request.receive, speech.whole(), deadline)
    except BaseException:
        release()
        raise
    release()
    return _shown(form, found)


def _shown(form: SpeechForm, found: Transcription) -> Response:
    if form.response_format == "text":
        return PlainTextResponse(found.text + "\n")
    if form.response_format in ("srt", "vtt"):
        return PlainTextResponse(subtitles(found.segments, form.response_format))
    usage = DurationUsage(seconds=found.duration)
    answer: VerboseTranscription | PlainTranscription
    if form.response_format == "verbose_json":
        answer = verbose(found, translates=form.task.translates)
    else:
        answer = PlainTranscription(text=found.text, usage=usage)
    return Response(msgspec.json.encode(answer), media_type="application/json")


async def _events(speech: Speech, release: Admitted) -> AsyncIterator[bytes]:
    """The text as it comes."""
    pieces: list[str] = []
    try:
        async with aclosing(speech.texts("delta")) as texts:
            async for text in texts:
                pieces.append(text if pieces else text.lstrip())
                if pieces[-1]:
                    yield _event(TranscriptDelta(delta=pieces[-1]))
        usage = DurationUsage(seconds=speech.found.duration)
        yield _event(TranscriptDone(text="".join(pieces), usage=usage)) + DONE
    except VllmxError as error:
        yield OPENAI.failed(error)
    finally:
        release()


def _event(data: TranscriptDelta | TranscriptDone) -> bytes:
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


_EXAMPLE = {"file": "speech.wav", "model": "whisper", "response_format": "verbose_json"}


def _route(path: str, endpoint: Endpoint, form: Form, events: Events | None) -> Route:
    return keyed(
        "POST",
        path,
        endpoint,
        GENERATING,
        (PlainTranscription, VerboseTranscription),
        form,
        text="Needs a model that writes down audio, such as Whisper; others answer 400.",
        events=events,
        statuses=GENERATES,
        example=_EXAMPLE,
    )


class AudioApi(Api):
    """Transcriptions and translations."""

    routes = (
        _route(
            "/v1/audio/transcriptions",
            transcriptions,
            TRANSCRIPTION,
            Events(TranscriptDelta | TranscriptDone, is_named=False, ends_with="[DONE]"),
        ),
        _route("/v1/audio/translations", translations, TRANSLATION, None),
    )
