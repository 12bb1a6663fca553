"""tokenizer.json and its companions as the tokenizer.* metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from vllmx_core.end_tokens import END_TOKENS, end_tokens
from vllmx_core.errors import UnsupportedModelError, WeightFormatError, shown
from vllmx_core.records import Record

from vllmx_models.formats.gguf.quantize import losses
from vllmx_models.formats.gguf.quantize.tokenizer_files import (
    TokenizerFiles,
    read_tokenizer_files,
    steps,
)

NORMAL, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 3, 4, 5, 6
_MARKED = (CONTROL, USER_DEFINED)
"""Types of tokens that readers recognise as end tokens by name."""
_NAMED = {
    "bos": "bos",
    "eos": "eos",
    "pad": "padding",
    "unk": "unknown",
    "sep": "seperator",  # the key is misspelt in the format
    "cls": "cls",
}
_WORD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PRE_TOKENIZERS: Mapping[tuple[str, ...], str] = {
    (): "gpt-2",
    (r"\d",): "smollm",
    (r"\p{N}",): "smollm",
    (_WORD + r"\p{N}{1,3}" + _REST,): "llama-bpe",
    (_WORD + r"\p{N}" + _REST,): "qwen2",
}
"""Split expressions of tokenizer.json, without that of the byte-level step."""


class StatedTokenizer(Record):
    """A tokenizer as GGUF metadata."""

    metadata: Mapping[str, Any]
    lost: tuple[str, ...] = ()
    """A line for each thing that the tokenizer's files have and the metadata do not."""


def tokenizer_metadata(
    folder: Path, vocab_size: int, pre: str | None, end_ids: Sequence[int] = ()
) -> StatedTokenizer:
    """The tokenizer of a folder.

    Args:
        pre: the name of the pre-tokenizer where its expressions are not known here.
        end_ids: tokens that end a sequence, by generation_config.json or config.json.

    Raises:
        ModelNotFoundError: there is no tokenizer.json.
        UnsupportedModelError: a kind of tokenizer, or expressions, that cannot be named.
        WeightFormatError: the file is damaged, or has more tokens than the model.
    """
    files = read_tokenizer_files(folder)
    try:
        return _stated(files, vocab_size, pre, end_ids)
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise WeightFormatError(
            f"{files.path} or a file next to it is not as it should be ({shown(error)}): download"
            " it again"
        ) from error


def _stated(
    files: TokenizerFiles, vocab_size: int, pre: str | None, end_ids: Sequence[int]
) -> StatedTokenizer:
    tokenizer = files.tokenizer
    model = tokenizer["model"]
    if model["type"] != "BPE":
        raise UnsupportedModelError(
            f"the tokenizer is of the kind {model['type']!r}; BPE tokenizers can be written"
        )
    sentencepiece = bool(model.get("byte_fallback")) and not _is_byte_level(
        tokenizer.get("pre_tokenizer")
    )
    tokens, types = _tokens(files, vocab_size, sentencepiece)
    ids = {token: index for index, token in enumerate(tokens)}
    merges = [_merge(pair, model["vocab"]) for pair in model["merges"]]
    found: dict[str, Any] = {"model": "llama" if sentencepiece else "gpt2"}
    kind = None if sentencepiece else pre or _pre_tokenizer(tokenizer)
    found["pre"] = kind or "default"
    found |= {"tokens": tokens, "token_type": np.array(types, np.int32)}
    if sentencepiece:
        found["scores"] = _scores(tokens, merges)
        found["add_space_prefix"] = _adds_space(tokenizer)
    else:
        found["merges"] = merges
    found |= _special(files, ids)
    marked = [token for token, type_ in zip(tokens, types, strict=True) if type_ in _MARKED]
    known = [index for index in end_ids if 0 <= index < vocab_size]
    found |= _ends(known, found.get("eos_token_id"), tokens, frozenset(marked))
    ends = {tokens[index] for index in known}
    if files.token("eos") in ids:
        ends.add(str(files.token("eos")))
    lost = (
        *losses.of_tokenizer(files, kind, ids),
        *(f"the end token {index}: the model has none" for index in end_ids if index not in known),
        *losses.of_ends(ends, found, tokens, marked),
    )
    metadata = {f"tokenizer.ggml.{key}": value for key, value in found.items()}
    return StatedTokenizer(metadata | _templates(files.templates), lost)


def _is_byte_level(part: Mapping[str, Any] | None) -> bool:
    """True if a pre-tokenizer spells bytes as characters, so that bytes need no fallback tokens,
    whatever the model says."""
    if part is None:
        return False
    if part["type"] == "Sequence":
        return any(map(_is_byte_level, part["pretokenizers"]))
    return bool(part["type"] == "ByteLevel")


