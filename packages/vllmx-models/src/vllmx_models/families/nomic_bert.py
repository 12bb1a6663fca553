"""Nomic BERT (nomic-embed-text, arXiv:2402.01613; version 2, arXiv:2502.07972), Jina's embedders v3
(arXiv:2409.10173) and GTE (gte-multilingual, gte-v1.5, arXiv:2407.19669): BERT's post-norm layers
with RoPE, and most with a gated feed-forward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vllmx_core.model import Activation, Array
from vllmx_core.ops.experts import ExpertsSpec
from vllmx_core.ops.route import RouteSpec
from vllmx_core.records import Record
from vllmx_core.weights.spec import PartSpec, RowRuns, WeightSpec

from vllmx_models.blocks.attention import AttentionNames
from vllmx_models.blocks.dense import MLPNames
from vllmx_models.blocks.layer import FeedForward, LayerNames, LayerScope
from vllmx_models.blocks.moe import EachExpert, EitherExperts, MoE, Router
from vllmx_models.blocks.norms import LayerNorms, Norm
from vllmx_models.blocks.rope import read_rope
from vllmx_models.config import ConfigReader
from vllmx_models.configs.decoder import attention_mixer, dense_mlp, head_size, num_layers
from vllmx_models.configs.moe import num_experts
from vllmx_models.formats.gguf.architecture import GGUFArchitecture
from vllmx_models.formats.gguf.encoder_models import encoder_config
from vllmx_models.formats.gguf.hyperparameters import GGUFHeader
from vllmx_models.trunks.decoder import LayerSpec
from vllmx_models.trunks.encoder import EncoderNames, EncoderSpec, classifier, embedder

_NOMIC = EncoderNames(
    embedding_norm="emb_ln", layers="encoder.layers", prefixes=("nomic_bert.", "bert.")
)
_NOMIC_ATTENTION = AttentionNames("attn", qkv="Wqkv", o="out_proj")
_NOMIC_MLP = MLPNames("mlp", gate="fc12", up="fc11", down="fc2")
_NOMIC_NORMS = LayerNorms(None, "norm1", None, "norm2")
_NOMIC_KEYS: Mapping[str, str] = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
    "rotary_emb_base": "rope_theta",
}
_NOMIC_FIXED: Mapping[str, Any] = {
    "prenorm": False,
    "rotary_emb_interleaved": False,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "parallel_block": False,
    "expert_choice_router": False,
    "moe_normalize_expert_weights": False,
    "num_shared_experts": 0,
}
"""Required values of keys in published configs; others mean a different model."""
_JINA = EncoderNames(embedding_norm="emb_ln", layers="encoder.layers", prefixes=("roberta.",))
_JINA_ATTENTION = AttentionNames("mixer", qkv="Wqkv", o="out_proj")
_NEW_FIXED: Mapping[str, Any] = {
    "layer_norm_type": "layer_norm",
    "logn_attention_clip1": False,
    "logn_attention_scale": False,
    "pack_qkv": True,
    "position_embedding_type": "rope",
}
"""Required values of keys in GTE's first configs."""
_GTE = EncoderNames(prefixes=("gte.", "new."))
_GTE_ATTENTION = AttentionNames("attention", qkv="qkv_proj", o="o_proj")
_GTE_MLP = MLPNames("mlp", up_gate="up_gate_proj", down="down_proj")
_GTE_NORMS = LayerNorms(None, "attn_ln", None, "mlp_ln")


def _nomic_config(read: ConfigReader) -> ConfigReader:
    """Reads old and new configs by the current key names."""
    _check(read, _NOMIC_FIXED)
    renamed = {_NOMIC_KEYS.get(key, key): value for key, value in read.config.items()}
    return ConfigReader(renamed, read.architecture)


def _gte_config(read: ConfigReader) -> ConfigReader:
    """Reads a config of transformers, or of the code that came with GTE's first files and called
    the model "new". That one scales rotations by a fixed NTK: the base times a factor, and the
    frequencies in addition by its root (https://kexue.fm/archives/9706)."""
    config = read.config
    if config.get("model_type") != "new":
        return read
    _check(read, _NEW_FIXED)
    theta = read.number("rope_theta", 10000.0)
    changed: dict[str, Any] = {"rope_theta": theta}
    scaling = config.get("rope_scaling")
    if isinstance(scaling, Mapping) and scaling.get("type") == "ntk":
        factor = ConfigReader(scaling, read.architecture).number("factor")
        if scaling.get("mixed_b") is not None:
            raise read.error("rope_scaling", "must have no mixed_b")
        slower = factor ** (2 / head_size(read))
        scaling = {"rope_type": "linear", "factor": slower}
        changed = {"rope_theta": theta * factor, "rope_scaling": scaling}
    return ConfigReader({**config, **changed}, read.architecture)


