"""Images in the text of a prompt and among its token ids."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from vllmx_core.errors import InvalidRequestError

from vllmx_engine.images.processor import ImageProcessor
from vllmx_engine.text.prompt_text import PromptText


def write_images(prompt: str, processor: ImageProcessor, sizes: Sequence[int]) -> str:
    """The prompt with a place for each token of each image. `sizes`: tokens of the images.

    Raises:
        InvalidRequestError: the template wrote more or fewer marks than there are images: it knows
            none, or a text of the conversation holds the mark.
    """
    marked = prompt.marked if isinstance(prompt, PromptText) else prompt
    texts = marked.split(processor.mark)
    if len(texts) != len(sizes) + 1:
        raise InvalidRequestError(
            f"the prompt has {len(texts) - 1} marks {processor.mark!r} for {len(sizes)} images:"
            " leave the mark out of texts, and use a chat template that knows images",
            param="messages",
        )
    pieces = [texts[0]]
    for num_tokens, text in zip(sizes, texts[1:], strict=True):
        pieces += (processor.written(num_tokens), text)
    text = "".join(pieces)
    return PromptText.of_marked(text) if isinstance(prompt, PromptText) else text


def place_images(ids: Sequence[int], token_id: int, sizes: Sequence[int]) -> list[int]:
    """The place of each image's first token among the ids of a prompt of `write_images`.

    Raises InvalidRequestError where a text of the conversation holds the token of images.
    """
    at = np.flatnonzero(np.asarray(ids, np.int64) == token_id)
    starts: list[int] = []
    taken = 0
    for num_tokens in sizes:
        own = at[taken : taken + num_tokens]
        if own.size != num_tokens or own[-1] - own[0] != own.size - 1:
            raise _token_in_text()
        starts.append(int(own[0]))
        taken += own.size
    if taken != at.size:
        raise _token_in_text()
    return starts


def _token_in_text() -> InvalidRequestError:
    return InvalidRequestError(
        "a text of the conversation holds the token that stands for images: leave it out",
        param="messages",
    )
