"""Metadata of a GGUF file other than the layers': pooling, and the keys kept from a GGUF file that
is converted again."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from vllmx_core.errors import UnsupportedModelError, listing, shown
from vllmx_core.plugins.checkpoint import Checkpoint
from vllmx_core.plugins.registry import Registry
from vllmx_core.text_modules import JoinedSource, with_text_modules

from vllmx_models.formats.gguf.file import GGUFFile

_POOLING = {"mean": 1, "cls": 2, "last": 3}
_SCORES = 4
_OWN = ("general.alignment", "general.file_type", "general.quantization_version", "general.type")
"""Keys that describe one file, not the model."""


def pooling_metadata(
    registry: Registry, checkpoint: Checkpoint, name: str
) -> tuple[dict[str, Any], list[str]]:
    """(keys for a model that makes vectors or scores, a line for each part of its pooling that the
    file lacks)."""
    try:
        found = with_text_modules(registry, checkpoint, "auto")
    except UnsupportedModelError as error:
        return {}, [error.message]
    if isinstance(found.weights, JoinedSource):
        for source in found.weights.others.values():
            source.close()
    config, modules = found.config, found.config.get("modules", ())
    kinds = [module["kind"] for module in modules]
    lost = [f"modules.json: the dense layer {m['folder']}" for m in modules if m["kind"] == "dense"]
    if "pooling" in kinds and "normalize" not in kinds:
        lost.append("modules.json: vectors without a normalize module; readers normalise them")
    if "score_tokens" in config:
        lost.append(f"modules.json: scores by the tokens {shown(config['score_tokens'])}")
    if (limit := config.get("text_limit")) is not None:
        lost.append(f"sentence_bert_config.json: max_seq_length = {limit}")
    prompts = config.get("text_settings", {}).get("prompts")
    if isinstance(prompts, Mapping) and any(prompts.values()):
        lost.append(f"config_sentence_transformers.json: the prompts {listing(list(prompts), 4)}")
    pooling = [module["pooling"] for module in modules if module["kind"] == "pooling"]
    kind = _SCORES if config.get("scores_pairs") else _POOLING[pooling[0]] if pooling else None
    return ({} if kind is None else {f"{name}.pooling_type": kind}), lost


def kept_metadata(
    checkpoint: Checkpoint, written: Collection[str]
) -> tuple[dict[str, Any], list[str]]:
    """(general keys of a converted GGUF file that are kept, a line with the keys that are not)."""
    if checkpoint.path.suffix != ".gguf":
        return {}, []
    file = GGUFFile(checkpoint.path)
    metadata = file.metadata
    file.close()
    rest = [key for key in metadata if key not in written and key not in _OWN]
    kept = {key: metadata[key] for key in rest if key.startswith("general.")}
    if "general.name" in metadata:  # readers know some tokenizers by it
        kept["general.name"] = metadata["general.name"]
    lost = [key for key in rest if key not in kept and not key.startswith(("split.", "quantize."))]
    return kept, [f"keys of {checkpoint.path.name}: {listing(lost, 8)}"] if lost else []
