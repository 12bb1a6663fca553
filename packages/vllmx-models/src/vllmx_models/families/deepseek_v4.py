"""DeepSeek V4 Flash and Pro: hyper-connections, compressed attention, and experts that the first
layers choose by a table of token ids.

All layers attend to a window. Some also attend to one entry for each 4 tokens, among which an
indexer picks ("compressed sparse"), others to one for each 128 ("heavily compressed").
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from vllmx_core.errors import listing
from vllmx_core.model import HyperSpec
from vllmx_core.ops.experts import ExpertsSpec
from vllmx_core.ops.route import RouteSpec

from vllmx_models.blocks.compressed import CompressedMixer, Compressor, EntryIndexer
from vllmx_models.blocks.dense import DenseMLP, MLPNames
from vllmx_models.blocks.hyper_connections import HyperConnections
from vllmx_models.blocks.moe import EachExpert, MoE, Router
from vllmx_models.blocks.norms import LayerNorms
from vllmx_models.blocks.rope import Rope, read_rope
from vllmx_models.config import ConfigReader
from vllmx_models.configs.decoder import decoder_spec, num_layers
from vllmx_models.configs.hybrid import hybrid_layers, layer_kinds
from vllmx_models.configs.moe import chosen_experts, num_experts
from vllmx_models.trunks.decoder import Decoder, ModelNames

POSITIONS = 1 << 20
SLIDING, SPARSE, HEAVY = KINDS = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)
RATIOS = {SPARSE: 4, HEAVY: 128}
"""Tokens of an entry; `compress_ratios` names the kinds of layers by them."""
FEED_FORWARDS = ("hash_moe", "moe")
HASH_LAYERS = 3
SCORES: Mapping[str, Literal["softmax", "sigmoid", "sqrt_softplus"]] = {
    "sqrtsoftplus": "sqrt_softplus",
    "softmax": "softmax",
    "sigmoid": "sigmoid",
}
DEFAULTS: Mapping[str, Any] = {
    "compress_rope_theta": 160000.0,
    "hc_eps": 1e-6,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "head_dim": 512,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 512,
    "max_position_embeddings": POSITIONS,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "num_key_value_heads": 1,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "q_lora_rank": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 1.5,
    "sliding_window": 128,
    "swiglu_limit": 10.0,
}
"""The defaults of transformers for absent keys."""
HONOURED = ("layer_types", "num_local_experts", "partial_rotary_factor", "sliding_window")
NAMES = ModelNames(
    "embed",
    "layers",
    "norm",
    "head",
    also=("", "model."),
    embedding_also="model.embed_tokens",
)
"""The published names; transformers adds "model." and renames the table."""
SHARED = MLPNames("ffn.shared_experts", "w1", "w3", "w2")


def deepseek_v4(config: Mapping[str, Any]) -> Decoder:
    """Layers of three kinds, two kinds of routers."""
    given = {key: value for key, value in config.items() if value is not None}
    read = ConfigReader({**DEFAULTS, **given}, "DeepseekV4ForCausalLM")
    read.refuse_quirks(*HONOURED)
    routers = {kind: _moe(read, hashed=kind == "hash_moe") for kind in FEED_FORWARDS}
    layers = hybrid_layers(
        _kinds(read),
        _mixers(read),
        [routers[kind] for kind in _feed_forward_kinds(read)],
        LayerNorms("attn_norm", None, "ffn_norm"),
    )
    hyper = HyperSpec(
        read.integer("hc_mult", low=2, high=64),
        read.integer("hc_sinkhorn_iters", high=1024),
        read.number("hc_eps"),
        read.number("rms_norm_eps"),
    )
    return Decoder(
        decoder_spec(
            read,
            layers,
            default_positions=POSITIONS,
            names=NAMES,
            hyper=HyperConnections(hyper),
        )
    )


def _kinds(read: ConfigReader) -> list[str]:
    """The kind of each layer; published configs name it by the tokens of an entry."""
    count = num_layers(read)
    by_ratio = {0: SLIDING, **{ratio: kind for kind, ratio in RATIOS.items()}}
    default = [SPARSE if layer > 1 and layer % 2 else HEAVY for layer in range(count)]
    if read.has("compress_ratios"):
        ratios = read.integers("compress_ratios", count)
        if any(ratio not in by_ratio for ratio in ratios):
            raise read.error("compress_ratios", f"must be a list of {listing(by_ratio)}")
        default = [by_ratio[ratio] for ratio in ratios]
    return layer_kinds(read, KINDS, default)


def _feed_forward_kinds(read: ConfigReader) -> list[str]:
    hashed = read.integer("num_hash_layers", HASH_LAYERS, low=0)
    default = ["hash_moe" if layer < hashed else "moe" for layer in range(num_layers(read))]
    return layer_kinds(read, FEED_FORWARDS, default, "mlp_layer_types")


def _mixers(read: ConfigReader) -> dict[str, CompressedMixer]:
    if read.integer("num_key_value_heads") != 1:
        raise read.error("num_key_value_heads", "must be 1: all heads read one row")
    heads, size = read.integer("num_attention_heads", high=1 << 16), read.integer("head_dim")
    groups = read.integer("o_groups", high=heads)
    if heads % groups:
        raise read.error("o_groups", f"must divide num_attention_heads = {heads}")
    main, compressed = _ropes(read, size)
    ratios = {kind: _ratio(read, kind) for kind in RATIOS}
    indexer = EntryIndexer(
        read.integer("index_n_heads", high=1 << 16),
        read.integer("index_head_dim", low=main.rotary_dim, high=4096),
        read.integer("index_topk", high=1 << 20),
    )

    def mixer(rope: Rope, *entries: Any) -> CompressedMixer:
        return CompressedMixer(
            heads,
            size,
            read.integer("q_lora_rank"),
            read.integer("sliding_window", low=2, high=1 << 16),
            groups,
            read.integer("o_lora_rank"),
            rope,
            read.number("rms_norm_eps"),
            *entries,
        )

    return {
        SLIDING: mixer(main),
        SPARSE: mixer(compressed, Compressor(ratios[SPARSE], True), indexer),
        HEAVY: mixer(compressed, Compressor(ratios[HEAVY], False)),
    }


def _ratio(read: ConfigReader, kind: str) -> int:
    return read.part("compress_rates").integer(kind, RATIOS[kind], low=2, high=1 << 16)


def _ropes(read: ConfigReader, size: int) -> tuple[Rope, Rope]:
    """The RoPE of layers with a window alone, and that of layers with entries, which is scaled."""
    share = read.number("partial_rotary_factor", 64 / 512)
    rotary = read.integer("qk_rope_head_dim", int(size * share), high=size)
    given = read.config.get("rope_parameters") or read.config.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise read.error("rope_scaling", "must be an object")
    if "main" not in given:
        given = {"compress": {**given, "rope_theta": read.number("compress_rope_theta")}}
    positions, found = read.integer("max_position_embeddings"), []
    for kind, theta in (("main", "rope_theta"), ("compress", "compress_rope_theta")):
        parameters = dict(given.get(kind) or {})
        parameters.pop("partial_rotary_factor", None)  # `rotary` has it already
        if "yarn" in (parameters.get("rope_type"), parameters.get("type")):
            parameters.setdefault("attention_factor", 1.0)  # never warmed by the authors' code
        rope = read_rope(
            {"rope_parameters": {"rope_theta": read.number(theta), **parameters}},
            rotary,
            max_positions=positions,
        )
        assert rope is not None
        found.append(rope)
    return found[0], found[1]


def _moe(read: ConfigReader, *, hashed: bool) -> MoE:
    """Clamped experts, and a clamped MLP that every token goes through."""
    if read.activation() != "silu":
        raise read.error("hidden_act", "must be silu, which the clamped gate is made of")
    if not read.flag("norm_topk_prob", True):
        raise read.error("norm_topk_prob", "must be true")
    score = read.config.get("scoring_func", "sqrtsoftplus")
    if score not in SCORES:
        raise read.error("scoring_func", f"is not known here; known: {', '.join(SCORES)}")
    count, limit = num_experts(read, ("n_routed_experts",)), read.number("swiglu_limit")
    route = RouteSpec(
        chosen_experts(read, count),
        SCORES[score],
        renormalise=True,
        eps=1e-20,
        scale=read.number("routed_scaling_factor"),
    )
    inner = read.integer("moe_intermediate_size")
    every = read.integer("n_shared_experts", low=0, high=256) * inner
    return MoE(
        count,
        inner,
        Router(
            route,
            choice_bias=None if hashed else "gate.bias",
            table=("gate.tid2eid", read.integer("vocab_size")) if hashed else None,
        ),
        ExpertsSpec(clamp=limit, alpha=None),
        EachExpert("w1", "w3", "w2"),
        shared=DenseMLP(every, names=SHARED, limit=limit) if every else None,
        module="ffn",
    )
