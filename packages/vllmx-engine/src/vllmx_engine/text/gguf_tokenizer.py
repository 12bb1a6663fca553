"""The tokenizer of a GGUF file, from its metadata.

`tokenizer.ggml.model` names the algorithm: "gpt2" is byte-level BPE behind one of many
pre-tokenizers, "llama" is SentencePiece's BPE with a score for each token, "gemma4" the same with
listed merges, "t5" its Unigram, "bert" is WordPiece. Which tokens begin and end a text follows
llama.cpp, since files are made for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken
from vllmx_core.end_tokens import end_tokens
from vllmx_core.errors import UnsupportedModelError, WeightFormatError, shown
from vllmx_core.records import Record

from vllmx_engine.text.gguf_backends import (
    PRE_TOKENIZERS,
    PreTokenizerKind,
    byte_level_bpe,
    byte_tokens,
    merged_bpe,
    merges_of_scores,
    unigram,
    unusable,
    word_piece,
)
from vllmx_engine.text.model_files import MAX_TEMPLATE_BYTES, library_errors
from vllmx_engine.text.tokenizer import Tokenizer

logger = logging.getLogger("vllmx.text")

MAX_TOKENS = 1 << 22
PREFIX = "tokenizer.ggml."


class TokenType(IntEnum):
    """Values of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class GGUFVocabulary:
    """Checked access to the tokenizer's metadata.

    Raises:
        WeightFormatError: a value is missing, of another type or length, or out of range.
    """

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.metadata = metadata
        self.tokens = self._tokens()
        self.types = self._numbers("token_type", "iu", TokenType.NORMAL).astype(np.int64)
        self.ids = {token: index for index, token in enumerate(self.tokens)}
        if len(self.ids) != len(self.tokens):
            raise WeightFormatError(
                f"the GGUF vocabulary names {len(self.tokens) - len(self.ids)} tokens twice:"
                " convert the model again"
            )

    @property
    def scores(self) -> Sequence[float]:
        """One for each token; the higher, the earlier it is made."""
        values = self._numbers("scores", "iuf", 0.0)
        if not np.isfinite(values).all():
            raise WeightFormatError(
                f"{PREFIX}scores of the GGUF file has values that are not finite: the file is"
                " damaged, download it again"
            )
        scores: list[float] = values.tolist()
        return scores

    @property
    def merges(self) -> list[tuple[str, str]]:
        """Pairs in the order in which they are made."""
        pairs = []
        for index, line in enumerate(self.strings("merges")):
            cut = line.find(" ", 1)
            if cut < 0 or not line[cut + 1 :]:
                raise WeightFormatError(
                    f"merge {index} of the GGUF vocabulary, {shown(line)}, is not a pair of tokens"
                )
            pairs.append((line[:cut], line[cut + 1 :]))
        return pairs

    def value(self, key: str) -> Any:
        """`tokenizer.ggml.KEY`, None where it is absent."""
        return self.metadata.get(PREFIX + key)

    def flag(self, key: str, default: bool) -> bool:
        return bool(self._of_kind(key, bool, "a truth value", default))

    def text(self, key: str, default: str) -> str:
        return str(self._of_kind(key, str, "text", default))

    def _of_kind(self, key: str, kind: type, what: str, default: Any) -> Any:
        value = self.value(key)
        if value is None:
            return default
        if type(value) is not kind:
            raise wrong_value(key, value, what)
        return value

    def token_id(self, key: str, default: int | None) -> int | None:
        """A token's id, or `default` where the file names none or one that does not exist."""
        value: int | None = self._of_kind(key, int, "a token id", None)
        if value is not None and 0 <= value < len(self.tokens):
            return value
        if value is not None:
            logger.warning(
                "%s%s = %d is ignored: there are %d tokens", PREFIX, key, value, len(self.tokens)
            )
        return default if default is not None and default < len(self.tokens) else None

    def strings(self, key: str) -> list[str]:
        value = self.value(key)
        if value is None or isinstance(value, str) or not isinstance(value, Sequence):
            raise wrong_value(key, value, "an array of strings")
        found = list(value)
        if any(type(item) is not str for item in found):
            raise wrong_value(key, value, "an array of strings")
        return found

    def of_type(self, *types: TokenType) -> list[int]:
        """Ids of all tokens of these types."""
        ids: list[int] = np.flatnonzero(np.isin(self.types, types)).tolist()
        return ids

    def _tokens(self) -> list[str]:
        tokens = self.strings("tokens")
        if not 0 < len(tokens) <= MAX_TOKENS:
            raise WeightFormatError(
                f"the GGUF vocabulary has {len(tokens)} tokens, 1 to {MAX_TOKENS} are possible"
            )
        return [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens)]

    def _numbers(self, key: str, kinds: str, default: float) -> np.ndarray[Any, np.dtype[Any]]:
        value = self.value(key)
        if value is None:
            return np.full(len(self.tokens), default)
        if not isinstance(value, np.ndarray) or value.ndim != 1 or value.dtype.kind not in kinds:
            raise wrong_value(key, value, "an array of numbers")
        if len(value) < len(self.tokens):
            raise WeightFormatError(
                f"{PREFIX}{key} has {len(value)} entries for {len(self.tokens)} tokens: convert"
                " the model again"
            )
        return value[: len(self.tokens)]


