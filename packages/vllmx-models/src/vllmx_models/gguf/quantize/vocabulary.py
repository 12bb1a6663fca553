"""tokenizer.json and its companions as the tokenizer.* metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from vllmx_core.errors import ModelNotFoundError, UnsupportedModelError, WeightFormatError, shown

from vllmx_models.json_files import MIB, read_json_object, read_text

MAX_TOKENIZER_BYTES = 256 * MIB
MAX_TEMPLATE_BYTES = MIB
"""Longer ones are refused when a model is loaded."""
NORMAL, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 3, 4, 5, 6
_NAMED = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
_WORD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PRE_TOKENIZERS: Mapping[tuple[str, ...], str] = {
    (): "gpt-2",
    (r"\d",): "smollm",
    (r"\p{N}",): "smollm",
    (_WORD + r"\p{N}{1,3}" + _REST,): "llama-bpe",
    (_WORD + r"\p{N}" + _REST,): "qwen2",
}
"""The expressions that tokenizer.json splits by, before the byte-level step's own."""


def tokenizer_metadata(folder: Path, vocab_size: int, pre: str | None) -> dict[str, Any]:
    """`pre` names the pre-tokenizer where its expressions are not known here.

    Raises:
        ModelNotFoundError: there is no tokenizer.json.
        UnsupportedModelError: a kind of tokenizer, or expressions, that cannot be named.
        WeightFormatError: the file is damaged, or has more tokens than the model.
    """
    path = folder / "tokenizer.json"
    tokenizer = read_json_object(path, MAX_TOKENIZER_BYTES)
    if tokenizer is None:
        raise ModelNotFoundError(f"{path} is needed to write a GGUF file", param="model")
    config = read_json_object(folder / "tokenizer_config.json", 64 * MIB) or {}
    alone = read_text(folder / "chat_template.jinja", MAX_TEMPLATE_BYTES)
    try:
        return _metadata(tokenizer, config, vocab_size, pre) | _template(alone, config)
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise WeightFormatError(
            f"{path} or a file beside it is not as it should be ({shown(error)}): download it again"
        ) from error


def _metadata(
    tokenizer: Mapping[str, Any], config: Mapping[str, Any], vocab_size: int, pre: str | None
) -> dict[str, Any]:
    model = tokenizer["model"]
    if model["type"] != "BPE":
        raise UnsupportedModelError(
            f"the tokenizer is of the kind {model['type']!r}; BPE tokenizers can be written"
        )
    sentencepiece = bool(model.get("byte_fallback"))
    tokens, types = _tokens(tokenizer, vocab_size, sentencepiece)
    merges = [_merge(pair, model["vocab"]) for pair in model["merges"]]
    found: dict[str, Any] = {"model": "llama" if sentencepiece else "gpt2"}
    found["pre"] = "default" if sentencepiece else pre or _pre_tokenizer(tokenizer)
    found |= {"tokens": tokens, "token_type": np.array(types, np.int32)}
    if sentencepiece:
        found["scores"] = _scores(tokens, merges)
        found["add_space_prefix"] = _adds_space(tokenizer)
    else:
        found["merges"] = merges
    found |= _special(tokenizer, config, {token: index for index, token in enumerate(tokens)})
    return {f"tokenizer.ggml.{key}": value for key, value in found.items()}


def _tokens(
    tokenizer: Mapping[str, Any], vocab_size: int, sentencepiece: bool
) -> tuple[list[str], list[int]]:
    """All tokens by id, ids without one filled, and their types."""
    added = tokenizer.get("added_tokens") or []
    ids = dict(tokenizer["model"]["vocab"])
    ids |= {token["content"]: token["id"] for token in added}
    for token, index in ids.items():
        if not isinstance(token, str) or type(index) is not int or not 0 <= index < vocab_size:
            raise WeightFormatError(
                f"the tokenizer has the id {shown(index)} for {shown(token)}, the model's go from 0"
                f" to {vocab_size - 1}: they are not of one model"
            )
    if not ids:
        raise WeightFormatError("tokenizer.json has no tokens: download it again")
    tokens = [f"[PAD{index}]" for index in range(vocab_size)]
    types = [UNUSED] * vocab_size
    for token, index in ids.items():
        is_byte = sentencepiece and len(token) == 6 and token.startswith("<0x")
        tokens[index], types[index] = token, BYTE if is_byte else NORMAL
    for token in added:
        types[token["id"]] = CONTROL if token["special"] else USER_DEFINED
    return tokens, types


