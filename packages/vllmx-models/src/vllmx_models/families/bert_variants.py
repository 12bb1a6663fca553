"""Relatives of BERT: DistilBERT (arXiv:1910.01108) without token types, MPNet (arXiv:2004.09297)
with a learned bias of scores by distance in addition to positions, and Jina's embedders v2
(arXiv:2310.19923) with ALiBi instead of positions, and a gated feed-forward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vllmx_core.model import Activation

from vllmx_models.blocks.attention import AttentionMixer, AttentionNames
from vllmx_models.blocks.dense import MLPNames
from vllmx_models.blocks.norms import LayerNorms
from vllmx_models.blocks.position_bias import Alibi, LearnedBias
from vllmx_models.config import ConfigReader
from vllmx_models.configs.decoder import dense_mlp
from vllmx_models.families.bert import TENSORS, BertNames, bert_spec, masked
from vllmx_models.formats.gguf.architecture import GGUFArchitecture
from vllmx_models.formats.gguf.encoder_models import encoder_config
from vllmx_models.formats.gguf.hyperparameters import GGUFHeader
from vllmx_models.trunks.encoder import Encoder, EncoderNames, EncoderSpec, classifier, embedder

_DISTIL_NAMES = BertNames(
    AttentionNames("attention", "q_lin", "k_lin", "v_lin", "out_lin"),
    MLPNames("ffn", up="lin1", down="lin2"),
    LayerNorms(None, "sa_layer_norm", None, "output_layer_norm"),
    EncoderNames(layers="transformer.layer", prefixes=("distilbert.",)),
)
_DISTIL_KEYS: Mapping[str, str] = {
    "dim": "hidden_size",
    "n_heads": "num_attention_heads",
    "n_layers": "num_hidden_layers",
    "hidden_dim": "intermediate_size",
    "activation": "hidden_act",
}
_MPNET_NAMES = BertNames(
    AttentionNames("attention.attn", "q", "k", "v", "o"),
    norms=LayerNorms(None, "attention.LayerNorm", None, "output.LayerNorm"),
    others=EncoderNames(prefixes=("mpnet.",)),
)
_JINA_NAMES = BertNames(
    mlp=MLPNames("mlp", gate="gated_layers_w", up="gated_layers_v", down="wo"),
    norms=LayerNorms(None, "attention.output.LayerNorm", None, "mlp.layernorm"),
)
_JINA_GATES: Mapping[str, Activation] = {"geglu": "gelu", "reglu": "relu"}
_MPNET_FIRST = 2
_MPNET_BUCKETS = 32
"""Fixed in the model's code, whatever its config says."""


def _distilbert(read: ConfigReader) -> EncoderSpec:
    return bert_spec(_distil_keys(read), names=_DISTIL_NAMES, token_types=0)


def _distil_keys(read: ConfigReader) -> ConfigReader:
    named = {ours: read.config[key] for key, ours in _DISTIL_KEYS.items() if key in read.config}
    return ConfigReader({**read.config, **named}, read.architecture)


def _mpnet(read: ConfigReader) -> EncoderSpec:
    if read.integer("relative_attention_num_buckets", _MPNET_BUCKETS) != _MPNET_BUCKETS:
        raise read.error("relative_attention_num_buckets", f"must be {_MPNET_BUCKETS}")
    spec = bert_spec(read, _MPNET_FIRST, _MPNET_NAMES, token_types=0)
    bias = LearnedBias("encoder.relative_attention_bias.weight", spec.max_model_len)
    return _biased(spec, bias)


def _jina_bert(read: ConfigReader) -> EncoderSpec:
    if read.config.get("position_embedding_type", "alibi") != "alibi":
        raise read.error("position_embedding_type", "must be alibi")
    kind = read.config.get("feed_forward_type", "geglu")
    if kind not in _JINA_GATES:
        raise read.error("feed_forward_type", f"must be {' or '.join(_JINA_GATES)}")
    absolute = ConfigReader(
        {**read.config, "position_embedding_type": "absolute"}, read.architecture
    )
    spec = replace(bert_spec(absolute, names=_JINA_NAMES), positions=0)
    names = replace(_JINA_NAMES.mlp, gate_up=read.config.get("gate_up", "gated_layers"))
    mlp = dense_mlp(read, _JINA_GATES[kind], down_bias=True, names=names)
    return _biased(spec, Alibi(read.integer("num_attention_heads")), feed_forward=mlp)


def _biased(spec: EncoderSpec, bias: Alibi | LearnedBias, **changes: Any) -> EncoderSpec:
    """The encoder with a bias of scores, and other changes of its layers."""
    layer = spec.layers[0]
    assert isinstance(layer.mixer, AttentionMixer)
    biased = replace(layer, mixer=replace(layer.mixer, position_bias=bias), **changes)
    return replace(spec, layers=(biased,) * len(spec.layers))


distilbert = embedder(_distilbert, "DistilBert")
distilbert_classifier = classifier(
    _distilbert, "DistilBert", "pre_classifier", "classifier", "relu"
)
mpnet = embedder(_mpnet, "MPNet")
mpnet_classifier = classifier(_mpnet, "MPNet", "classifier.dense", "classifier.out_proj")
jina_bert = embedder(_jina_bert, "JinaBert")
jina_bert_classifier = classifier(_jina_bert, "JinaBert", "pooler.dense", "classifier")


def distilbert_words(config: Mapping[str, Any]) -> Encoder:
    """See `bert_words`."""
    read = _distil_keys(ConfigReader(config, "DistilBertForMaskedLM"))
    names = ("vocab_transform", "vocab_layer_norm", "vocab_projector.bias")
    return masked(distilbert(config), read, names)


def _gguf_config(header: GGUFHeader) -> dict[str, Any]:
    """Older files have the halves of the feed-forward's first matrix apart."""
    apart = "blk.0.ffn_gate.weight" in header.tensors
    packed = None if apart else _JINA_NAMES.mlp.up
    return {**encoder_config(header, "attention.max_alibi_bias"), "gate_up": packed}


GGUF = GGUFArchitecture(
    "JinaBertModel",
    {
        **TENSORS,
        "blk.{}.ffn_up": "encoder.layer.{}.mlp.gated_layers_v",
        "blk.{}.ffn_gate": "encoder.layer.{}.mlp.gated_layers_w",
        "blk.{}.ffn_down": "encoder.layer.{}.mlp.wo",
        "blk.{}.layer_output_norm": "encoder.layer.{}.mlp.layernorm",
    },
    config=_gguf_config,
)
