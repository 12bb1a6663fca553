"""Texts and pairs of texts as ids that fit: what is too long is cut where a token ends."""

from __future__ import annotations

from vllmx_engine.text.tokenizer import Tokenizer, TooManyTokensError

_MAX_CUTS = 4


def encode_fitting(
    tokenizer: Tokenizer,
    parts: tuple[str, str, str],
    first: str | None,
    add_special_tokens: bool,
    limit: int,
    *,
    is_cut: bool,
) -> tuple[list[int], list[int]]:
    """Ids, and for each which text of a pair it belongs to.

    Args:
        parts: what stands before a text, the text, and what stands behind it.
        first: the other text of a pair, before those.
        limit: the most tokens.
        is_cut: of a longer text the first part is taken, so that all else stays.

    Raises TooManyTokensError where nothing is cut, InvalidRequestError.
    """
    before, text, behind = parts
    if is_cut:  # of each no more than could stay is looked at
        before, text = (tokenizer.part_with(each, limit) for each in (before, text))
        first = None if first is None else tokenizer.part_with(first, limit)
    for _ in range(_MAX_CUTS):
        try:
            return tokenizer.encode_pair(
                first, before + text + behind, add_special_tokens, limit=limit, exact=is_cut
            )
        except TooManyTokensError as error:
            if not is_cut:
                raise
            if not text:
                break
            surplus = error.num_tokens - limit
        text = tokenizer.without_last(text, surplus)
    ids, types = tokenizer.encode_pair(first, before + text + behind, add_special_tokens)
    return ids[:limit], types[:limit]
