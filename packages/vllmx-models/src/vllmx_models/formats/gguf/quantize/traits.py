"""GGUF metadata of any decoder; `GGUFArchitecture.states` adds to it or overrides it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from vllmx_core.errors import UnsupportedModelError
from vllmx_core.plan import F32

from vllmx_models.blocks.attention import AttentionMixer
from vllmx_models.blocks.dense import DenseMLP
from vllmx_models.blocks.dense_and_experts import DenseAndExperts
from vllmx_models.blocks.latent import LatentMixer
from vllmx_models.blocks.layer import FeedForward, Mixer
from vllmx_models.blocks.mamba import MambaMixer
from vllmx_models.blocks.moe import MoE
from vllmx_models.blocks.rope import Rope
from vllmx_models.formats.gguf.rope import (
    FREQS,
    LOG_MULTIPLIER,
    LONG,
    SHORT,
    STILL,
    llama3_divisors,
)
from vllmx_models.trunks.decoder import DecoderSpec

_YARN: Mapping[str, str] = {
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
    "attention_factor": "yarn_attn_factor",
}


def decoder_metadata(
    spec: DecoderSpec, mixer: AttentionMixer | LatentMixer, name: str
) -> tuple[dict[str, Any], dict[str, F32]]:
    """Keys with the prefix "ARCHITECTURE.", and the tensors that they need. `mixer` is the first
    one of attention."""
    values: dict[str, Any] = {
        "block_count": len(spec.layers),
        "embedding_length": spec.hidden_size,
        "attention.head_count": mixer.num_heads,
        **(_heads(mixer) if isinstance(mixer, AttentionMixer) else _latents(mixer)),
        **_feed_forward([layer.feed_forward for layer in spec.layers]),
        f"attention.layer_norm{'_rms' * (spec.norm.kind == 'rms')}_epsilon": float(spec.norm.eps),
        "vocab_size": spec.vocab_size,
    }
    windows = {_window(mixer) for mixer in spec.mixers if mixer.cache is not None}
    if windows != {None}:
        values["attention.sliding_window"] = max(window or 0 for window in windows)
    rotating = [mixer.rope for mixer in spec.mixers if mixer.rope is not None]
    if not rotating and any(isinstance(one, MambaMixer) for one in spec.mixers):
        values["context_length"] = spec.max_model_len
        return {f"{name}.{key}": value for key, value in values.items()}, {}
    if not rotating:
        raise UnsupportedModelError(
            f"no layer of the model has a rotary embedding, which the GGUF architecture {name!r}"
            " cannot state"
        )
    whole = [mixer.rope for mixer in spec.mixers if _window(mixer) is None]
    rope = next((rope for rope in whole if rope is not None), rotating[0])
    values["context_length"] = rope.max_positions
    values["rope.dimension_count"] = rope.rotary_dim
    values["rope.freq_base"] = float(rope.theta)
    scaling, extra = _scaling(rope)
    if isinstance(mixer, LatentMixer) and rope.options.get("mscale_all_dim"):
        values[LOG_MULTIPLIER] = 0.1 * rope.number("mscale_all_dim")
    if mixer.query_scale is not None:
        values["attention.temperature_scale"] = mixer.query_scale.beta
        if isinstance(mixer, AttentionMixer) and rope.options.get("mscale_all_dim"):
            values[LOG_MULTIPLIER] = rope.number("mscale_all_dim")
    values |= {f"rope.scaling.{key}": value for key, value in scaling.items()}
    return {f"{name}.{key}": value for key, value in values.items()}, extra


def experts_of(feed_forward: FeedForward | None) -> MoE | DenseAndExperts | None:
    """The feed-forward, if it has experts."""
    return feed_forward if isinstance(feed_forward, MoE | DenseAndExperts) else None


def _heads(mixer: AttentionMixer) -> dict[str, Any]:
    return {
        "attention.head_count_kv": mixer.num_kv_heads,
        "attention.key_length": mixer.head_size,
        "attention.value_length": mixer.value_size or mixer.head_size,
    }


def _latents(mixer: LatentMixer) -> dict[str, Any]:
    """Describes latents as one head of keys and values for all query heads; lengths ending in "mla"
    are those of heads before absorption."""
    values = {
        "attention.head_count_kv": 1,
        "attention.key_length": mixer.rank + mixer.rope.rotary_dim,
        "attention.value_length": mixer.rank,
        "attention.key_length_mla": mixer.nope_size + mixer.rope.rotary_dim,
        "attention.value_length_mla": mixer.value_size,
        "attention.kv_lora_rank": mixer.rank,
    }
    return values if mixer.q_rank is None else {**values, "attention.q_lora_rank": mixer.q_rank}


def _window(mixer: Mixer) -> int | None:
    return mixer.window if isinstance(mixer, AttentionMixer) else None


def _feed_forward(layers: list[FeedForward | None]) -> dict[str, Any]:
    """The widths; without dense layers the dense width is an expert's."""
    values: dict[str, Any] = {}
    for feed_forward in reversed(layers):  # the first layers win
        if isinstance(feed_forward, DenseMLP):
            values["feed_forward_length"] = feed_forward.intermediate_size
        elif isinstance(feed_forward, DenseAndExperts):
            values["feed_forward_length"] = feed_forward.dense.intermediate_size
    moe = next((found for one in layers if (found := experts_of(one)) is not None), None)
    if moe is None:
        return values
    values.setdefault("feed_forward_length", moe.intermediate_size)
    values["expert_count"] = moe.count
    values["expert_feed_forward_length"] = moe.intermediate_size
    if isinstance(moe, DenseAndExperts):
        return {**values, "expert_used_count": moe.chosen}
    route = moe.router.route
    values["expert_used_count"] = route.chosen
    if route.score == "sigmoid":
        values |= {"expert_gating_func": 2, "expert_weights_norm": route.renormalise}
    if moe.shared is not None and moe.shared_gate is not None:
        values["expert_shared_feed_forward_length"] = moe.shared.intermediate_size
    return values


