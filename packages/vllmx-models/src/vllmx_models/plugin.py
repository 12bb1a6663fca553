"""What this distribution brings; see `vllmx_core.hooks`."""

from __future__ import annotations

from vllmx_core.hooks import hookimpl
from vllmx_core.specs import ModelSourceSpec, ModelSpec, WeightFormatSpec


@hookimpl
def vllmx_models() -> tuple[ModelSpec, ...]:
    return (
        ModelSpec("llama", "vllmx_models.llama:llama", ("LlamaForCausalLM",), ("llama",)),
        ModelSpec("mistral", "vllmx_models.mistral:mistral", ("MistralForCausalLM",), ("mistral",)),
        ModelSpec("qwen2", "vllmx_models.qwen2:qwen2", ("Qwen2ForCausalLM",), ("qwen2",)),
        ModelSpec("qwen3", "vllmx_models.qwen3:qwen3", ("Qwen3ForCausalLM",), ("qwen3",)),
        ModelSpec("smollm3", "vllmx_models.smollm3:smollm3", ("SmolLM3ForCausalLM",), ("smollm3",)),
    )


@hookimpl
def vllmx_weight_formats() -> tuple[WeightFormatSpec, ...]:
    implementation = "vllmx_models.safetensors:open_checkpoint"
    return (WeightFormatSpec("safetensors", implementation, ("*.safetensors",)),)


@hookimpl
def vllmx_model_sources() -> tuple[ModelSourceSpec, ...]:
    return (
        ModelSourceSpec("local path", "vllmx_models.sources:local_path", 100),
        ModelSourceSpec("Hugging Face hub", "vllmx_models.sources:hub_snapshot", 0),
    )
