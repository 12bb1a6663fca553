"""The tests that verify each architecture, and the backends that implement its ops.

`vllmx models` and docs/models.md print them. The tests read their cases from here, or compare their
cases with these lists, so that each claim has a test.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from vllmx_core.plugins.specs import ModelSpec

LOGITS, VECTORS, IMAGES, LAYOUT, EXPERTS = "logits", "vectors", "images", "layout", "experts"
KINDS: Mapping[str, str] = {
    LOGITS: "float32 logits to 2e-5 of transformers' and greedy ids, in chunks and on backends",
    VECTORS: "vectors or scores of each token to 2e-5 of the original code's",
    IMAGES: "logits to transformers' with several images, cut anywhere",
    LAYOUT: "reads the layers and the names of tensors of an architecture that is compared",
    EXPERTS: "experts in GPTQ, AWQ, FP8, compressed-tensors, NVFP4 and, in place, `--isq`",
}
EVERYWHERE = ("cpu", "cuda", "metal", "numpy", "torch")

_LLAMA_LAYOUTS = (
    "AquilaForCausalLM",
    "AquilaModel",
    "InternLM3ForCausalLM",
    "InternLMForCausalLM",
    "LLaMAForCausalLM",
    "MiMoForCausalLM",
    "XverseForCausalLM",
    "YiForCausalLM",
)
_ENCODERS = (
    "BertForSequenceClassification",
    "BertModel",
    "Gemma3TextModel",
    "GteForSequenceClassification",
    "GteModel",
    "ModernBertForSequenceClassification",
    "ModernBertModel",
    "NewForSequenceClassification",
    "NewModel",
    "NomicBertForSequenceClassification",
    "NomicBertModel",
    "RobertaForSequenceClassification",
    "RobertaModel",
    "XLMRobertaForSequenceClassification",
    "XLMRobertaModel",
)
_EXPERTS = tuple(
    f"{name}ForCausalLM"
    for name in (
        "DeepseekV2",
        "DeepseekV3",
        "DeepseekV32",
        "Gemma4",
        "Glm4Moe",
        "Glm4MoeLite",
        "GlmMoeDsa",
        "GptOss",
        "GraniteMoe",
        "GraniteMoeHybrid",
        "KimiLinear",
        "Lfm2Moe",
        "MiniMaxM2",
        "Mixtral",
        "NemotronH",
        "Olmoe",
        "Qwen2Moe",
        "Qwen3Moe",
        "Qwen3Next",
        "Qwen3_5Moe",
    )
)


def with_verification(spec: ModelSpec) -> ModelSpec:
    """Adds the verified properties and tested backends of a model."""
    (name,) = spec.architectures
    return replace(spec, backends=EVERYWHERE, checked=_checked(name))


def _checked(name: str) -> tuple[str, ...]:
    if name in _LLAMA_LAYOUTS:
        return (LAYOUT,)
    if name in _ENCODERS:
        return (VECTORS,)
    if name.endswith("ForConditionalGeneration"):
        return (IMAGES,)
    return (LOGITS, EXPERTS) if name in _EXPERTS else (LOGITS,)
