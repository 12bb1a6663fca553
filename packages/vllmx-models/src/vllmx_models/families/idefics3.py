"""Idefics3 (Idefics3ForConditionalGeneration, arXiv 2408.12637) and SmolVLM
(SmolVLMForConditionalGeneration, arXiv 2504.05299): SigLIP over pieces of an image, in front of a
Llama."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vllmx_core.model import FeatureSpec

from vllmx_models.blocks.vit import vit_sizes
from vllmx_models.config import ConfigReader
from vllmx_models.configs.text import has_text_config, text_config
from vllmx_models.families.llama import llama
from vllmx_models.text_types import TEXT_TYPES
from vllmx_models.towers.siglip import IdeficsTower
from vllmx_models.trunks.decoder import Decoder, ModelNames

_TEXT = {**TEXT_TYPES["llama"]["llama"], "rms_norm_eps": 1e-5}
_NAMES = ModelNames(
    "model.text_model.embed_tokens", "model.text_model.layers", "model.text_model.norm"
)


def idefics3(config: Mapping[str, Any]) -> Decoder:
    """Images are supported, videos are not."""
    outer = ConfigReader(config, "Idefics3ForConditionalGeneration")
    text = llama(text_config(config, _TEXT)).spec
    sizes = vit_sizes(outer.part("vision_config"), 1152, heads=16, patch=32)
    merge = outer.integer("scale_factor", 2, high=64)
    if sizes["side"] % merge:
        raise outer.error("scale_factor", f"must divide a side of {sizes['side']} patches")
    features = FeatureSpec(1, text.hidden_size)
    tower = IdeficsTower(merge=merge, out_size=text.hidden_size, **sizes)
    names = _NAMES if has_text_config(config) else ModelNames()
    return Decoder(replace(text, names=names, features=features), tower)


smolvlm = idefics3