def _ends(
    ids: Sequence[int], eos: int | None, tokens: Sequence[str], marked: Collection[str]
) -> dict[str, int]:
    """Keys for end tokens that readers do not recognise by name: the usual one, if the tokenizer
    names none, and two more."""
    found: dict[str, int] = {}
    if eos is None and ids:
        found["eos_token_id"] = eos = ids[0]
    everywhere = END_TOKENS.intersection(marked)
    rest = [index for index in dict.fromkeys(ids) if index != eos]
    rest = [index for index in rest if tokens[index] not in everywhere]
    known = end_tokens((), marked)  # some of them to vllmx alone
    rest.sort(key=lambda index: tokens[index] in known)
    return found | dict(zip(("eot_token_id", "eom_token_id"), rest, strict=False))


def _tokens(
    files: TokenizerFiles, vocab_size: int, sentencepiece: bool
) -> tuple[list[str], list[int]]:
    """All tokens by id, ids without one filled, and their types."""
    ids = dict(files.tokenizer["model"]["vocab"])
    if not ids:
        raise WeightFormatError("tokenizer.json has no tokens: download it again")
    ids |= {token["content"]: token["id"] for token in files.added}
    for token, index in ids.items():
        if not isinstance(token, str) or type(index) is not int or not 0 <= index < vocab_size:
            raise WeightFormatError(
                f"the tokenizer has the id {shown(index)} for {shown(token)}, the model's go from 0"
                f" to {vocab_size - 1}: they are not of one model"
            )
    tokens = [f"[PAD{index}]" for index in range(vocab_size)]
    types = [UNUSED] * vocab_size
    for token, index in ids.items():
        is_byte = sentencepiece and len(token) == 6 and token.startswith("<0x")
        tokens[index], types[index] = token, BYTE if is_byte else NORMAL
    for token in files.added:
        types[token["id"]] = CONTROL if token["special"] else USER_DEFINED
    return tokens, types


def _merge(pair: Any, vocab: Mapping[str, int]) -> str:
    """Writes two tokens with a space between them, as older files do."""
    left, right = pair.split(" ") if isinstance(pair, str) else pair
    for token in (left, right, left + right):
        if token not in vocab:  # readers would refuse the file
            raise WeightFormatError(
                f"tokenizer.json has a merge of {shown(left)} and {shown(right)}, and no token"
                f" {shown(token)}: download it again"
            )
    return " ".join((left, right))


def _scores(tokens: Sequence[str], merges: Sequence[str]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The negated rank of the first merge that makes each token, since merges run in order."""
    first: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        first.setdefault(merge.replace(" ", ""), rank)
    return np.array([-first.get(token, 1_000_000) for token in tokens], np.float32)


def _pre_tokenizer(tokenizer: Mapping[str, Any]) -> str:
    found = list(steps(tokenizer.get("pre_tokenizer")))
    expressions = []
    for step in found:
        if step["type"] == "Split":
            expressions.append(step["pattern"].get("Regex", ""))
        elif step["type"] == "Digits" and step["individual_digits"]:
            expressions.append(r"\d")
        elif step["type"] != "ByteLevel":
            expressions.append(str(step["type"]))
    byte_level = bool(found) and found[-1]["type"] == "ByteLevel"
    name = _PRE_TOKENIZERS.get(tuple(expressions))
    own = name in ("gpt-2", "smollm")  # they end with the byte-level step's own expression
    if name is None or not byte_level or bool(found[-1].get("use_regex", True)) != own:
        raise UnsupportedModelError(
            f"the pre-tokenizer's expressions {shown(expressions)} have no name that is known"
            " here: name the kind by --pre, as llama.cpp calls it"
        )
    return name


def _adds_space(tokenizer: Mapping[str, Any]) -> bool:
    if any(step["type"] == "Prepend" for step in steps(tokenizer.get("normalizer"))):
        return True
    return any(
        step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never"
        for step in steps(tokenizer.get("pre_tokenizer"))
    )


def _special(files: TokenizerFiles, ids: Mapping[str, int]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    names: dict[str, str] = {}
    for ours, theirs in _NAMED.items():
        token = files.token(ours)
        if token is not None and token in ids:
            names[ours] = token
            found[f"{theirs}_token_id"] = ids[token]
    templates = [
        step["single"]
        for step in steps(files.tokenizer.get("post_processor"))
        if step["type"] == "TemplateProcessing"
    ]
    for key, end in (("bos", 0), ("eos", -1)):
        template = [single[end] for single in templates]
        adds = any(
            part.get("SpecialToken", {}).get("id") == names.get(key, "") for part in template
        )
        found[f"add_{key}_token"] = bool(files.config.get(f"add_{key}_token", False)) or adds
    return found


def _templates(named: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {
        f"tokenizer.chat_template.{name}": text for name, text in named.items() if name != "default"
    }
    if found:
        found["tokenizer.chat_templates"] = [name for name in named if name != "default"]
    if "default" in named:
        found["tokenizer.chat_template"] = named["default"]
    return found
