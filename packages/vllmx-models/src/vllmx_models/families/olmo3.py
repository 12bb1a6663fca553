"""OLMo 3 (Olmo3ForCausalLM): OLMo 2 with a window in three of four layers, which are not scaled to
the longer context."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllmx_models.config import ConfigReader
from vllmx_models.configs.decoder import scaled_where_full, sliding_pattern
from vllmx_models.families.olmo2 import olmo_decoder
from vllmx_models.trunks.decoder import Decoder

DEFAULT_THETA = 500_000.0
DEFAULT_WINDOW = 4096


def olmo3(config: Mapping[str, Any]) -> Decoder:
    """Layers with a window keep the rotation that they were first trained with."""
    read = ConfigReader(config, "Olmo3ForCausalLM")
    read.refuse_quirks("attention_bias", "layer_types", "sliding_window")
    sliding = sliding_pattern(read, 4)
    window = read.integer("sliding_window", DEFAULT_WINDOW, high=1 << 31)
    theta = read.number("rope_theta", DEFAULT_THETA)
    return olmo_decoder(read, scaled_where_full(read, theta, theta), sliding, window)
