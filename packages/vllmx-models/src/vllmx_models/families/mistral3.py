"""Pixtral's tower in front of Mistral (Mistral3ForConditionalGeneration: Mistral Small 3.1 and 3.2,
Ministral 3) and of Qwen3 (LightOnOcrForConditionalGeneration, arXiv 2601.14251)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllmx_models.blocks.vit import square
from vllmx_models.config import ConfigReader
from vllmx_models.families.inner_texts import inner_text, seeing
from vllmx_models.towers.pixtral import PixtralTower
from vllmx_models.trunks.decoder import Decoder


def mistral3(config: Mapping[str, Any]) -> Decoder:
    """Squares of patches are joined to one token."""
    outer = ConfigReader(config, "Mistral3ForConditionalGeneration")
    text = inner_text(config, outer.architecture, "mistral")
    if config.get("vision_config") is None:
        return text
    join_eps = text.spec.norm.eps
    return with_pixtral(text, outer, outer.integer("spatial_merge_size", 2, high=16), join_eps)


def lighton_ocr(config: Mapping[str, Any]) -> Decoder:
    """LightOnOCR: the same before Qwen3, without tokens between lines."""
    outer = ConfigReader(config, "LightOnOcrForConditionalGeneration")
    text = inner_text({"tie_word_embeddings": True, **config}, outer.architecture, "qwen3")
    if config.get("vision_config") is None:
        return text
    merge = outer.integer("spatial_merge_size", 2, high=16)
    modules = ("vision_encoder.", "vision_projection.")
    return with_pixtral(text, outer, merge, text.spec.norm.eps, modules=modules, breaks=False)


def with_pixtral(
    text: Decoder,
    outer: ConfigReader,
    merge: int = 1,
    join_eps: float | None = None,
    **others: Any,
) -> Decoder:
    """A text model behind Pixtral's tower. `join_eps` and `others`: fields of `PixtralTower`;
    nothing is joined without the first."""
    read, joins = outer.part("vision_config"), join_eps is not None
    size, heads = read.integer("hidden_size", 1024), read.integer("num_attention_heads", 16)
    if size % heads or size // heads % 4:
        raise read.error("num_attention_heads", f"must divide {size} into multiples of 4")
    if read.integer("head_dim", size // heads) != size // heads:
        raise read.error("head_dim", f"must be {size // heads}")
    if read.integer("num_channels", 3) != 3:
        raise read.error("num_channels", "must be 3")
    if outer.config.get("vision_feature_layer", -1) != -1:
        raise outer.error("vision_feature_layer", "must be -1")
    theta = read.number("rope_theta", 10000.0)
    tower = PixtralTower(
        depth=read.integer("num_hidden_layers", 24, high=1024),
        hidden_size=size,
        num_heads=heads,
        mlp_size=read.integer("intermediate_size", 4096),
        activation=read.activation(default="gelu"),
        patch=square(read, "patch_size", 14 if joins else 16, 256),
        frames=1,
        merge=merge,
        out_size=text.spec.hidden_size,
        theta=read.part("rope_parameters").number("rope_theta", theta),
        joins=joins,
        join_eps=join_eps or 0.0,
        projector_activation=outer.activation("projector_hidden_act", "gelu"),
        projector_bias=outer.flag("multimodal_projector_bias", not joins),
        **others,
    )
    return seeing(text, tower)
