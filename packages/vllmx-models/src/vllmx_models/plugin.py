"""This distribution's plugin hooks, see `vllmx_core.plugins.hooks`."""

from __future__ import annotations

from dataclasses import replace

from vllmx_core.plugins.hooks import hookimpl
from vllmx_core.plugins.specs import (
    ModelSourceSpec,
    ModelSpec,
    ParserSpec,
    QuantizationSpec,
    QuantizerSpec,
    WeightFormatSpec,
)

from vllmx_models.parsers import PARSERS
from vllmx_models.text_types import INNER_TEXTS, TEXT_TYPES
from vllmx_models.verified import with_verification

_AROUND = tuple(INNER_TEXTS)


@hookimpl
def vllmx_models() -> tuple[ModelSpec, ...]:
    return tuple(with_verification(spec) for spec in _models())


def _models() -> tuple[ModelSpec, ...]:
    return (
        _model("bamba", "BambaForCausalLM", gguf=False),
        _model(
            "bailing_moe_v2",
            "BailingMoeV2ForCausalLM",
            "dots1",
            gguf="bailingmoe2",
            table="BAILING_GGUF",
        ),
        _model("cohere", "CohereForCausalLM", gguf="command-r"),
        _model("cohere2", "Cohere2ForCausalLM", "cohere", gguf=True, table="COHERE2_GGUF"),
        _model("cwm", "CwmForCausalLM", "llama_variants", gguf=False),
        replace(_model("decilm", "DeciLMForCausalLM", "deci"), model_types=("nemotron-nas",)),
        _model("deepseek_v2", "DeepseekV2ForCausalLM", "deepseek", gguf="deepseek2"),
        _model("deepseek_v3", "DeepseekV3ForCausalLM", "deepseek", among="deepseek2"),
        _model("deepseek_v32", "DeepseekV32ForCausalLM", "deepseek", gguf="deepseek32"),
        _model("deepseek_v4", "DeepseekV4ForCausalLM", gguf=False),
        _model("dots1", "Dots1ForCausalLM", gguf=True),
        _model("ernie4_5", "Ernie4_5ForCausalLM", "llama_variants", gguf=True, table="ERNIE_GGUF"),
        _model("ernie4_5_moe", "Ernie4_5_MoeForCausalLM", gguf="ernie4_5-moe"),
        _model("exaone4", "Exaone4ForCausalLM", gguf=True),
        _model(
            "exaone_moe", "ExaoneMoeForCausalLM", "exaone4", gguf="exaone-moe", table="MOE_GGUF"
        ),
        _model("falcon", "FalconForCausalLM", "gpt_neox", gguf=True, table="FALCON_GGUF"),
        _model("falcon_mamba", "FalconMambaForCausalLM", "mamba", among="mamba"),
        _model("falcon_h1", "FalconH1ForCausalLM", gguf="falcon-h1"),
        _model("gemma", "GemmaForCausalLM", gguf=True),
        _model("gemma2", "Gemma2ForCausalLM", "gemma", gguf=True, table="GEMMA2_GGUF"),
        _model("gemma3", "Gemma3ForConditionalGeneration", gguf=False),
        _model("gemma3_text", "Gemma3ForCausalLM", "gemma3", gguf="gemma3"),
        _model("gemma3n_text", "Gemma3nForCausalLM", "gemma3n", gguf="gemma3n"),
        _model("gemma4", "Gemma4ForConditionalGeneration", gguf=False),
        _model("gemma4_text", "Gemma4ForCausalLM", "gemma4", gguf="gemma4"),
        _model("glm4", "Glm4ForCausalLM", gguf=True),
        _model("glm4_moe", "Glm4MoeForCausalLM", gguf="glm4moe"),
        _model("glm4_moe_lite", "Glm4MoeLiteForCausalLM", "deepseek", among="deepseek2"),
        _model("glm46v", "Glm46VForConditionalGeneration", "glm4v"),
        _model("glm4v", "Glm4vForConditionalGeneration"),
        _model("glm4v_moe", "Glm4vMoeForConditionalGeneration", "glm4v"),
        _model("glm_ocr", "GlmOcrForConditionalGeneration", "glm4v"),
        _model("glm_moe_dsa", "GlmMoeDsaForCausalLM", "deepseek", gguf="glm-dsa"),
        _model("gpt2", "GPT2LMHeadModel", gguf=True),
        _model("gpt_neo", "GPTNeoForCausalLM", "gpt2"),
        _model("gpt_neox", "GPTNeoXForCausalLM", gguf="gptneox", table="NEOX_GGUF"),
        _model("gptj", "GPTJForCausalLM", "gpt_neox"),
        _model("gpt_oss", "GptOssForCausalLM", gguf="gpt-oss"),
        _model("granite", "GraniteForCausalLM", gguf=True),
        _model("granitemoe", "GraniteMoeForCausalLM", "granite", gguf=True, table="MOE_GGUF"),
        _model("granitemoehybrid", "GraniteMoeHybridForCausalLM", gguf="granitehybrid"),
        _model("helium", "HeliumForCausalLM", "llama_variants", gguf=False),
        _model("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", "hunyuan", gguf="hunyuan-dense"),
        _model(
            "hunyuan_v1_moe",
            "HunYuanMoEV1ForCausalLM",
            "hunyuan",
            gguf="hunyuan-moe",
            table="MOE_GGUF",
        ),
        _model("hy_v3", "HYV3ForCausalLM", "dots1", gguf=False),
        _model("idefics3", "Idefics3ForConditionalGeneration", gguf=False),
        _model("internlm", "InternLMForCausalLM", "llama_variants", gguf=False),
        _model("internlm3", "InternLM3ForCausalLM", "llama_variants", gguf=False),
        _model("internvl", "InternVLForConditionalGeneration", "image_chats", around=_AROUND),
        _model("jamba", "JambaForCausalLM", "mamba", gguf=True, table="JAMBA_GGUF"),
        _model("kimi_linear", "KimiLinearForCausalLM", gguf="kimi-linear"),
        _model("lfm2", "Lfm2ForCausalLM", gguf=True),
        _model("lfm2_moe", "Lfm2MoeForCausalLM", "lfm2", gguf="lfm2moe", table="MOE_GGUF"),
        _model("lighton_ocr", "LightOnOcrForConditionalGeneration", "mistral3", around=_AROUND),
        _model("llama", "LlamaForCausalLM", gguf=True),
        _model("llava", "LlavaForConditionalGeneration", "image_chats", around=_AROUND),
        _model("mimo", "MiMoForCausalLM", "llama_variants", gguf=False),
        _model("mimo_v2_flash", "MiMoV2FlashForCausalLM", gguf="mimo2"),
        _model("llama4", "Llama4ForCausalLM", gguf=True),
        _model("mamba", "MambaForCausalLM", gguf=True),
        _model("mamba2", "Mamba2ForCausalLM", "mamba", gguf=True, table="MAMBA2_GGUF"),
        _model("minimax_m2", "MiniMaxM2ForCausalLM", gguf="minimax-m2"),
        _model("ministral3", "Ministral3ForCausalLM", "mistral", gguf="mistral3"),
        replace(
            _model("mistral", "MistralForCausalLM", among="llama"),
            gguf_among=("llama", "mistral3"),
        ),
        _model("mistral3", "Mistral3ForConditionalGeneration", around=_AROUND),
        _model("mistral4", "Mistral4ForCausalLM", "deepseek", gguf=True),
        _model("mixtral", "MixtralForCausalLM", "mistral", among="llama"),
        replace(
            _model("nemotron_h", "NemotronHForCausalLM", gguf=True),
            gguf_names=("nemotron_h", "nemotron_h_moe"),
        ),
        _model("mt5", "MT5ForConditionalGeneration", "t5", gguf=False),
        _model("olmo2", "Olmo2ForCausalLM", "olmo", gguf=True),
        _model("olmo3", "Olmo3ForCausalLM", "olmo", among="olmo2"),
        _model("olmoe", "OlmoeForCausalLM", gguf=True),
        _model("opt", "OPTForCausalLM", "gpt2"),
        _model("phi3", "Phi3ForCausalLM", gguf=True),
        _model("phimoe", "PhimoeForCausalLM", gguf=True),
        ModelSpec("phi_moe", "vllmx_models.families.phimoe:phimoe", ("PhiMoEForCausalLM",)),
        _model("qwen2", "Qwen2ForCausalLM", "qwen", gguf=True),
        replace(
            _model("qwen2_5_omni", "Qwen2_5OmniForConditionalGeneration", "audio_chats"),
            architectures=(
                "Qwen2_5OmniForConditionalGeneration",
                "Qwen2_5OmniModel",
                "Qwen2_5OmniThinkerForConditionalGeneration",
            ),
            model_types=("qwen2_5_omni", "qwen2_5_omni_thinker"),
        ),
        _model("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", gguf="qwen2vl"),
        _model("qwen2_audio", "Qwen2AudioForConditionalGeneration", "audio_chats"),
        _model("qwen2_moe", "Qwen2MoeForCausalLM", "qwen_moe", gguf="qwen2moe"),
        _model("qwen2_vl", "Qwen2VLForConditionalGeneration", "qwen2_5_vl"),
        _model("qwen3", "Qwen3ForCausalLM", "qwen", gguf=True, table="QWEN3_GGUF"),
        _model("qwen3_5", "Qwen3_5ForConditionalGeneration", gguf=False),
        _model("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", "qwen3_5", gguf=False),
        _model(
            "qwen3_5_moe_text",
            "Qwen3_5MoeForCausalLM",
            "qwen3_5",
            gguf="qwen35moe",
            table="MOE_GGUF",
        ),
        _model("qwen3_5_text", "Qwen3_5ForCausalLM", "qwen3_5", gguf="qwen35"),
        _model("qwen3_vl", "Qwen3VLForConditionalGeneration", gguf="qwen3vl"),
        _model(
            "qwen3_vl_moe",
            "Qwen3VLMoeForConditionalGeneration",
            "qwen3_vl",
            gguf="qwen3vlmoe",
            table="MOE_GGUF",
        ),
        _model("qwen3_moe", "Qwen3MoeForCausalLM", "qwen_moe", gguf="qwen3moe", table="QWEN3_GGUF"),
        _model("qwen3_asr", "Qwen3ASRForConditionalGeneration", "audio_chats"),
        _model("qwen3_next", "Qwen3NextForCausalLM", gguf="qwen3next"),
        replace(
            _model("qwen3_omni_moe", "Qwen3OmniMoeForConditionalGeneration", "audio_chats"),
            architectures=(
                "Qwen3OmniMoeForConditionalGeneration",
                "Qwen3OmniMoeThinkerForConditionalGeneration",
            ),
            model_types=("qwen3_omni_moe", "qwen3_omni_moe_thinker"),
        ),
        _model("seed_oss", "SeedOssForCausalLM", "llama_variants", gguf=True, table="SEED_GGUF"),
        _model("smollm3", "SmolLM3ForCausalLM", gguf=True),
        _model("smolvlm", "SmolVLMForConditionalGeneration", "idefics3"),
        _model("stablelm", "StableLmForCausalLM", gguf=True),
        _model("starcoder2", "Starcoder2ForCausalLM", gguf=True),
        _model("t5", "T5ForConditionalGeneration", gguf=True),
        _model("voxtral", "VoxtralForConditionalGeneration", "audio_chats"),
        _model("whisper", "WhisperForConditionalGeneration", gguf=False),
        _model("yi", "YiForCausalLM", "llama_variants", gguf=False),
        ModelSpec(
            "gemma3_embedder",
            "vllmx_models.families.gemma3:gemma3_embedder",
            ("Gemma3TextModel",),
            gguf_names=("gemma-embedding",),
            gguf="vllmx_models.families.gemma3:EMBEDDER_GGUF",
        ),
        *_llamas(),
        *_encoders(),
        *_drafters(),
    )


