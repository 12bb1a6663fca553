"""The weight format "gguf": a file, a set of shards, or a folder with one model."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from vllmx_core.errors import PluginError, UnsupportedModelError, WeightFormatError, shown
from vllmx_core.plan import F32
from vllmx_core.plugins.checkpoint import Checkpoint, adapter_error
from vllmx_core.plugins.registry import Registry
from vllmx_core.plugins.specs import ModelSpec
from vllmx_core.weights.part import WeightPart
from vllmx_core.weights.views import rows_of

from vllmx_models.formats.gguf.architecture import GGUFArchitecture
from vllmx_models.formats.gguf.blocks import weight_part
from vllmx_models.formats.gguf.encoder_models import PAIR_HEAD, text_modules
from vllmx_models.formats.gguf.file import GGUFFile
from vllmx_models.formats.gguf.hyperparameters import GGUFHeader
from vllmx_models.formats.gguf.places import (
    Heads,
    deinterleaved,
    is_norm,
    log_of_negated,
    places_of,
    shifted,
    split_name,
)
from vllmx_models.formats.gguf.shards import model_file, open_shards

_DTYPES = {"F32": "float32", "F16": "float16"}
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


class GGUFSource:
    """A `WeightSource` under the names of the original checkpoint; see `blocks` for the layouts."""

    def __init__(self, files: Sequence[GGUFFile], table: GGUFArchitecture, heads: Heads) -> None:
        self._files = tuple(files)
        self._places = places_of(self._files, table, heads)
        self._table = table

    def names(self) -> Collection[str]:
        return self._places.keys()

    def part(self, name: str) -> WeightPart:
        """Raises WeightFormatError, with the nearest names, when `name` is missing."""
        place = self._places.get(name)
        if place is None:
            near = ", ".join(difflib.get_close_matches(name, self._places, n=3))
            raise WeightFormatError(
                f"{self._files[0].path} has no tensor for {name!r}"
                f" ({'nearest: ' + near if near else f'it has {len(self._places)} others'}): the"
                " file is incomplete or made by a converter of another model, download it again"
            )
        stored = place.file.stored(place.info.name).cut(place.begin, place.end)
        part = weight_part(name, place.info.kind, place.shape, stored)
        pattern = split_name(place.info.name)[0]
        if pattern in self._table.decays:
            return log_of_negated(part)
        if len(place.shape) == 1 and is_norm(place.info.name):
            plain = pattern in self._table.plain_norms
            return part if plain else shifted(part, -self._table.norm_offset)
        if place.heads is None:
            return part
        return rows_of(part, deinterleaved(place.shape[0], place.heads))

    def close(self) -> None:
        """Closes the files; parts must not be used any more."""
        for file in self._files:
            file.close()


def open_checkpoint(path: Path, registry: Registry) -> Checkpoint:
    """Opens a file with its shards, or a folder that holds one model.

    Raises:
        ModelNotFoundError: there is no file, or several models to choose from.
        WeightFormatError: a file is damaged, truncated or missing.
        UnsupportedModelError: an architecture, or a trait of one, that no plugin knows.
    """
    path = model_file(path) if path.is_dir() else path
    files = open_shards(path)
    try:
        return _checkpoint(path, files, registry)
    except BaseException:
        for file in files:
            file.close()
        raise


def _checkpoint(path: Path, files: Sequence[GGUFFile], registry: Registry) -> Checkpoint:
    metadata = files[0].metadata
    name = metadata.get("general.architecture")
    if not isinstance(name, str):
        raise WeightFormatError(f"{path} does not name its general.architecture: convert it again")
    kind = metadata.get("general.type", "model")
    if isinstance(kind, str) and kind == "adapter":
        raise adapter_error(
            path,
            metadata.get("general.base_model.0.name"),
            "llama.cpp: llama-export-lora -m BASE --lora ADAPTER -o MERGED",
        )
    if not isinstance(kind, str) or kind != "model":
        raise UnsupportedModelError(
            f"{path} holds no whole model but one of general.type {shown(kind)}: give the"
            " model's file"
        )
    table = _table(path, name, registry)
    header = _header(path, files, name)
    modules = text_modules(header)
    if "score_rows" in modules and not table.name_of(PAIR_HEAD, ".weight"):
        table = replace(table, tensors={**table.tensors, PAIR_HEAD: "score"})
    config: dict[str, Any] = {
        "architectures": [table.architecture],
        "model_type": name,
        **_from_tensors(header),
        **modules,
        **table.config(header),
    }
    count = config.get("num_attention_heads", 1)
    heads = Heads(count, config.get("num_key_value_heads", count), config.get("head_dim", 1))
    return Checkpoint(
        path,
        config,
        GGUFSource(files, table, heads),
        _generation_config(metadata),
        tokenizer={key: value for key, value in metadata.items() if _of_tokenizer(key)},
    )


def _table(path: Path, name: str, registry: Registry) -> GGUFArchitecture:
    spec = registry.gguf_model_for(name)
    if spec is not None:
        found = spec.load_gguf()
        if not isinstance(found, GGUFArchitecture):
            raise PluginError(f"model {spec.name!r}: {spec.gguf} is not a GGUFArchitecture")
        return found
    specs = registry.all(ModelSpec)
    known = ", ".join(sorted(known for spec in specs for known in spec.gguf_names))
    raise UnsupportedModelError(
        f"{path} holds a model of the GGUF architecture {shown(name)}, which no installed plugin"
        f" serves; known: {known or 'none'}"
    )


def _header(path: Path, files: Sequence[GGUFFile], architecture: str) -> GGUFHeader:
    tensors = {name: info for file in files for name, info in file.tensors.items()}
    if not tensors:
        raise WeightFormatError(f"{path} holds a vocabulary and no weights: take the model's file")

    def vector(name: str) -> F32:
        file = next(file for file in files if name in file.tensors)
        info = file.tensors[name]
        with np.errstate(all="ignore"):  # the caller checks for NaN
            return weight_part(name, info.kind, info.shape, file.data(name)).dequantize()

    return GGUFHeader(path, architecture, files[0].metadata, tensors, vector)


def _from_tensors(header: GGUFHeader) -> dict[str, Any]:
    """Config values that the tensors give more reliably than the metadata."""
    table = header.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise WeightFormatError(
            f"{header.path} has no matrix token_embd.weight: the file is incomplete"
        )
    by_type: Counter[str] = Counter()
    for info in header.tensors.values():
        by_type[info.kind.name] += info.num_bytes
    return {
        "vocab_size": table.shape[0],
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "torch_dtype": _DTYPES.get(by_type.most_common(1)[0][0], "bfloat16"),
    }


def _generation_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The author's sampling defaults, as generation_config.json would name them."""
    values = {ours: metadata.get(f"general.sampling.{key}") for key, ours in _SAMPLING.items()}
    return {key: value for key, value in values.items() if type(value) in (int, float)}


def _of_tokenizer(key: str) -> bool:
    return key.startswith("tokenizer.") or key in ("general.architecture", "general.name")
