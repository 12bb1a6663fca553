"""Filling into the middle of a text: the marks that a model was trained with, where it has some."""

from __future__ import annotations

from vllmx_core.records import Record

from vllmx_engine.text.tokenizer import Tokenizer


class FimMarks(Record):
    """The special tokens, as text, before the parts of a fill-in-the-middle prompt."""

    prefix: str
    suffix: str
    middle: str = ""
    """The marker before the part that the model writes; without it the prefix comes last."""

    def prompt(self, before: str, after: str) -> str:
        """Returns the prompt for the text between two texts."""
        if not self.middle:
            return f"{self.suffix}{after}{self.prefix}{before}"
        return f"{self.prefix}{before}{self.suffix}{after}{self.middle}"


_KNOWN = (
    FimMarks("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen Coder, CodeGemma
    FimMarks("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    FimMarks("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    FimMarks("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek Coder
    FimMarks("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # CodeGeeX, GLM-4
    FimMarks("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    FimMarks("<PRE>", "<SUF>", "<MID>"),
    FimMarks("[PREFIX]", "[SUFFIX]"),  # Codestral
)
_CONFIG = ("prefix_token", "suffix_token", "middle_token")


def fim_marks(tokenizer: Tokenizer) -> FimMarks | None:
    """The model's own: those that its tokenizer config names, else ones of a family whose special
    tokens it has. None where there are none."""
    named = [_spelling(tokenizer.config.get(name)) for name in _CONFIG]
    if all(token and tokenizer.token_to_id(token) is not None for token in named):
        return FimMarks(*map(str, named))
    for marks in _KNOWN:
        tokens = (marks.prefix, marks.suffix, marks.middle)
        if all(_is_special(tokenizer, token) for token in tokens if token):
            return marks
    return None


def _spelling(value: object) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _is_special(tokenizer: Tokenizer, token: str) -> bool:
    """True for a token that the tokenizer searches text for, so that it becomes its id anywhere."""
    found = tokenizer.token_to_id(token)
    return found is not None and tokenizer.encode(token, False) == [found]
