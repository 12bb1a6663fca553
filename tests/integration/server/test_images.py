"""Images over HTTP, before a small model that sees them: what is wrong is told in the shape of each
API, and nobody else notices. Then the examples of docs/images.md."""

from __future__ import annotations

import base64
import io
import json
import re
import socket
import struct
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest
from PIL import Image
from vllmx.terminal.conversation import Conversation
from vllmx.terminal.remote import RemoteModel
from vllmx.terminal.rounds import LocalModel
from vllmx_core.config import EngineConfig
from vllmx_core.sampling import SamplingParams
from vllmx_engine.llm import LLM

from tests.waiting import PATIENCE_S

from ...null.images.pictures import data_url, picture, stored  # noqa: TID252 - no package to name
from ..image_files import write_text, write_tower  # noqa: TID252
from ..image_models import FAMILIES, MARKS, VARIANTS, save  # noqa: TID252
from .conftest import RunningServer, running_server

MAX_BODY_BYTES, MAX_PIXELS, MAX_IMAGES = 150_000, 10_000, 2
GOOD = stored(picture(24, 16, seed=1))
GOOD_JPEG = stored(picture(24, 16), "JPEG")
WORD = {"type": "text", "text": "w5"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-VL, and a folder of images beside it."""
    folder = save(FAMILIES["qwen3_vl"].make(), tmp_path_factory.mktemp("seeing"))
    (folder / "images").mkdir()
    (folder / "images" / "cat.png").write_bytes(GOOD)
    return folder


@pytest.fixture(scope="module")
def seeing(folder: Path) -> Iterator[RunningServer]:
    with running_server(
        "--model", str(folder), "--served-model-name", "seeing", "--backend", "numpy",
        "--dtype", "float32", "--max-model-len", "200", "--num-kv-blocks", "64",
        "--max-body-bytes", str(MAX_BODY_BYTES), "--max-image-pixels", str(MAX_PIXELS),
        "--limit-images", str(MAX_IMAGES), "--allowed-local-media-path", str(folder / "images"),
    ) as running:  # fmt: skip
        yield running


def part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def chat(*parts: Any, role: str = "user", **more: Any) -> dict[str, Any]:
    messages = [{"role": role, "content": list(parts)}]
    return {"model": "seeing", "messages": messages, "temperature": 0, "max_tokens": 4, **more}


def png(width: int, height: int) -> bytes:
    """A file that says such a size and holds nothing of it."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def grey16() -> bytes:
    levels = np.random.default_rng(0).integers(0, 1 << 16, (16, 24), np.uint16)
    return stored(Image.fromarray(levels))


def animated() -> bytes:
    first, second = picture(24, 16, seed=3), picture(24, 16, seed=4)
    return stored(first, "GIF", save_all=True, append_images=[second])


SEEN = {
    "JPEG in CMYK": data_url(stored(picture(24, 16, "CMYK"), "JPEG"), "image/jpeg"),
    "grey of 16 bits": data_url(grey16()),
    "an animation": data_url(animated(), "image/gif"),
    "WebP": data_url(stored(picture(24, 16), "WEBP"), "image/webp"),
    "another media type than the file's": data_url(GOOD, "image/jpeg"),
}
WRONG = {
    "truncated PNG": (data_url(GOOD[:-60]), "damaged or truncated"),
    "truncated JPEG": (data_url(GOOD_JPEG[:-90]), "damaged or truncated"),
    "header alone": (data_url(png(20, 20)), "damaged or truncated"),
    "a bomb": (data_url(png(50_000, 50_000)), "more than 10000 pixels"),
    "too many pixels": (data_url(stored(Image.new("RGB", (101, 100)))), "more than 10000 pixels"),
    "0 x 0": (data_url(png(0, 0)), "damaged or truncated PNG"),
    "GIF without pixels": (data_url(b"GIF89a" + bytes(7) + b";"), "truncated GIF"),
    "a JPEG of many segments": (data_url(GOOD_JPEG[:2] + b"\xff\xfe\0\2" * 5000), "4096 segments"),
    "no image": (data_url(b"hello"), "no image that can be read"),
    "TIFF": (data_url(stored(picture(8, 8), "TIFF"), "image/tiff"), "PNG, JPEG, WebP or GIF"),
    "nothing": (data_url(b""), "no bytes"),
    "wrong base64": ("data:image/png;base64,@@@=", "base64"),
    "no base64": ("data:image/png,abc", "base64"),
    "no image's media type": (data_url(b"hello", "text/plain"), "image"),
    "http": ("http://127.0.0.1:9/cat.png", "allowed"),
    "a file outside the folder": ("file:///etc/hostname", "allowed"),
    "a way out of the folder": ("file://{images}/../config.json", "allowed"),
    "a file that is not there": ("file://{images}/dog.png", "file"),
    "another scheme": ("ftp://host/cat.png", "data URL"),
    "no URL": ("", "URL"),
}


def openai_error(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert error["type"] == "invalid_request_error", error
    assert error["message"]
    assert {"message", "type", "param", "code"} <= error.keys()
    return error


@pytest.mark.parametrize("kind", SEEN)
def test_images_that_are_seen(seeing: RunningServer, kind: str) -> None:
    answer = seeing.post("/v1/chat/completions", chat(part(SEEN[kind]), WORD))
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] > 4


def test_the_first_picture_of_an_animation_is_seen(seeing: RunningServer) -> None:
    """An animation and its first picture come to the same blocks, so that the second finds those of
    the first."""
    still = Image.open(io.BytesIO(animated())).convert("RGB")
    asked = [WORD] * 20
    seeing.post("/v1/chat/completions", chat(*asked, part(SEEN["an animation"])))
    answer = seeing.post("/v1/chat/completions", chat(*asked, part(data_url(stored(still)))))
    usage = answer.json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] // 16 * 16


