"""The bound on a token's text is never too small, and is there for the usual tokenizers."""

from __future__ import annotations

import traceback
import unicodedata
from collections import defaultdict

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, normalizers, pre_tokenizers
from vllmx_engine.text import tokenizer as tokenizer_module
from vllmx_engine.text.token_bound import _NFC_SHRINKS, token_bound
from vllmx_engine.text.tokenizer import Tokenizer, TooManyTokensError

from .conftest import byte_level_backend, sentencepiece_backend


def with_nfc() -> tokenizers.Tokenizer:
    backend = byte_level_backend()
    backend.normalizer = normalizers.NFC()
    return backend


BACKENDS = [byte_level_backend(), sentencepiece_backend(), with_nfc()]
PARTS = ["the", "   ", "<|im_end|>", "é中", "e\u0301", "\u1112\u1161\u11ab", "\u212a", "\n", "9"]


@pytest.mark.parametrize("backend", BACKENDS, ids=["byte level", "sentencepiece", "nfc"])
@given(parts=st.lists(st.one_of(st.sampled_from(PARTS), st.characters(exclude_categories=["Cs"]))))
@settings(max_examples=50, deadline=None)
def test_no_text_has_fewer_tokens(backend: tokenizers.Tokenizer, parts: list[str]) -> None:
    bound = token_bound(backend)
    assert bound is not None
    text = "".join(parts) * 3
    assert bound.fewest_tokens(text) <= len(backend.encode(text, add_special_tokens=False).ids)


def test_a_text_of_the_longest_token_alone_meets_the_bound() -> None:
    backend = byte_level_backend()
    bound = token_bound(backend)
    assert bound is not None
    text = "<|tool▁call|>" * 100
    assert bound.fewest_tokens(text) == len(backend.encode(text).ids) == 100


def test_nfc_shrinks_by_less_than_is_reckoned() -> None:
    spelt: defaultdict[str, int] = defaultdict(int)
    points = [chr(code) for code in range(0x30000) if not 0xD800 <= code < 0xE000]
    for point in points:  # the longest text that stands for one character of a decomposition
        decomposed = unicodedata.normalize("NFD", point)
        if len(decomposed) == 1:
            spelt[decomposed] = max(spelt[decomposed], len(point.encode()))
    for point in points:
        if unicodedata.is_normalized("NFC", point):
            longest = sum(spelt[part] for part in unicodedata.normalize("NFD", point))
            assert longest <= _NFC_SHRINKS * len(point.encode()), hex(ord(point))


def changed(**parts: object) -> tokenizers.Tokenizer:
    backend = byte_level_backend()
    for name, part in parts.items():
        setattr(backend, name, part)
    return backend


def strips() -> tokenizers.Tokenizer:
    backend = byte_level_backend()
    backend.add_tokens([tokenizers.AddedToken("<wide>", rstrip=True)])
    return backend


@pytest.mark.parametrize(
    "backend",
    [
        changed(normalizer=normalizers.NFKC()),
        changed(normalizer=normalizers.Strip()),
        changed(pre_tokenizer=pre_tokenizers.Whitespace()),
        changed(
            pre_tokenizer=pre_tokenizers.Sequence(
                [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()]
            )
        ),
        changed(pre_tokenizer=None),
        changed(model=models.BPE(vocab={"a": 0}, merges=[])),
        changed(model=models.WordLevel(vocab={"a": 0}, unk_token="a")),
        strips(),
    ],
)
def test_what_loses_text_has_no_bound(backend: tokenizers.Tokenizer) -> None:
    assert token_bound(backend) is None


def test_a_long_text_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer(byte_level_backend())
    with pytest.raises(TooManyTokensError) as caught:
        tokenizer.encode("the " * 50, limit=3)
    assert (caught.value.num_tokens > 3, caught.value.exact) == (True, True)
    monkeypatch.setattr(tokenizer_module, "_LONG_CHARS", 100)
    monkeypatch.setattr(Tokenizer, "_encodings", lambda *_: pytest.fail("tokenised"))
    with pytest.raises(TooManyTokensError) as caught:
        tokenizer.encode("the " * 50, limit=3)
    assert not caught.value.exact


def test_the_refusal_of_a_text_keeps_nothing_of_its_tokens() -> None:
    with pytest.raises(TooManyTokensError) as caught:
        Tokenizer(byte_level_backend()).encode("the " * 50, limit=3)
    frames = [frame for frame, _ in traceback.walk_tb(caught.tb)]
    assert len(frames) > 1
    for frame in frames:
        assert not any(isinstance(v, tokenizers.Encoding) for v in frame.f_locals.values())


@pytest.mark.parametrize("special", [False, True])
def test_a_limit_changes_no_ids(special: bool) -> None:
    config = {"bos_token": "<s>", "add_bos_token": True}
    tokenizer = Tokenizer(byte_level_backend(), config)
    ids = tokenizer.encode("the quick", special)
    assert tokenizer.encode("the quick", special, limit=len(ids)) == ids
    with pytest.raises(TooManyTokensError):
        tokenizer.encode("the quick", special, limit=len(ids) - 1)
