"""Tokens that end a sequence, by name: most GGUF files name one end token but need several.

Reading and writing such files use the same list, which follows llama.cpp.
"""

from __future__ import annotations

from collections.abc import Collection

END_TOKENS = frozenset(
    (
        "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
        "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]",
        "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
    )
)  # fmt: skip
_GLM_ROLES = frozenset(("<|user|>", "<|observation|>"))
"""GLM ends an answer with the role that speaks next; other models have only one of the two."""


def end_tokens(named: Collection[str], marked: Collection[str]) -> set[str]:
    """All tokens that end a sequence.

    Args:
        named: those that keys of the file name.
        marked: the control and user-defined tokens of the vocabulary.
    """
    found = {*named, *END_TOKENS.intersection(marked)}
    if set(marked) >= _GLM_ROLES:
        found |= _GLM_ROLES
    # in these two formats a message ends with <|end|>, and the turn goes on
    if {"<|return|>", "<|call|>"} <= found or {"<|calls|>", "<|flush|>"} <= found:
        found.discard("<|end|>")
    return found
