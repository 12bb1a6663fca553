"""Llama 4 Scout and Maverick (Llama4ForCausalLM): three layers that rotate and attend within chunks
of the context for each one that sees all of it without rotation, and experts by sigmoid that read
what their score scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vllmx_core.ops.route import RouteSpec

from vllmx_models.blocks.dense import DenseMLP, MLPNames
from vllmx_models.blocks.moe import EachExpert, EitherExperts, MoE, Router, StackedExperts
from vllmx_models.blocks.norms import Norm
from vllmx_models.blocks.query_scale import QueryScale
from vllmx_models.blocks.rope import Rope
from vllmx_models.config import ConfigReader
from vllmx_models.configs.decoder import (
    attention_mixer,
    decoder_spec,
    head_size,
    layer_ropes,
    num_layers,
    rotating_layers,
)
from vllmx_models.configs.hybrid import layer_kinds
from vllmx_models.configs.moe import (
    EXPERT_KEYS,
    chosen_experts,
    experts_spec,
    layer_numbers,
    num_experts,
)
from vllmx_models.formats.gguf.architecture import (
    DECODER_TENSORS,
    GGUFArchitecture,
    decoder_config,
    experts_config,
)
from vllmx_models.formats.gguf.hyperparameters import GGUFHeader
from vllmx_models.trunks.decoder import Decoder, DecoderSpec, LayerSpec

POSITIONS, CHUNK = 131072, 8192
HONOURED = ("attention_bias", "attn_temperature_tuning", "layer_types", "no_rope_layers")
PLAIN_ROPES = ("default", "linear", "llama3")
"""Scalings that keep the length of what they rotate, so that norms may come before."""
_MODULE, _EACH = "feed_forward", EachExpert()


def llama4(config: Mapping[str, Any]) -> Decoder:
    """The norm of query and key heads has no weight; queries of layers without rotation grow."""
    read = ConfigReader({"rms_norm_eps": 1e-5, **config}, "Llama4ForCausalLM")
    read.refuse_quirks(*HONOURED, "use_qk_norm", *EXPERT_KEYS)
    count, turns, norm = num_layers(read), rotating_layers(read), Norm(read.number("rms_norm_eps"))
    kinds = layer_kinds(
        read,
        ("chunked_attention", "full_attention"),
        ["chunked_attention" if one else "full_attention" for one in turns],
    )
    chunks = [kind == "chunked_attention" for kind in kinds]
    chunk = read.integer("attention_chunk_size", CHUNK, high=1 << 31) if any(chunks) else None
    head, bias = head_size(read), read.flag("attention_bias", False)
    mixer = attention_mixer(read, head, qkv_bias=bias, o_bias=bias, interleaved=True)
    still = replace(mixer, query_scale=_growth(read))
    if read.flag("use_qk_norm", True):
        mixer = replace(mixer, qk_norm=norm, norm_weights="none")
    ropes = layer_ropes(
        read, head, [False] * count, default_positions=POSITIONS, default_theta=500_000.0
    )
    if mixer.qk_norm and any(rope and not _keeps_length(rope) for rope in ropes):
        raise read.error("rope_scaling", "is not known here with norms of rotated heads")
    every = read.integer("interleave_moe_layer_step", 1)
    sparse = frozenset(range(every - 1, count, every))
    if "moe_layers" in config:
        sparse = layer_numbers(read, "moe_layers")
    moe = _experts(read) if sparse else None
    inner = read.integer("intermediate_size_mlp", 16384)
    dense = DenseMLP(inner, read.activation(), names=MLPNames(_MODULE))

    def layer(number: int, rope: Rope | None) -> LayerSpec:
        own = replace(mixer, rope=rope) if turns[number] else still
        own = replace(own, window=chunk if chunks[number] else None, chunked=chunks[number])
        feed = moe if moe is not None and number in sparse else dense
        return LayerSpec(own, feed)

    layers = tuple(layer(number, rope) for number, rope in enumerate(ropes))
    return Decoder(decoder_spec(read, layers, default_positions=POSITIONS, norm=norm))


def _keeps_length(rope: Rope) -> bool:
    """GGUF files have Scout's frequencies as longrope's, with a factor of 1."""
    return rope.kind in PLAIN_ROPES or rope.options.get("attention_factor") == 1


def _growth(read: ConfigReader) -> QueryScale | None:
    if not read.flag("attn_temperature_tuning", True):
        return None
    return QueryScale(
        read.number("attn_scale", 0.1), read.integer("floor_scale", CHUNK, high=1 << 31), 1
    )


def _experts(read: ConfigReader) -> MoE:
    count, inner = num_experts(read), read.integer("intermediate_size")
    if chosen_experts(read, count) != 1:
        raise read.error("num_experts_per_tok", "is not known here: one expert, 1")
    return MoE(
        count,
        inner,
        Router(RouteSpec(1, "sigmoid"), "router"),
        experts_spec(read),
        EitherExperts(StackedExperts(transposed=True), _EACH),
        shared=DenseMLP(inner, read.activation(), names=MLPNames(f"{_MODULE}.shared_expert")),
        module=_MODULE,
        scaled_input=True,
    )


_STEP, _WINDOW = "interleave_moe_layer_step", "attention.sliding_window"


def _gguf_config(header: GGUFHeader) -> dict[str, Any]:
    """Files leave out what all published models share; only those of 128 experts have no norm of
    heads."""
    config = decoder_config(header, "expert_count", _WINDOW) | experts_config(header)
    return config | {
        "intermediate_size_mlp": config["intermediate_size"],
        "intermediate_size": config["moe_intermediate_size"],
        "attention_chunk_size": header.integer(_WINDOW, CHUNK),
        "interleave_moe_layer_step": header.integer(_STEP),
        "use_qk_norm": config["num_experts"] != 128,
    }


def _states(spec: DecoderSpec) -> dict[str, Any]:
    sparse = [n for n, layer in enumerate(spec.layers) if isinstance(layer.feed_forward, MoE)]
    return {_STEP: sparse[0] + 1} if sparse else {}


_LAYER = f"model.layers.{{}}.{_MODULE}"
_EXPERTS = {
    f"blk.{{}}.ffn_{name}_{kind}": f"{_LAYER}.{module}.{name}_proj"
    for name in ("gate", "up", "down")
    for kind, module in (("exps", "experts.{}"), ("shexp", "shared_expert"))
}
_DENSE = {f"blk.{{}}.ffn_{name}": f"{_LAYER}.{name}_proj" for name in ("gate", "up", "down")}
GGUF = GGUFArchitecture(
    "Llama4ForCausalLM",
    {**DECODER_TENSORS, **_DENSE, **_EXPERTS, "blk.{}.ffn_gate_inp": f"{_LAYER}.router"},
    config=_gguf_config,
    states=_states,
)
