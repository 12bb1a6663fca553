"""Images of conversations: taken out of messages, prepared off the loop, placed in the prompt."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from vllmx_core.config import EngineConfig
from vllmx_core.errors import CapacityError, ContextLengthError, InvalidRequestError
from vllmx_core.plugins.registry import Registry
from vllmx_core.sampling import SamplingParams
from vllmx_engine.async_llm import AsyncLLM
from vllmx_engine.client.chat_images import ChatImages, Reader, chat_images
from vllmx_engine.client.request import RequestBuilder
from vllmx_engine.images.limits import ImageLimits
from vllmx_engine.images.processor import Fit, ImageProcessor
from vllmx_engine.images.whole import GemmaImages
from vllmx_engine.llm import LLM
from vllmx_engine.text.tokenizer import Tokenizer
from vllmx_engine.wire.images import ImageRoom, Pixels, PreparedImage
from vllmx_engine.wire.messages import CoreInfo

from ..images.pictures import data_url, picture, stored  # noqa: TID252 - no package to name
from .conftest import MakeEngine

GREEDY = SamplingParams(temperature=0, max_tokens=2)
TEMPLATE = """{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}
{%- for part in m.content %}{% if part.type == 'image' %}@{% else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}{% endfor %}"""


class Squares(ImageProcessor):
    """A processor for a tokenizer of bytes: an image of N x N pixels is N tokens."""

    mark = "@"
    token = "#"

    def written(self, fit: Fit) -> str:
        return "[" + self.token * fit.num_tokens + "]"

    def fit(self, height: int, width: int, where: str) -> Fit:
        return Fit(height, width, (1, height, 1), width, height * width * 3)

    def prepare(self, image: Pixels, fit: Fit) -> list[PreparedImage]:
        patches, levels = image.reshape(fit.height, -1), np.zeros((3, 256), np.float32)
        return [PreparedImage.of(patches, levels, fit.grid, fit.num_tokens)]


def squares(limits: ImageLimits, room: ImageRoom) -> ChatImages:
    return ChatImages("fake", {"image": Reader(Squares(), limits, ord("#"))}, room)


def images(limits: ImageLimits = ImageLimits(), room: int = 500) -> ChatImages:  # noqa: B008
    return squares(limits, ImageRoom(room))


def part(size: int, seed: int = 0) -> dict[str, Any]:
    url = data_url(stored(picture(size, size, seed=seed)))
    return {"type": "image_url", "image_url": {"url": url}}


def asked(*content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(content)}]


TEXT = {"type": "text", "text": "and"}


@pytest.fixture
def template(tmp_path: Path) -> str:
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATE)
    return str(path)


async def test_images_are_placed(make_engine: MakeEngine, template: str) -> None:
    async with make_engine(chat_template=template) as llm:
        llm._images = images()
        messages = asked(part(3), TEXT, part(2, 1))
        stream = await llm.submit_chat(messages, GREEDY, kind="final")
        assert bytes(stream.prompt_token_ids) == b"[###]and[##]"
        first, second = stream.request.core[0].images
        assert (first.start, second.start) == (1, 9)
        assert first.digest != second.digest
        assert stream.request.prompt == "@and@"
        with pytest.raises(InvalidRequestError, match="sees no images"):  # the fake model's core
            await stream.last()
        assert bytes(await llm.encode_chat(messages)) == b"[###]and[##]"


def test_llm_takes_images(folder: str, registry: Registry, template: str) -> None:
    with LLM(folder, registry=registry, backend="fake", chat_template=template) as llm:
        with pytest.raises(InvalidRequestError, match="reads text alone"):
            llm.chat(asked(part(3)), GREEDY, use_tqdm=False)
        llm._engine.images = images()
        output = llm.chat(asked(part(3), TEXT), GREEDY, use_tqdm=False)[0]
        assert bytes(output.prompt_token_ids or []) == b"[###]and"


async def refused(llm: AsyncLLM, *content: Any) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        await llm.submit_chat(asked(*content), GREEDY)
    assert llm.num_in_flight == 0
    return caught.value.message


async def test_what_cannot_be_taken(make_engine: MakeEngine, template: str) -> None:
    async with make_engine(chat_template=template) as llm:
        assert "reads text alone" in await refused(llm, part(1))
        llm._images = images(ImageLimits(max_images=1, max_bytes=10_000, max_pixels=100), room=5)
        assert "2 images, at most 1" in await refused(llm, part(1), part(1))
        assert "10000 bytes" in await refused(llm, part(80))
        assert "100 pixels" in await refused(llm, part(11))
        assert "6 tokens" in await refused(llm, part(6))
        assert "1 marks '@' for 0 images" in await refused(llm, {"type": "text", "text": "a@b"})
        assert "stands for images" in await refused(llm, part(2), {"type": "text", "text": "#"})
        for wrong in ({}, {"image_url": 5}, {"image_url": {"url": None}}):
            assert "without a URL" in await refused(llm, {"type": "image_url", **wrong})
        sound = {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}
        assert "is an audio, but fake reads text and images here" in await refused(llm, sound)
        far = {"type": "image_url", "image_url": {"url": "http://example.org/a.png"}}
        assert "--allowed-media-domains" in await refused(llm, far)


async def test_images_that_do_not_fit_are_refused_before_any_is_decoded(
    make_engine: MakeEngine, template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decoded(*_: object) -> Pixels:
        raise AssertionError("an image was decoded")

    monkeypatch.setattr("vllmx_engine.client.chat_images.decode", decoded)
    (tmp_path / "a.png").write_bytes(stored(picture(4, 4)))
    file = {"type": "image_url", "image_url": f"file://{tmp_path}/a.png"}
    limits = ImageLimits(folder=tmp_path.resolve())
    async with make_engine(chat_template=template) as llm:
        for content in ((part(4), part(4)), (file, part(4)), (file, file)):
            llm._images = images(limits, room=7)
            with pytest.raises(ContextLengthError, match=r"take 8, .* room for 7"):
                await llm.submit_chat(asked(*content), GREEDY)
        llm._images = squares(limits, ImageRoom(99, 7, 5, 4))
        with pytest.raises(CapacityError, match=r"images of 8 tokens.*encoder-cache-memory"):
            await llm.submit_chat(asked(part(4), file), GREEDY)
        with pytest.raises(CapacityError, match=r"an image of 6 .*--max-num-batched-tokens to 9"):
            await llm.submit_chat(asked(part(6)), GREEDY)
        with pytest.raises(CapacityError, match=r"^a video of 6 tokens"):
            ImageRoom(99, 9, 5, 4, kind="video").check_features([6])
        llm._images = images(limits, room=5000)
        long = {"type": "text", "text": "x" * llm.info.max_model_len}
        with pytest.raises(ContextLengthError):  # the text beside it, not the image alone
            await llm.submit_chat(asked(part(4), long), GREEDY)
        assert bytes(await llm.encode_chat(asked(part(3)))) == b"[###]"  # counted by the header


async def test_files_are_read_off_the_loop(
    make_engine: MakeEngine, template: str, tmp_path: Path
) -> None:
    (tmp_path / "a.png").write_bytes(stored(picture(4, 4)))
    async with make_engine(chat_template=template) as llm:
        llm._images = images(ImageLimits(folder=tmp_path.resolve()))
        threads: set[str] = set()
        decode = Squares.prepare

        def prepare(self: Squares, image: Pixels, fit: Fit) -> list[PreparedImage]:
            threads.add(threading.current_thread().name)
            return decode(self, image, fit)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Squares, "prepare", prepare)
            there = {"type": "image_url", "image_url": f"file://{tmp_path}/a.png"}
            gone = {"type": "image_url", "image_url": f"file://{tmp_path}/b.png"}
            stream = await llm.submit_chat(asked(there, there), GREEDY)
            stream.abort()
            assert bytes(stream.prompt_token_ids) == b"[####][####]"
            assert "cannot be read" in await refused(llm, there, gone)
        assert threads == {"vllmx-text_0"}


def test_the_processor_of_a_model(tokenizer: Tokenizer, info: CoreInfo, folder: str) -> None:
    config = EngineConfig(model=folder)
    (Path(folder) / "preprocessor_config.json").write_text(
        '{"image_processor_type": "Gemma3ImageProcessor"}'
    )
    taking = msgspec.structs.replace(info, takes_images=True)
    with pytest.raises(InvalidRequestError, match="reads text alone"):
        chat_images(config, RequestBuilder(tokenizer, info)).take(asked(part(1)))
    with pytest.raises(Exception, match=f"no token '{GemmaImages.token}'"):
        chat_images(config, RequestBuilder(tokenizer, taking))
