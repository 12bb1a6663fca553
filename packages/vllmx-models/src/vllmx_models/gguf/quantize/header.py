"""A checkpoint's config as GGUF metadata: the inverse of an architecture's config reader.

What is written is read back before the file is made, and the two models must be equal: a trait
that the format cannot state is refused rather than lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from vllmx_core.checkpoint import Checkpoint, build_model
from vllmx_core.errors import UnsupportedModelError, shown
from vllmx_core.plan import F32
from vllmx_core.registry import Registry
from vllmx_core.specs import ModelSpec

from vllmx_models.blocks.attention import AttentionMixer
from vllmx_models.blocks.dense import DenseMLP
from vllmx_models.blocks.layer import Mixer
from vllmx_models.blocks.moe import MoE
from vllmx_models.decoder import Decoder, DecoderSpec, LayerSpec
from vllmx_models.gguf.architecture import GGUFArchitecture
from vllmx_models.gguf.hyperparameters import GGUFHeader
from vllmx_models.gguf.quantize.writer import NewTensor
from vllmx_models.gguf.rope import FREQS, LONG, SHORT, llama3_divisors
from vllmx_models.rope import Rope

_STORED_AS: Mapping[str, str] = {
    "MistralForCausalLM": "LlamaForCausalLM",
    "MixtralForCausalLM": "LlamaForCausalLM",
    "Olmo3ForCausalLM": "Olmo2ForCausalLM",
}
_YARN: Mapping[str, str] = {
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
    "attention_factor": "yarn_attn_factor",
}
_SAMPLING: Mapping[str, str] = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}


@dataclass(frozen=True, slots=True)
class Target:
    """The form that a checkpoint takes in a file."""

    name: str
    """Of `general.architecture`."""
    table: GGUFArchitecture
    spec: DecoderSpec
    mixer: AttentionMixer
    """Of every layer, but for rotation and window."""
    experts: int
    """Of each layer."""
    metadata: Mapping[str, Any]
    extra: Mapping[str, F32]
    """Tensors that the metadata need, by their names in the file."""


def target_of(registry: Registry, checkpoint: Checkpoint) -> Target:
    """Raises UnsupportedModelError for an architecture that has no form in GGUF files here."""
    model = build_model(registry, checkpoint)
    architecture = registry.model_for(checkpoint.config).architectures[0]
    name, table = architecture_table(registry, architecture)
    if not isinstance(model, Decoder):
        raise UnsupportedModelError(f"{architecture} cannot be written to a GGUF file by vllmx yet")
    mixer, feed_forward = _uniform(model.spec, architecture)
    metadata, extra = _decoder(model.spec, mixer, feed_forward, name)
    metadata |= {f"{name}.{key}": value for key, value in table.states(model.spec).items()}
    experts = feed_forward.count if isinstance(feed_forward, MoE) else 0
    metadata |= _sampling(checkpoint)
    return Target(name, table, model.spec, mixer, experts, metadata, extra)


def _uniform(spec: DecoderSpec, architecture: str) -> tuple[AttentionMixer, DenseMLP | MoE]:
    """The blocks of each layer; a rotation and a window are those of the first."""
    first = spec.layers[0]
    if (
        isinstance(first.mixer, AttentionMixer)
        and isinstance(first.feed_forward, DenseMLP | MoE)
        and all(_plain(layer) == _plain(first) for layer in spec.layers)
    ):
        return first.mixer, first.feed_forward
    raise UnsupportedModelError(
        f"{architecture} cannot be written to a GGUF file by vllmx yet: its layers differ in more"
        " than rotation and window, or are not attention with an MLP or experts"
    )


def _plain(layer: LayerSpec) -> LayerSpec:
    """What a file states for all layers alike."""
    if not isinstance(layer.mixer, AttentionMixer):
        return layer
    return replace(layer, mixer=replace(layer.mixer, rope=None, window=None))


def _sampling(checkpoint: Checkpoint) -> dict[str, Any]:
    """The author's sampling defaults, where they are numbers."""
    found: dict[str, Any] = {}
    for ours, theirs in _SAMPLING.items():
        value = checkpoint.generation_config.get(ours)
        if not isinstance(value, int | float) or isinstance(value, bool):
            continue
        if not abs(value) < 1 << 31:
            raise UnsupportedModelError(
                f"generation_config.json of {checkpoint.path}: {ours} = {shown(value)} is no number"
                " that a GGUF file states: repair the file"
            )
        found[f"general.sampling.{theirs}"] = int(value) if ours == "top_k" else float(value)
    return found


