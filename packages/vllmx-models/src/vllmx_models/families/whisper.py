"""Whisper (WhisperForConditionalGeneration, arXiv 2212.04356): an encoder of log-mel frames, and a
decoder that reads it by cross-attention. Positions of text are learned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllmx_core.model import Array, FeatureSpec, Ops, StepInputs, Weight
from vllmx_core.weights.spec import PartSpec, WeightSpec

from vllmx_models.blocks.attention import AttentionMixer, AttentionNames
from vllmx_models.blocks.cross import CrossThenMLP
from vllmx_models.blocks.dense import DenseMLP, MLPNames
from vllmx_models.blocks.norms import LayerNorms, Norm
from vllmx_models.config import ConfigReader
from vllmx_models.towers.whisper import EPS, CrossTower
from vllmx_models.trunks.decoder import Decoder, DecoderSpec, LayerSpec, ModelNames

_ATTENTION = AttentionNames(o="out_proj")
_MLP = MLPNames("", up="fc1", down="fc2")
_NORMS = LayerNorms("self_attn_layer_norm", before_mlp=None)
_NAMES = ModelNames(
    "model.decoder.embed_tokens", "model.decoder.layers", "model.decoder.layer_norm", "proj_out"
)


class WhisperDecoder(Decoder):
    """A decoder that adds a learned vector of its position to each token."""

    def trunk_weights(self) -> tuple[WeightSpec, ...]:
        """See `Decoder.trunk_weights`."""
        table = (PartSpec("model.decoder.embed_positions.weight", self.spec.max_model_len),)
        positions = WeightSpec("positions", "embedding", table, self.spec.hidden_size)
        return (*super().trunk_weights(), positions)

    def first_input(self, ops: Ops, w: Mapping[str, Weight], step: StepInputs) -> Array:
        """See `Decoder.first_input`."""
        x = super().first_input(ops, w, step)
        return ops.add(x, ops.embedding(step.positions, w["positions"]))


def whisper(config: Mapping[str, Any]) -> WhisperDecoder:
    """All sizes from tiny to large-v3 and turbo."""
    read = ConfigReader(config, "WhisperForConditionalGeneration")
    size, activation = read.integer("d_model"), read.activation("activation_function", "gelu")
    if read.flag("scale_embedding", False):
        raise read.error("scale_embedding", "must be false")
    layers = read.integer("decoder_layers", high=1024)
    heads = whole_heads(read, "decoder_attention_heads", size)
    norm = Norm(EPS, "layer", bias=True)
    mlp = DenseMLP(read.integer("decoder_ffn_dim"), activation, gated=False, bias=True, names=_MLP)
    head = size // heads
    mixer = AttentionMixer(
        heads, heads, head, qkv_bias=True, k_bias=False, o_bias=True, names=_ATTENTION
    )
    layer = LayerSpec(mixer, CrossThenMLP(heads, head, mlp, norm), _NORMS)
    positions = read.integer("max_source_positions", 1500, high=1 << 14)
    spec = DecoderSpec(
        vocab_size=read.integer("vocab_size"),
        hidden_size=size,
        layers=(layer,) * layers,
        max_model_len=read.integer("max_target_positions", 448),
        dtype=read.dtype(),
        norm=norm,
        tied_embeddings=read.flag("tie_word_embeddings", True),
        features=FeatureSpec(2 * layers, size, crossed=positions),
        names=_NAMES,
    )
    tower = CrossTower(
        mels=read.integer("num_mel_bins", 80, high=1024),
        depth=read.integer("encoder_layers", high=1024),
        hidden_size=size,
        num_heads=whole_heads(read, "encoder_attention_heads", size),
        mlp_size=read.integer("encoder_ffn_dim"),
        activation=activation,
        positions=positions,
        module="model.encoder",
        num_decoder_layers=layers,
    )
    return WhisperDecoder(spec, tower)


def whole_heads(read: ConfigReader, key: str, size: int, *default: int) -> int:
    """The number of heads, which must divide a width."""
    heads = read.integer(key, *default, high=1 << 16)
    if size % heads:
        raise read.error(key, f"must divide the width {size}")
    return heads
