"""Nomic BERT (nomic-embed-text, arXiv:2402.01613) and GTE (gte-multilingual, gte-v1.5,
arXiv:2407.19669): BERT's post-norm layers with RoPE and a gated feed-forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllmx_models.blocks.attention import AttentionNames
from vllmx_models.blocks.dense import MLPNames
from vllmx_models.blocks.norms import LayerNorms, Norm
from vllmx_models.blocks.rope import read_rope
from vllmx_models.config import ConfigReader
from vllmx_models.configs.decoder import attention_mixer, dense_mlp, head_size, num_layers
from vllmx_models.formats.gguf.architecture import GGUFArchitecture
from vllmx_models.formats.gguf.encoder_models import encoder_config
from vllmx_models.trunks.decoder import LayerSpec
from vllmx_models.trunks.encoder import Encoder, EncoderNames, EncoderSpec
from vllmx_models.trunks.pooling_heads import ClassHead, num_labels, pooled

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
    "activation_function": "swiglu",
    "qkv_proj_bias": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "prenorm": False,
    "rotary_emb_interleaved": False,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "parallel_block": False,
    "moe_every_n_layers": 0,
}
"""Required values of keys in published configs; others mean a different model."""
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


def nomic_bert(config: Mapping[str, Any]) -> Encoder:
    """An embedder with mean pooling."""
    spec = _nomic(_nomic_config(config, "NomicBertModel"))
    return Encoder(spec, pooled(config, spec.hidden_size, "mean"))


def nomic_bert_classifier(config: Mapping[str, Any]) -> Encoder:
    """A classifier on the first token."""
    read = _nomic_config(config, "NomicBertForSequenceClassification")
    head = ClassHead(num_labels(read), "pooler.dense", "classifier")
    return Encoder(_nomic(read), head)


def gte(config: Mapping[str, Any]) -> Encoder:
    """An embedder that takes the first token's vector."""
    spec = _gte(_gte_config(config, "GteModel"))
    return Encoder(spec, pooled(config, spec.hidden_size, "cls"))


def gte_classifier(config: Mapping[str, Any]) -> Encoder:
    """A classifier on the first token."""
    read = _gte_config(config, "GteForSequenceClassification")
    return Encoder(_gte(read), ClassHead(num_labels(read), "pooler.dense", "classifier"))


def _nomic_config(config: Mapping[str, Any], architecture: str) -> ConfigReader:
    """Reads old and new configs by the current key names."""
    _check(ConfigReader(config, architecture), _NOMIC_FIXED)
    renamed = {_NOMIC_KEYS.get(key, key): value for key, value in config.items()}
    return ConfigReader(renamed, architecture)


def _gte_config(config: Mapping[str, Any], architecture: str) -> ConfigReader:
    """Reads a config of transformers, or of the code that came with GTE's first files and called
    the model "new". That one scales rotations by a fixed NTK: the base times a factor, and the
    frequencies in addition by its root (https://kexue.fm/archives/9706)."""
    read = ConfigReader(config, architecture)
    if config.get("model_type") != "new":
        return read
    _check(read, _NEW_FIXED)
    theta = read.number("rope_theta", 10000.0)
    changed: dict[str, Any] = {"rope_theta": theta}
    scaling = config.get("rope_scaling")
    if isinstance(scaling, Mapping) and scaling.get("type") == "ntk":
        factor = ConfigReader(scaling, architecture).number("factor")
        if scaling.get("mixed_b") is not None:
            raise read.error("rope_scaling", "must have no mixed_b")
        slower = factor ** (2 / head_size(read))
        scaling = {"rope_type": "linear", "factor": slower}
        changed = {"rope_theta": theta * factor, "rope_scaling": scaling}
    return ConfigReader({**config, **changed}, architecture)


def _check(read: ConfigReader, fixed: Mapping[str, Any]) -> None:
    """Raises UnsupportedModelError if a key has another value."""
    for key, value in fixed.items():
        if read.config.get(key, value) not in (value, None):
            raise read.error(key, f"must be {value}")


def _nomic(read: ConfigReader) -> EncoderSpec:
    read.refuse_quirks()
    mlp = dense_mlp(read, read.activation("hidden_act", "silu"), names=_NOMIC_MLP)
    layer = _layer(read, _NOMIC_ATTENTION, mlp, _NOMIC_NORMS, 1000.0, bias=False)
    return _spec(read, layer, _NOMIC, token_types=2)


def _gte(read: ConfigReader) -> EncoderSpec:
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


_LAYER = "encoder.layers.{}"
GGUF = GGUFArchitecture(
    "NomicBertModel",
    {
        "token_embd": "embeddings.word_embeddings",
        "token_types": "embeddings.token_type_embeddings",
        "token_embd_norm": "emb_ln",
        "blk.{}.attn_qkv": f"{_LAYER}.attn.Wqkv",
        "blk.{}.attn_output": f"{_LAYER}.attn.out_proj",
        "blk.{}.attn_output_norm": f"{_LAYER}.norm1",
        "blk.{}.ffn_up": f"{_LAYER}.mlp.fc11",
        "blk.{}.ffn_gate": f"{_LAYER}.mlp.fc12",
        "blk.{}.ffn_down": f"{_LAYER}.mlp.fc2",
        "blk.{}.layer_output_norm": f"{_LAYER}.norm2",
    },
    config=lambda header: {
        **encoder_config(header),
        "rope_theta": header.number("rope.freq_base", 1000.0),
    },
)