def _check(read: ConfigReader, fixed: Mapping[str, Any]) -> None:
    """Raises UnsupportedModelError if a key has another value."""
    for key, value in fixed.items():
        if read.config.get(key, value) not in (value, None):
            raise read.error(key, f"must be {value}")


class ExpertRows(Record):
    """Two tensors (X * F, E) with the experts of a layer; the second holds transposes."""

    intermediate_size: int  # F

    def first(self, module: str, expert: int, rows: int) -> tuple[PartSpec, ...]:
        return (PartSpec(f"{module}.experts.mlp.w1", rows, runs=self._runs(expert)),)

    def down(self, module: str, expert: int, rows: int) -> tuple[PartSpec, ...]:
        runs = self._runs(expert)
        return (PartSpec(f"{module}.experts.mlp.w2", rows, runs=runs, turned=True),)

    def _runs(self, expert: int) -> RowRuns:
        return RowRuns(expert * self.intermediate_size, self.intermediate_size, 1)


class BiasedExperts(Record):
    """Experts, and one vector that is added to the sum of those that a token goes to. It is read as
    a table of one row, never quantised: the token type of all tokens is 0."""

    experts: MoE

    def weights(self, names: LayerNames) -> tuple[WeightSpec, ...]:
        size = names.hidden_size
        bias = PartSpec(f"{names.within('mlp')}.experts.bias", 1)
        table = WeightSpec(
            f"{names.ours}.experts_bias", "embedding", (bias,), size, role="router", shape=(size,)
        )
        return (*self.experts.weights(names), table)

    def record(self, x: Array, scope: LayerScope) -> Array:
        ops = scope.ops
        bias = ops.embedding(scope.step.token_types, scope.weight("experts_bias"))
        return ops.add(self.experts.record(x, scope), bias)


def _nomic(read: ConfigReader) -> EncoderSpec:
    """Version 2 has a feed-forward without a gate, biases, and experts in every other layer."""
    read = _nomic_config(read)
    read.refuse_quirks("num_experts")
    gated = read.config.get("activation_function") in (None, "swiglu")
    activation = read.activation("hidden_act" if gated else "activation_function", "silu")
    mlp = dense_mlp(
        read,
        activation,
        gated=gated,
        bias=read.flag("mlp_fc1_bias", False),
        down_bias=read.flag("mlp_fc2_bias", False),
        names=_NOMIC_MLP if gated else replace(_NOMIC_MLP, up=read.config.get("mlp_up", "fc1")),
    )
    bias = read.flag("qkv_proj_bias", False)
    layer = _layer(read, _NOMIC_ATTENTION, mlp, _NOMIC_NORMS, 1000.0, bias=bias)
    spec = _spec(read, layer, _NOMIC, token_types=2)
    every = read.integer("moe_every_n_layers", 0, low=0)
    if not every:
        return spec
    if gated or spec.token_types > 1:
        key = "activation_function" if gated else "type_vocab_size"
        raise read.error(key, "is not known here in a model with experts")
    experts = replace(layer, feed_forward=_nomic_experts(read, activation))
    layers = (experts if number % every == 1 else layer for number in range(len(spec.layers)))
    return replace(spec, layers=tuple(layers))


def _nomic_experts(read: ConfigReader, activation: Activation) -> FeedForward:
    size, count = read.integer("intermediate_size"), num_experts(read)
    moe = MoE(
        count,
        size,
        Router(RouteSpec(read.integer("moe_top_k", 1, high=count)), "router.layer"),
        ExpertsSpec(activation, gated=False),
        EitherExperts(EachExpert(None, "w1", "w2"), ExpertRows(size)),
    )
    return BiasedExperts(moe) if read.flag("moe_bias", True) else moe


def _jina(read: ConfigReader) -> EncoderSpec:
    read.refuse_quirks()
    activation, names = read.activation("hidden_act", "gelu"), replace(_NOMIC_MLP, up="fc1")
    mlp = dense_mlp(read, activation, gated=False, bias=True, names=names)
    layer = _layer(read, _JINA_ATTENTION, mlp, _NOMIC_NORMS, 20_000.0, bias=True)
    return _spec(read, layer, _JINA, token_types=1)


