"""The tokenizer of a Hugging Face folder, joined from its files as when the folder is served."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vllmx_core.errors import ModelNotFoundError, WeightFormatError, shown
from vllmx_core.records import Record
from vllmx_core.system.json_files import MIB, read_json_object, read_text

MAX_TOKENIZER_BYTES = 256 * MIB
MAX_TEMPLATE_BYTES = MIB
"""Longer ones are refused when a model is loaded."""
NAMES = ("bos", "eos", "pad", "unk", "sep", "cls")


class TokenizerFiles(Record):
    """The tokenizer files of a folder."""

    path: Path
    """tokenizer.json."""
    tokenizer: Mapping[str, Any]
    """The content of tokenizer.json."""
    config: Mapping[str, Any]
    """tokenizer_config.json, over special_tokens_map.json."""
    added: tuple[Mapping[str, Any], ...]
    """Added tokens with `content`, `id` and `special`: those of tokenizer.json, then those of other
    files."""
    templates: Mapping[str, str]
    """Chat templates by name."""

    def token(self, name: str) -> str | None:
        """The text of a named token, such as "eos"."""
        token = self.config.get(f"{name}_token")
        token = token["content"] if isinstance(token, dict) else token
        if token is None and name == "unk":
            token = self.tokenizer["model"].get("unk_token")
        return token if isinstance(token, str) else None


def read_tokenizer_files(folder: Path) -> TokenizerFiles:
    """Raises ModelNotFoundError without a tokenizer.json, WeightFormatError for a damaged file."""
    path = folder / "tokenizer.json"
    tokenizer = read_json_object(path, MAX_TOKENIZER_BYTES)
    if tokenizer is None:
        raise ModelNotFoundError(f"{path} is needed to write a GGUF file", param="model")
    special = read_json_object(folder / "special_tokens_map.json", 64 * MIB) or {}
    config = {f"{name}_token": special.get(f"{name}_token") for name in NAMES}
    config |= read_json_object(folder / "tokenizer_config.json", 64 * MIB) or {}
    if "added_tokens_decoder" not in config:
        more = read_json_object(folder / "added_tokens.json", 64 * MIB) or {}
        config["added_tokens_decoder"] = {
            str(index): {"content": text} for text, index in more.items()
        }
    try:
        added = _added(tokenizer, config)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise WeightFormatError(
            f"the added tokens of {path} or of another file of its folder are malformed"
            f" ({shown(error)}): download it again"
        ) from error
    return TokenizerFiles(path, tokenizer, config, added, _templates(folder, config))


def steps(part: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """The steps of a normalizer, a pre-tokenizer or a post-processor, without their sequences."""
    if part is None:
        return
    if part["type"] != "Sequence":
        yield part
        return
    for key in ("normalizers", "pretokenizers", "processors"):
        for each in part.get(key, ()):
            yield from steps(each)


def _added(
    tokenizer: Mapping[str, Any], config: Mapping[str, Any]
) -> tuple[Mapping[str, Any], ...]:
    found = list(tokenizer.get("added_tokens") or [])
    ids = dict(tokenizer["model"]["vocab"]) if isinstance(tokenizer["model"]["vocab"], dict) else {}
    ids |= {token["content"]: token["id"] for token in found}
    taken = set(ids.values())
    known = {token["content"] for token in found}
    for key, entry in (config["added_tokens_decoder"] or {}).items():
        content, index = entry["content"], int(key)
        if content in known or (content in ids and ids[content] != index):
            continue
        if content in ids or index not in taken:
            found.append({**entry, "id": index, "special": bool(entry.get("special"))})
    return tuple(found)


def _templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Separate files win over the entry of tokenizer_config.json."""
    named: dict[str, Any] = {}
    for found in (config, read_json_object(folder / "chat_template.json") or {}):
        named |= _by_name(found.get("chat_template"))
    alone = read_text(folder / "chat_template.jinja", MAX_TEMPLATE_BYTES)
    if alone is not None:
        named["default"] = alone
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        named[path.stem] = read_text(path, MAX_TEMPLATE_BYTES)
    for name, text in named.items():
        words = isinstance(name, str) and isinstance(text, str)
        if not words or len(text.encode("utf-8", "replace")) > MAX_TEMPLATE_BYTES:
            raise WeightFormatError(
                f"the chat template {shown(name)} is not a text of at most {MAX_TEMPLATE_BYTES}"
                " bytes: use the files of the original model"
            )
    return named


def _by_name(template: Any) -> dict[str, Any]:
    """The templates of an entry: none, one text, an object, or a list of names and templates."""
    if template is None:
        return {}
    if isinstance(template, dict):
        return template
    if isinstance(template, list):
        try:
            return {entry["name"]: entry["template"] for entry in template}
        except (KeyError, TypeError) as error:
            raise WeightFormatError(
                f"a chat_template of tokenizer_config.json has an entry without a name or a"
                f" template ({shown(error)}): download the file again"
            ) from error
    return {"default": template}
