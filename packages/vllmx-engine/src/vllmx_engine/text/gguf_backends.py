"""Tokenizers of the `tokenizers` library from the plain tables of a GGUF file."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors
from vllmx_core.errors import WeightFormatError

from vllmx_engine.text.gguf_pretokenizers import PreTokenizerKind
from vllmx_engine.text.library_errors import library_errors


def unusable(reason: str) -> WeightFormatError:
    """The error for a file whose tables the library does not take, to be raised."""
    return WeightFormatError(
        f"the GGUF file's vocabulary does not make a tokenizer ({reason}): convert the model again"
    )


SPACE = "\u2581"
"""SentencePiece's sign for a space; in a WordPiece vocabulary it begins a word."""


def byte_tokens() -> frozenset[str]:
    """The names of the 256 tokens that stand for single bytes."""
    return frozenset(f"<0x{byte:02X}>" for byte in range(256))


@library_errors(unusable)
def byte_level_bpe(
    ids: Mapping[str, int], merges: Sequence[tuple[str, str]], kind: PreTokenizerKind
) -> tokenizers.Tokenizer:
    """GPT-2's BPE over bytes. Raises WeightFormatError for merges of tokens that do not exist."""
    model = models.BPE(dict(ids), list(merges), ignore_merges=kind.ignore_merges)
    backend = tokenizers.Tokenizer(model)
    if kind.nfc:
        backend.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in kind.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, to_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend


@library_errors(unusable)
def score_bpe(
    ids: Mapping[str, int],
    scores: Sequence[float],
    made: Collection[int],
    *,
    unknown: str | None,
    byte_fallback: bool,
    space_prefix: bool,
) -> tokenizers.Tokenizer:
    """SentencePiece's BPE: of all neighbours that together are a token, those of the highest score
    are joined first, the leftmost of equals.

    Args:
        made: tokens that may come about in this way; control and byte tokens may not.
    """
    merges = _merges_of_scores(ids, scores, made)
    return merged_bpe(
        ids, merges, unknown=unknown, byte_fallback=byte_fallback, space_prefix=space_prefix
    )


@library_errors(unusable)
def merged_bpe(
    ids: Mapping[str, int],
    merges: Sequence[tuple[str, str]],
    *,
    unknown: str | None,
    byte_fallback: bool,
    space_prefix: bool,
) -> tokenizers.Tokenizer:
    """SentencePiece's characters, whose merges are listed: a text is not cut before. Raises
    WeightFormatError for merges of tokens that do not exist."""
    model = models.BPE(
        dict(ids), list(merges), unk_token=unknown, fuse_unk=True, byte_fallback=byte_fallback
    )
    backend = tokenizers.Tokenizer(model)
    to_marks = normalizers.Replace(" ", SPACE)
    to_spaces = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if space_prefix:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), to_marks])
        backend.decoder = decoders.Sequence([*to_spaces, decoders.Strip(" ", 1, 0)])
    else:
        backend.normalizer = to_marks
        backend.decoder = decoders.Sequence(to_spaces)
    return backend


def _merges_of_scores(
    ids: Mapping[str, int], scores: Sequence[float], made: Collection[int]
) -> list[tuple[str, str]]:
    """Every way to cut a token into two others, the best token first; of one token, the cuts in
    the order of their parts' ids."""
    ranked: list[tuple[float, int, int, int, str, str]] = []
    for token, index in ids.items():
        if index not in made:
            continue
        for cut in range(1, len(token)):
            left, right = ids.get(token[:cut]), ids.get(token[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[index], index, left, right, token[:cut], token[cut:]))
    ranked.sort(key=lambda entry: entry[:4])
    return [(left, right) for *_, left, right in ranked]


@library_errors(unusable)
def unigram(
    tokens: Sequence[str],
    scores: Sequence[float],
    *,
    unknown: int | None,
    characters: object,
    space_prefix: bool,
    strips: bool,
    begin: tuple[str, int] | None,
    end: tuple[str, int] | None,
) -> tokenizers.Tokenizer:
    """SentencePiece's Unigram: of all ways to cut a text, the one of the highest scores.

    Args:
        characters: SentencePiece's table of what characters become, as bytes; None: there is none.
        strips: whether spaces at the ends are dropped and several of them are one.
        begin, end: the marks around a text; between two texts the end is written twice.
    """
    vocabulary = list(zip(tokens, scores, strict=True))
    backend = tokenizers.Tokenizer(models.Unigram(vocabulary, unk_id=unknown))
    steps: list[normalizers.Normalizer] = []
    if isinstance(characters, np.ndarray) and characters.size:
        steps.append(normalizers.Precompiled(characters.astype(np.uint8).tobytes()))
    if strips:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    backend.normalizer = normalizers.Sequence(steps)
    scheme = "always" if space_prefix else "never"
    backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme=scheme)
    backend.decoder = decoders.Metaspace(SPACE, prepend_scheme=scheme)
    first = f"{begin[0]} " if begin else ""
    last = f" {end[0]}" if end else ""
    backend.post_processor = processors.TemplateProcessing(
        single=f"{first}$A{last}",
        pair=f"{first}$A{last}{last} $B{last}",
        special_tokens=[mark for mark in (begin, end) if mark],
    )
    return backend


@library_errors(unusable)
def word_piece(
    tokens: Sequence[str],
    *,
    special: Collection[int],
    unknown: str,
    begin: tuple[str, int],
    end: tuple[str, int],
) -> tokenizers.Tokenizer:
    """BERT's WordPiece. In the file a token that begins a word has a mark and the others none; in
    the library it is the other way round."""
    vocab = {
        token if index in special or token == unknown else _continuing(token): index
        for index, token in enumerate(tokens)
    }
    backend = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token=unknown))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.post_processor = processors.TemplateProcessing(
        single=f"{begin[0]} $A {end[0]}",
        pair=f"{begin[0]} $A {end[0]} $B:1 {end[0]}:1",
        special_tokens=[begin, end],
    )
    return backend


def _continuing(token: str) -> str:
    return token[1:] if token.startswith(SPACE) else f"##{token}"
