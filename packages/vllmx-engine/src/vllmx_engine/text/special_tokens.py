"""Special tokens: those that a model's files declare, and their spellings as plain text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, models, normalizers
from vllmx_core.errors import ConfigError, shown

from vllmx_engine.text.model_files import library_errors, read_json_object
from vllmx_engine.text.prompt_text import MARK

MAX_ID = (1 << 31) - 1
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")


def named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` and so on as strings; a config writes them as a string or as an object."""
    named: dict[str, str] = {}
    for name in NAMED_TOKENS:
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if value is None:
            continue
        if not isinstance(value, str):
            raise ConfigError(
                f"{name} in tokenizer_config.json must be a string, not {shown(value)}"
            )
        named[name] = value
    return named


def add_missing_tokens(
    backend: tokenizers.Tokenizer,
    declared: Sequence[tuple[int, tokenizers.AddedToken]],
    named: Mapping[str, str],
) -> None:
    """Add what the config declares and tokenizer.json lacks, where the ids agree.

    A token whose declared id is not the next free one cannot be added faithfully: it is left out,
    since a wrong id would be worse than none.
    """
    for token_id, token in declared:
        known = backend.token_to_id(token.content)
        free = backend.get_vocab_size(with_added_tokens=True)
        if known == token_id or (known is None and token_id == free):
            backend.add_tokens([token])
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    for content in named.values():
        if content not in added and backend.token_to_id(content) is not None:
            backend.add_special_tokens([content])


def declared_tokens(config: Mapping[str, Any]) -> list[tuple[int, tokenizers.AddedToken]]:
    """`added_tokens_decoder` by ascending ids. Raises ConfigError where it is malformed."""
    declared = config.get("added_tokens_decoder") or {}
    if not isinstance(declared, dict):
        raise ConfigError("added_tokens_decoder in tokenizer_config.json must be an object")
    tokens = []
    for key, entry in declared.items():
        content = entry.get("content") if isinstance(entry, dict) else None
        if not _is_id(str(key)) or not isinstance(content, str):
            raise ConfigError(
                f"added_tokens_decoder in tokenizer_config.json has the malformed entry"
                f" {shown(key)}: {shown(entry)}"
            )
        flags = {
            name: bool(entry.get(name, False))
            for name in ("special", "lstrip", "rstrip", "single_word", "normalized")
        }
        with library_errors(unusable):
            tokens.append((int(key), tokenizers.AddedToken(content, **flags)))
    return sorted(tokens, key=lambda item: item[0])


def _is_id(text: str) -> bool:
    """True if it is a token id in decimal digits."""
    return len(text) <= len(str(MAX_ID)) and text.isascii() and text.isdecimal()


def added_tokens_file(path: Path) -> dict[str, Any]:
    """added_tokens.json (token -> id) in the shape of `added_tokens_decoder`."""
    entries = read_json_object(path)
    return {str(token_id): {"content": token} for token, token_id in entries.items()}


def unusable(reason: str) -> ConfigError:
    """The error for what the tokenizer itself refuses."""
    return ConfigError(
        f"the model's tokenizer contradicts itself ({reason}); download its files again"
    )


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
    """True if a token is markup rather than text: a special one, or one in brackets."""
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
