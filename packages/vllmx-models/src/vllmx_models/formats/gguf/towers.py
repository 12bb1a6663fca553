"""Towers in GGUF files of their own ("mmproj"), by `projector_type`: how metadata become
config.json and preprocessor_config.json, and the names of tensors.

Source: convert_hf_to_gguf.py and tools/mtmd/clip.cpp of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from vllmx_core.records import Record

from vllmx_models.formats.gguf import square_towers as squares
from vllmx_models.formats.gguf.hyperparameters import GGUFHeader
from vllmx_models.formats.gguf.tower_metadata import (
    activation,
    block_count,
    colours,
    feed_forward,
    layer_entries,
)
from vllmx_models.formats.gguf.tower_weights import (
    Entry,
    colours_last,
    frames,
    one_below_the_other,
    pairs_apart,
)
from vllmx_models.text_types import TEXT_ARCHITECTURES

_PATCH = "v.patch_embd.weight"
_QKV = ("v.blk.{}.attn_q", "v.blk.{}.attn_k", "v.blk.{}.attn_v")


class TowerForm(Record):
    """One `projector_type`. `GGUFHeader` is that of the tower's file, its architecture "clip"."""

    architectures: tuple[str, ...]
    """The architectures of config.json that use it."""
    config: Callable[[GGUFHeader], dict[str, Any]]
    """Entries of config.json for the tower: `vision_config` and the like."""
    processor: Callable[[GGUFHeader], dict[str, Any]]
    """preprocessor_config.json."""
    entries: Callable[[GGUFHeader], Iterator[Entry]]
    joined: str | None = None
    """The architecture of text model and tower together; None: the text model's own has a tower."""


# --- Qwen -----------------------------------------------------------------------------------------
_LEAST_TOKENS = {"qwen3vl_merger": 64, "qwen2.5vl_merger": 4, "qwen2vl_merger": 4}
_MOST_TOKENS = 16384


def _qwen_vision(header: GGUFHeader) -> dict[str, Any]:
    return {
        "depth": block_count(header),
        "hidden_size": header.integer("vision.embedding_length"),
        "num_heads": header.integer("vision.attention.head_count"),
        "intermediate_size": header.integer("vision.feed_forward_length"),
        "patch_size": header.integer("vision.patch_size"),
        "temporal_patch_size": 2,
        "spatial_merge_size": header.integer("vision.spatial_merge_size", 2),
        "out_hidden_size": header.integer("vision.projection_dim"),
    }


def _qwen_processor(header: GGUFHeader) -> dict[str, Any]:
    """Sizes of images as the original models have them, unless the file has its own."""
    patch, merge = (
        header.integer("vision.patch_size", high=256),
        header.integer("vision.spatial_merge_size", 2, high=16),
    )
    token = (patch * merge) ** 2
    least = _LEAST_TOKENS[projector_type(header)] * token
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": patch,
        "merge_size": merge,
        "temporal_patch_size": 2,
        "size": {
            "shortest_edge": header.integer("vision.image_min_pixels", least),
            "longest_edge": header.integer("vision.image_max_pixels", _MOST_TOKENS * token),
        },
        **colours(header),
    }


def _deepstack(header: GGUFHeader) -> list[int]:
    count = block_count(header)
    if not header.has("vision.is_deepstack_layers"):
        return []
    given = header.flags("vision.is_deepstack_layers", count)
    return [layer for layer in range(count) if given[layer]]


def _qwen3_config(header: GGUFHeader) -> dict[str, Any]:
    side = header.integer("vision.image_size") // header.integer("vision.patch_size")
    table = header.tensors.get("v.position_embd.weight")
    vision = _qwen_vision(header) | {
        "num_position_embeddings": side * side if table is None else table.shape[0],
        "hidden_act": "gelu_pytorch_tanh",
        "deepstack_visual_indexes": _deepstack(header),
    }
    return {"vision_config": vision}


