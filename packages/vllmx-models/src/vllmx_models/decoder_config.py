"""From config.json to a `DecoderSpec`: what the architectures of the shared decoder read alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllmx_models.config import ConfigReader
from vllmx_models.decoder import DecoderSpec, LayerSpec
from vllmx_models.rope import Rope, read_rope

MAX_LAYERS = 1024


def num_layers(read: ConfigReader) -> int:
    return read.integer("num_hidden_layers", high=MAX_LAYERS)


def head_size(read: ConfigReader, default: int | None = None) -> int:
    """`head_dim`; without it `default`, or hidden size over heads, which must come out even."""
    if read.has("head_dim"):
        return read.integer("head_dim", high=4096)
    if default is not None:
        return default
    hidden, heads = read.integer("hidden_size"), read.integer("num_attention_heads")
    if hidden % heads:
        raise read.error("hidden_size", f"is not a multiple of num_attention_heads = {heads}")
    return hidden // heads


def layer_ropes(
    read: ConfigReader,
    head: int,
    sliding: Sequence[bool],
    *,
    default_positions: int,
    default_theta: float = 10000.0,
) -> list[Rope | None]:
    """The rotation of each layer: one for all, or one for each layer type."""
    positions = read.integer("max_position_embeddings", default_positions)
    full, window = (
        read_rope(
            read.config,
            head,
            layer_type=layer_type,
            max_positions=positions,
            default_theta=default_theta,
        )
        for layer_type in ("full_attention", "sliding_attention")
    )
    return [window if slides else full for slides in sliding]


def sliding_layers(read: ConfigReader, by_default: Sequence[bool]) -> list[bool]:
    """Which layers attend through a window: what `layer_types` says, else `by_default`."""
    if not read.has("layer_types"):
        return list(by_default)
    types, count = read.config["layer_types"], len(by_default)
    known = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or any(kind not in known for kind in types):
        raise read.error("layer_types", f"must be a list of {' or '.join(known)}")
    if len(types) != count:
        raise read.error("layer_types", f"must have an entry for each of the {count} layers")
    return [kind == "sliding_attention" for kind in types]


def switched_window(read: ConfigReader, default: int | None) -> int | None:
    """`sliding_window` where `use_sliding_window` turns it on."""
    if not read.flag("use_sliding_window", False):
        return None
    if "sliding_window" in read.config and not read.has("sliding_window"):
        return None
    if default is None and not read.has("sliding_window"):
        return None
    return read.integer("sliding_window", default, high=1 << 31)


def layer_specs(
    read: ConfigReader,
    ropes: Sequence[Rope | None],
    sliding: Sequence[bool],
    window: int | None,
) -> tuple[LayerSpec, ...]:
    """One LayerSpec for each layer; refuses layers that slide through no window."""
    if window is None and any(sliding):
        raise read.error(
            "layer_types", "has sliding layers, but sliding_window is not set or not in use"
        )
    return tuple(
        LayerSpec(rope, window if slides else None)
        for rope, slides in zip(ropes, sliding, strict=True)
    )


def decoder_spec(
    read: ConfigReader,
    head: int,
    layers: tuple[LayerSpec, ...],
    *,
    default_positions: int,
    default_kv_heads: int | None = None,
    default_tied: bool = False,
    **flags: Any,
) -> DecoderSpec:
    """The dimensions that every architecture names alike; `flags` are `DecoderSpec`'s."""
    heads = read.integer("num_attention_heads", high=1 << 16)
    kv_heads = read.integer("num_key_value_heads", default_kv_heads or heads, high=1 << 16)
    if heads % kv_heads:
        raise read.error("num_key_value_heads", f"must divide num_attention_heads = {heads}")
    positions = read.integer("max_position_embeddings", default_positions)
    claims = [layer.rope.context_len for layer in layers if layer.rope is not None]
    return DecoderSpec(
        vocab_size=read.integer("vocab_size"),
        hidden_size=read.integer("hidden_size"),
        intermediate_size=read.integer("intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head,
        layers=layers,
        max_model_len=max(claims, default=positions),
        dtype=read.dtype(),
        norm_eps=read.number("rms_norm_eps", 1e-6),
        activation=read.activation(),
        tied_embeddings=read.flag("tie_word_embeddings", default_tied),
        **flags,
    )