def check(registry: Registry, target: Target, tensors: Sequence[NewTensor], path: Path) -> None:
    """Reads the metadata back. Raises UnsupportedModelError when another model comes out."""
    header = GGUFHeader(
        path,
        target.name,
        target.metadata,
        {tensor.name: tensor.info for tensor in tensors},
        target.extra.__getitem__,
    )
    config = {
        "architectures": [target.table.architecture],
        "vocab_size": target.spec.vocab_size,
        "tie_word_embeddings": target.spec.tied_embeddings,
        "torch_dtype": "bfloat16",  # of no matter: each tensor has its own
        **target.table.config(header),
    }
    found = registry.model_for(config).load()(config).spec
    wanted = replace(target.spec, dtype=found.dtype)
    for name in (field.name for field in fields(DecoderSpec)):
        ours, theirs = getattr(wanted, name), getattr(found, name)
        if ours != theirs and not (name == "layers" and _same_layers(wanted, found)):
            raise UnsupportedModelError(
                f"the GGUF architecture {target.name!r} cannot state {name} ="
                f" {shown(ours)} of this model; a reader would take {shown(theirs)}"
            )


def _same_layers(one: DecoderSpec, other: DecoderSpec) -> bool:
    """Whether layers are alike and their tables equal, however they are described."""
    pairs = list(zip(one.layers, other.layers, strict=True))
    mixers = list(zip(one.mixers, other.mixers, strict=True))
    ropes = {(str(a.rope), str(b.rope)): (a.rope, b.rope) for a, b in mixers}
    windows = all(a.cache == b.cache for a, b in mixers)
    return (
        windows
        and all(_plain(a) == _plain(b) for a, b in pairs)
        and all(
            a is b is None or (a is not None and b is not None and _same_table(one, a, b))
            for a, b in ropes.values()
        )
    )


def _same_table(spec: DecoderSpec, one: Rope, other: Rope) -> bool:
    first, second = (rope.frequencies(spec.max_model_len) for rope in (one, other))
    return (
        len(first[0]) == len(second[0])
        and np.allclose(first[0], second[0], rtol=1e-5, atol=0)
        and abs(first[1] - second[1]) < 1e-5
    )


def architecture_table(registry: Registry, architecture: str) -> tuple[str, GGUFArchitecture]:
    """The architecture's name in GGUF files and its form there. Raises UnsupportedModelError."""
    wanted = _STORED_AS.get(architecture, architecture)
    spec = registry.find_model(wanted)
    if spec is not None and spec.gguf_names:
        table: GGUFArchitecture = spec.load_gguf()
        return spec.gguf_names[0], table
    specs = [spec for spec in registry.all(ModelSpec) if spec.gguf_names]
    known = ", ".join(name for spec in specs for name in spec.architectures)
    raise UnsupportedModelError(
        f"{architecture} has no form in GGUF files that vllmx knows; known: {known}"
    )


def _decoder(
    spec: DecoderSpec, mixer: AttentionMixer, feed_forward: DenseMLP | MoE, name: str
) -> tuple[dict[str, Any], dict[str, F32]]:
    values: dict[str, Any] = {
        "block_count": len(spec.layers),
        "embedding_length": spec.hidden_size,
        "feed_forward_length": feed_forward.intermediate_size,
        "attention.head_count": mixer.num_heads,
        "attention.head_count_kv": mixer.num_kv_heads,
        "attention.key_length": mixer.head_size,
        "attention.value_length": mixer.head_size,
        f"attention.layer_norm{'_rms' * (spec.norm.kind == 'rms')}_epsilon": float(spec.norm.eps),
        "vocab_size": spec.vocab_size,
        **(_experts(feed_forward) if isinstance(feed_forward, MoE) else {}),
    }
    windows = {_window(mixer) for mixer in spec.mixers}
    if windows != {None}:
        values["attention.sliding_window"] = max(window or 0 for window in windows)
    rotating = [mixer.rope for mixer in spec.mixers if mixer.rope is not None]
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
    values |= {f"rope.scaling.{key}": value for key, value in scaling.items()}
    return {f"{name}.{key}": value for key, value in values.items()}, extra


def _window(mixer: Mixer) -> int | None:
    return mixer.window if isinstance(mixer, AttentionMixer) else None


def _experts(moe: MoE) -> dict[str, Any]:
    values: dict[str, Any] = {
        "expert_count": moe.count,
        "expert_used_count": moe.router.route.chosen,
        "expert_feed_forward_length": moe.intermediate_size,
    }
    route = moe.router.route
    if route.score == "sigmoid":
        values |= {"expert_gating_func": 2, "expert_weights_norm": route.renormalise}
    if moe.shared is not None:
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
        divisors = llama3_divisors(rope.theta, rope.rotary_dim, rope.number("factor"), context)
        return {}, {FREQS: divisors}
    if rope.kind == "longrope":
        factors = {LONG: "long_factor", SHORT: "short_factor"}
        extra = {name: np.asarray(options[key], np.float32) for name, key in factors.items()}
        original = rope.number("original_max_position_embeddings", rope.max_positions)
        return {"type": "longrope", "original_context_length": int(original)}, extra
    if rope.kind == "default":
        return {}, {}
    raise UnsupportedModelError(f"RoPE scaling {rope.kind!r} has no form in GGUF files")