@pytest.mark.parametrize("kind", WRONG)
def test_images_that_are_refused(seeing: RunningServer, folder: Path, kind: str) -> None:
    """All three APIs refuse them, each in its own shape."""
    url, message = WRONG[kind]
    url = url.format(images=folder / "images")
    error = openai_error(seeing.post("/v1/chat/completions", chat(WORD, part(url))))
    assert message in error["message"], error
    assert error["param"] is None or error["param"].startswith("messages")
    image = {"type": "input_image", "image_url": url}
    said = [{"role": "user", "content": [{"type": "input_text", "text": "w5"}, image]}]
    body = {"model": "seeing", "input": said, "max_output_tokens": 16}
    assert message in openai_error(seeing.post("/v1/responses", body))["message"]
    source = {"type": "url", "url": url}
    if (found := re.fullmatch("data:([^;]*);base64,(.*)", url)) is not None:
        source = {"type": "base64", "media_type": found[1], "data": found[2]}
    said = [{"role": "user", "content": [WORD, {"type": "image", "source": source}]}]
    body = {"model": "seeing", "messages": said, "max_tokens": 4}
    answer = seeing.post("/v1/messages", body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert message in answer.json()["error"]["message"], answer.text


def test_too_many_images(seeing: RunningServer) -> None:
    parts = [part(data_url(GOOD))] * (MAX_IMAGES + 1)
    error = openai_error(seeing.post("/v1/chat/completions", chat(*parts)))
    assert "3 images, at most 2" in error["message"]
    image = {"type": "input_image", "image_url": data_url(GOOD)}
    body = {"model": "seeing", "input": [{"role": "user", "content": [image] * 3}]}
    for route in ("/v1/responses", "/v1/responses/input_tokens", "/v1/responses/compact"):
        error = openai_error(seeing.post(route, body))
        assert "3 images" in error["message"]
        assert error["param"].startswith("input"), route
    spread = chat(*parts[:2])
    spread["messages"] += chat(parts[0])["messages"]
    assert "3 images" in openai_error(seeing.post("/v1/chat/completions", spread))["message"]
    assert seeing.post("/v1/chat/completions", chat(*parts[:2], WORD)).status_code == 200


def test_a_body_at_the_limit(seeing: RunningServer) -> None:
    body = json.dumps(chat(part(data_url(GOOD)), WORD)).encode()
    for size, status in ((MAX_BODY_BYTES, 200), (MAX_BODY_BYTES + 1, 413)):
        answer = httpx.post(
            f"{seeing.url}/v1/chat/completions",
            content=body.ljust(size),
            headers={"content-type": "application/json"},
            timeout=PATIENCE_S,
        )
        assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"]


def test_images_that_tools_return_are_seen(seeing: RunningServer) -> None:
    """As a coding client sends them: the prompt is longer by their tokens."""
    image = {"type": "input_image", "image_url": data_url(GOOD)}
    call = {"type": "function_call", "call_id": "c", "name": "w5", "arguments": "{}"}
    lengths = []
    for output in ("w5", [{"type": "input_text", "text": "w5"}, image]):
        result = {"type": "function_call_output", "call_id": "c", "output": output}
        said = [{"role": "user", "content": "w5"}, call, result]
        body = {"model": "seeing", "input": said, "max_output_tokens": 16}
        answer = seeing.post("/v1/responses", body)
        assert answer.status_code == 200, answer.text
        lengths.append(answer.json()["usage"]["input_tokens"])
    source = {"type": "base64", "media_type": "image/png"}
    source["data"] = base64.b64encode(GOOD).decode()
    use = {"type": "tool_use", "id": "c", "name": "w5", "input": {}}
    for content in ("w5", [WORD, {"type": "image", "source": source}]):
        result = {"type": "tool_result", "tool_use_id": "c", "content": content}
        turns = [("user", "w5"), ("assistant", [use]), ("user", [result])]
        messages = [{"role": role, "content": content} for role, content in turns]
        answer = seeing.post("/v1/messages", {"messages": messages, "max_tokens": 4})
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        lengths.append(usage["input_tokens"] + usage["cache_read_input_tokens"])
    assert lengths[0] < lengths[1]
    assert lengths[2] < lengths[3]


def test_the_three_apis_see_the_same(seeing: RunningServer, folder: Path) -> None:
    """The image comes from a data URL and from the folder that is allowed."""
    base = base64.b64encode(GOOD).decode()
    texts = []
    for url in (data_url(GOOD), f"file://{folder}/images/cat.png"):
        answer = seeing.post("/v1/chat/completions", chat(part(url), WORD)).json()
        texts.append(answer["choices"][0]["message"]["content"])
    said = [
        {"type": "input_image", "image_url": data_url(GOOD)},
        {"type": "input_text", "text": "w5"},
    ]
    body: dict[str, Any] = {"input": [{"role": "user", "content": said}], "max_output_tokens": 4}
    body |= {"model": "seeing", "temperature": 0}
    answer = seeing.post("/v1/responses", body).json()
    texts.append(answer["output"][0]["content"][0]["text"])
    source = {"type": "base64", "media_type": "image/png", "data": base}
    body = chat({"type": "image", "source": source}, WORD)
    texts.append(seeing.post("/v1/messages", body).json()["content"][0]["text"])
    assert texts == texts[:1] * 4


@pytest.mark.parametrize("role", ["system", "tool", "assistant"])
def test_images_of_other_roles_are_seen(seeing: RunningServer, role: str) -> None:
    """The template writes images of other roles, too."""
    message: dict[str, Any] = {"role": role, "content": [WORD, part(data_url(GOOD))]}
    if role == "tool":
        message["tool_call_id"] = "call_1"
    body = chat(WORD)
    body["messages"] = [message, *body["messages"]]
    found = seeing.post("/v1/chat/completions", body).json()
    wanted = seeing.post("/v1/chat/completions", chat(*message["content"], WORD)).json()
    assert found["usage"]["prompt_tokens"] == wanted["usage"]["prompt_tokens"]
    said = [each["choices"][0]["message"]["content"] for each in (found, wanted)]
    assert said[0] == said[1]


def test_anthropic_images_in_the_system_prompt_are_refused(seeing: RunningServer) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(GOOD).decode()}
    body = chat(WORD) | {"system": [{"type": "image", "source": source}]}
    answer = seeing.post("/v1/messages", body)
    assert answer.status_code == 400, answer.text
    assert "has the type 'image', which is not served here" in answer.json()["error"]["message"]


