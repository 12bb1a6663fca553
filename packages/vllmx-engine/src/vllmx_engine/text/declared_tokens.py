"""Special and added tokens, as the files beside tokenizer.json declare them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from vllmx_core.errors import ConfigError, shown

from vllmx_engine.text.library_errors import library_errors
from vllmx_engine.text.model_files import read_json_object

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
    """Whether it is a token id in decimal digits."""
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
