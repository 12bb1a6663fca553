"""ELECTRA (ElectraModel, ElectraForSequenceClassification): BERT that was trained to find replaced
tokens, as an embedder and as a classifier."""

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

ATTENTION = AttentionNames("attention", "self.query", "self.key", "self.value", "output.dense")
MLP = MLPNames("", up="intermediate.dense", down="output.dense")
NORMS = LayerNorms(None, "attention.output.LayerNorm", None, "output.LayerNorm")
NAMES = EncoderNames(prefixes=("electra.",))


def electra(config: Mapping[str, Any]) -> Encoder:
    """The mean of a text's tokens, unless its modules say otherwise."""
    spec = trunk(config, "ElectraModel")
    return Encoder(spec, pooled(config, spec.hidden_size, "mean"))


def electra_classifier(config: Mapping[str, Any]) -> Encoder:
    """Scores of labels from the first token."""
    architecture = "ElectraForSequenceClassification"
    labels = num_labels(ConfigReader(config, architecture))
    head = ClassHead(labels, "classifier.dense", "classifier.out_proj", activation="gelu")
    return Encoder(trunk(config, architecture), head)


def trunk(config: Mapping[str, Any], architecture: str) -> EncoderSpec:
    """Positions have a table, and a norm of the stream follows each block."""
    read = ConfigReader(config, architecture)
    read.refuse_quirks()
    size = read.integer("hidden_size")
    if read.integer("embedding_size", size) != size:
        raise read.error("embedding_size", f"must be hidden_size = {size}")
    rows = read.integer("max_position_embeddings", 512, high=1 << 20)
    attention = attention_mixer(
        read, head_size(read), qkv_bias=True, o_bias=True, both_ways=True, names=ATTENTION
    )
    activation = read.activation("hidden_act", "gelu")
    mlp = dense_mlp(read, activation, gated=False, bias=True, names=MLP)
    return EncoderSpec(
        vocab_size=read.integer("vocab_size"),
        hidden_size=size,
        layers=(LayerSpec(attention, mlp, NORMS),) * num_layers(read),
        max_model_len=rows,
        dtype=read.dtype(),
        norm=Norm(read.number("layer_norm_eps", 1e-12), "layer", bias=True),
        sums_normed=True,
        positions=rows,
        token_types=read.integer("type_vocab_size", 2),
        names=NAMES,
    )