def _gte(read: ConfigReader) -> EncoderSpec:
    read = _gte_config(read)
    read.refuse_quirks("position_embedding_type", "pack_qkv")
    mlp = dense_mlp(read, read.activation("hidden_act", "gelu"), down_bias=True, names=_GTE_MLP)
    layer = _layer(read, _GTE_ATTENTION, mlp, _GTE_NORMS, 160_000.0, bias=True)
    return _spec(read, layer, _GTE, token_types=1)


def _layer(
    read: ConfigReader,
    names: AttentionNames,
    mlp: Any,
    norms: LayerNorms,
    theta: float,
    *,
    bias: bool,
) -> LayerSpec:
    size = head_size(read)
    positions = read.integer("max_position_embeddings")
    rope = read_rope(read.config, size, max_positions=positions, default_theta=theta)
    mixer = attention_mixer(
        read, size, rope=rope, qkv_bias=bias, o_bias=bias, both_ways=True, names=names
    )
    return LayerSpec(mixer, mlp, norms)


def _spec(
    read: ConfigReader, layer: LayerSpec, names: EncoderNames, *, token_types: int
) -> EncoderSpec:
    return EncoderSpec(
        vocab_size=read.integer("vocab_size"),
        hidden_size=read.integer("hidden_size"),
        layers=(layer,) * num_layers(read),
        max_model_len=read.integer("max_position_embeddings"),
        dtype=read.dtype(),
        norm=Norm(read.number("layer_norm_eps", 1e-12), "layer", bias=True),
        sums_normed=True,
        token_types=read.integer("type_vocab_size", token_types, low=0, high=1 << 20),
        names=names,
    )


nomic_bert = embedder(_nomic, "NomicBert")
nomic_bert_classifier = classifier(_nomic, "NomicBert", "pooler.dense", "classifier")
jina_v3 = embedder(_jina, "JinaEmbeddingsV3")
jina_v3_classifier = classifier(
    _jina, "JinaEmbeddingsV3", "classifier.dense", "classifier.out_proj"
)
gte = embedder(_gte, "Gte", "cls")
gte_classifier = classifier(_gte, "Gte", "pooler.dense", "classifier")


_LAYER = "encoder.layers.{}"


def _gguf_config(header: GGUFHeader) -> dict[str, Any]:
    """Files of models with experts have no bias of them."""
    config = {
        **encoder_config(header, "expert_count"),
        "rope_theta": header.number("rope.freq_base", 1000.0),
    }
    if not header.has("expert_count"):
        return config
    return config | {
        "activation_function": "gelu",
        "qkv_proj_bias": True,
        "mlp_fc1_bias": True,
        "mlp_fc2_bias": True,
        "mlp_up": _NOMIC_MLP.up,
        "moe_every_n_layers": header.integer("moe_every_n_layers"),
        "num_experts": header.integer("expert_count"),
        "moe_top_k": header.integer("expert_used_count"),
        "moe_bias": False,
    }


_TENSORS: Mapping[str, str] = {
    "token_embd": "embeddings.word_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "token_embd_norm": "emb_ln",
    "blk.{}.attn_qkv": f"{_LAYER}.attn.Wqkv",
    "blk.{}.attn_output": f"{_LAYER}.attn.out_proj",
    "blk.{}.attn_output_norm": f"{_LAYER}.norm1",
    "blk.{}.ffn_up": f"{_LAYER}.mlp.fc11",
    "blk.{}.ffn_gate": f"{_LAYER}.mlp.fc12",
    "blk.{}.ffn_down": f"{_LAYER}.mlp.fc2",
    "blk.{}.ffn_gate_inp": f"{_LAYER}.mlp.router.layer",
    "blk.{}.ffn_up_exps": f"{_LAYER}.mlp.experts.{{}}.w1",
    "blk.{}.ffn_down_exps": f"{_LAYER}.mlp.experts.{{}}.w2",
    "blk.{}.layer_output_norm": f"{_LAYER}.norm2",
}
GGUF = GGUFArchitecture("NomicBertModel", _TENSORS, config=_gguf_config)
JINA_GGUF = GGUFArchitecture(
    "JinaEmbeddingsV3Model",
    {
        **_TENSORS,
        "blk.{}.attn_qkv": f"{_LAYER}.mixer.Wqkv",
        "blk.{}.attn_output": f"{_LAYER}.mixer.out_proj",
        "blk.{}.ffn_up": f"{_LAYER}.mlp.fc1",
    },
    config=lambda header: {
        **encoder_config(header),
        "rope_theta": header.number("rope.freq_base", 20_000.0),
    },
)
