"""Towers in GGUF files that see squares: vision transformers before Gemma 3, Idefics3 and InternVL.
See `vllmx_models.formats.gguf.towers`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllmx_models.formats.gguf.hyperparameters import GGUFHeader
from vllmx_models.formats.gguf.tower_metadata import (
    activation,
    block_count,
    colours,
    feed_forward,
    layer_entries,
)
from vllmx_models.formats.gguf.tower_weights import Entry, without_offset


# --- Gemma 3 ----------------------------------------------------------------------------------
def _gemma3_sizes(header: GGUFHeader) -> tuple[int, int, int]:
    """Sizes of an image and of a patch, and tokens of an image."""
    size, patch = header.integer("vision.image_size"), header.integer("vision.patch_size")
    side = size // patch // header.integer("vision.projector.scale_factor", 4)
    return size, patch, side * side


def _vit_config(header: GGUFHeader) -> dict[str, Any]:
    """`vision_config` of a vision transformer over squares."""
    return {
        "num_hidden_layers": block_count(header),
        "hidden_size": header.integer("vision.embedding_length"),
        "num_attention_heads": header.integer("vision.attention.head_count"),
        "intermediate_size": header.integer("vision.feed_forward_length"),
        "layer_norm_eps": header.number("vision.attention.layer_norm_epsilon", 1e-6),
        "hidden_act": "gelu_pytorch_tanh",
        "image_size": header.integer("vision.image_size"),
        "patch_size": header.integer("vision.patch_size"),
    }


def gemma3_config(header: GGUFHeader) -> dict[str, Any]:
    tokens = _gemma3_sizes(header)[2]
    return {"vision_config": _vit_config(header), "mm_tokens_per_image": tokens}


def gemma3_processor(header: GGUFHeader) -> dict[str, Any]:
    size, patch, tokens = _gemma3_sizes(header)
    return {
        "image_processor_type": "Gemma3ImageProcessor",
        "size": {"height": size, "width": size},
        "patch_size": patch,
        "image_seq_length": tokens,
        **colours(header),
    }


def _siglip_entries(header: GGUFHeader, tower: str) -> Iterator[Entry]:
    yield Entry(f"{tower}.embeddings.patch_embedding", ("v.patch_embd",))
    yield Entry(f"{tower}.embeddings.position_embedding", ("v.position_embd",))
    up, down = feed_forward(header)
    yield from layer_entries(
        header,
        f"{tower}.encoder.layers",
        {
            "ln1": "layer_norm1",
            "attn_q": "self_attn.q_proj",
            "attn_k": "self_attn.k_proj",
            "attn_v": "self_attn.v_proj",
            "attn_out": "self_attn.out_proj",
            "ln2": "layer_norm2",
            up: "mlp.fc1",
            down: "mlp.fc2",
        },
    )
    yield Entry(f"{tower}.post_layernorm", ("v.post_ln",))


def gemma3_entries(header: GGUFHeader) -> Iterator[Entry]:
    yield from _siglip_entries(header, "vision_tower.vision_model")
    projector = "multi_modal_projector.mm"
    stored = ("mm.input_projection.weight",)
    yield Entry(f"{projector}_input_projection_weight", stored, whole=True)
    yield Entry(f"{projector}_soft_emb_norm", ("mm.soft_emb_norm",), without_offset)


# --- Idefics3 and InternVL ------------------------------------------------------------------------
def idefics3_config(header: GGUFHeader) -> dict[str, Any]:
    merge = header.integer("vision.projector.scale_factor", high=64)
    return {"vision_config": _vit_config(header), "scale_factor": merge}


def idefics3_processor(header: GGUFHeader) -> dict[str, Any]:
    side = header.integer("vision.image_size")
    return {
        "image_processor_type": "Idefics3ImageProcessor",
        "patch_size": header.integer("vision.patch_size"),
        "scale_factor": header.integer("vision.projector.scale_factor", high=64),
        "size": {"longest_edge": header.integer("vision.preproc_image_size", 4 * side)},
        "max_image_size": {"longest_edge": side},
        **colours(header),
    }


def idefics3_entries(header: GGUFHeader) -> Iterator[Entry]:
    yield from _siglip_entries(header, "model.vision_model")
    fc = ("mm.model.fc.weight",)
    yield Entry("model.connector.modality_projection.proj.weight", fc, whole=True)


def internvl_config(header: GGUFHeader) -> dict[str, Any]:
    """Files do not say how norms are made: one without a bias is an RMS norm."""
    merge = header.integer("vision.projector.scale_factor", 2, high=64)
    has = header.tensors.keys()
    vision = _vit_config(header) | {
        "hidden_act": activation(header),
        "norm_type": "layer_norm" if "v.blk.0.ln1.bias" in has else "rms_norm",
        "use_qk_norm": "v.blk.0.attn_q_norm.weight" in has,
        "attention_bias": "v.blk.0.attn_q.bias" in has,
    }
    return {"vision_config": vision, "downsample_ratio": 1 / merge}


def internvl_processor(header: GGUFHeader) -> dict[str, Any]:
    side = header.integer("vision.image_size")
    return {
        "image_processor_type": "GotOcr2ImageProcessor",
        "patch_size": header.integer("vision.patch_size"),
        "downsample_ratio": 1 / header.integer("vision.projector.scale_factor", 2, high=64),
        "size": {"height": side, "width": side},
        **colours(header),
    }


def internvl_entries(header: GGUFHeader) -> Iterator[Entry]:
    tower = "vision_tower"
    yield Entry(f"{tower}.embeddings.cls_token", ("v.class_embd",), whole=True)
    yield Entry(f"{tower}.embeddings.patch_embeddings.projection", ("v.patch_embd",))
    positions = ("v.position_embd.weight",)
    yield Entry(f"{tower}.embeddings.position_embeddings", positions, whole=True)
    up, down = feed_forward(header)
    yield from layer_entries(
        header,
        f"{tower}.encoder.layer",
        {
            "ln1": "layernorm_before",
            "attn_q": "attention.q_proj",
            "attn_k": "attention.k_proj",
            "attn_v": "attention.v_proj",
            "attn_q_norm": "attention.q_norm",
            "attn_k_norm": "attention.k_norm",
            "attn_out": "attention.projection_layer",
            "ln2": "layernorm_after",
            up: "mlp.fc1",
            down: "mlp.fc2",
        },
    )
    for layer in range(block_count(header)):
        for number in (1, 2):
            stored = (f"v.blk.{layer}.ls{number}.weight",)
            yield Entry(f"{tower}.encoder.layer.{layer}.lambda_{number}", stored, whole=True)
    projector = {"layer_norm": 0, "linear_1": 1, "linear_2": 3}
    for name, number in projector.items():
        yield Entry(f"multi_modal_projector.{name}", (f"mm.model.mlp.{number}",))