def _drafters() -> tuple[ModelSpec, ...]:
    """Drafters that read hidden states of their target, by the names of several authors."""
    names = {
        "eagle3": (
            "LlamaForCausalLMEagle3",
            "Eagle3LlamaForCausalLM",
            "Eagle3Speculator",
            "Eagle3DraftModel",
        ),
        "dflash": ("DFlashDraftModel", "DFlashSpeculator"),
    }
    found = [
        ModelSpec(name.lower(), f"vllmx_models.families.{kind}:{kind}", (name,))
        for kind, architectures in names.items()
        for name in architectures
    ]
    table = "vllmx_models.formats.gguf.gemma4:ASSISTANT"
    assistant = ModelSpec(
        "gemma4_assistant",
        "vllmx_models.families.gemma4_assistant:gemma4_assistant",
        ("Gemma4AssistantForCausalLM",),
        gguf_names=("gemma4-assistant",),
        gguf=table,
    )
    return (*found, assistant)


def _llamas() -> tuple[ModelSpec, ...]:
    """Architectures that are Llama under another class name."""
    names = ("AquilaForCausalLM", "AquilaModel", "LLaMAForCausalLM", "XverseForCausalLM")
    return tuple(
        ModelSpec(name.lower(), "vllmx_models.families.llama:llama", (name,)) for name in names
    )