def wrong_value(key: str, value: Any, wanted: str) -> WeightFormatError:
    """The error for a value of another kind than it should be, to be raised."""
    found = "(absent)" if value is None else f"{type(value).__name__} {shown(value)}"
    return WeightFormatError(
        f"{PREFIX}{key} of the GGUF file must be {wanted}, it is {found}: convert the model again"
    )


_TEMPLATE = "tokenizer.chat_template"
_NAMED_IDS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",  # the key is misspelt in the format
    "pad_token": "padding_token_id",
    "cls_token": "cls_token_id",
}


class Algorithm(Record):
    """The construction of a tokenizer for a value of `tokenizer.ggml.model`."""

    build: Callable[[GGUFVocabulary], tuple[tokenizers.Tokenizer, bool]]
    """Gives the tokenizer, and whether it puts BOS first where the file does not say."""
    default_ids: Mapping[str, int]
    """Token ids where the file names none."""
    always_bos: bool = False
    """Prefix BOS whatever the file says: some files of Gemma 4 are wrong."""


def gguf_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that a file's metadata describe (`Checkpoint.tokenizer`).

    Raises:
        WeightFormatError: values are missing or damaged.
        UnsupportedModelError: an algorithm or a pre-tokenizer that is not known.
    """
    name = metadata.get(f"{PREFIX}model")
    if not isinstance(name, str):
        raise WeightFormatError(
            "the GGUF file has no tokenizer (tokenizer.ggml.model): give a folder with"
            " tokenizer.json by --tokenizer"
        )
    if name not in _ALGORITHMS:
        raise UnsupportedModelError(
            f"the GGUF file's tokenizer is of the kind {shown(name)}, which is not known here;"
            f" known: {', '.join(_ALGORITHMS)}; give a folder with tokenizer.json by --tokenizer"
        )
    algorithm, vocabulary = _ALGORITHMS[name], GGUFVocabulary(metadata)
    backend, adds_bos = algorithm.build(vocabulary)
    _add_tokens(backend, vocabulary)
    ids = {
        token: vocabulary.token_id(key, algorithm.default_ids.get(token))
        for token, key in _NAMED_IDS.items()
    }
    config: dict[str, Any] = {
        token: vocabulary.tokens[token_id]
        for token, token_id in ids.items()
        if token_id is not None
    }
    adds_bos = vocabulary.flag("add_bos_token", adds_bos)
    config["add_bos_token"] = adds_bos or algorithm.always_bos
    config["add_eos_token"] = vocabulary.flag("add_eos_token", False)
    return Tokenizer(
        backend,
        config,
        eos_token_ids=_end_ids(vocabulary, ids["eos_token"]),
        chat_templates=_chat_templates(metadata),
    )


def _pre_tokenizer(vocabulary: GGUFVocabulary) -> PreTokenizerKind:
    name = vocabulary.text("pre", "")
    if not name:
        logger.warning(
            "the GGUF file does not name its pre-tokenizer (tokenizer.ggml.pre); the default one"
            " may cut texts in another way than the model has learnt"
        )
        name = "default"
    if name not in PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"the GGUF file's pre-tokenizer {shown(name)} is not known here; known:"
            f" {', '.join(sorted(PRE_TOKENIZERS))}; give a folder with tokenizer.json by"
            " --tokenizer"
        )
    return PRE_TOKENIZERS[name]


def _build_bpe(vocabulary: GGUFVocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    kind = _pre_tokenizer(vocabulary)
    return byte_level_bpe(vocabulary.ids, vocabulary.merges, kind), kind.add_bos


def _build_sentencepiece(vocabulary: GGUFVocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    made = frozenset(vocabulary.of_type(TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED))
    options = _sentencepiece_options(vocabulary, 0, space_prefix=True)
    merges = merges_of_scores(vocabulary.ids, vocabulary.scores, made)
    return merged_bpe(vocabulary.ids, merges, **options), True


def _build_merged(vocabulary: GGUFVocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    options = _sentencepiece_options(vocabulary, None, space_prefix=False)
    return merged_bpe(vocabulary.ids, vocabulary.merges, **options), True


def _sentencepiece_options(
    vocabulary: GGUFVocabulary, unknown_id: int | None, *, space_prefix: bool
) -> dict[str, Any]:
    """The options that the file states; the unknown token and the prefix are what holds where it is
    silent."""
    unknown = vocabulary.token_id("unknown_token_id", unknown_id)
    return {
        "unknown": None if unknown is None else vocabulary.tokens[unknown],
        "byte_fallback": byte_tokens() <= vocabulary.ids.keys(),
        "space_prefix": vocabulary.flag("add_space_prefix", space_prefix),
    }


def _build_word_piece(vocabulary: GGUFVocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    def token(key: str, default: int) -> tuple[str, int]:
        found = vocabulary.token_id(key, default)
        if found is None:
            raise wrong_value(key, vocabulary.value(key), "the id of a token")
        return vocabulary.tokens[found], found

    backend = word_piece(
        vocabulary.tokens,
        special=frozenset(vocabulary.of_type(TokenType.CONTROL, TokenType.UNKNOWN)),
        unknown=token("unknown_token_id", 100)[0],
        begin=token("cls_token_id", 101),
        end=token("seperator_token_id", 102),
    )
    return backend, False  # its post-processor adds both marks


def _build_unigram(vocabulary: GGUFVocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    def mark(kind: str) -> tuple[str, int] | None:
        found = vocabulary.token_id(f"{kind}_token_id", None)
        wanted = found is not None and vocabulary.flag(f"add_{kind}_token", False)
        return (vocabulary.tokens[found], found) if found is not None and wanted else None

    backend = unigram(
        vocabulary.tokens,
        vocabulary.scores,
        unknown=vocabulary.token_id("unknown_token_id", 2),
        characters=vocabulary.value("precompiled_charsmap"),
        space_prefix=vocabulary.flag("add_space_prefix", True),
        strips=vocabulary.flag("remove_extra_whitespaces", True),
        begin=mark("bos"),
        end=mark("eos"),
    )
    return backend, False  # its post-processor adds the marks


_ALGORITHMS: Mapping[str, Algorithm] = {
    "gpt2": Algorithm(_build_bpe, {}),
    "llama": Algorithm(_build_sentencepiece, {"bos_token": 1, "eos_token": 2, "unk_token": 0}),
    "gemma4": Algorithm(_build_merged, {}, always_bos=True),
    "t5": Algorithm(_build_unigram, {"eos_token": 1, "unk_token": 2, "pad_token": 0}),
    "bert": Algorithm(
        _build_word_piece, {"unk_token": 100, "cls_token": 101, "sep_token": 102, "pad_token": 0}
    ),
}


def _add_tokens(backend: tokenizers.Tokenizer, vocabulary: GGUFVocabulary) -> None:
    """Tokens that are found in a text before anything else."""
    name = str(vocabulary.metadata.get("general.name", "")).lower()
    phi3 = "phi-3" in name or "phi3" in name

    def added(token_id: int, special: bool) -> AddedToken:
        content = vocabulary.tokens[token_id]
        # Phi-3's own tokenizer swallows the spaces behind its turn marks; no key says so
        strips = phi3 and content not in ("<unk>", "<s>", "<|endoftext|>")
        return AddedToken(content, special=special, normalized=False, rstrip=strips)

    special = vocabulary.of_type(TokenType.CONTROL, TokenType.UNKNOWN)
    plain = vocabulary.of_type(TokenType.USER_DEFINED)
    with library_errors(unusable):
        backend.add_special_tokens([added(index, True) for index in special])
        backend.add_tokens([added(index, False) for index in plain])


def _end_ids(vocabulary: GGUFVocabulary, eos: int | None) -> list[int]:
    """Every token that ends a sequence."""
    named = (vocabulary.token_id(f"{kind}_token_id", None) for kind in ("eot", "eom"))
    stated = {vocabulary.tokens[index] for index in (eos, *named) if index is not None}
    kinds = (TokenType.CONTROL, TokenType.USER_DEFINED)
    marked = {vocabulary.tokens[index] for index in vocabulary.of_type(*kinds)}
    return sorted(vocabulary.ids[token] for token in end_tokens(stated, marked))


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """`tokenizer.chat_template` as "default", `tokenizer.chat_template.NAME` as NAME."""
    templates: dict[str, str] = {}
    for key, value in metadata.items():
        if key != _TEMPLATE and not key.startswith(f"{_TEMPLATE}."):
            continue
        if not isinstance(value, str) or len(value.encode("utf-8")) > MAX_TEMPLATE_BYTES:
            raise WeightFormatError(
                f"{shown(key)} of the GGUF file must be text of at most {MAX_TEMPLATE_BYTES} bytes"
            )
        templates[key[len(_TEMPLATE) + 1 :] or "default"] = value
    return templates