def test_a_chat_in_the_terminal_shows_an_image_here_and_over_the_server(
    seeing: RunningServer, folder: Path
) -> None:
    """`/image FILE` of `vllmx chat`: what the server answers to the same request."""
    asked = chat(part(data_url(GOOD)), WORD)
    wanted = seeing.post("/v1/chat/completions", asked).json()["choices"][0]["message"]["content"]
    here = LocalModel(
        EngineConfig(
            model=str(folder), backend="numpy", dtype="float32", max_model_len=200, num_kv_blocks=64
        ),
        {},
    )
    for model in (here, RemoteModel(seeing.url, None, None, {})):
        talk = Conversation(model, {"temperature": 0, "max_tokens": 4}, None)
        talk.command(f"/image {folder / 'images' / 'cat.png'}")
        assert "".join(talk.answer("w5")) == wanted
        assert talk.messages[0]["content"][0]["type"] == "image_url"
        model.close()


def test_a_model_of_text_alone_says_so(server: RunningServer) -> None:
    body = chat(WORD, part(data_url(GOOD))) | {"model": "demo"}
    error = openai_error(server.post("/v1/chat/completions", body))
    assert "reads text alone" in error["message"]
    assert "ask a model that takes images" in error["message"]
    source = {"type": "url", "url": data_url(GOOD)}
    body = chat(WORD, {"type": "image", "source": source}) | {"model": "demo"}
    answer = server.post("/v1/messages", body)
    assert answer.status_code == 400
    assert "reads text alone" in answer.json()["error"]["message"]


