"""Tiny random models for text and images, and what transformers says of their prompts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Glm4vConfig,
    Glm4vForConditionalGeneration,
    Glm4vMoeConfig,
    Glm4vMoeForConditionalGeneration,
    Glm46VConfig,
    Glm46VForConditionalGeneration,
    GlmOcrConfig,
    GlmOcrForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)
from vllmx_engine.images.processor import levels_of
from vllmx_models.blocks.tower import merge_order

from .image_parts import BREAK, END, PAD, START, TEXT, random_model
from .square_models import gemma3, idefics3, internvl, lighton_ocr, llava, mistral3, pixtral

__all__ = ["BREAK", "END", "PAD", "START"]  # for tests of these models

Image = tuple[np.ndarray, tuple[int, int, int]]
"""Patches and grid."""


_TURNS: dict[str, Any] = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "mrope_interleaved": True,
    "mrope_section": [4, 2, 2],
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
_TOWER: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 48,
    "num_position_embeddings": 25,
}
_TOKENS: dict[str, Any] = {
    "image_token_id": PAD,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
    "video_token_id": 93,
    "tie_word_embeddings": False,
}
_DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "rope_parameters": _TURNS | {"partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
}


def qwen3_vl() -> Any:
    """Four layers over a tower of three, which gives two layers more."""
    text, tower = TEXT | {"rope_parameters": _TURNS}, _TOWER | {"deepstack_visual_indexes": [0, 2]}
    config = Qwen3VLConfig(text_config=text, vision_config=tower, **_TOKENS)
    return random_model(Qwen3VLForConditionalGeneration, config)


def qwen3_vl_moe() -> Any:
    """Experts in the even layers."""
    text = TEXT | _EXPERTS | {"rope_parameters": _TURNS, "mlp_only_layers": [1]}
    tower = _TOWER | {"deepstack_visual_indexes": [1]}
    config = Qwen3VLMoeConfig(text_config=text, vision_config=tower, **_TOKENS)
    return random_model(Qwen3VLMoeForConditionalGeneration, config)


def qwen3_5() -> Any:
    """Two layers that keep a state."""
    config = Qwen3_5Config(text_config=TEXT | _DELTA, vision_config=_TOWER, **_TOKENS)
    return random_model(Qwen3_5ForConditionalGeneration, config)


def qwen3_5_moe() -> Any:
    """The same with experts."""
    text = TEXT | _DELTA | _EXPERTS | {"shared_expert_intermediate_size": 28}
    config = Qwen3_5MoeConfig(text_config=text, vision_config=_TOWER, **_TOKENS)
    return random_model(Qwen3_5MoeForConditionalGeneration, config)


def gemma4(*, clipped: bool = False) -> Any:
    """Images see both ways in every other layer; the last two layers share their pages. Clipped:
    what goes into and out of the tower's matrices is held between bounds, each its own."""
    text = TEXT | {
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "global_head_dim": 24,
        "vocab_size_per_layer_input": 97,
        "use_bidirectional_attention": "vision",
        "final_logit_softcapping": 30.0,
        "pad_token_id": 3,
        "tie_word_embeddings": True,
    }
    tower = {
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 3,
        "patch_size": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "pooling_kernel_size": 2,
        "position_embedding_size": 32,
        "standardize": True,
        "model_type": "gemma4_vision",
        "use_clipped_linears": clipped,
    }
    config = Gemma4Config(
        text_config=text,
        vision_config=tower,
        image_token_id=PAD,
        video_token_id=94,
        audio_token_id=95,
        boi_token_id=START,
        eoi_token_id=END,
        tie_word_embeddings=True,
    )
    model = random_model(Gemma4ForConditionalGeneration, config)
    for name, buffer in model.named_buffers():
        if "std_" in name or "layer_scalar" in name:
            torch.nn.init.normal_(buffer, std=0.5)
        elif name.endswith(("put_min", "put_max")):
            low, high = (-1.6, -0.8) if name.endswith("min") else (0.7, 1.5)
            torch.nn.init.uniform_(buffer, low, high)
    return model


def qwen2_5_vl() -> Any:
    """One layer of the tower's three sees all of an image, the others windows of 2 x 2 tokens."""
    text = {key: value for key, value in TEXT.items() if key != "head_dim"} | {
        "hidden_size": 64,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [2, 3, 3],
        },
    }
    tower = {key: value for key, value in _TOWER.items() if key != "num_position_embeddings"} | {
        "out_hidden_size": 64,
        "window_size": 16,
        "fullatt_block_indexes": [1],
    }
    config = Qwen2_5_VLConfig(text_config=text, vision_config=tower, **_TOKENS)
    return random_model(Qwen2_5_VLForConditionalGeneration, config)


