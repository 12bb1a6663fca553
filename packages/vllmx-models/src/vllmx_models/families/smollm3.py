"""SmolLM3 (SmolLM3ForCausalLM): Llama without position embedding in every fourth layer (NoPE)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllmx_models.config import ConfigReader
from vllmx_models.configs.decoder import (
    attention_mixer,
    decoder_spec,
    dense_mlp,
    head_size,
    layer_ropes,
    layer_specs,
    rotating_layers,
    sliding_layers,
    switched_window,
)
from vllmx_models.formats.gguf.architecture import INTERLEAVED, GGUFArchitecture
from vllmx_models.trunks.decoder import Decoder

DEFAULT_POSITIONS = 32768
DEFAULT_THETA = 2_000_000.0


def smollm3(config: Mapping[str, Any]) -> Decoder:
    """`no_rope_layers` has a 1 for each layer with RoPE; a window, if enabled, applies to the
    layers without."""
    read = ConfigReader(config, "SmolLM3ForCausalLM")
    read.refuse_quirks(
        "attention_bias",
        "mlp_bias",
        "no_rope_layers",
        "sliding_window",
        "use_sliding_window",
        "layer_types",
    )
    rotates, window = rotating_layers(read), switched_window(read, None)
    sliding = sliding_layers(read, [window is not None and not turns for turns in rotates])
    head, bias = head_size(read), read.flag("attention_bias", False)
    ropes = layer_ropes(
        read, head, sliding, default_positions=DEFAULT_POSITIONS, default_theta=DEFAULT_THETA
    )
    used = [rope if turns else None for rope, turns in zip(ropes, rotates, strict=True)]
    mixer = attention_mixer(read, head, qkv_bias=bias, o_bias=bias)
    mlp = dense_mlp(read, bias=read.flag("mlp_bias", False))
    layers = layer_specs(read, mixer, mlp, used, sliding, window)
    return Decoder(
        decoder_spec(read, layers, default_positions=DEFAULT_POSITIONS, default_tied=True)
    )


# files do not list the layers with RoPE: always three of four
GGUF = GGUFArchitecture("SmolLM3ForCausalLM", interleaved=INTERLEAVED)