def test_others_are_served_meanwhile(seeing: RunningServer, folder: Path) -> None:
    """Wrong images, clients that go away, and good requests at once."""
    body = chat(part(data_url(GOOD)), WORD)
    wanted = seeing.post("/v1/chat/completions", body).json()["choices"]
    place = urlsplit(seeing.url)

    def wrong(kind: str) -> int:
        url = WRONG[kind][0].format(images=folder / "images")
        return seeing.post("/v1/chat/completions", chat(part(url))).status_code

    def left(number: int) -> int:
        """Sends a request and hangs up."""
        image = data_url(stored(picture(96, 96, seed=number)))
        data = json.dumps(chat(part(image), max_tokens=40)).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n"
        with socket.create_connection((place.hostname, place.port), 60) as connection:
            connection.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + data)
        return 400

    def good(_: int) -> int:
        answer = seeing.post("/v1/chat/completions", body)
        return 200 if answer.json()["choices"] == wanted else 0

    with ThreadPoolExecutor(4) as pool:
        tasks = [pool.submit(wrong, kind) for kind in WRONG]
        tasks += [pool.submit(left, number) for number in range(4)]
        goods = [pool.submit(good, number) for number in range(6)]
        assert {task.result() for task in tasks} == {400}
        assert {task.result() for task in goods} == {200}
    seeing.becomes_idle()


def test_a_tower_in_a_file_of_its_own(tmp_path: Path) -> None:
    """Gemma 4 in two GGUF files, its tower clipped; the answer is that of its own checkpoint."""
    model = VARIANTS["gemma4, clipped"].make()
    folder = save(model, tmp_path / "folder")
    own = dict(zip([*MARKS][:3], ("<|image|>", "<|image>", "<image|>"), strict=True))
    tokenizer = folder / "tokenizer.json"
    text = tokenizer.read_text()
    for mark, gemma in own.items():
        text = text.replace(mark, gemma)
    tokenizer.write_text(text)
    template = (
        "{% for part in messages[0].content %}{% if part.type == 'image' %}<|image|>{% else %}"
    )
    template += "{{ part.text }}{% endif %}{% endfor %} w11"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    preprocessor = {
        "image_processor_type": "Gemma4ImageProcessor",
        "patch_size": 4,
        "pooling_kernel_size": 2,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    text_file = write_text(tmp_path / "model.gguf", "gemma4", model)
    tower = write_tower(tmp_path / "tower.gguf", "gemma4", model)
    options = {
        "backend": "cpu",
        "dtype": "float32",
        "kv_cache_dtype": "f32",
        "num_kv_blocks": 64,
        "max_model_len": 400,
    }
    body = chat(part(data_url(stored(picture(24, 24, seed=1)))), WORD)
    with LLM(str(folder), **options) as llm:
        params = SamplingParams(temperature=0, max_tokens=4)
        wanted = llm.chat(body["messages"], params, use_tqdm=False)[0].outputs[0].text
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in options.items()]
    files = ("--model", str(text_file), "--mmproj", str(tower), "--tokenizer", str(folder))
    with running_server(*files, *flags, "--served-model-name", "seeing") as running:
        answer = running.post("/v1/chat/completions", body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["content"] == wanted


# --- docs/images.md -------------------------------------------------------------------------------
PAGE = (Path(__file__).parents[3] / "docs" / "images.md").read_text(encoding="utf-8")
EXAMPLES = [
    one for one in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "video" not in one
]


@pytest.mark.parametrize("example", EXAMPLES, ids=["over HTTP", "in Python"])
def test_examples_of_the_page(
    seeing: RunningServer,
    folder: Path,
    example: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The examples run as they stand, but for the model, its address and where the image lies."""
    pytest.importorskip("openai", reason="the client is not installed")
    monkeypatch.chdir(folder / "images")
    monkeypatch.setenv("VLLMX_BACKEND", "numpy")
    monkeypatch.setenv("VLLMX_MAX_MODEL_LEN", "200")
    assert "Qwen/Qwen3.5-4B" in example
    model = "seeing" if "base_url" in example else str(folder)
    example = example.replace("Qwen/Qwen3.5-4B", model)
    example = example.replace("http://localhost:8000", seeing.url)
    example = example.replace("/home/me/", f"{folder}/images/")
    exec(compile(example, "an example of docs", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.strip()