def qwen2_vl() -> Any:
    """The tower's sizes have other names."""
    text = {key: value for key, value in TEXT.items() if key != "head_dim"} | {
        "hidden_size": 64,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [2, 3, 3],
        },
    }
    tower = {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}
    shared = ("depth", "num_heads", "patch_size", "spatial_merge_size", "temporal_patch_size")
    tower |= {key: _TOWER[key] for key in shared}
    config = Qwen2VLConfig(text_config=text, vision_config=tower, **_TOKENS)
    return random_model(Qwen2VLForConditionalGeneration, config)


_GLM_TOWER: dict[str, Any] = {
    **{key: value for key, value in _TOWER.items() if key != "num_position_embeddings"},
    "image_size": 20,
}


def glm4v(kind: Any = Glm4vForConditionalGeneration, config: Any = Glm4vConfig) -> Any:
    """The tower's table of positions is stretched."""
    rope = {"rope_type": "default", "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
    text = {key: value for key, value in TEXT.items() if key != "head_dim"} | {
        "hidden_size": 64,
        "pad_token_id": 0,
        "rope_parameters": rope | {"rope_theta": 10000.0},
    }
    text["model_type"] = "glm4v_text"
    tower = _GLM_TOWER | {"out_hidden_size": 64, "model_type": "glm4v_vision"}
    return random_model(kind, config(text_config=text, vision_config=tower, **_TOKENS))


def glm_ocr() -> Any:
    """Heads are wider than the hidden size, and normed in the tower."""
    rope = {"rope_type": "default", "partial_rotary_factor": 1.0, "mrope_section": [4, 2, 2]}
    text = TEXT | {"pad_token_id": 0, "rope_parameters": rope | {"rope_theta": 10000.0}}
    config = GlmOcrConfig(text_config=text, vision_config=_GLM_TOWER, **_TOKENS)
    return random_model(GlmOcrForConditionalGeneration, config)


def glm4v_moe() -> Any:
    """The last three layers have experts; queries, keys and values of the tower a bias."""
    rope = {"rope_type": "default", "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}
    text = TEXT | {
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "n_shared_experts": 1,
        "attention_bias": True,
        "rope_parameters": rope | {"rope_theta": 10000.0},
    }
    tower = _GLM_TOWER | {"attention_bias": True}
    config = Glm4vMoeConfig(text_config=text, vision_config=tower, **_TOKENS)
    model = random_model(Glm4vMoeForConditionalGeneration, config)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, std=0.2)
    return model


PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 64, "longest_edge": 4096},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
VIDEO = 93
MARKS = {
    "<|image_pad|>": PAD, "<|vision_start|>": START, "<|vision_end|>": END,
    "<|video_pad|>": VIDEO,
}  # fmt: skip
_TEMPLATE = (
    "{% for message in messages %}{% for part in message.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif part.type == 'video' %}"
    "<|vision_start|><|video_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endfor %} w11"
)