def _qwen3_entries(header: GGUFHeader) -> Iterator[Entry]:
    tower = "model.visual"
    patch = f"{tower}.patch_embed.proj"
    yield Entry(f"{patch}.weight", (_PATCH, f"{_PATCH}.1"), frames, whole=True)
    yield Entry(f"{patch}.bias", ("v.patch_embd.bias",), whole=True)
    yield Entry(f"{tower}.pos_embed", ("v.position_embd",))
    yield from layer_entries(
        header,
        f"{tower}.blocks",
        {
            "ln1": "norm1",
            "attn_qkv": "attn.qkv",
            "attn_out": "attn.proj",
            "ln2": "norm2",
            "ffn_up": "mlp.linear_fc1",
            "ffn_down": "mlp.linear_fc2",
        },
    )
    merger = {"norm": "v.post_ln", "linear_fc1": "mm.0", "linear_fc2": "mm.2"}
    for name, stored in merger.items():
        yield Entry(f"{tower}.merger.{name}", (stored,))
    for number, layer in enumerate(_deepstack(header)):
        theirs = f"{tower}.deepstack_merger_list.{number}"
        for name, stored in (("norm", "norm"), ("linear_fc1", "fc1"), ("linear_fc2", "fc2")):
            yield Entry(f"{theirs}.{name}", (f"v.deepstack.{layer}.{stored}",))


def _qwen2_5_config(header: GGUFHeader) -> dict[str, Any]:
    """Each n-th layer sees all of an image."""
    depth = block_count(header)
    every = header.integer("vision.n_wa_pattern", high=1024)
    vision = _qwen_vision(header) | {
        "hidden_act": "silu" if header.flag("use_silu", True) else "gelu",
        "window_size": header.integer("vision.window_size", 112),
        "fullatt_block_indexes": list(range(every - 1, depth, every)),
    }
    return {"vision_config": vision}


def _qwen2_5_entries(header: GGUFHeader) -> Iterator[Entry]:
    tower = "visual"
    name = f"{tower}.patch_embed.proj.weight"
    yield Entry(name, (_PATCH, f"{_PATCH}.1"), frames, whole=True)
    up, down = feed_forward(header)
    yield from layer_entries(
        header,
        f"{tower}.blocks",
        {
            "ln1": "norm1",
            "attn_out": "attn.proj",
            "ln2": "norm2",
            "ffn_gate": "mlp.gate_proj",
            up: "mlp.up_proj",
            down: "mlp.down_proj",
        },
    )
    for layer in range(block_count(header)):
        stored = tuple(one.format(layer) for one in _QKV)
        yield Entry(f"{tower}.blocks.{layer}.attn.qkv", stored, one_below_the_other)
    yield Entry(f"{tower}.merger.ln_q", ("v.post_ln",))
    yield Entry(f"{tower}.merger.mlp.0", ("mm.0",))
    yield Entry(f"{tower}.merger.mlp.2", ("mm.2",))


def _qwen2_config(header: GGUFHeader) -> dict[str, Any]:
    """Sizes by the names of Qwen2-VL."""
    vision, size = _qwen_vision(header), header.integer("vision.embedding_length")
    ratio, rest = divmod(vision.pop("intermediate_size") or 4 * size, size)
    if rest:
        raise header.error("vision.feed_forward_length", f"must be a multiple of {size}")
    names = {"embed_dim": size, "hidden_size": vision.pop("out_hidden_size"), "mlp_ratio": ratio}
    return {"vision_config": {**vision, **names, "hidden_act": activation(header)}}


def _qwen2_entries(header: GGUFHeader) -> Iterator[Entry]:
    tower = "visual"
    yield Entry(f"{tower}.patch_embed.proj.weight", (_PATCH, f"{_PATCH}.1"), frames, whole=True)
    up, down = feed_forward(header)
    names = {
        "ln1": "norm1",
        "attn_out": "attn.proj",
        "ln2": "norm2",
        up: "mlp.fc1",
        down: "mlp.fc2",
    }
    yield from layer_entries(header, f"{tower}.blocks", names)
    for layer in range(block_count(header)):
        stored = tuple(one.format(layer) for one in _QKV)
        yield Entry(f"{tower}.blocks.{layer}.attn.qkv", stored, one_below_the_other)
    yield Entry(f"{tower}.merger.ln_q", ("v.post_ln",))
    yield Entry(f"{tower}.merger.mlp.0", ("mm.0",))
    yield Entry(f"{tower}.merger.mlp.2", ("mm.2",))


# --- Pixtral --------------------------------------------------------------------------------------
_PIXTRAL_SIZE = 1540


