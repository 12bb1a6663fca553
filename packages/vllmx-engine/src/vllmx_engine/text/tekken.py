"""tekken.json, Mistral's own tokenizer file: byte-level BPE whose tokens are listed by rank.

Control tokens come first, then the tokens of the vocabulary. The file has no merges: a token may
arise from each pair of tokens that make its bytes, and lower ranks go first.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, pre_tokenizers, processors
from vllmx_core.errors import ConfigError, shown

from vllmx_engine.text.gguf_backends import PreTokenizerKind, byte_level_bpe
from vllmx_engine.text.model_files import MAX_TOKENIZER_BYTES, library_errors, read_json_object

TEKKEN_NAME = "tekken.json"
MOST_TOKENS = 1 << 20
LONGEST_TOKEN = 512
"""Bytes; longer ones are not cut into pairs."""
_MARKS = ("<unk>", "<s>", "</s>")
"""The first control tokens, where the file does not list them."""


def read_tekken(folder: Path) -> tuple[tokenizers.Tokenizer, dict[str, Any]] | None:
    """The tokenizer of a folder and what tokenizer_config.json would say of its special tokens;
    None without the file. Raises ConfigError for a damaged one."""
    path = folder / TEKKEN_NAME
    if not path.is_file():
        return None
    data = read_json_object(path, MAX_TOKENIZER_BYTES)
    config, listed = data.get("config"), data.get("vocab")
    if not isinstance(config, Mapping) or not isinstance(listed, list):
        raise _damaged(path, "has no config or no vocab")
    num_special = _count(path, config, "default_num_special_tokens")
    count = _count(path, config, "default_vocab_size") - num_special
    if not 256 <= count <= len(listed):
        raise _damaged(path, f"has {len(listed)} tokens where {count} are wanted")
    pattern = config.get("pattern")
    if not isinstance(pattern, str):
        raise _damaged(path, "has no pattern")
    special = _special(path, data, num_special)
    names = dict(zip(range(256), _byte_names(), strict=True))
    ranks = {_bytes(path, one): rank for rank, one in enumerate(listed[:count])}
    texts = {token: "".join(names[byte] for byte in token) for token in ranks}
    ids = {texts[token]: num_special + rank for token, rank in ranks.items()}
    merges = [(texts[left], texts[right]) for left, right in _merges(ranks)]
    kind = PreTokenizerKind((pattern,), ignore_merges=True)
    backend = byte_level_bpe({**{name: i for i, name in enumerate(special)}, **ids}, merges, kind)
    with library_errors(lambda reason: _damaged(path, f"cannot be used ({reason})")):
        backend.add_special_tokens([AddedToken(name, normalized=False) for name in special])
        backend.post_processor = processors.TemplateProcessing(
            f"{special[1]} $A", f"{special[1]} $A {special[1]} $B", [(special[1], 1)]
        )
    found = dict(zip(("unk_token", "bos_token", "eos_token"), special, strict=False))
    return backend, found


def _special(path: Path, data: Mapping[str, Any], count: int) -> list[str]:
    """The names of the control tokens by id."""
    names = dict(enumerate(_MARKS))
    listed = data.get("special_tokens") or []
    if not isinstance(listed, list):
        raise _damaged(path, "has special_tokens that are not a list")
    for one in listed:
        if not isinstance(one, Mapping) or type(one.get("rank")) is not int:
            raise _damaged(path, f"has the special token {shown(one)}")
        names[one["rank"]] = str(one.get("token_str"))
    return [names.get(rank, f"<SPECIAL_{rank}>") for rank in range(count)]


def _merges(ranks: Mapping[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """Pairs of tokens that make each token, by rank."""
    for token in ranks:
        if 2 <= len(token) <= LONGEST_TOKEN:
            pairs = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
            known = [(a, b) for a, b in pairs if a in ranks and b in ranks]
            yield from sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))


def _byte_names() -> list[str]:
    """The character for each byte in byte-level vocabularies."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    names = {byte: chr(byte) for byte in plain}
    others = (byte for byte in range(256) if byte not in names)
    names |= {byte: chr(256 + index) for index, byte in enumerate(others)}
    assert set(names.values()) == set(pre_tokenizers.ByteLevel.alphabet())
    return [names[byte] for byte in range(256)]


def _bytes(path: Path, entry: Any) -> bytes:
    encoded = entry.get("token_bytes") if isinstance(entry, Mapping) else None
    try:
        return base64.b64decode(encoded, validate=True)  # type: ignore[arg-type]
    except (TypeError, binascii.Error) as error:
        raise _damaged(path, f"has the token {shown(entry)}") from error


def _count(path: Path, config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if type(value) is not int or not 3 <= value <= MOST_TOKENS:
        raise _damaged(path, f"has {key} = {shown(value)}, not a number from 3 to {MOST_TOKENS}")
    return value


def _damaged(path: Path, what: str) -> ConfigError:
    return ConfigError(f"{path} {what}: download the file again")
