"""Audio in chats over HTTP: the answers are those of `LLM.chat`; what is wrong ends as 400."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from vllmx_core.sampling import SamplingParams
from vllmx_engine.llm import LLM

from tests.waiting import PATIENCE_S

from ...null.images.pictures import data_url, picture, stored  # noqa: TID252 - no package to name
from ..audio_models import FAMILIES, save  # noqa: TID252
from ..whisper_models import sound, wav  # noqa: TID252
from .conftest import RunningServer, running_server

MAX_BYTES, MAX_SECONDS = 400_000, 9
GOOD = wav(sound(4.3, seed=1))
WORD = {"type": "text", "text": "w5"}
SETTINGS: dict[str, Any] = {"backend": "numpy", "dtype": "float32", "max_model_len": 260}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    family = FAMILIES["voxtral"]
    folder = save(family, family.make(), tmp_path_factory.mktemp("hearing"))
    (folder / "files").mkdir()
    (folder / "files" / "good.wav").write_bytes(GOOD)
    return folder


@pytest.fixture(scope="module")
def hearing(folder: Path) -> Iterator[RunningServer]:
    with running_server(
        "--model", str(folder), "--served-model-name", "hearing", "--backend", "numpy",
        "--dtype", "float32", "--max-model-len", "260", "--limit-images", "3",
        "--max-audio-bytes", str(MAX_BYTES), "--max-audio-seconds", str(MAX_SECONDS),
        "--allowed-local-media-path", str(folder / "files"),
    ) as running:  # fmt: skip
        yield running


def audio(data: bytes = GOOD, form: str = "wav") -> dict[str, Any]:
    encoded = base64.b64encode(data).decode()
    return {"type": "input_audio", "input_audio": {"data": encoded, "format": form}}


def far(url: str) -> dict[str, Any]:
    return {"type": "audio_url", "audio_url": {"url": url}}


def chat(*content: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": list(content)}]
    return {"model": "hearing", "messages": messages, "temperature": 0, "max_tokens": 8}


def test_the_answers_are_those_in_python(hearing: RunningServer, folder: Path) -> None:
    with LLM(str(folder), **SETTINGS) as llm:
        params = SamplingParams(temperature=0, max_tokens=8)
        talk: list[Any] = chat(WORD, audio())["messages"]
        output = llm.chat(talk, params, use_tqdm=False)[0]
    expected = output.outputs[0].text
    client = openai.OpenAI(base_url=f"{hearing.url}/v1", api_key="none", timeout=PATIENCE_S)
    for part in (
        audio(),
        far(data_url(GOOD, "audio/wav")),
        far(f"file://{folder}/files/good.wav"),
    ):
        found = client.chat.completions.create(**chat(WORD, part))
        assert found.choices[0].message.content == expected
        assert found.usage is not None
        assert found.usage.prompt_tokens == len(output.prompt_token_ids or [])
    assert found.usage.prompt_tokens_details is not None
    assert found.usage.prompt_tokens_details.cached_tokens == 64  # the audio is in the prefix cache
    other = client.chat.completions.create(**chat(WORD, audio(wav(sound(4.3, seed=2)))))
    assert other.choices[0].message.content != expected
    assert other.usage is not None
    assert other.usage.prompt_tokens_details is not None
    assert other.usage.prompt_tokens_details.cached_tokens == 0


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "bytes": (audio(wav(sound(13))), f"an audio of more than {MAX_BYTES} bytes"),
    "seconds": (audio(wav(sound(9.5, rate=8000), rate=8000)), f"more than {MAX_SECONDS} s"),
    "context": (audio(wav(sound(8.9))), "the request's audio files take"),
    "noise": (audio(b"RIFF and so on"), "audio"),
    "base64": (far("data:audio/wav;base64,!!"), "base64 that cannot be decoded"),
    "format": (audio(form="pcm16"), "input_audio.format is 'pcm16': use wav, mp3"),
    "domain": (far("https://example.org/a.wav"), "--allowed-media-domains"),
    "another folder": (far("file:///etc/passwd"), "--allowed-local-media-path"),
    "an image": (far(data_url(b"x")), "a data URL of an audio in base64: data:audio/wav"),
    "a picture": (
        {"type": "image_url", "image_url": {"url": data_url(stored(picture(4, 4)))}},
        "is an image, but hearing reads text and audio files here",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_audio_that_is_refused(hearing: RunningServer, kind: str) -> None:
    part, message = WRONG[kind]
    before = [audio()] * 2 if kind == "context" else []
    answer = hearing.post("/v1/chat/completions", chat(WORD, *before, part))
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert message in error["message"], error
    assert error["param"].startswith("messages")


def test_transcriptions(hearing: RunningServer, folder: Path) -> None:
    client = openai.OpenAI(base_url=f"{hearing.url}/v1", api_key="none", timeout=PATIENCE_S)
    create = client.audio.transcriptions.create
    given: dict[str, Any] = {"model": "hearing", "file": ("a.wav", GOOD), "language": "de"}
    with LLM(str(folder), **SETTINGS) as llm:
        expected = llm.transcribe(GOOD, language="de").text
    assert expected
    assert create(**given).text == expected
    streamed = [one.delta for one in create(stream=True, **given) if hasattr(one, "delta")]
    assert "".join(streamed).strip() == expected
    with pytest.raises(openai.BadRequestError, match="gives no times"):
        create(response_format="srt", **given)


def test_too_many_and_other_routes(hearing: RunningServer) -> None:
    answer = hearing.post("/v1/chat/completions", chat(*[audio(wav(sound(0.1)))] * 4))
    assert "4 audio files, at most 3 are taken" in answer.json()["error"]["message"]
    (card,) = hearing.get("/v1/models").json()["data"]
    assert card["input_modalities"] == ["text", "audio"]
