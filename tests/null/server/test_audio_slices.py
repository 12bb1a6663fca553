"""Uploads of audio: decoded and prepared in slices, away from the event loop."""

from __future__ import annotations

import asyncio
import io
import threading
import wave
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request
from vllmx_core.errors import InvalidRequestError
from vllmx_core.plan import F32
from vllmx_core.sampling import SamplingParams
from vllmx_engine.audio.decode import Resampler
from vllmx_engine.audio.slices import Sliced
from vllmx_engine.speech.transcriber import Window
from vllmx_server.generating.served import Served as State
from vllmx_server.limits.admission import BodyBudget
from vllmx_server.limits.admitted import Admitted

from tests.waiting import PATIENCE_S, until

from .conftest import Served

RATE, SLICE_S = 8000, 8


def upload(slices: int) -> tuple[bytes, bytes]:
    """The head and the body of a request with so many slices of silence."""
    file = io.BytesIO()
    with wave.open(file, "wb") as audio:
        audio.setnchannels(1)
        audio.setsampwidth(1)
        audio.setframerate(RATE)
        audio.writeframes(bytes(slices * SLICE_S * RATE))
    body = (
        b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
        + file.getvalue()
        + b"\r\n--x--\r\n"
    )
    head = (
        "POST /v1/audio/transcriptions HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Type: multipart/form-data; boundary=x\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode(), body


class Heard(SimpleNamespace):
    """Stands for the transcriber of a model that hears."""

    def windows(self, samples: F32) -> None:
        raise InvalidRequestError(f"heard {samples.size} samples", param="file")


async def test_a_client_that_leaves_frees_its_worker(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, slices = threading.Event(), threading.Event(), list[int]()
    feed = Resampler.feed

    def held(self: Resampler, samples: F32) -> F32:
        slices.append(samples.size)
        begun.set()
        assert go_on.wait(PATIENCE_S)
        return feed(self, samples)

    monkeypatch.setattr(Resampler, "feed", held)
    hearing = Heard(checked=lambda task: task, frames=SimpleNamespace(rate=16000))
    served.llm.__dict__["transcriber"] = hearing
    _, writer = await served.connect()
    for part in upload(100):
        writer.write(part)
    await writer.drain()
    assert await asyncio.to_thread(begun.wait, PATIENCE_S)
    writer.transport.abort()
    await until(lambda: not served.state.stores[BodyBudget].num_bytes)  # the server has seen it
    assert len(slices) == 1
    go_on.set()
    reader, writer = await served.connect()
    for part in upload(2):
        writer.write(part)
    answer = await asyncio.wait_for(reader.readuntil(b"samples"), PATIENCE_S)
    assert f"heard {2 * SLICE_S * 16000} samples".encode() in answer
    assert slices == [SLICE_S * RATE] * 3 + [16]


async def test_windows_are_prepared_once_and_off_the_loop(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one too, in which the language is found. Keys are charged for the seconds."""
    heard, charged, builder = list[tuple[float, int]](), list[int](), served.llm._builder
    admit = State.admit

    async def admitted(state: State, request: Request, num_tokens: int) -> Admitted:
        charged.append(num_tokens)
        return await admit(state, request, num_tokens)

    def hear(window: Window) -> Sliced[list[Window]]:
        heard.append((window.start_s, threading.get_ident()))
        yield
        return [window]

    def asked(window: list[Window], *others: Any) -> Any:
        assert [type(one) for one in window] == [Window]
        prompt, params = {"prompt_token_ids": [1, 2]}, SamplingParams(max_tokens=1)
        return builder.build(prompt, params, options=others[-1])

    monkeypatch.setattr(State, "admit", admitted)
    served.llm.__dict__["transcriber"] = SimpleNamespace(
        checked=lambda task: task,
        frames=SimpleNamespace(rate=16000),
        languages={"en": 0},
        tokens_per_s=17.0,
        windows=lambda samples: [Window(float(at), samples) for at in range(3)],
        heard=hear,
        detection=asked,
        language_of=lambda output: "en",
        request=asked,
        text_of=lambda output: "x",
    )
    reader, writer = await served.connect()
    for part in upload(2):
        writer.write(part)
    answer = await asyncio.wait_for(reader.readuntil(b"}}"), PATIENCE_S)
    assert b'"xxx"' in answer
    assert sorted(at for at, _ in heard) == [0.0, 1.0, 2.0]
    assert threading.get_ident() not in [thread for _, thread in heard]
    assert charged == [3 * 128 + 2 * SLICE_S * 17]
