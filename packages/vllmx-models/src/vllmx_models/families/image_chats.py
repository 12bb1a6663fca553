"""Text models that see squares: InternVL (InternVLForConditionalGeneration, arXiv 2412.05271) and
LLaVA (LlavaForConditionalGeneration, arXiv 2310.03744). A vision transformer and a projector make
the embeddings of image tokens, in front of any text model."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from vllmx_core.errors import shown

from vllmx_models.blocks.vit import ViTNames, vit_sizes
from vllmx_models.config import ConfigReader
from vllmx_models.families.inner_texts import inner_text, seeing
from vllmx_models.families.mistral3 import with_pixtral
from vllmx_models.towers.projected import ProjectedTower
from vllmx_models.trunks.decoder import Decoder

logger = logging.getLogger("vllmx.models")
_INTERN_NAMES = ViTNames(
    patch="embeddings.patch_embeddings.projection",
    positions="embeddings.position_embeddings",
    class_token="embeddings.cls_token",  # noqa: S106 - a tensor
    layers="encoder.layer",
    before="layernorm_before",
    attention="attention",
    out="attention.projection_layer",
    after="layernorm_after",
    last_norm="layernorm",
)
_INTERN_SIZES = {
    "num_hidden_layers": 24,
    "intermediate_size": 4096,
    "hidden_act": "gelu",
    "image_size": 448,
}
_CLIP_SIZES = {
    "num_hidden_layers": 24,
    "intermediate_size": 4096,
    "hidden_act": "quick_gelu",
    "image_size": 336,
    "layer_norm_eps": 1e-5,
}


def internvl(config: Mapping[str, Any]) -> Decoder:
    """Images are supported, videos are not."""
    outer = ConfigReader(config, "InternVLForConditionalGeneration")
    text = inner_text(config, outer.architecture, "qwen2")
    if config.get("vision_config") is None:
        return text
    read = outer.part("vision_config")
    kind = read.config.get("norm_type", "layer_norm")
    if kind not in ("layer_norm", "rms_norm"):
        raise read.error("norm_type", "must be layer_norm or rms_norm")
    for key in ("use_absolute_position_embeddings", "use_mean_pooling"):
        if not read.flag(key, True):
            raise read.error(key, "must be true")
    sizes = vit_sizes(with_defaults(read, _INTERN_SIZES), 1024, 16, 14)
    ratio = outer.number("downsample_ratio", 0.5)
    merge = int(1 / max(ratio, 1 / 64))
    if merge * ratio != 1 or sizes["side"] % merge:
        raise outer.error(
            "downsample_ratio", f"must be 1 / n, n a divisor of {sizes['side']} patches"
        )
    tower = ProjectedTower(
        **sizes | {"depth": _feature_layer(outer, sizes["depth"], -1)},
        merge=merge,
        out_size=text.spec.hidden_size,
        names=_INTERN_NAMES,
        class_token=True,
        qkv_bias=read.flag("attention_bias", False),
        last_norm=False,
        rms=kind == "rms_norm",
        qk_norm=read.flag("use_qk_norm", False),
        scaled=True,
        projector_norm=True,
        projector_activation=outer.activation("projector_hidden_act", "gelu"),
    )
    return seeing(text, tower)


def llava(config: Mapping[str, Any]) -> Decoder:
    """CLIP's, SigLIP's or Pixtral's tower. Others are left out: text alone is served."""
    outer = ConfigReader(config, "LlavaForConditionalGeneration")
    text = inner_text(config, outer.architecture, "llama")
    if config.get("vision_config") is None:
        return text
    read = outer.part("vision_config")
    kind = read.config.get("model_type", "clip_vision_model")
    if kind == "pixtral":
        return with_pixtral(text, outer)
    if kind not in ("clip_vision_model", "siglip_vision_model"):
        logger.warning("text alone is served, images are refused: a tower of type %s", shown(kind))
        return text
    clip = kind == "clip_vision_model"
    if clip:
        sizes = vit_sizes(with_defaults(read, _CLIP_SIZES), 1024, 16, 14)
    else:
        sizes = vit_sizes(read, 768, 12, 16)
    strategy = outer.config.get("vision_feature_select_strategy", "default")
    if strategy != ("default" if clip else "full"):
        raise outer.error(
            "vision_feature_select_strategy", "must be default for CLIP and full for SigLIP"
        )
    tower = ProjectedTower(
        **sizes | {"depth": _feature_layer(outer, sizes["depth"], -2)},
        merge=1,
        out_size=text.spec.hidden_size,
        class_token=clip,
        patch_bias=not clip,
        first_norm=clip,
        last_norm=False,
        projector_bias=outer.flag("multimodal_projector_bias", True),
        projector_activation=outer.activation("projector_hidden_act", "gelu"),
    )
    return seeing(text, tower)


def with_defaults(read: ConfigReader, defaults: Mapping[str, Any]) -> ConfigReader:
    """Reads the same object over `defaults`."""
    given = {key: value for key, value in read.config.items() if value is not None}
    return ConfigReader({**defaults, **given}, read.architecture)


def _feature_layer(outer: ConfigReader, depth: int, default: int) -> int:
    """The number of layers that run before the features."""
    layer = outer.config.get("vision_feature_layer", default)
    if type(layer) is not int or not -depth <= layer <= depth or not layer % (depth + 1):
        raise outer.error("vision_feature_layer", f"must be one of the tower's {depth} layers")
    return layer % (depth + 1)