def save(model: Any, folder: Path) -> Path:
    """The checkpoint's folder, with a tokenizer of the words w0, w1 ... and a chat template."""
    model.save_pretrained(folder)
    words = {f"w{index}": index for index in range(97) if index not in MARKS.values()}
    tokenizer = Tokenizer(WordLevel({**words, **MARKS}, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": _TEMPLATE}))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return folder


LEVELS = levels_of(PROCESSOR)


def grey(patches: np.ndarray) -> np.ndarray:
    """The levels that such patches stand for."""
    return np.searchsorted(LEVELS[0], patches).astype(np.uint8)


def colours_last(patches: np.ndarray) -> np.ndarray:
    """The same with each pixel's colours together."""
    return patches.reshape(len(patches), 3, -1).transpose(0, 2, 1).reshape(len(patches), -1)


@dataclass(frozen=True)
class Family:
    """How images of models of one kind come, and what transformers is given of them."""

    make: Callable[[], Any]
    spans: int = 0
    """Most tokens of an image, where they see each other both ways."""
    form: Literal["qwen", "square", "pieces", "gemma4", "pixtral"] = "qwen"
    types: str = "mm_token_type_ids"
    side: int = 6
    """Patches in a row of a square."""
    merge: int = 2
    breaks: bool = False
    """Each line of an image's tokens but the last ends with `BREAK`."""

    def image(self, rows: int, columns: int, seed: int) -> Image:
        """Patches and grid of an image that is made up."""
        random, width = np.random.default_rng(seed), 3 * 4 * 4
        if self.form == "qwen":
            width *= 2
        elif self.form not in ("gemma4", "pixtral"):
            rows = columns = self.side
        return LEVELS[0][random.integers(0, 256, (rows * columns, width))], (1, rows, columns)

    def given(self, images: list[Image]) -> dict[str, Any]:
        """The images for transformers."""
        if not images:
            return {}
        if self.form == "gemma4":
            return _gemma4_images(images)
        if self.form == "pixtral":
            return _pixtral_images(images, self.merge)
        patches = torch.from_numpy(np.concatenate([one for one, _ in images]))
        if self.form == "qwen":
            grids = torch.tensor([grid for _, grid in images])
            return {"pixel_values": patches, "image_grid_thw": grids}
        side, merge = self.side // self.merge, self.merge
        cut = patches.reshape(len(images), side, side, merge, merge, 3, 4, 4)
        pixels = cut.permute(0, 5, 1, 3, 6, 2, 4, 7)
        pixels = pixels.reshape(len(images), 3, 4 * self.side, 4 * self.side)
        return {"pixel_values": pixels if self.form == "square" else pixels[None]}

    @torch.inference_mode()
    def logits(self, model: Any, ids: list[int], images: list[Image]) -> np.ndarray:
        """(T, V) by transformers."""
        tokens = torch.tensor([ids])
        given = {"input_ids": tokens, **self.given(images)}
        if self.types and self.form != "pieces":
            given[self.types] = (tokens == PAD).int()
        model.model.rope_deltas = None
        found: np.ndarray = model(**given).logits[0].numpy()
        return found


def _gemma4_images(images: list[Image]) -> dict[str, Any]:
    """Padded to the largest, with the column and the row of each patch."""
    most = max(len(patches) for patches, _ in images)
    pixels = np.zeros((len(images), most, images[0][0].shape[1]), np.float32)
    positions = np.full((len(images), most, 2), -1)
    for number, (patches, (_, tall, wide)) in enumerate(images):
        row, column = merge_order(tall, wide, 2)
        pixels[number, : len(patches)] = colours_last(patches) / 2 + 0.5
        positions[number, : len(patches)] = np.stack([column, row], axis=1)
    return {
        "pixel_values": torch.from_numpy(pixels),
        "image_position_ids": torch.from_numpy(positions),
    }


def _pixtral_images(images: list[Image], merge: int) -> dict[str, Any]:
    """Padded to the largest side, with the size of each."""
    sizes = torch.tensor([(4 * tall, 4 * wide) for _, (_, tall, wide) in images])
    pixels = np.zeros((len(images), 3, *sizes.amax(dim=0).tolist()), np.float32)
    for number, (patches, (_, tall, wide)) in enumerate(images):
        cut = patches.reshape(tall // merge, wide // merge, merge, merge, 3, 4, 4)
        whole = cut.transpose(4, 0, 2, 5, 1, 3, 6).reshape(3, 4 * tall, 4 * wide)
        pixels[number, :, : 4 * tall, : 4 * wide] = whole
    return {"pixel_values": torch.from_numpy(pixels), "image_sizes": sizes}


FAMILIES = {
    "glm46v": Family(partial(glm4v, Glm46VForConditionalGeneration, Glm46VConfig)),
    "glm4v": Family(glm4v),
    "glm4v_moe": Family(glm4v_moe),
    "glm_ocr": Family(glm_ocr),
    "qwen2_5_vl": Family(qwen2_5_vl),
    "qwen2_vl": Family(qwen2_vl),
    "qwen3_vl": Family(qwen3_vl),
    "qwen3_vl_moe": Family(qwen3_vl_moe),
    "qwen3_5": Family(qwen3_5),
    "qwen3_5_moe": Family(qwen3_5_moe),
    "gemma3": Family(gemma3, 9, "square", "token_type_ids"),
    "gemma4": Family(gemma4, 16, "gemma4"),
    "idefics3": Family(idefics3, form="pieces"),
    "internvl": Family(internvl, form="square", types=""),
    "llava": Family(llava, form="square", types="", side=4, merge=1),
    "lighton_ocr": Family(lighton_ocr, form="pixtral", types=""),
    "mistral3": Family(mistral3, form="pixtral", types="", breaks=True),
    "smolvlm": Family(
        partial(idefics3, SmolVLMForConditionalGeneration, SmolVLMConfig), form="pieces"
    ),
}
VARIANTS = {
    "gemma4, clipped": Family(partial(gemma4, clipped=True), 16, "gemma4"),
    "internvl, normed": Family(
        partial(internvl, norm_type="rms_norm", use_qk_norm=True, attention_bias=False),
        form="square",
        types="",
    ),
    "llava, pixtral": Family(pixtral, form="pixtral", types="", merge=1, breaks=True),
    "llava, siglip": Family(
        partial(llava, model_type="siglip_vision_model", vision_use_head=False),
        form="square", types="", side=4, merge=1,
    ),
}  # fmt: skip
"""Of these families."""
