"""Images in the text of prompts and among their ids."""

from __future__ import annotations

import pytest
from vllmx_core.errors import InvalidRequestError
from vllmx_engine.client.chat_images import place_images, write_images
from vllmx_engine.images.processor import Fit
from vllmx_engine.images.whole import GemmaImages, QwenImages


def test_marks_become_places() -> None:
    qwen, gemma = QwenImages({}), GemmaImages({})
    pad = qwen.mark
    texts = [qwen.written(Fit(1, 1, (1, 1, size), size, 0)) for size in (2, 3)]
    assert write_images(f"a{pad}b{pad}", qwen, texts) == f"a{pad * 2}b{pad * 3}"
    soft = gemma.token
    text = gemma.written(Fit(1, 1, (1, 1, 2), 2, 0))
    assert write_images("a<start_of_image>b", gemma, [text]) == (
        f"a\n\n<start_of_image>{soft * 2}<end_of_image>\n\nb"
    )
    assert write_images("plain", qwen, []) == "plain"


@pytest.mark.parametrize("prompt", ["none", "<|image_pad|><|image_pad|>"])
def test_marks_in_texts_are_refused(prompt: str) -> None:
    with pytest.raises(InvalidRequestError, match="for 1 images"):
        write_images(prompt, QwenImages({}), ["x"])


def test_images_are_found_among_ids() -> None:
    images = [2, 1, 2]
    assert place_images([5, 9, 9, 9, 1, 9, 9], 9, images) == [1, 3, 5]
    assert place_images([1, 2], 9, []) == []


@pytest.mark.parametrize("ids", [[9, 9, 9], [9], [9, 1, 9], []])
def test_tokens_of_images_in_texts_are_refused(ids: list[int]) -> None:
    with pytest.raises(InvalidRequestError, match="stands for images"):
        place_images(ids, 9, [2])
