"""Mamba-2 (Mamba2ForCausalLM): recurrent layers alone, no attention and no MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllmx_models.blocks.mamba import MambaMixer
from vllmx_models.blocks.norms import LayerNorms, Norm
from vllmx_models.config import ConfigReader
from vllmx_models.configs.decoder import decoder_spec, num_layers
from vllmx_models.trunks.decoder import Decoder, LayerSpec, ModelNames

NAMES = ModelNames(
    "backbone.embeddings", "backbone.layers", "backbone.norm_f", also=("backbone.", "model.")
)
POSITIONS = 1 << 15
"""Tokens of a text at the most: states take the same room however long it is, and configs name no
greatest length."""


def mamba2(config: Mapping[str, Any]) -> Decoder:
    """A layer is a norm and a mixer, whose answer is added to what came in."""
    read = ConfigReader(config, "Mamba2ForCausalLM")
    read.refuse_quirks()
    eps = read.number("layer_norm_epsilon", 1e-5)
    layer = LayerSpec(mixer(read, eps), None, LayerNorms("norm", None, None))
    layers = (layer,) * num_layers(read)
    return Decoder(
        decoder_spec(read, layers, default_positions=POSITIONS, norm=Norm(eps), names=NAMES)
    )


def mixer(read: ConfigReader, eps: float) -> MambaMixer:
    """The mixer of a config. Its norm covers all features at once, so that groups of heads would
    need another one."""
    heads, size = read.integer("num_heads", 128), read.integer("head_dim", 64)
    if heads * size != read.integer("expand", 2) * read.integer("hidden_size"):
        raise read.error("num_heads", "times head_dim must be expand times hidden_size")
    if read.integer("n_groups", 8) != 1:
        raise read.error("n_groups", "must be 1")
    return MambaMixer(
        heads,
        size,
        1,
        read.integer("state_size", 128),
        read.integer("conv_kernel", 4, low=2),
        eps,
        conv_bias=read.flag("use_conv_bias", True),
        bias=read.flag("use_bias", False),
        module="mixer",
    )
