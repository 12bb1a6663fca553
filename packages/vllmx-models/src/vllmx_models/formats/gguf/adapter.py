"""LoRA adapters in GGUF files, as llama.cpp's convert_lora_to_gguf.py writes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from vllmx_core.adapters import Adapter, module_key
from vllmx_core.errors import AdapterError, shown
from vllmx_core.plan import F32
from vllmx_core.plugins.registry import Registry

from vllmx_models.formats.gguf.architecture import GGUFArchitecture
from vllmx_models.formats.gguf.blocks import weight_part
from vllmx_models.formats.gguf.file import GGUFFile
from vllmx_models.formats.gguf.places import FUSED, Heads, deinterleaved, split_name
from vllmx_models.formats.peft import low_rank

_HALVES = {"lora_a": "a", "lora_b": "b"}
Halves = dict[str, F32]


def open_adapter(path: Path, registry: Registry, config: Mapping[str, Any]) -> Adapter:
    """Reads an adapter whole.

    Args:
        config: the base model's: its heads, and what the adapter must belong to.

    Raises:
        AdapterError: it is not a LoRA, of another architecture, or damaged.
        ModelNotFoundError, WeightFormatError: the file is missing or damaged.
    """
    file = GGUFFile(path)
    try:
        metadata = file.metadata
        kinds = metadata.get("general.type"), metadata.get("adapter.type")
        if kinds != ("adapter", "lora"):
            raise AdapterError(f"{path} is not a LoRA adapter: its types are {shown(kinds)}")
        name = metadata.get("general.architecture")
        spec = registry.gguf_model_for(name) if isinstance(name, str) else None
        if spec is None:
            raise AdapterError(f"{path} is of the architecture {shown(name)}, which is not known")
        alpha = metadata.get("adapter.lora.alpha", 0.0)
        if not isinstance(alpha, int | float):
            raise AdapterError(f"{path}: adapter.lora.alpha is {shown(alpha)}, not a number")
        halves: dict[str, Halves] = {}
        for tensor in file.tensors.values():
            stem, _, half = tensor.name.rpartition(".")
            if half not in _HALVES:
                raise AdapterError(f"{path} has a tensor {shown(tensor.name)}, which no LoRA has")
            part = weight_part(tensor.name, tensor.kind, tensor.shape, file.data(tensor.name))
            halves.setdefault(stem, {})[_HALVES[half]] = part.dequantize()
    finally:
        file.close()
    table: GGUFArchitecture = spec.load_gguf()
    count = config.get("num_attention_heads", 1)
    heads = Heads(count, config.get("num_key_value_heads", count), config.get("head_dim", 1))

    def scale(name: str, rank: int) -> float:
        return float(alpha) / rank if alpha else 1.0

    return Adapter(
        {
            module_key(name): low_rank(name, pair, scale, path)
            for stem, both in halves.items()
            for name, pair in _modules(stem, both, table, heads, path)
        }
    )


def _modules(
    stem: str, halves: Halves, table: GGUFArchitecture, heads: Heads, path: Path
) -> Iterator[tuple[str, Halves]]:
    """The modules of the original checkpoint that one tensor of the file is."""
    pattern, layer, suffix = split_name(stem)
    b = halves.get("b")
    if pattern == "token_embd":  # rows of ids
        yield table.name_of(pattern, ""), {k: v.T if k == "a" else v for k, v in halves.items()}
        return
    pieces = {pattern: 0 if b is None else len(b)}
    if pattern == FUSED and not table.name_of(pattern, suffix):
        pieces = heads.fused
        if b is None or sum(pieces.values()) != len(b):
            raise AdapterError(f"{path}: {stem!r} has not the rows of queries, keys and values")
    first = 0
    for piece, rows in pieces.items():
        name = table.name_of(piece, suffix)
        if not name or name.count("{}") > 1:
            raise AdapterError(
                f"{path} changes {shown(stem)}, which a model of {table.architecture} does not have"
                " or which are its experts: they are not served with an adapter"
            )
        found = dict(halves)
        group = table.interleaved.get(piece)
        if b is not None:
            found["b"] = b[first : first + rows]
            if group is not None and rows % (2 * heads.count(group)) == 0:
                found["b"] = found["b"][deinterleaved(rows, heads.count(group))]
        first += rows
        yield (
            name.format(layer).removesuffix(".weight"),
            {half: np.asarray(values) for half, values in found.items()},
        )
