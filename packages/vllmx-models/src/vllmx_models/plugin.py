"""What this distribution brings; see `vllmx_core.hooks`."""

from __future__ import annotations

from vllmx_core.hooks import hookimpl
from vllmx_core.specs import (
    ModelSourceSpec,
    ModelSpec,
    QuantizationSpec,
    QuantizerSpec,
    WeightFormatSpec,
)


@hookimpl
def vllmx_models() -> tuple[ModelSpec, ...]:
    return (
        _model("llama", "LlamaForCausalLM", gguf=True),
        _model("mistral", "MistralForCausalLM", gguf=False),  # in GGUF files it is a llama
        _model("qwen2", "Qwen2ForCausalLM", gguf=True),
        _model("qwen3", "Qwen3ForCausalLM", gguf=True),
        _model("smollm3", "SmolLM3ForCausalLM", gguf=True),
    )


def _model(name: str, architecture: str, *, gguf: bool) -> ModelSpec:
    """The module, its constructor, the model_type and the GGUF architecture are named alike."""
    module = f"vllmx_models.{name}"
    return ModelSpec(
        name,
        f"{module}:{name}",
        (architecture,),
        (name,),
        gguf_names=(name,) if gguf else (),
        gguf=f"{module}:GGUF" if gguf else "",
    )


@hookimpl
def vllmx_weight_formats() -> tuple[WeightFormatSpec, ...]:
    return (
        WeightFormatSpec(
            "safetensors", "vllmx_models.safetensors:open_checkpoint", ("*.safetensors",)
        ),
        # below safetensors: a folder with both holds the GGUF as a smaller copy
        WeightFormatSpec(
            "gguf",
            "vllmx_models.gguf.source:open_checkpoint",
            ("*.gguf",),
            priority=-1,
            needs_registry=True,
        ),
    )


@hookimpl
def vllmx_quantizations() -> tuple[QuantizationSpec, ...]:
    schemes = "vllmx_models.quantization"
    return (
        QuantizationSpec("awq", f"{schemes}.awq:awq"),
        QuantizationSpec("compressed-tensors", f"{schemes}.compressed_tensors:compressed_tensors"),
        QuantizationSpec("fbgemm_fp8", f"{schemes}.fp8:fp8"),
        QuantizationSpec("fp8", f"{schemes}.fp8:fp8"),
        QuantizationSpec("gptq", f"{schemes}.gptq:gptq"),
        QuantizationSpec("mlx", f"{schemes}.mlx:mlx"),
        QuantizationSpec("modelopt", f"{schemes}.modelopt:modelopt"),
        QuantizationSpec("mxfp4", f"{schemes}.mxfp4:mxfp4"),
    )


IN_SITU = (
    "q8_0", "q6_k", "q5_k", "q5_k_m", "q5_k_s", "q4_k", "q4_k_m", "q4_k_s", "q3_k", "q3_k_l",
    "q3_k_m", "q3_k_s", "q2_k", "q2_k_s", "q5_1", "q5_0", "q4_1", "q4_0", "int8", "fp8",
)  # fmt: skip
"""What `vllmx_models.isq` makes; it is not imported for this list."""


@hookimpl
def vllmx_quantizers() -> tuple[QuantizerSpec, ...]:
    return tuple(QuantizerSpec(name, "vllmx_models.isq:in_situ") for name in IN_SITU)


@hookimpl
def vllmx_model_sources() -> tuple[ModelSourceSpec, ...]:
    return (
        ModelSourceSpec("local path", "vllmx_models.sources:local_path", 100),
        ModelSourceSpec("Hugging Face hub", "vllmx_models.sources:hub_snapshot", 0),
        ModelSourceSpec("file on the hub", "vllmx_models.sources:hub_file", 0),
    )
