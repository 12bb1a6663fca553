"""Transcriptions over HTTP, by OpenAI's client and by hand; files that are wrong end as 400."""

from __future__ import annotations

import contextlib
import io
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import openai
import pytest
from vllmx_engine.llm import LLM

from tests.waiting import PATIENCE_S, wait_until

from ..whisper_models import make, save, sound, wav  # noqa: TID252 - no package to name
from .conftest import PLAIN, RunningServer, running_server

MAX_BYTES, MAX_SECONDS = 400_000, 9
LONG = sound(7.3, seed=5)
FLAGS = ("--backend", "numpy", "--dtype", "float32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make(), tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def hearing(folder: Path) -> Iterator[RunningServer]:
    with running_server(
        "--model", f"whisper={folder}", "--model", "demo=demo", *FLAGS,
        "--max-audio-bytes", str(MAX_BYTES), "--max-audio-seconds", str(MAX_SECONDS),
    ) as running:  # fmt: skip
        yield running


@pytest.fixture(scope="module")
def expected(folder: Path) -> Any:
    """The long audio by `LLM.transcribe`."""
    with LLM(str(folder), backend="numpy", dtype="float32") as llm:
        return llm.transcribe(wav(LONG), language="de", timestamps=True)


@pytest.fixture
def client(hearing: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{hearing.url}/v1", api_key="none", timeout=PATIENCE_S, max_retries=0
    )


def named(data: bytes, name: str = "speech.wav") -> tuple[str, bytes]:
    return name, data


def letters(text: str) -> str:
    """The text without what the bytes of random tokens form otherwise in pieces."""
    return "".join(letter for letter in text if letter.isascii()).strip()


def test_all_shapes_of_a_long_audio(client: openai.OpenAI, expected: Any) -> None:
    create, file = client.audio.transcriptions.create, named(wav(LONG))
    common: dict[str, Any] = {"model": "whisper", "file": file, "language": "de"}
    found = create(response_format="verbose_json", timestamp_granularities=["segment"], **common)
    assert found.duration == expected.duration
    assert found.language == "de"
    assert found.text == expected.text
    assert [(one.start, one.end, one.text) for one in found.segments or ()] == [
        (one.start, one.end, one.text) for one in expected.segments
    ]
    starts = [one.start for one in expected.segments]
    assert starts == sorted(starts)
    assert starts[-1] > 4  # from the last of four windows
    subtitles = create(response_format="srt", **common)
    assert subtitles.count(" --> ") == len(starts)
    assert subtitles.startswith("1\n00:00:0")
    assert create(response_format="vtt", **common).startswith("WEBVTT\n\n00:00:0")
    plain = create(response_format="json", **common)
    assert plain.text
    assert create(response_format="text", **common) == plain.text + "\n"
    events = list(create(stream=True, **common))
    assert letters("".join(one.delta for one in events[:-1])) == letters(plain.text)
    assert letters(events[-1].text) == letters(plain.text)


def test_the_language_is_found_and_translated(
    client: openai.OpenAI, hearing: RunningServer
) -> None:
    file = named(wav(sound(1.4, seed=2)))
    found = client.audio.transcriptions.create(
        model="whisper", file=file, response_format="verbose_json", prompt="names and style"
    )
    assert found.language in ("en", "de")
    url = f"{hearing.url}/v1/audio/translations"
    translated = httpx.post(url, files={"file": file}, data={"model": "whisper"}, **PLAIN)
    assert translated.status_code == 200, translated.text
    assert translated.json()["text"]


def test_what_is_no_audio_ends_as_400(hearing: RunningServer) -> None:
    good = wav(sound(0.2))
    promised = bytearray(good)
    struct.pack_into("<I", promised, 40, 0xFFFFFFF0)
    no_numbers = np.full(800, np.nan, np.float32).tobytes()
    floats = (
        b"RIFF"
        + struct.pack("<I", 36 + len(no_numbers))
        + b"WAVEfmt "
        + struct.pack("<IHHIIHH", 16, 3, 1, 16000, 64000, 4, 32)
        + b"data"
        + struct.pack("<I", len(no_numbers))
        + no_numbers
    )
    no_rate = bytearray(good)
    struct.pack_into("<I", no_rate, 24, 0)
    bad = {
        "empty": b"", "text": b"no audio at all", "cut": good[:30],
        "no samples": wav(sound(0.2)[:0]),
        "nan": floats, "no rate": bytes(no_rate),
        "long": wav(sound(MAX_SECONDS + 1, rate=8000), 8000),
    }  # fmt: skip
    for name, data in bad.items():
        answer = _post(hearing, data)
        assert answer.status_code == 400, (name, answer.text)
        assert answer.json()["error"]["param"] == "file", name
    assert _post(hearing, bytes(MAX_BYTES + 1)).status_code == 413
    for name, data in {
        "promises": bytes(promised), "one sample": wav(sound(0.2)[:1]),
        "fast and wide": wav(sound(0.1, rate=192_000), 192_000, channels=8),
        "8 bits": wav(sound(0.2), width=1), "24 bits": wav(sound(0.2), width=3),
    }.items():  # fmt: skip
        answer = _post(hearing, data)
        assert answer.status_code == 200, (name, answer.text)


def test_fields_that_are_wrong(hearing: RunningServer) -> None:
    good = wav(sound(0.2))
    for field, value in {
        "response_format": "xml", "temperature": "3", "language": "xx", "model": "other",
        "stream": "maybe", "timestamp_granularities[]": "word", "beams": "1",
    }.items():  # fmt: skip
        answer = _post(hearing, good, **{field: value})
        assert answer.status_code == (404 if field == "model" else 400), (field, answer.text)
        assert answer.json()["error"]["param"] == field
    both = _post(hearing, good, stream="true", response_format="srt")
    assert both.status_code == 400
    talk = {"model": "whisper", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    for path, body in {
        "completions": {"model": "whisper", "prompt": "a"}, "chat/completions": talk,
        "messages": talk, "responses": {"model": "whisper", "input": "a"},
    }.items():  # fmt: skip
        text = hearing.post(f"/v1/{path}", body)
        assert text.status_code == 400, path
        assert "/v1/audio/transcriptions" in text.text, path


def test_a_model_beside_it_hears_nothing(hearing: RunningServer) -> None:
    good = wav(sound(0.2))
    assert _post(hearing, good, model="whisper").status_code == 200
    refused = _post(hearing, good, model="demo")
    assert refused.status_code == 400, refused.text
    assert "writes down no audio" in refused.text
    cards = hearing.get("/v1/models").json()["data"]
    found = {card["id"]: card["input_modalities"] for card in cards}
    assert found == {"whisper": ["audio"], "demo": ["text"]}
    assert any("/v1/audio/transcriptions -F model=whisper" in line for line in hearing.lines)


def test_files_that_are_being_sent_are_bounded(hearing: RunningServer) -> None:
    """Slow clients that each send most of the largest file."""
    head = (
        b"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: localhost\r\n"
        b"Content-Type: multipart/form-data; boundary=b\r\nContent-Length: 400000\r\n\r\n"
        b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\n'
    )
    place = urlsplit(hearing.url)
    with contextlib.ExitStack() as open_sockets:
        for _ in range(20):
            one = socket.create_connection((place.hostname, place.port), timeout=PATIENCE_S)
            open_sockets.enter_context(one).sendall(head + bytes(390_000))
        wait_until(lambda: _post(hearing, bytes(300_000)).status_code == 503)
    wait_until(lambda: _post(hearing, wav(sound(4.0))).status_code == 200)


def _post(server: RunningServer, data: bytes, **fields: str) -> httpx.Response:
    files = {"file": ("x.wav", io.BytesIO(data))}
    url = f"{server.url}/v1/audio/transcriptions"
    return httpx.post(url, data=fields, files=files, **PLAIN)
