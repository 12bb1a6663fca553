"""Tiny random models whose towers see squares, or images of any size as Pixtral's does."""

from __future__ import annotations

from typing import Any

from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    InternVLConfig,
    InternVLForConditionalGeneration,
    LightOnOcrConfig,
    LightOnOcrForConditionalGeneration,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
)

from .image_parts import PAD, TEXT, random_model


def gemma3() -> Any:
    """An image is longer than the window."""
    text = TEXT | {
        "sliding_window": 8,
        "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }
    tower = {
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "patch_size": 4,
        "num_attention_heads": 2,
        "image_size": 24,
        "vision_use_head": False,
        "model_type": "siglip_vision_model",
    }
    config = Gemma3Config(
        text_config=text,
        vision_config=tower,
        mm_tokens_per_image=9,
        image_token_index=PAD,
        tie_word_embeddings=False,
    )
    return random_model(Gemma3ForConditionalGeneration, config)


def idefics3(kind: Any = Idefics3ForConditionalGeneration, config: Any = Idefics3Config) -> Any:
    """A piece of an image is 6 x 6 patches, a token 2 x 2 of them."""
    tower = {
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "patch_size": 4,
        "num_attention_heads": 2,
        "image_size": 24,
    }
    text = TEXT | {"model_type": "llama"}
    made = config(
        text_config=text,
        vision_config=tower,
        scale_factor=2,
        image_token_id=PAD,
        tie_word_embeddings=False,
    )
    return random_model(kind, made)


_SQUARE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "patch_size": 4,
    "num_attention_heads": 2,
    "image_size": 24,
}


def internvl(**vision: Any) -> Any:
    """The class token is seen, and has no feature."""
    config = InternVLConfig(
        text_config={"model_type": "qwen3"} | TEXT,
        vision_config=_SQUARE | {"attention_bias": True} | vision,
        image_token_id=PAD,
        tie_word_embeddings=False,
    )
    return random_model(InternVLForConditionalGeneration, config)


def llava(**vision: Any) -> Any:
    """Four layers, and the features of the third."""
    named = {"model_type": "clip_vision_model", "image_size": 16, "num_hidden_layers": 4}
    config = LlavaConfig(
        text_config={"model_type": "llama"} | TEXT,
        vision_config=_SQUARE | named | vision,
        image_token_index=PAD,
        vision_feature_select_strategy="full" if vision else "default",
        tie_word_embeddings=False,
    )
    return random_model(LlavaForConditionalGeneration, config)


_PIXTRAL: dict[str, Any] = _SQUARE | {"model_type": "pixtral", "head_dim": 16}


def mistral3() -> Any:
    """A token is 2 x 2 patches."""
    config = Mistral3Config(
        text_config={"model_type": "mistral"} | TEXT,
        vision_config=_PIXTRAL,
        image_token_index=PAD,
        tie_word_embeddings=False,
    )
    return random_model(Mistral3ForConditionalGeneration, config)


def lighton_ocr() -> Any:
    """The same before Qwen3, without breaks."""
    config = LightOnOcrConfig(
        text_config={"model_type": "qwen3"} | TEXT,
        vision_config=_PIXTRAL,
        image_token_id=PAD,
        tie_word_embeddings=False,
    )
    return random_model(LightOnOcrForConditionalGeneration, config)


def pixtral() -> Any:
    """A token is one patch."""
    config = LlavaConfig(
        text_config={"model_type": "mistral"} | TEXT,
        vision_config=_PIXTRAL,
        image_token_index=PAD,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        tie_word_embeddings=False,
    )
    return random_model(LlavaForConditionalGeneration, config)
