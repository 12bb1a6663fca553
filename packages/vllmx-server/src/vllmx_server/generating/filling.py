"""Prompts that ask for the middle of a text."""

from __future__ import annotations

from vllmx_engine.text.fim import fim_marks

from vllmx_server.generating.fields import field_error
from vllmx_server.generating.served import Served


def filled(
    served: Served, prompts: list[str | list[int]], suffix: str, field: str = "suffix"
) -> list[str | list[int]]:
    """Prompts for the text between each of these and the suffix, which the body has as `field`.
    Raises InvalidRequestError."""
    marks = fim_marks(served.llm.tokenizer)
    if marks is None:
        raise field_error(
            field,
            f"is not served: model {served.llm.config.name!r} has no tokens for filling into"
            " the middle of a text; load one that has, such as Qwen/Qwen2.5-Coder-0.5B",
        )
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise field_error(field, "needs prompts that are texts, not token ids")
    return [marks.prompt(str(prompt), suffix) for prompt in prompts]
