"""DistilBERT (DistilBertModel, DistilBertForSequenceClassification): BERT with half of its layers
and without token types, as an embedder and as a classifier."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllmx_models.blocks.attention import AttentionNames
from vllmx_models.blocks.dense import MLPNames
from vllmx_models.blocks.norms import LayerNorms, Norm
from vllmx_models.config import ConfigReader
from vllmx_models.configs.decoder import attention_mixer, dense_mlp, head_size, num_layers
from vllmx_models.trunks.decoder import LayerSpec
from vllmx_models.trunks.encoder import Encoder, EncoderNames, EncoderSpec
from vllmx_models.trunks.pooling_heads import ClassHead, num_labels, pooled

KEYS = {
    "hidden_size": ("dim", 768),
    "num_attention_heads": ("n_heads", 12),
    "num_hidden_layers": ("n_layers", 6),
    "intermediate_size": ("hidden_dim", 3072),
}
"""What others call these keys of config.json, and what transformers takes where it is silent."""
ATTENTION = AttentionNames("attention", "q_lin", "k_lin", "v_lin", "out_lin")
MLP = MLPNames("ffn", up="lin1", down="lin2")
NORMS = LayerNorms(None, "sa_layer_norm", None, "output_layer_norm")
NAMES = EncoderNames(layers="transformer.layer", prefixes=("distilbert.",))


def distilbert(config: Mapping[str, Any]) -> Encoder:
    """The mean of a text's tokens, unless its modules say otherwise."""
    spec = trunk(config, "DistilBertModel")
    return Encoder(spec, pooled(config, spec.hidden_size, "mean"))


def distilbert_classifier(config: Mapping[str, Any]) -> Encoder:
    """Scores of labels from the first token."""
    architecture = "DistilBertForSequenceClassification"
    labels = num_labels(ConfigReader(config, architecture))
    head = ClassHead(labels, "pre_classifier", "classifier", activation="relu")
    return Encoder(trunk(config, architecture), head)


def trunk(config: Mapping[str, Any], architecture: str) -> EncoderSpec:
    """Positions have a table, and a norm of the stream stands behind each block."""
    named = {ours: config.get(theirs, default) for ours, (theirs, default) in KEYS.items()}
    read = ConfigReader({**config, **named}, architecture)
    read.refuse_quirks()
    rows = read.integer("max_position_embeddings", 512, high=1 << 20)
    attention = attention_mixer(
        read, head_size(read), qkv_bias=True, o_bias=True, both_ways=True, names=ATTENTION
    )
    activation = read.activation("activation", "gelu")
    mlp = dense_mlp(read, activation, gated=False, bias=True, names=MLP)
    return EncoderSpec(
        vocab_size=read.integer("vocab_size", 30522),
        hidden_size=read.integer("hidden_size"),
        layers=(LayerSpec(attention, mlp, NORMS),) * num_layers(read),
        max_model_len=rows,
        dtype=read.dtype(),
        norm=Norm(1e-12, "layer", bias=True),
        sums_normed=True,
        positions=rows,
        names=NAMES,
    )
