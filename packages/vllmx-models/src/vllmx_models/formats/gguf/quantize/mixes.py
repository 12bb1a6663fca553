"""Block types for the tensors of a mix such as q4_k_m, by the rules of llama.cpp's quantiser.

A mix spends more bits where an error costs most: the head, and values and down projections
(experts' included) in the first and last eighth of the layers and every third layer between.
Routers stay F32.
"""

from __future__ import annotations

from collections.abc import Mapping

from vllmx_core.records import Record

from vllmx_models.formats.gguf.blocks import TYPES_BY_NAME


class Mix(Record):
    """A value of `--type`."""

    base: str
    """The type of every matrix that no rule names."""
    file_type: int
    """The value of `general.file_type`."""


MIXES: Mapping[str, Mix] = {
    "f32": Mix("F32", 0),
    "f16": Mix("F16", 1),
    "bf16": Mix("BF16", 32),
    "q8_0": Mix("Q8_0", 7),
    "q4_0": Mix("Q4_0", 2),
    "q4_1": Mix("Q4_1", 3),
    "q5_0": Mix("Q5_0", 8),
    "q5_1": Mix("Q5_1", 9),
    "q2_k": Mix("Q2_K", 10),
    "q2_k_s": Mix("Q2_K", 21),
    "q3_k_s": Mix("Q3_K", 11),
    "q3_k_m": Mix("Q3_K", 12),
    "q3_k_l": Mix("Q3_K", 13),
    "q4_k_s": Mix("Q4_K", 14),
    "q4_k_m": Mix("Q4_K", 15),
    "q5_k_s": Mix("Q5_K", 16),
    "q5_k_m": Mix("Q5_K", 17),
    "q6_k": Mix("Q6_K", 18),
    "mxfp4_moe": Mix("Q8_0", 38),
}
_NARROWER: Mapping[str, str] = {
    "Q2_K": "Q4_0",
    "Q3_K": "Q4_0",
    "Q4_K": "Q5_0",
    "Q5_K": "Q5_1",
    "Q6_K": "Q8_0",
}
"""Types for rows whose length is not a multiple of 256."""

_TABLES = ("token_embd", "per_layer_token_embd")
_EXACT = (".bias", "_norm.weight")
_SMALL = (".ffn_gate_inp", ".ssm_conv1d", ".shortconv.conv.")
_FEW_EXPERTS = 8
"""Mixtral's number: its attention is small compared with its experts and gets more bits."""
_FIVE_BITS_WITH_EXPERTS = ("q2_k", "q3_k_s", "q3_k_m", "q4_k_s", "q4_k_m")


class Layers(Record):
    """Properties of a model that the rules need."""

    count: int
    heads_per_kv: int
    tied: bool
    experts: int = 0
    """Experts in a layer."""
    values: tuple[int, ...] = ()
    """Numbers of the layers with separate values; empty: all."""


def type_of(mix: str, name: str, shape: tuple[int, ...], layers: Layers) -> str:
    """The type of one tensor, by its name in the file. Vectors stay F32; a matrix whose rows are
    not whole blocks of its type gets the next type that fits, finally F16."""
    exact = name.endswith(_EXACT) or any(one in name for one in _SMALL)
    if len(shape) == 1 or exact or not name.endswith(".weight"):
        return "F32"
    base = MIXES[mix].base
    if "per_layer_model_proj" in name:
        return base if base in ("F32", "F16") else "BF16"
    if ".indexer.proj" in name and base in ("F32", "F16", "BF16"):
        return "F32"
    kind = base if base in ("F32", "F16", "BF16") else _ruled(mix, base, name, shape, layers)
    if shape[-1] % TYPES_BY_NAME[kind].values:
        kind = _NARROWER.get(kind, kind)
    return "F16" if shape[-1] % TYPES_BY_NAME[kind].values else kind


def _ruled(mix: str, base: str, name: str, shape: tuple[int, ...], layers: Layers) -> str:
    stem = name.removesuffix(".weight")
    if mix == "mxfp4_moe":
        return "MXFP4" if len(shape) == 3 else base
    if stem == "output" or (stem in _TABLES and layers.tied):
        narrow = shape[-1] % TYPES_BY_NAME[base].values != 0
        return "Q8_0" if base == "Q8_0" or narrow else "Q6_K"
    block, _, rest = stem.partition(".")
    if block != "blk":
        return base
    layer, role = int(rest.partition(".")[0]), rest.rpartition(".")[2]
    if role == "attn_k" and layers.experts == _FEW_EXPERTS:
        return "Q8_0"
    rule = {
        "attn_v": _values,
        "attn_qkv": _packed,
        "attn_output": _attention_output,
        "ffn_down": _down,
        "ffn_down_exps": _down,
        "ffn_down_shexp": _down,
    }.get(role)
    return base if rule is None else rule(mix, layer, layers) or base


def _more_bits(layer: int, count: int) -> bool:
    eighth = count // 8
    return layer < eighth or layer >= 7 * count // 8 or (layer - eighth) % 3 == 2


def _values(mix: str, layer: int, layers: Layers) -> str | None:
    if layers.experts == _FEW_EXPERTS:
        return "Q8_0"
    shared = layers.heads_per_kv >= 4
    place = layers.values.index(layer) if layers.values else layer
    count = len(layers.values) or layers.count
    kind = {
        "q2_k": "Q4_K" if shared else "Q3_K",
        "q2_k_s": "Q4_K" if shared else None,
        "q3_k_m": "Q5_K" if place < 2 else "Q4_K",
        "q3_k_l": "Q5_K",
        "q4_k_s": "Q5_K" if place < 4 else None,
        "q4_k_m": "Q6_K" if _more_bits(place, count) else None,
        "q5_k_m": "Q6_K" if _more_bits(place, count) else None,
    }.get(mix)
    large = layers.count == 80 and layers.heads_per_kv == 8  # Llama 70B: a small matrix there
    if large and (kind or MIXES[mix].base) in ("Q3_K", "Q4_K"):
        return "Q5_K"
    return kind


def _down(mix: str, layer: int, layers: Layers) -> str | None:
    more = _more_bits(layer, layers.count)
    early = layer < layers.count // 8
    return {
        "q2_k": "Q3_K",
        "q2_k_s": "Q4_K" if early else None,
        "q3_k_m": "Q5_K" if layer < layers.count // 16 else "Q4_K",
        "q3_k_l": "Q5_K",
        "q4_k_s": "Q5_K" if early else None,
        "q4_k_m": "Q6_K" if more else None,
        "q5_k_m": "Q6_K" if more else None,
    }.get(mix)


def _packed(mix: str, layer: int, layers: Layers) -> str | None:
    """Queries, keys and values in one tensor."""
    return {"q3_k_m": "Q4_K", "q3_k_l": "Q4_K", "q4_k_m": "Q5_K", "q5_k_m": "Q6_K"}.get(mix)


def _attention_output(mix: str, layer: int, layers: Layers) -> str | None:
    if layers.experts == _FEW_EXPERTS:
        return "Q5_K" if mix in _FIVE_BITS_WITH_EXPERTS else None
    return {"q2_k": "Q3_K", "q3_k_m": "Q4_K", "q3_k_l": "Q5_K"}.get(mix)
