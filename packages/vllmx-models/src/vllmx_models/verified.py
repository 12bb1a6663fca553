"""The tests that verify each architecture, and the backends that implement its ops.

`vllmx models` and docs/models.md print them. The tests read their cases from here, or compare their
cases with these lists, so that each claim has a test.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from vllmx_core.plugins.specs import ModelSpec

LOGITS, VECTORS, IMAGES, LAYOUT, EXPERTS = "logits", "vectors", "images", "layout", "experts"
DRAFTS, SPEECH, AUDIO, TEXTS = "drafts", "speech", "audio", "texts"
KINDS: Mapping[str, str] = {
    LOGITS: "float32 logits to 2e-5 of transformers' and greedy ids, in chunks and on backends",
    VECTORS: "vectors or scores of each token to 2e-5 of the original code's",
    IMAGES: "logits to transformers' with several images, cut anywhere",
    LAYOUT: "reads the layers and the names of tensors of an architecture that is compared",
    SPEECH: "greedy ids of audio, with and without timestamps, several at a time",
    AUDIO: "features to transformers' and greedy ids of chats with several audio files",
    TEXTS: "greedy ids behind prompts that an encoder reads, several at a time",
    DRAFTS: "draft logits to 2e-5 of the authors' formula, by `--speculate model:PATH`",
    EXPERTS: "experts in GPTQ, AWQ, FP8, compressed-tensors, NVFP4 and, in place, `--isq`",
}
EVERYWHERE = ("cpu", "cuda", "metal", "numpy", "torch")
_WITHOUT_CUDA = ("cpu", "metal", "numpy", "torch")
_HEARING = (
    "Qwen2AudioForConditionalGeneration",
    "Qwen2_5OmniForConditionalGeneration",
    "Qwen3ASRForConditionalGeneration",
    "Qwen3OmniMoeForConditionalGeneration",
    "VoxtralForConditionalGeneration",
)
_READING = ("MT5ForConditionalGeneration", "T5ForConditionalGeneration")
_NO_CUDA = (
    "BertForMaskedLM",
    "DeepseekV4ForCausalLM",
    "DistilBertForMaskedLM",
    "FalconMambaForCausalLM",
    "JambaForCausalLM",
    "JinaBertForMaskedLM",
    "JinaBertForSequenceClassification",
    "JinaBertModel",
    "MambaForCausalLM",
    "MPNetForMaskedLM",
    "MPNetForSequenceClassification",
    "MPNetModel",
    "PhiMoEForCausalLM",
    "PhimoeForCausalLM",
)
_BACKENDS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys((*_READING, "WhisperForConditionalGeneration"), ("cpu", "numpy", "torch")),
    **dict.fromkeys((*_HEARING, *_NO_CUDA), _WITHOUT_CUDA),
}
"""The backends of architectures with ops that others lack."""

_LAYOUTS = (
    "AquilaForCausalLM",
    "AquilaModel",
    "DeciLMForCausalLM",
    "InternLM3ForCausalLM",
    "InternLMForCausalLM",
    "LLaMAForCausalLM",
    "MiMoForCausalLM",
    "PhiMoEForCausalLM",
    "XverseForCausalLM",
    "YiForCausalLM",
)
_DRAFTERS = (
    "DFlashDraftModel",
    "DFlashSpeculator",
    "Eagle3DraftModel",
    "Eagle3LlamaForCausalLM",
    "Eagle3Speculator",
    "Gemma4AssistantForCausalLM",
    "LlamaForCausalLMEagle3",
)
_ENCODERS = (
    "BertForMaskedLM",
    "BertForSequenceClassification",
    "BertModel",
    "DistilBertForMaskedLM",
    "DistilBertForSequenceClassification",
    "DistilBertModel",
    "EuroBertForSequenceClassification",
    "EuroBertModel",
    "Gemma3TextModel",
    "GteForSequenceClassification",
    "GteModel",
    "HF_ColBERT",
    "JinaBertForMaskedLM",
    "JinaBertForSequenceClassification",
    "JinaBertModel",
    "JinaEmbeddingsV3ForSequenceClassification",
    "JinaEmbeddingsV3Model",
    "MPNetForMaskedLM",
    "MPNetForSequenceClassification",
    "MPNetModel",
    "ModernBertForSequenceClassification",
    "ModernBertModel",
    "NewForSequenceClassification",
    "NewModel",
    "NomicBertForSequenceClassification",
    "NomicBertModel",
    "RobertaForMaskedLM",
    "RobertaForSequenceClassification",
    "RobertaModel",
    "XLMRobertaForMaskedLM",
    "XLMRobertaForSequenceClassification",
    "XLMRobertaModel",
)
_EXPERTS = tuple(
    f"{name}ForCausalLM"
    for name in (
        "BailingMoeV2",
        "DeepseekV2",
        "DeepseekV3",
        "DeepseekV32",
        "Dots1",
        "Ernie4_5_Moe",
        "ExaoneMoe",
        "Gemma4",
        "Glm4Moe",
        "Glm4MoeLite",
        "GlmMoeDsa",
        "GptOss",
        "GraniteMoe",
        "GraniteMoeHybrid",
        "HYV3",
        "HunYuanMoEV1",
        "Jamba",
        "KimiLinear",
        "Lfm2Moe",
        "Llama4",
        "MiMoV2Flash",
        "MiniMaxM2",
        "Mistral4",
        "Mixtral",
        "NemotronH",
        "Olmoe",
        "Phimoe",
        "Qwen2Moe",
        "Qwen3Moe",
        "Qwen3Next",
        "Qwen3_5Moe",
    )
)


def with_verification(spec: ModelSpec) -> ModelSpec:
    """Adds the verified properties and tested backends of a model."""
    name = spec.architectures[0]
    return replace(spec, backends=_BACKENDS.get(name, EVERYWHERE), checked=_checked(name))


def _checked(name: str) -> tuple[str, ...]:
    if name in _LAYOUTS:
        return (LAYOUT,)
    if name == "WhisperForConditionalGeneration":
        return (SPEECH,)
    if name in _READING:
        return (TEXTS,)
    if name in _HEARING:
        return (AUDIO,)
    if name in _DRAFTERS:
        return (DRAFTS,)
    if name in _ENCODERS:
        return (VECTORS,)
    if name.endswith("ForConditionalGeneration"):
        return (IMAGES,)
    return (LOGITS, EXPERTS) if name in _EXPERTS else (LOGITS,)
