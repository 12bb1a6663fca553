"""A checkpoint's config as GGUF metadata, the inverse of an architecture's config reader; pooling;
and the keys kept from a GGUF file that is converted again."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from types import NoneType
from typing import Any

from vllmx_core.errors import UnsupportedModelError, listing, shown
from vllmx_core.plan import F32
from vllmx_core.plugins.checkpoint import Checkpoint, build_model
from vllmx_core.plugins.registry import Registry
from vllmx_core.plugins.specs import ModelSpec
from vllmx_core.records import Record
from vllmx_core.text_modules import JoinedSource, with_text_modules
from vllmx_core.weights.map import choices, name_in
from vllmx_core.weights.part import WeightSource

from vllmx_models.blocks.attention import AttentionMixer
from vllmx_models.blocks.dense import DenseMLP
from vllmx_models.blocks.dense_and_experts import DenseAndExperts
from vllmx_models.blocks.latent import LatentMixer
from vllmx_models.blocks.mamba import MambaMixer
from vllmx_models.blocks.moe import MoE
from vllmx_models.blocks.recurrent import DeltaMixer
from vllmx_models.blocks.short_conv import ConvMixer
from vllmx_models.formats.gguf.architecture import GGUFArchitecture
from vllmx_models.formats.gguf.file import GGUFFile
from vllmx_models.formats.gguf.quantize.traits import decoder_metadata, experts_of
from vllmx_models.trunks.decoder import Decoder, DecoderSpec, LayerSpec
from vllmx_models.trunks.heads import Heads

_STORED_AS: Mapping[str, str] = {
    "DeepseekV3ForCausalLM": "DeepseekV2ForCausalLM",
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Gemma4ForConditionalGeneration": "Gemma4ForCausalLM",
    "Glm4MoeLiteForCausalLM": "DeepseekV2ForCausalLM",
    "MistralForCausalLM": "LlamaForCausalLM",
    "MixtralForCausalLM": "LlamaForCausalLM",
    "Olmo3ForCausalLM": "Olmo2ForCausalLM",
    "PhiMoEForCausalLM": "PhimoeForCausalLM",
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM",
}
_MIXERS = (AttentionMixer, LatentMixer, ConvMixer, DeltaMixer, MambaMixer, NoneType)
_FEEDS = (DenseMLP, MoE, DenseAndExperts, NoneType)
_OTHER_PARTS = ("vision_config", "modules")
"""Keys of config.json for parts other than the decoder."""
_SAMPLING: Mapping[str, str] = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}
_POOLING = {"mean": 1, "cls": 2, "last": 3}
_SCORES = 4
_OWN = ("general.alignment", "general.file_type", "general.quantization_version", "general.type")
"""Keys that describe one file, not the model."""


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
    """The keys of generation_config.json that `metadata` contains."""
    heads: Heads | None = None
    """The layer of multi-token prediction, which follows the others in the file."""

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        return self.spec.layers + (() if self.heads is None else self.heads.spec.layers)

    def module_of(self, layer: int) -> str:
        """The name of a layer in the checkpoint."""
        names = self.spec.names
        if self.heads is not None and layer == len(self.spec.layers):
            names, layer = self.heads.spec.names, self.heads.spec.names.first_layer
        return f"{names.layers}.{layer}"

    @property
    def num_kv_heads(self) -> int:
        """The number in the file: latents are one head."""
        return self.mixer.num_kv_heads if isinstance(self.mixer, AttentionMixer) else 1


def target_of(registry: Registry, checkpoint: Checkpoint) -> Target:
    """The form of a checkpoint. Raises UnsupportedModelError for an architecture that vllmx cannot
    write to a GGUF file."""
    text = {key: value for key, value in checkpoint.config.items() if key not in _OTHER_PARTS}
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
    heads = _complete_heads(model, table, checkpoint.weights)
    written = model.spec.layers + (() if heads is None else heads.spec.layers)
    stated = table.states(replace(model.spec, layers=written))
    stated = {**stated, **table.kept(checkpoint.config)}
    metadata |= {f"{name}.{key}": value for key, value in stated.items()}
    if heads is not None:
        metadata |= {
            f"{name}.block_count": len(model.spec.layers) + 1,
            f"{name}.nextn_predict_layers": 1,
        }
    sampling = _sampling(checkpoint)
    metadata |= {f"general.sampling.{_SAMPLING[key]}": value for key, value in sampling.items()}
    return Target(name, table, model.spec, mixer, experts, metadata, extra, tuple(sampling), heads)


def _complete_heads(model: Decoder, table: GGUFArchitecture, source: WeightSource) -> Heads | None:
    """The layer of multi-token prediction, if the checkpoint has all of it and the file can."""
    heads = model.heads
    if not isinstance(heads, Heads) or "blk.{}.nextn.eh_proj" not in table.tensors:
        return None
    if len(heads.spec.layers) > 1:  # files have one
        return None
    read = {one.name for spec in model.weights() for part in spec.parts for one in choices(part)}
    parts = [part for spec in heads.weights() for part in spec.parts]
    own = [part for part in parts if not any(one.name in read for one in choices(part))]
    names = source.names()
    return heads if own and all(name_in(source, part) in names for part in own) else None


def _known_blocks(spec: DecoderSpec, architecture: str) -> AttentionMixer | LatentMixer:
    """The first attention layer. Raises UnsupportedModelError if a layer has a block that vllmx
    cannot describe in GGUF metadata."""
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


# --- other metadata -------------------------------------------------------------------------------
def pooling_metadata(
    registry: Registry, checkpoint: Checkpoint, name: str
) -> tuple[dict[str, Any], list[str]]:
    """(keys for a model that makes vectors or scores, a line for each part of its pooling that the
    file lacks)."""
    try:
        found = with_text_modules(registry, checkpoint, "auto")
    except UnsupportedModelError as error:
        return {}, [error.message]
    if isinstance(found.weights, JoinedSource):
        for source in found.weights.others.values():
            source.close()
    config, modules = found.config, found.config.get("modules", ())
    kinds = [module["kind"] for module in modules]
    lost = [f"modules.json: the dense layer {m['folder']}" for m in modules if m["kind"] == "dense"]
    if "pooling" in kinds and "normalize" not in kinds:
        lost.append("modules.json: vectors without a normalize module; readers normalise them")
    if "score_tokens" in config:
        lost.append(f"modules.json: scores by the tokens {shown(config['score_tokens'])}")
    if (limit := config.get("text_limit")) is not None:
        lost.append(f"sentence_bert_config.json: max_seq_length = {limit}")
    prompts = config.get("text_settings", {}).get("prompts")
    if isinstance(prompts, Mapping) and any(prompts.values()):
        lost.append(f"config_sentence_transformers.json: the prompts {listing(list(prompts), 4)}")
    pooling = [module["pooling"] for module in modules if module["kind"] == "pooling"]
    kind = _SCORES if config.get("scores_pairs") else _POOLING[pooling[0]] if pooling else None
    return ({} if kind is None else {f"{name}.pooling_type": kind}), lost


def kept_metadata(
    checkpoint: Checkpoint, written: Collection[str]
) -> tuple[dict[str, Any], list[str]]:
    """(general keys of a converted GGUF file that are kept, a line with the keys that are not)."""
    if checkpoint.path.suffix != ".gguf":
        return {}, []
    file = GGUFFile(checkpoint.path)
    metadata = file.metadata
    file.close()
    rest = [key for key in metadata if key not in written and key not in _OWN]
    kept = {key: metadata[key] for key in rest if key.startswith("general.")}
    if "general.name" in metadata:  # readers know some tokenizers by it
        kept["general.name"] = metadata["general.name"]
    lost = [key for key in rest if key not in kept and not key.startswith(("split.", "quantize."))]
    return kept, [f"keys of {checkpoint.path.name}: {listing(lost, 8)}"] if lost else []
