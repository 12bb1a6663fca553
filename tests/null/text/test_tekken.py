"""tekken.json against a plain BPE by ranks over the same vocabulary."""

from __future__ import annotations

import base64
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from vllmx_core.errors import ConfigError
from vllmx_engine.text.tokenizer import Tokenizer

regex = pytest.importorskip("regex")
PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+"
WORDS = [
    "th",
    "he",
    "in",
    " t",
    "the",
    " the",
    "er",
    "re",
    "ere",
    "there",
    " there",
    "\u00e9",
    "an",
]
TOKENS = [bytes([byte]) for byte in range(256)] + [word.encode() for word in WORDS]
SPECIAL = 10
TEXTS = ["the there other", " there\u00e9, 12 cats\n\nin\tan\u00e9", "\U0001f600 ethere 3.5", ""]


def written(folder: Path, **changes: Any) -> Path:
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for rank, token in enumerate(TOKENS)
    ]
    config = {
        "pattern": PATTERN,
        "num_vocab_tokens": len(TOKENS),
        "default_vocab_size": len(TOKENS) + SPECIAL - 1,  # the file has more than are used
        "default_num_special_tokens": SPECIAL,
        "version": "v3",
    }
    special = [{"rank": 3, "token_str": "[INST]", "is_control": True}]
    data = {"config": config, "vocab": vocab, "special_tokens": special} | changes
    (folder / "tekken.json").write_text(json.dumps(data))
    return folder


def by_ranks(text: str) -> list[int]:
    """Joins the neighbours whose token has the lowest rank until none have one."""
    ranks = {token: rank for rank, token in enumerate(TOKENS[:-1])}
    found = []
    for piece in regex.findall(PATTERN, text):
        parts = [bytes([byte]) for byte in piece.encode()]
        while True:
            pairs = [a + b for a, b in itertools.pairwise(parts)]
            known = [(ranks[pair], at) for at, pair in enumerate(pairs) if pair in ranks]
            if not known:
                break
            _, at = min(known)
            parts[at : at + 2] = [pairs[at]]
        found += [SPECIAL + ranks[part] for part in parts]
    return found


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_those_of_merging_by_rank(text: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(written(tmp_path))
    assert tokenizer.encode(text, add_special_tokens=False) == by_ranks(text)
    assert tokenizer.encode(text) == [1, *by_ranks(text)]
    assert tokenizer.backend.decode(by_ranks(text)) == text


def test_control_tokens(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(written(tmp_path))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.encode("[INST]the", add_special_tokens=False) == [3, *by_ranks("the")]
    assert tokenizer.vocab_size == len(TOKENS) + SPECIAL - 1


@pytest.mark.parametrize(
    "changes", [{"config": None}, {"vocab": [{"token_bytes": "?"}] * 300}, {"special_tokens": [3]}]
)
def test_a_damaged_file_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="download the file again"):
        Tokenizer.from_folder(written(tmp_path, **changes))
