"""How each pre-tokenizer kind of GGUF files (`tokenizer.ggml.pre`) cuts a text before BPE.

A kind is a list of regular expressions in Oniguruma's dialect, applied one after the other: each
cuts the pieces of the one before into matches and what lies between them. The expressions are those
of the models' own tokenizers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from vllmx_core.records import Record

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
    "default": PreTokenizerKind((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": _gpt2,
    "phi-2": _gpt2,
    "gigachat": _gpt2,
    "exaone4": _gpt2,
    "jais": _gpt2,
    "roberta-bpe": _gpt2,
    "trillion": _gpt2,
    "granite-docling": _gpt2,
    "mpt": replace(_gpt2, nfc=True),
    "olmo": replace(_gpt2, nfc=True),
    "starcoder": _digits,
    "refact": _digits,
    "smollm": _digits,
    "codeshell": _digits,
    "exaone": _digits,
    "minerva-7b": _digits,
    "mellum2": _digits,
    "command-r": replace(_digits, nfc=True),
    "llama3": _llama3,
    "llama-v3": _llama3,
    "llama-bpe": _llama3,
    "falcon3": _llama3,
    "falcon-h1": _llama3,
    "pixtral": _llama3,
    "midm-2.0": _llama3,
    "lfm2": _llama3,
    "dbrx": PreTokenizerKind((_LLAMA3,)),
    "smaug-bpe": PreTokenizerKind((_LLAMA3,)),
    "chatglm-bpe": PreTokenizerKind((_LLAMA3,)),
    "glm4": _glm4,
    "glm5": _glm4,
    "qwen2": _qwen2,
    "deepseek-r1-qwen": _qwen2,
    "megrez": _qwen2,
    "stablelm2": _qwen2,
    "hunyuan": PreTokenizerKind((_QWEN2,)),
    "solar-open": PreTokenizerKind((_QWEN2,)),
    "grok-2": PreTokenizerKind((_QWEN2,)),
    "qwen35": PreTokenizerKind(
        (
            rf"{_ELISIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
            r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _SPACES,
        ),
        nfc=True,
    ),
    "bailingmoe": PreTokenizerKind(
        (
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
            r"|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    "seed-coder": PreTokenizerKind(
        (rf"{_ELISIONS}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",)
    ),
    "gpt-4o": _gpt4o,
    "llama4": _gpt4o,
    "kanana2": _gpt4o,
    "minimax-m2": _gpt4o,
    "tekken": PreTokenizerKind((_TEKKEN,), ignore_merges=True, add_bos=True),
    "deepseek-llm": PreTokenizerKind(
        (
            r"[\r\n]",
            rf"\s?[{_DEEPSEEK_LETTERS}]+",
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            _DEEPSEEK_HAN,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": PreTokenizerKind(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_HAN, r"\p{N}")
    ),
    "deepseek-v3": _deepseek3,
    "hunyuan-dense": _deepseek3,
    "joyai-llm": _deepseek3,
    "falcon": PreTokenizerKind((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "poro-chat": PreTokenizerKind((_SENTENCE_MARKS,)),
    "bloom": PreTokenizerKind((_SENTENCE_MARKS,)),
    "gpt3-finnish": PreTokenizerKind((_SENTENCE_MARKS,)),
    "viking": PreTokenizerKind((_SENTENCE_MARKS, r"\p{N}")),
    "chameleon": PreTokenizerKind(
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
}
"""The kinds by name; models of one kind share an entry under the names that their converters gave
them."""