def _encoders() -> tuple[ModelSpec, ...]:
    """Encoders for embeddings, and their cross-encoders and classifiers."""
    modules = {
        "Bert": ("bert", "bert"),
        "DistilBert": ("bert_variants", "distilbert"),
        "EuroBert": ("eurobert", "eurobert"),
        "Gte": ("nomic_bert", "gte"),
        "JinaBert": ("bert_variants", "jina_bert"),
        "JinaEmbeddingsV3": ("nomic_bert", "jina_v3"),
        "MPNet": ("bert_variants", "mpnet"),
        "ModernBert": ("modernbert", "modernbert"),
        "New": ("nomic_bert", "gte"),
        "NomicBert": ("nomic_bert", "nomic_bert"),
        "Roberta": ("bert", "roberta"),
        "XLMRoberta": ("bert", "roberta"),
    }
    files = {
        "BertModel": ("bert",),
        "EuroBertModel": ("eurobert",),
        "JinaBertModel": ("jina-bert-v2",),
        "JinaEmbeddingsV3Model": ("jina-bert-v3",),
        "ModernBertModel": ("modern-bert",),
        "NomicBertModel": ("nomic-bert", "nomic-bert-moe"),
    }
    tables = {"JinaEmbeddingsV3Model": "JINA_GGUF"}
    names = [
        (f"{family}{form}", module, f"{function}{end}")
        for family, (module, function) in modules.items()
        for form, end in (("Model", ""), ("ForSequenceClassification", "_classifier"))
    ]
    names += [
        ("HF_ColBERT", "bert", "bert"),
        ("BertForMaskedLM", "bert", "bert_words"),
        ("DistilBertForMaskedLM", "bert_variants", "distilbert_words"),
        # published embedders say so
        ("JinaBertForMaskedLM", "bert_variants", "jina_bert"),
        ("MPNetForMaskedLM", "bert_variants", "mpnet"),
        ("RobertaForMaskedLM", "bert", "roberta"),
        ("XLMRobertaForMaskedLM", "bert", "roberta"),
    ]
    return tuple(
        ModelSpec(
            name.lower(),
            f"vllmx_models.families.{module}:{function}",
            (name,),
            gguf_names=files.get(name, ()),
            gguf=f"vllmx_models.families.{module}:{tables.get(name, 'GGUF')}"
            if name in files
            else "",
        )
        for name, module, function in names
    )


