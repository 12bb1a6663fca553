"""A checkpoint's config as GGUF metadata: the inverse of an architecture's config reader."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import NoneType
from typing import Any

from vllmx_core.errors import UnsupportedModelError, shown
from vllmx_core.plan import F32
from vllmx_core.plugins.checkpoint import Checkpoint, build_model
from vllmx_core.plugins.registry import Registry
from vllmx_core.plugins.specs import ModelSpec
from vllmx_core.records import Record

from vllmx_models.blocks.attention import AttentionMixer
from vllmx_models.blocks.dense import DenseMLP
from vllmx_models.blocks.dense_and_experts import DenseAndExperts
from vllmx_models.blocks.latent import LatentMixer
from vllmx_models.blocks.mamba import MambaMixer
from vllmx_models.blocks.moe import MoE
from vllmx_models.blocks.recurrent import DeltaMixer
from vllmx_models.blocks.short_conv import ConvMixer
from vllmx_models.formats.gguf.architecture import GGUFArchitecture
from vllmx_models.formats.gguf.quantize.traits import decoder_metadata, experts_of
from vllmx_models.trunks.decoder import Decoder, DecoderSpec

_STORED_AS: Mapping[str, str] = {
    "DeepseekV3ForCausalLM": "DeepseekV2ForCausalLM",
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Gemma4ForConditionalGeneration": "Gemma4ForCausalLM",
    "Glm4MoeLiteForCausalLM": "DeepseekV2ForCausalLM",
    "MistralForCausalLM": "LlamaForCausalLM",
    "MixtralForCausalLM": "LlamaForCausalLM",
    "Olmo3ForCausalLM": "Olmo2ForCausalLM",
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM",
}
_MIXERS = (AttentionMixer, LatentMixer, ConvMixer, DeltaMixer, MambaMixer, NoneType)
_FEEDS = (DenseMLP, MoE, DenseAndExperts, NoneType)
_BESIDE = ("vision_config", "modules")
"""Keys of config.json for parts other than the decoder."""
_SAMPLING: Mapping[str, str] = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}


class Target(Record):
    """The form that a checkpoint takes in a file."""

    name: str
    """The value of `general.architecture`."""
    table: GGUFArchitecture
    spec: DecoderSpec
    mixer: AttentionMixer | LatentMixer
    """The mixer of the first layer that attends."""
    experts: int
    """The number of experts in layers that have experts."""
    metadata: Mapping[str, Any]
    extra: Mapping[str, F32]
    """Tensors that the metadata need, by their names in the file."""
    sampling: tuple[str, ...] = ()
    """The keys of generation_config.json that `metadata` states."""

    @property
    def num_kv_heads(self) -> int:
        """The number that the file states: latents are one head."""
        return self.mixer.num_kv_heads if isinstance(self.mixer, AttentionMixer) else 1


def target_of(registry: Registry, checkpoint: Checkpoint) -> Target:
    """Raises UnsupportedModelError for an architecture that has no form in GGUF files here."""
    text = {key: value for key, value in checkpoint.config.items() if key not in _BESIDE}
    model = build_model(registry, replace(checkpoint, config=text))
    architecture = registry.model_for(checkpoint.config).architectures[0]
    name, table = architecture_table(registry, architecture)
    if not isinstance(model, Decoder):
        raise UnsupportedModelError(f"{architecture} cannot be written to a GGUF file by vllmx yet")
    mixer = _known_blocks(model.spec, architecture)
    found = (experts_of(layer.feed_forward) for layer in model.spec.layers)
    experts = max((moe.count for moe in found if moe is not None), default=0)
    name = (table.with_experts if experts else "") or name
    metadata, extra = decoder_metadata(model.spec, mixer, name)
    stated = {**table.states(model.spec), **table.kept(checkpoint.config)}
    metadata |= {f"{name}.{key}": value for key, value in stated.items()}
    sampling = _sampling(checkpoint)
    metadata |= {f"general.sampling.{_SAMPLING[key]}": value for key, value in sampling.items()}
    return Target(name, table, model.spec, mixer, experts, metadata, extra, tuple(sampling))


def _known_blocks(spec: DecoderSpec, architecture: str) -> AttentionMixer | LatentMixer:
    """The first layer of attention. Raises UnsupportedModelError where a layer has another block
    than those that files state here."""
    for layer in spec.layers:
        if not isinstance(layer.mixer, _MIXERS) or not isinstance(layer.feed_forward, _FEEDS):
            raise UnsupportedModelError(
                f"{architecture} cannot be written to a GGUF file by vllmx yet: not all of its"
                " layers are attention or a recurrence that such files have, with an MLP or experts"
            )
    for mixer in spec.mixers:
        if isinstance(mixer, AttentionMixer | LatentMixer):
            return mixer
    raise UnsupportedModelError(
        f"{architecture} cannot be written to a GGUF file by vllmx yet: no layer is attention"
    )


def _sampling(checkpoint: Checkpoint) -> dict[str, Any]:
    """The author's sampling defaults that are valid numbers."""
    found: dict[str, Any] = {}
    for ours in _SAMPLING:
        value = checkpoint.generation_config.get(ours)
        if not isinstance(value, int | float) or isinstance(value, bool):
            continue
        if not abs(value) < 1 << 31:
            raise UnsupportedModelError(
                f"generation_config.json of {checkpoint.path}: {ours} = {shown(value)} does not"
                " fit a GGUF file: repair the file"
            )
        if ours != "top_k":
            found[ours] = float(value)
        elif value == int(value):
            found[ours] = int(value)
    return found


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
