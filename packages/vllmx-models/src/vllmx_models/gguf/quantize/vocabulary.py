"""tokenizer.json and its companions as the tokenizer.* metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from vllmx_core.errors import ModelNotFoundError, UnsupportedModelError, WeightFormatError

from vllmx_models.json_files import MIB, read_json_object

MAX_TOKENIZER_BYTES = 256 * MIB
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
    try:
        return _metadata(tokenizer, config, vocab_size, pre) | _template(folder, config)
    except (KeyError, TypeError, AttributeError) as error:
        raise WeightFormatError(f"{path} is not as it should be ({error!r})") from error


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
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
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
    if max(ids.values()) >= vocab_size:
        raise WeightFormatError(
            f"the tokenizer has the id {max(ids.values())}, the model {vocab_size} tokens: they are"
            " not of one model"
        )
    tokens = [f"[PAD{index}]" for index in range(vocab_size)]
    types = [UNUSED] * vocab_size
    for token, index in ids.items():
        is_byte = sentencepiece and len(token) == 6 and token.startswith("<0x")
        tokens[index], types[index] = token, BYTE if is_byte else NORMAL
    for token in added:
        types[token["id"]] = CONTROL if token["special"] else USER_DEFINED
    return tokens, types


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
            f"the pre-tokenizer's expressions {str(expressions)[:300]} have no name that is known"
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


def _template(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    file = folder / "chat_template.jinja"
    template = file.read_text(encoding="utf-8") if file.is_file() else config.get("chat_template")
    if isinstance(template, str):
        return {"tokenizer.chat_template": template}
    named = {entry["name"]: entry["template"] for entry in template or []}
    found: dict[str, Any] = {
        f"tokenizer.chat_template.{name}": text for name, text in named.items() if name != "default"
    }
    if found:
        found["tokenizer.chat_templates"] = [name for name in named if name != "default"]
    if "default" in named:
        found["tokenizer.chat_template"] = named["default"]
    return found
