"""Config keys shared by hybrids of attention and recurrent layers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from vllmx_models.blocks.layer import FeedForward, Mixer
from vllmx_models.blocks.mamba import MambaMixer
from vllmx_models.blocks.norms import PRE, LayerNorms
from vllmx_models.config import ConfigReader
from vllmx_models.trunks.decoder import LayerSpec

MAMBA_DEFAULTS: Mapping[str, Any] = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
"""The defaults of transformers for absent keys."""


def layer_kinds(
    read: ConfigReader, known: Sequence[str], by_default: Sequence[str], key: str = "layer_types"
) -> list[str]:
    """The kind of each layer, from `key`, else `by_default`, which has an entry for each layer."""
    if not read.has(key):
        return list(by_default)
    kinds = read.config[key]
    if not isinstance(kinds, list) or any(kind not in known for kind in kinds):
        raise read.error(key, f"must be a list of {' or '.join(known)}")
    if len(kinds) != len(by_default):
        raise read.error(key, f"must have an entry for each of the {len(by_default)} layers")
    return kinds


def dt_limits(read: ConfigReader) -> tuple[float, float]:
    """The minimum and maximum step size of Mamba-2, from `time_step_limit`."""
    given = read.config.get("time_step_limit")
    if given is None:
        return 0.0, math.inf
    if not isinstance(given, list | tuple) or len(given) != 2:
        raise read.error("time_step_limit", "must be a list of two numbers")
    # transformers writes an infinity as an object
    values = [math.inf if one in ("inf", {"__float__": "Infinity"}) else one for one in given]
    if any(type(one) not in (int, float) for one in values) or not 0 <= values[0] <= values[1]:
        raise read.error("time_step_limit", "must be two numbers that rise from 0")
    return float(values[0]), float(values[1])


def hybrid_layers(
    kinds: Sequence[str],
    mixers: Mapping[str, Mixer],
    feed_forwards: Sequence[FeedForward],
    norms: LayerNorms = PRE,
) -> tuple[LayerSpec, ...]:
    """Layers with the mixer of each layer's kind."""
    return tuple(
        LayerSpec(mixers[kind], feed_forward, norms)
        for kind, feed_forward in zip(kinds, feed_forwards, strict=True)
    )


def mamba_mixer(read: ConfigReader, **options: Any) -> MambaMixer:
    """The Mamba-2 mixer by the keys of Granite 4, Bamba and Falcon-H1; `options` are
    `MambaMixer`'s."""
    heads = read.integer("mamba_n_heads", high=1 << 16)
    width = read.integer("mamba_expand") * read.integer("hidden_size")
    if read.has("mamba_d_ssm"):
        width = read.integer("mamba_d_ssm")
    size = width // heads
    if read.config.get("mamba_d_head") not in (None, "auto"):
        size = read.integer("mamba_d_head")
    if size * heads != width:
        raise read.error("mamba_n_heads", f"times mamba_d_head must be {width}")
    if read.activation() != "silu":
        raise read.error("hidden_act", "is not known here for convolutions: silu")
    groups = read.integer("mamba_n_groups", high=heads)
    if heads % groups:
        raise read.error("mamba_n_groups", f"must divide mamba_n_heads = {heads}")
    low, high = dt_limits(read)
    return MambaMixer(
        heads,
        size,
        groups,
        read.integer("mamba_d_state", high=4096),
        read.integer("mamba_d_conv", low=2, high=64),
        options.pop("norm_eps", read.number("rms_norm_eps", 1e-6)),
        conv_bias=read.flag("mamba_conv_bias", True),
        bias=read.flag("mamba_proj_bias", False),
        dt_min=low,
        dt_max=high,
        **options,
    )
