"""Dense Qwen2, Qwen2.5 (Qwen2ForCausalLM) and Qwen3 (Qwen3ForCausalLM).

Llama's layout. Qwen2 adds biases to q, k and v and an optional sliding window in the upper layers
(arXiv:2407.10671). Qwen3 drops the biases and normalises query and key heads (arXiv:2505.09388).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllmx_models.blocks.attention import AttentionMixer
from vllmx_models.blocks.layer import FeedForward
from vllmx_models.config import ConfigReader
from vllmx_models.configs.decoder import (
    attention_mixer,
    decoder_spec,
    dense_mlp,
    head_size,
    layer_ropes,
    layer_specs,
    num_layers,
    rms,
    sliding_layers,
    switched_window,
)
from vllmx_models.formats.gguf.architecture import (
    DECODER_TENSORS,
    HEAD_NORM_TENSORS,
    GGUFArchitecture,
)
from vllmx_models.trunks.decoder import Decoder, LayerSpec

DEFAULT_POSITIONS = 32768
WINDOW_KEYS = ("sliding_window", "use_sliding_window", "layer_types")


def qwen2(config: Mapping[str, Any]) -> Decoder:
    """q, k and v always have a bias, o never has one."""
    read = ConfigReader(config, "Qwen2ForCausalLM")
    # transformers ignores attention_bias here: the biases are part of the architecture
    read.refuse_quirks("attention_bias", *WINDOW_KEYS)
    mixer = attention_mixer(read, head_size(read), qkv_bias=True)
    layers = qwen_layers(read, mixer, dense_mlp(read))
    return Decoder(decoder_spec(read, layers, default_positions=DEFAULT_POSITIONS))


def qwen_layers(
    read: ConfigReader, mixer: AttentionMixer, feed_forward: FeedForward
) -> tuple[LayerSpec, ...]:
    """Layers with a window where `layer_types` says so, or from `max_window_layers` on."""
    window = switched_window(read, 4096)
    first = read.integer("max_window_layers", 28, low=0)
    upper = [window is not None and layer >= first for layer in range(num_layers(read))]
    sliding = sliding_layers(read, upper)
    ropes = layer_ropes(read, mixer.head_size, sliding, default_positions=DEFAULT_POSITIONS)
    return layer_specs(read, mixer, feed_forward, ropes, sliding, window)


GGUF = GGUFArchitecture("Qwen2ForCausalLM")


def qwen3(config: Mapping[str, Any]) -> Decoder:
    """The head size is independent of hidden_size and defaults to 128."""
    read = ConfigReader(config, "Qwen3ForCausalLM")
    read.refuse_quirks("attention_bias", *WINDOW_KEYS)
    bias = read.flag("attention_bias", False)
    mixer = attention_mixer(
        read, head_size(read, 128), qk_norm=rms(read), qkv_bias=bias, o_bias=bias
    )
    layers = qwen_layers(read, mixer, dense_mlp(read))
    return Decoder(decoder_spec(read, layers, default_positions=DEFAULT_POSITIONS))


QWEN3_GGUF = GGUFArchitecture("Qwen3ForCausalLM", {**DECODER_TENSORS, **HEAD_NORM_TENSORS})