def _pixtral_config(header: GGUFHeader) -> dict[str, Any]:
    vision = {
        "num_hidden_layers": block_count(header),
        "hidden_size": header.integer("vision.embedding_length"),
        "num_attention_heads": header.integer("vision.attention.head_count"),
        "intermediate_size": header.integer("vision.feed_forward_length"),
        "patch_size": header.integer("vision.patch_size"),
        "rope_theta": header.number("vision.rope.freq_base", 10000.0),
        "hidden_act": activation(header),
    }
    return {
        "vision_config": vision,
        "spatial_merge_size": header.integer("vision.spatial_merge_size", 1, high=16),
        "multimodal_projector_bias": "mm.1.bias" in header.tensors,
    }


def _pixtral_processor(header: GGUFHeader) -> dict[str, Any]:
    return {
        "image_processor_type": "PixtralImageProcessor",
        "patch_size": header.integer("vision.patch_size"),
        "spatial_merge_size": header.integer("vision.spatial_merge_size", 1, high=16),
        "size": {"longest_edge": header.integer("vision.image_size", _PIXTRAL_SIZE)},
        **colours(header),
    }


def _pixtral_entries(header: GGUFHeader) -> Iterator[Entry]:
    tower, projector = "vision_tower", "multi_modal_projector"
    yield Entry(f"{tower}.patch_conv", ("v.patch_embd",))
    yield Entry(f"{tower}.ln_pre", ("v.pre_ln",))
    heads = header.integer("vision.attention.head_count", high=1024)
    for layer in range(block_count(header)):
        attention = f"{tower}.transformer.layers.{layer}.attention"
        for one in "qk":
            stored = (f"v.blk.{layer}.attn_{one}.weight",)
            yield Entry(f"{attention}.{one}_proj.weight", stored, pairs_apart(heads), whole=True)
    yield from layer_entries(
        header,
        f"{tower}.transformer.layers",
        {
            "ln1": "attention_norm",
            "attn_v": "attention.v_proj",
            "attn_out": "attention.o_proj",
            "ln2": "ffn_norm",
            "ffn_gate": "feed_forward.gate_proj",
            "ffn_up": "feed_forward.up_proj",
            "ffn_down": "feed_forward.down_proj",
        },
    )
    yield Entry("[IMG_BREAK]", ("v.token_embd.img_break",), whole=True)  # the text model has it
    yield Entry(f"{projector}.norm", ("mm.input_norm",))
    yield Entry(f"{projector}.patch_merger.merging_layer", ("mm.patch_merger",))
    for number in (1, 2):
        yield Entry(f"{projector}.linear_{number}", (f"mm.{number}",))


# --- Gemma 4 --------------------------------------------------------------------------------------
_GEMMA4_LINEARS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA4_TOKENS = 280
_CAUSAL_WIDTHS = (1536, 2560)
"""The widths of the text models E2B and E4B, in which attention within an image is causal; files do
not say so."""


def _gemma4_config(header: GGUFHeader) -> dict[str, Any]:
    """Sizes of heads and of the table are those of the tensors."""
    size, heads = (
        header.integer("vision.embedding_length"),
        header.integer("vision.attention.head_count"),
    )
    norm = header.tensors.get("v.blk.0.attn_q_norm.weight")
    keys = header.tensors.get("v.blk.0.attn_k.weight")
    table = header.tensors.get("v.position_embd.weight")
    head = size // heads if norm is None else norm.shape[0]
    vision: dict[str, Any] = {
        "num_hidden_layers": block_count(header),
        "hidden_size": size,
        "num_attention_heads": heads,
        "num_key_value_heads": heads if keys is None else keys.shape[0] // head,
        "head_dim": head,
        "intermediate_size": header.integer("vision.feed_forward_length"),
        "rms_norm_eps": header.number("vision.attention.layer_norm_epsilon", 1e-6),
        "patch_size": header.integer("vision.patch_size"),
        "pooling_kernel_size": header.integer("vision.projector.scale_factor", 3),
        "standardize": "v.std_bias" in header.tensors,
        "use_clipped_linears": any(name.endswith(".input_max") for name in _own(header)),
    }
    if table is not None and len(table.shape) == 3:
        vision["position_embedding_size"] = table.shape[1]
    causal = header.integer("vision.projection_dim") in _CAUSAL_WIDTHS
    both_ways = {} if causal else {"use_bidirectional_attention": "vision"}
    return {"vision_config": vision, **both_ways}