def _scaling(rope: Rope) -> tuple[dict[str, Any], dict[str, F32]]:
    options = rope.options
    if rope.kind == "linear":
        return {"type": "linear", "factor": rope.number("factor")}, {}
    if rope.kind == "yarn":
        original = rope.number("original_max_position_embeddings", rope.max_positions)
        stated = {theirs: rope.number(ours) for ours, theirs in _YARN.items() if ours in options}
        factor = rope.number("factor")
        length = {"original_context_length": int(original)}
        return {"type": "yarn", "factor": factor, **length, **stated}, {}
    if rope.kind == "llama3":
        context = int(rope.number("original_max_position_embeddings"))
        names = ("low_freq_factor", "high_freq_factor")
        own = (rope.theta, rope.rotary_dim, rope.number("factor"), context)
        divisors = llama3_divisors(*own, *(rope.number(name) for name in names))
        return {}, {FREQS: divisors}
    if rope.kind == "longrope":
        factors = {LONG: "long_factor", SHORT: "short_factor"}
        extra = {name: np.asarray(options[key], np.float32) for name, key in factors.items()}
        if options.get("attention_factor") == 1 and np.array_equal(extra[LONG], extra[SHORT]):
            return {}, {FREQS: extra[LONG]}
        original = rope.number("original_max_position_embeddings", rope.max_positions)
        return {"type": "longrope", "original_context_length": int(original)}, extra
    if rope.kind == "proportional":  # a divisor for each frequency; slow ones do not rotate
        inverse, _ = rope.frequencies(rope.max_positions)
        return {}, {FREQS: np.where(inverse == 0, STILL, np.float32(1)).astype(np.float32)}
    if rope.kind == "default":
        return {}, {}
    raise UnsupportedModelError(f"RoPE scaling {rope.kind!r} has no form in GGUF files")
