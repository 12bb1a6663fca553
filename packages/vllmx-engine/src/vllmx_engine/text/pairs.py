"""Texts and pairs of texts as ids that fit: what is too long is cut where a token ends."""

from __future__ import annotations

from vllmx_engine.text.tokenizer import Tokenizer

_MAX_CUTS = 4


def encode_fitting(
    tokenizer: Tokenizer,
    parts: tuple[str, str, str],
    first: str | None,
    add_special_tokens: bool,
    most: int | None,
) -> tuple[list[int], list[int]]:
    """Ids, and for each which text of a pair it belongs to.

    Args:
        parts: what stands before a text, the text, and what stands behind it.
        first: the other text of a pair, before those.
        most: of a longer text the first part is taken, so that all else stays; None: all of it.

    Raises InvalidRequestError.
    """
    before, text, behind = parts
    found = tokenizer.encode_pair(first, before + text + behind, add_special_tokens)
    for _ in range(_MAX_CUTS):
        if most is None or len(found[0]) <= most or not text:
            break
        ends = tokenizer.token_ends(text)
        kept = len(ends) - (len(found[0]) - most)
        text = text[: ends[kept - 1]] if kept > 0 else ""
        found = tokenizer.encode_pair(first, before + text + behind, add_special_tokens)
    ids, types = found
    return (ids, types) if most is None else (ids[:most], types[:most])