def _own(header: GGUFHeader) -> Iterator[str]:
    """Names of the tower's tensors, without those of an audio tower."""
    return (name for name in header.tensors if name.startswith("v."))


def _gemma4_processor(header: GGUFHeader) -> dict[str, Any]:
    return {
        "image_processor_type": "Gemma4ImageProcessor",
        "patch_size": header.integer("vision.patch_size"),
        "pooling_kernel_size": header.integer("vision.projector.scale_factor", 3),
        "max_soft_tokens": _GEMMA4_TOKENS,
    }


def _gemma4_entries(header: GGUFHeader) -> Iterator[Entry]:
    tower = "model.vision_tower"
    embedder = f"{tower}.patch_embedder"
    yield Entry(f"{embedder}.input_proj.weight", (_PATCH,), colours_last, whole=True)
    table = ("v.position_embd.weight",)
    yield Entry(f"{embedder}.position_embedding_table", table, whole=True)
    layers = f"{tower}.encoder.layers"
    yield from layer_entries(
        header,
        layers,
        {
            **{stored: f"{name}.linear" for stored, name in _GEMMA4_LINEARS.items()},
            "ln1": "input_layernorm",
            "attn_post_norm": "post_attention_layernorm",
            "ln2": "pre_feedforward_layernorm",
            "ffn_post_norm": "post_feedforward_layernorm",
            "attn_q_norm": "self_attn.q_norm",
            "attn_k_norm": "self_attn.k_norm",
        },
    )
    for layer in range(block_count(header)):
        for stored, name in _GEMMA4_LINEARS.items():
            for bound in ("input_min", "input_max", "output_min", "output_max"):
                ours = f"{layers}.{layer}.{name}.{bound}"
                yield Entry(ours, (f"v.blk.{layer}.{stored}.{bound}",), whole=True)
    for name in ("std_bias", "std_scale"):
        yield Entry(f"{tower}.{name}", (f"v.{name}",), whole=True)
    yield Entry("model.embed_vision.embedding_projection", ("mm.input_projection",))


# --- all ------------------------------------------------------------------------------------------
_QWEN3 = tuple(
    f"Qwen3{family}{end}"
    for family, end in (
        ("VL", "ForConditionalGeneration"),
        ("VLMoe", "ForConditionalGeneration"),
        ("_5", "ForCausalLM"),
        ("_5Moe", "ForCausalLM"),
    )
)
FORMS: Mapping[str, TowerForm] = {
    "qwen3vl_merger": TowerForm(_QWEN3, _qwen3_config, _qwen_processor, _qwen3_entries),
    "qwen2.5vl_merger": TowerForm(
        ("Qwen2_5_VLForConditionalGeneration",), _qwen2_5_config, _qwen_processor, _qwen2_5_entries
    ),
    "qwen2vl_merger": TowerForm(
        ("Qwen2_5_VLForConditionalGeneration",),
        _qwen2_config,
        _qwen_processor,
        _qwen2_entries,
        "Qwen2VLForConditionalGeneration",
    ),
    "pixtral": TowerForm(
        ("LlamaForCausalLM", "MistralForCausalLM", "Ministral3ForCausalLM"),
        _pixtral_config,
        _pixtral_processor,
        _pixtral_entries,
        "Mistral3ForConditionalGeneration",
    ),
    "gemma3": TowerForm(
        ("Gemma3ForCausalLM",),
        squares.gemma3_config,
        squares.gemma3_processor,
        squares.gemma3_entries,
    ),
    "gemma4v": TowerForm(
        ("Gemma4ForCausalLM",), _gemma4_config, _gemma4_processor, _gemma4_entries
    ),
    "idefics3": TowerForm(
        ("LlamaForCausalLM",),
        squares.idefics3_config,
        squares.idefics3_processor,
        squares.idefics3_entries,
        "Idefics3ForConditionalGeneration",
    ),
    "internvl": TowerForm(
        tuple(TEXT_ARCHITECTURES),
        squares.internvl_config,
        squares.internvl_processor,
        squares.internvl_entries,
        "InternVLForConditionalGeneration",
    ),
}


def projector_type(header: GGUFHeader) -> str:
    """The type of the vision tower, whose key differs in files that also have an audio tower;
    empty: the file has none."""
    return header.text("vision.projector_type", header.text("projector_type", ""))