def _model(
    name: str,
    architecture: str,
    file: str | None = None,
    *,
    gguf: bool | str = False,
    table: str = "GGUF",
    among: str = "",
    around: tuple[str, ...] = (),
) -> ModelSpec:
    """A model whose module, constructor, model_type and GGUF architecture are all called `name`.

    `file` overrides the module, `gguf` the architecture and `table` the module's GGUFArchitecture.
    `among`: GGUF files of another architecture hold the model, and its table reads them.
    """
    module = f"vllmx_models.families.{file or name}"
    return ModelSpec(
        name,
        f"{module}:{name}",
        (architecture,),
        (name,),
        gguf_names=(gguf if isinstance(gguf, str) else name,) if gguf else (),
        gguf=f"{module}:{table}" if gguf else "",
        gguf_among=(among,) if among else (),
        around=around,
        text_types=TEXT_TYPES.get(name, {}),
    )


@hookimpl
def vllmx_weight_formats() -> tuple[WeightFormatSpec, ...]:
    return (
        WeightFormatSpec(
            "safetensors",
            "vllmx_models.formats.safetensors:open_checkpoint",
            ("*.safetensors",),
            adapter="vllmx_models.formats.peft:open_adapter",
        ),
        # below safetensors: a folder with both holds the GGUF as a smaller copy
        WeightFormatSpec(
            "gguf",
            "vllmx_models.formats.gguf.source:open_checkpoint",
            ("*.gguf",),
            priority=-1,
            needs_registry=True,
            tower="vllmx_models.formats.gguf.mmproj:with_tower",
            adapter="vllmx_models.formats.gguf.adapter:open_adapter",
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
"""The names of `vllmx_models.isq`, listed here to avoid its import."""


@hookimpl
def vllmx_quantizers() -> tuple[QuantizerSpec, ...]:
    return tuple(QuantizerSpec(name, "vllmx_models.isq:in_situ") for name in IN_SITU)


@hookimpl
def vllmx_parsers() -> tuple[ParserSpec, ...]:
    return PARSERS


@hookimpl
def vllmx_model_sources() -> tuple[ModelSourceSpec, ...]:
    return (
        ModelSourceSpec("local path", "vllmx_models.sources:local_path", 100),
        ModelSourceSpec("Hugging Face hub", "vllmx_models.sources:hub_snapshot", 0),
        ModelSourceSpec("file on the hub", "vllmx_models.sources:hub_file", 0),
        ModelSourceSpec("ModelScope", "vllmx_models.sources:modelscope_model", 0),
    )