def _merge(pair: Any, vocab: Mapping[str, int]) -> str:
    """Writes two tokens with a space between them, as older files do."""
    left, right = pair.split(" ") if isinstance(pair, str) else pair
    for token in (left, right, left + right):
        if token not in vocab:  # nothing would load what is written
            raise WeightFormatError(
                f"tokenizer.json has a merge of {shown(left)} and {shown(right)}, and no token"
                f" {shown(token)}: download it again"
            )
    return " ".join((left, right))


def _scores(tokens: Sequence[str], merges: Sequence[str]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The rank of the first merge that makes a token, negated: the merges come in their order."""
    first: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        first.setdefault(merge.replace(" ", ""), rank)
    return np.array([-first.get(token, 1_000_000) for token in tokens], np.float32)


def _steps(part: Mapping[str, Any] | None, inner: str) -> list[Mapping[str, Any]]:
    """The parts of a Sequence, or the part alone."""
    if part is None:
        return []
    return list(part[inner]) if part["type"] == "Sequence" else [part]


def _pre_tokenizer(tokenizer: Mapping[str, Any]) -> str:
    steps = _steps(tokenizer.get("pre_tokenizer"), "pretokenizers")
    expressions = []
    for step in steps:
        if step["type"] == "Split":
            expressions.append(step["pattern"].get("Regex", ""))
        elif step["type"] == "Digits" and step["individual_digits"]:
            expressions.append(r"\d")
        elif step["type"] != "ByteLevel":
            expressions.append(str(step["type"]))
    byte_level = bool(steps) and steps[-1]["type"] == "ByteLevel"
    name = _PRE_TOKENIZERS.get(tuple(expressions))
    own = name in ("gpt-2", "smollm")  # they end with the byte-level step's own expression
    if name is None or not byte_level or bool(steps[-1].get("use_regex", True)) != own:
        raise UnsupportedModelError(
            f"the pre-tokenizer's expressions {shown(expressions)} have no name that is known"
            " here: name the kind by --pre, as llama.cpp calls it"
        )
    return name


def _adds_space(tokenizer: Mapping[str, Any]) -> bool:
    normalizers = _steps(tokenizer.get("normalizer"), "normalizers")
    if any(step["type"] == "Prepend" for step in normalizers):
        return True
    steps = _steps(tokenizer.get("pre_tokenizer"), "pretokenizers")
    return any(
        step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never"
        for step in steps
    )


def _special(
    tokenizer: Mapping[str, Any], config: Mapping[str, Any], ids: Mapping[str, int]
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    names: dict[str, str] = {}
    for ours, theirs in _NAMED.items():
        token = config.get(f"{ours}_token")
        token = token["content"] if isinstance(token, dict) else token
        if token is not None and token in ids:
            names[ours] = token
            found[f"{theirs}_token_id"] = ids[token]
    steps = _steps(tokenizer.get("post_processor"), "processors")
    for key, end in (("bos", 0), ("eos", -1)):
        template = [step["single"][end] for step in steps if step["type"] == "TemplateProcessing"]
        adds = any(
            part.get("SpecialToken", {}).get("id") == names.get(key, "") for part in template
        )
        found[f"add_{key}_token"] = bool(config.get(f"add_{key}_token", False)) or adds
    return found


def _template(alone: str | None, config: Mapping[str, Any]) -> dict[str, Any]:
    template = config.get("chat_template") if alone is None else alone
    if isinstance(template, str):
        template = [{"name": "default", "template": template}]
    named = {entry["name"]: entry["template"] for entry in template or []}
    for name, text in named.items():
        words = isinstance(name, str) and isinstance(text, str)
        if not words or len(text.encode("utf-8", "replace")) > MAX_TEMPLATE_BYTES:
            raise WeightFormatError(
                f"the chat template {shown(name)} is no text of at most {MAX_TEMPLATE_BYTES} bytes:"
                " use the files of the original model"
            )
    found: dict[str, Any] = {
        f"tokenizer.chat_template.{name}": text for name, text in named.items() if name != "default"
    }
    if found:
        found["tokenizer.chat_templates"] = [name for name in named if name != "default"]
    if "default" in named:
        found["tokenizer.chat_template"] = named["default"]
    return found
