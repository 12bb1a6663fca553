"""Prompts in the log, for an operator who asks for them (`--enable-log-requests`)."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from vllmx_core.errors import VllmxError
from vllmx_engine.client.request import Request
from vllmx_engine.text.tokenizer import Tokenizer

logger = logging.getLogger("vllmx.prompts")


@dataclass(frozen=True, slots=True)
class PromptLog:
    """Writes a line for each request that the core is given: its ids, its size and the beginning of
    its prompt as the model reads it. Line breaks and whatever cannot be printed are escaped, so
    that no prompt can forge a line. Nothing else that a client sends is in it.

    Attributes:
        tokenizer: for prompts that came as ids, or were made of several texts.
        max_len: characters of a prompt.
    """

    tokenizer: Tokenizer
    max_len: int

    def __call__(self, request: Request) -> None:
        ids, text = request.prompt_ids, request.prompt
        if text is None:
            text = self._text(ids[: self.max_len + 1])
        rest = " ..." if len(text) > self.max_len else ""
        first = request.core[0]
        logger.info(
            "request %s: %d prompt tokens, max_tokens=%d, prompt %r%s",
            first.shown, len(ids), first.max_tokens, text[: self.max_len], rest,
        )  # fmt: skip

    def _text(self, ids: list[int]) -> str:
        try:
            return self.tokenizer.decode(ids, skip_special_tokens=False)
        except VllmxError:  # some tokenizers have no text for some ids of the vocabulary
            return f"token ids {ids}"
