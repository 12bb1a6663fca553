"""Tokenizers of GGUF files: the pre-tokenizers by name, and the backends built from them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np
import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors
from vllmx_core.errors import WeightFormatError
from vllmx_core.records import Record

from vllmx_engine.text.model_files import library_errors

_ELISIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_LLAMA3 = rf"{_ELISIONS}|{_WORD}|\p{{N}}{{1,3}}|{_MARKS}"
_QWEN2 = rf"{_ELISIONS}|{_WORD}|\p{{N}}|{_MARKS}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_CASED_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES
_TEKKEN = rf"{_LEAD}{_UPPER}*{_LOWER}+|{_LEAD}{_UPPER}+{_LOWER}*|\p{{N}}|{_CASED_MARKS}"
_GPT4O = (
    rf"{_LEAD}{_UPPER}*{_LOWER}+{_ELISIONS}?|{_LEAD}{_UPPER}+{_LOWER}*{_ELISIONS}?"
    rf"|\p{{N}}{{1,3}}|{_CASED_MARKS}"
)
_DEEPSEEK_HAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK3_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK3_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES
)
_SENTENCE_MARKS = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
# the letters of the scripts that have two cases, as DeepSeek's first tokenizer lists them
_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
    "\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd"
    "\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d"
    "\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec"
    "\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b"
    "\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787"
    "\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)


class PreTokenizerKind(Record):
    """One value of `tokenizer.ggml.pre`."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    """A piece that is a token is taken whole, whatever the merges say."""
    nfc: bool = False
    """The model's own tokenizer composes characters first (Unicode NFC)."""
    add_bos: bool = False
    """Begins with BOS where the file does not say."""


_gpt2 = PreTokenizerKind((_GPT2,))
_digits = PreTokenizerKind((r"\p{N}", _GPT2))
_llama3 = PreTokenizerKind((_LLAMA3,), ignore_merges=True, add_bos=True)
_qwen2 = PreTokenizerKind((_QWEN2,), nfc=True)
_gpt4o = PreTokenizerKind((_GPT4O,))
_deepseek3 = PreTokenizerKind((r"\p{N}{1,3}", _DEEPSEEK3_KANA, _DEEPSEEK3_WORDS))
_glm4 = PreTokenizerKind((_LLAMA3,), ignore_merges=True)

PRE_TOKENIZERS: Mapping[str, PreTokenizerKind] = {
    name: kind
    for names, kind in (
        (
            "default",
            PreTokenizerKind((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
        ),
        ("gpt-2 phi-2 gigachat exaone4 jais roberta-bpe trillion granite-docling", _gpt2),
        ("mpt olmo", replace(_gpt2, nfc=True)),
        ("starcoder refact smollm codeshell exaone minerva-7b mellum2", _digits),
        ("command-r", replace(_digits, nfc=True)),
        ("llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2", _llama3),
        ("dbrx smaug-bpe chatglm-bpe", PreTokenizerKind((_LLAMA3,))),
        ("glm4 glm5", _glm4),
        ("qwen2 deepseek-r1-qwen megrez stablelm2", _qwen2),
        ("hunyuan solar-open grok-2", PreTokenizerKind((_QWEN2,))),
        (
            "qwen35",
            PreTokenizerKind(
                (
                    rf"{_ELISIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
                    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _SPACES,
                ),
                nfc=True,
            ),
        ),
        (
            "bailingmoe",
            PreTokenizerKind(
                (
                    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}"
                    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
                )
            ),
        ),
        (
            "seed-coder",
            PreTokenizerKind(
                (rf"{_ELISIONS}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",)
            ),
        ),
        ("gpt-4o llama4 kanana2 minimax-m2", _gpt4o),
        ("tekken", PreTokenizerKind((_TEKKEN,), ignore_merges=True, add_bos=True)),
        (
            "deepseek-llm",
            PreTokenizerKind(
                (
                    r"[\r\n]",
                    rf"\s?[{_DEEPSEEK_LETTERS}]+",
                    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
                    r"\s+$",
                    _DEEPSEEK_HAN,
                    r"\p{N}+",
                )
            ),
        ),
        (
            "deepseek-coder",
            PreTokenizerKind((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_HAN, r"\p{N}")),
        ),
        ("deepseek-v3 hunyuan-dense joyai-llm", _deepseek3),
        ("falcon", PreTokenizerKind((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"))),
        ("poro-chat bloom gpt3-finnish", PreTokenizerKind((_SENTENCE_MARKS,))),
        ("viking", PreTokenizerKind((_SENTENCE_MARKS, r"\p{N}"))),
        (
            "chameleon",
            PreTokenizerKind(
                (
                    "<sentinel:[0-9]+>",
                    "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
                    r"([\t\n]|    |  )",
                    r"\p{N}",
                    r"[\p{P}!-/:-@\[-`{-~]",
                    _GPT2,
                ),
                add_bos=True,
            ),
        ),
    )
    for name in names.split()
}
"""The kinds by name; models of one kind share an entry under the names that their converters gave
them."""


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


def merges_of_scores(
    ids: Mapping[str, int], scores: Sequence[float], made: Collection[int]
) -> list[tuple[str, str]]:
    """The merges of SentencePiece's BPE: of all neighbours that together are a token, those of the
    highest score are joined first. For one token, the cuts are in the order of their parts' ids.

    Args:
        made: tokens that may come about in this way; control and byte tokens may not.
    """
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
