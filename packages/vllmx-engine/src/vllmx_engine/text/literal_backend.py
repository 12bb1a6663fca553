"""A tokenizer that reads `prompt_text.MARK` as a break within which no special token is found.

It shares the model of the usual one, and has the same ids. Added tokens are found in the text with
its marks; then the normaliser drops the marks, so that a broken spelling is tokenised as text,
together with its neighbours.
"""

from __future__ import annotations

import json

import tokenizers
from tokenizers import AddedToken, models, normalizers

from vllmx_engine.text.prompt_text import MARK

_UNLIKELY = -1e5
"""The score of a piece that text must not become, far below any other."""


def literal_backend(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The tokenizer for marked text, made in milliseconds."""
    added = backend.get_added_tokens_decoder()
    found = tokenizers.Tokenizer(_model(backend, {each.content for each in added.values()}))
    _set_normalizer(found, backend)
    if backend.pre_tokenizer is not None:
        found.pre_tokenizer = backend.pre_tokenizer
    if backend.post_processor is not None:
        found.post_processor = backend.post_processor
    found.add_tokens([_as_written(added[token_id]) for token_id in sorted(added)])
    has_same_ids = _texts(found.get_added_tokens_decoder()) == _texts(added)
    return found if has_same_ids else _copied(backend)


def _texts(added: dict[int, AddedToken]) -> dict[int, str]:
    return {token_id: token.content for token_id, token in added.items()}


def _set_normalizer(found: tokenizers.Tokenizer, backend: tokenizers.Tokenizer) -> None:
    steps = [normalizers.Replace(MARK, "")]
    if backend.normalizer is not None:
        steps.append(backend.normalizer)
    found.normalizer = normalizers.Sequence(steps)


def _as_written(token: AddedToken) -> AddedToken:
    """The token, found before the marks are dropped."""
    return AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized and not is_markup(token),
        special=token.special,
    )


def is_markup(token: AddedToken) -> bool:
    """Whether a token is markup rather than text: a special one, or one in brackets."""
    text = token.content
    return token.special or (len(text) > 2 and text[0] + text[-1] in ("<>", "[]", "{}"))


def _model(backend: tokenizers.Tokenizer, added: set[str]) -> models.Model:
    """The model, or for Unigram, which finds any piece in text, a copy that avoids added tokens."""
    model: models.Model = backend.model
    if not isinstance(model, models.Unigram):
        return model
    state = json.loads(model.__getstate__())
    pieces = [(text, _UNLIKELY if text in added else score) for text, score in state["vocab"]]
    return models.Unigram(pieces, state["unk_id"], state.get("byte_fallback", False))


def _copied(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """A whole copy, for added tokens whose ids have gaps, which adding them again would fill."""
    state = json.loads(backend.to_str())
    for token in state["added_tokens"]:
        flags = {key: value for key, value in token.items() if key not in ("id", "content")}
        token["normalized"] = _as_written(AddedToken(token["content"], **flags)).normalized
    found = tokenizers.Tokenizer.from_str(json.dumps(state))
    _set_normalizer(found, backend)
    return found
