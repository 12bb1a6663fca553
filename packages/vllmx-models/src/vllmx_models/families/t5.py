"""T5 (T5ForConditionalGeneration, arXiv 1910.10683), its version 1.1 and Flan-T5, and mT5: an
encoder that reads the prompt, and a decoder that reads the encoder by cross-attention. Positions
are learned biases of attention scores by distance."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from vllmx_core.model import FeatureSpec
from vllmx_core.weights.spec import PartSpec

from vllmx_models.blocks.attention import AttentionMixer, AttentionNames
from vllmx_models.blocks.cross import CrossThenMLP
from vllmx_models.blocks.dense import DenseMLP, MLPNames
from vllmx_models.blocks.norms import LayerNorms, Norm
from vllmx_models.blocks.position_bias import LearnedBias
from vllmx_models.config import ConfigReader
from vllmx_models.formats.gguf.architecture import GGUFArchitecture
from vllmx_models.formats.gguf.hyperparameters import GGUFHeader
from vllmx_models.towers.text import TextTower
from vllmx_models.trunks.decoder import Decoder, DecoderSpec, LayerSpec, ModelNames

_ATTENTION = AttentionNames("layer.0.SelfAttention", q="q", k="k", v="v", o="o")
_CROSS = "layer.1.EncDecAttention"
_NAMES = ModelNames(
    "shared",
    "decoder.block",
    "decoder.final_layer_norm",
    embedding_also="decoder.embed_tokens",
)
_LENGTH = 512
"""Tokens of a prompt and of an answer where the config names no `n_positions`: the length of
pretraining. Biases know distances of any length."""


def t5(config: Mapping[str, Any]) -> Decoder:
    """Small to XXL. The first version scales the last hidden states, which its config tells by
    `tie_word_embeddings`."""
    read = ConfigReader(config, "T5ForConditionalGeneration")
    scales = read.flag("scale_decoder_outputs", config.get("tie_word_embeddings") is not False)
    return _encoder_decoder(read, "relu", scales=scales)


def mt5(config: Mapping[str, Any]) -> Decoder:
    """mT5 never scales the last hidden states."""
    read = ConfigReader(config, "MT5ForConditionalGeneration")
    return _encoder_decoder(read, "gated-gelu", scales=False)


def _tensors() -> Iterator[tuple[str, str]]:
    yield from (("token_embd", "shared"), ("output", "lm_head"))
    for short, module, mlp in (("enc", "encoder", 1), ("dec", "decoder", 2)):
        ours, theirs = f"{short}.blk.{{}}", f"{module}.block.{{}}.layer"
        yield f"{short}.output_norm", f"{module}.final_layer_norm"
        yield f"{ours}.attn_norm", f"{theirs}.0.layer_norm"
        yield f"{ours}.attn_rel_b", f"{theirs}.0.SelfAttention.relative_attention_bias"
        for one in "qkvo":
            yield f"{ours}.attn_{one}", f"{theirs}.0.SelfAttention.{one}"
            yield f"{ours}.cross_attn_{one}", f"{theirs}.1.EncDecAttention.{one}"
        yield f"{ours}.cross_attn_norm", f"{theirs}.1.layer_norm"
        yield f"{ours}.ffn_norm", f"{theirs}.{mlp}.layer_norm"
        for name, matrix in (("gate", "wi_0"), ("up", "wi_1"), ("down", "wo")):
            yield f"{ours}.ffn_{name}", f"{theirs}.{mlp}.DenseReluDense.{matrix}"


def _gguf_config(header: GGUFHeader) -> dict[str, Any]:
    """Files tell neither the feed-forward nor the scale of the last hidden states: the first
    version has no gates and scales."""
    header.refuse_quirks()
    gated = "enc.blk.0.ffn_gate.weight" in header.tensors
    size = header.integer("attention.key_length")
    if header.integer("attention.value_length", size) != size:
        raise header.error("attention.value_length", f"must be the key length, {size}")
    layers = header.integer("block_count")
    return {
        "d_model": header.integer("embedding_length"),
        "d_ff": header.integer("feed_forward_length"),
        "d_kv": size,
        "num_heads": header.integer("attention.head_count"),
        "num_layers": layers,
        "num_decoder_layers": header.integer("decoder_block_count", layers),
        "n_positions": header.integer("context_length"),
        "layer_norm_epsilon": header.number("attention.layer_norm_rms_epsilon"),
        "relative_attention_num_buckets": header.integer("attention.relative_buckets_count"),
        "decoder_start_token_id": header.integer("decoder_start_token_id", 0, low=0),
        "feed_forward_proj": "gated-gelu" if gated else "relu",
        "numbered_up": True,
        "scale_decoder_outputs": not gated,
    }


GGUF = GGUFArchitecture("T5ForConditionalGeneration", dict(_tensors()), config=_gguf_config)


def _encoder_decoder(read: ConfigReader, kind: str, *, scales: bool) -> Decoder:
    size, heads = read.integer("d_model"), read.integer("num_heads", high=1 << 16)
    head, length = read.integer("d_kv"), read.integer("n_positions", _LENGTH, high=1 << 14)
    depth = read.integer("num_layers", high=1024)
    layers = read.integer("num_decoder_layers", depth, high=1024)
    start, vocab = read.integer("decoder_start_token_id", 0, low=0), read.integer("vocab_size")
    if start >= vocab:
        raise read.error("decoder_start_token_id", f"must be below vocab_size = {vocab}")
    norm = Norm(read.number("layer_norm_epsilon", 1e-6))
    mlp = _mlp(read, kind, "layer.2.DenseReluDense")
    decoding = AttentionMixer(
        heads,
        heads,
        head,
        scale=1.0,
        position_bias=_bias(read, "decoder", length, causal=True),
        names=_ATTENTION,
    )
    crossing = CrossThenMLP(
        heads,
        head,
        mlp,
        norm,
        _CROSS,
        "q",
        "o",
        bias=False,
        scale=1.0,
        cross_norm="layer.1.layer_norm",
        mlp_norm="layer.2.layer_norm",
    )
    layer = LayerSpec(decoding, crossing, LayerNorms("layer.0.layer_norm", before_mlp=None))
    spec = DecoderSpec(
        vocab_size=vocab,
        hidden_size=size,
        layers=(layer,) * layers,
        max_model_len=length,
        dtype=read.dtype(),
        norm=norm,
        tied_embeddings=True,
        logit_scale=size**-0.5 if scales else 1.0,
        features=FeatureSpec(2 * layers, heads * head, crossed=length, decoder_start=start),
        names=_NAMES,
    )
    encoding = AttentionMixer(
        heads,
        heads,
        head,
        scale=1.0,
        both_ways=True,
        position_bias=_bias(read, "encoder", length, causal=False),
        names=_ATTENTION,
    )
    tower = TextTower(
        table=PartSpec("shared.weight", vocab, alternatives=("encoder.embed_tokens.weight",)),
        hidden_size=size,
        depth=depth,
        mixer=encoding,
        mlp=_mlp(read, kind, "layer.1.DenseReluDense"),
        norm=norm,
        norms=("layer.0.layer_norm", "layer.1.layer_norm"),
        positions=length,
        num_decoder_layers=layers,
        cross=f"decoder.block.{{}}.{_CROSS}",
    )
    return Decoder(spec, tower)


def _bias(read: ConfigReader, module: str, length: int, *, causal: bool) -> LearnedBias:
    buckets = read.integer("relative_attention_num_buckets", 32, low=4, high=1 << 12)
    farthest = read.integer("relative_attention_max_distance", 128, high=1 << 16)
    if buckets % 4:
        raise read.error("relative_attention_num_buckets", "must be a multiple of 4")
    if farthest <= buckets // 2:
        raise read.error("relative_attention_max_distance", f"must be above {buckets // 2}")
    source = f"{module}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    return LearnedBias(source, length, buckets, farthest, causal)


def _mlp(read: ConfigReader, default: str, module: str) -> DenseMLP:
    kind = str(read.config.get("feed_forward_proj") or default)
    gated = kind.startswith("gated-")
    name = "gelu_new" if kind == "gated-gelu" else kind.removeprefix("gated-")
    named = ConfigReader({"feed_forward_proj": name}, read.architecture)
    up = "wi_1" if gated or read.flag("numbered_up", False) else "wi"
    return DenseMLP(
        read.integer("d_ff"),
        named.activation("feed_forward_proj"),
        gated=gated,
        names=MLPNames(module, gate="wi_0", up=up, down="wo"),
    )
