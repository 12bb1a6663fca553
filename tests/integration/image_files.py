"""The tiny models of `image_models` as two GGUF files, a text model and a tower ("mmproj"): tensors
and keys as llama.cpp's converter writes them, with the names of the gguf package."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from ..null.gguf.models import TYPES, interleave, of_type  # noqa: TID252 - no package to name
from ..null.gguf.test_recurrent import LINEAR, converted  # noqa: TID252

Tensors = dict[str, np.ndarray]
_GEMMA4_LAYER = "vision_model.model.layers."


def parts_of(model: Any) -> tuple[Tensors, Tensors]:
    """The text model and the tower, under the names of published checkpoints."""
    text: Tensors = {}
    tower: Tensors = {}
    for name, values in model.state_dict().items():
        array = values.numpy()
        if name.startswith(("model.language_model.", "model.text_model.")):
            text[f"model.{name.split('.', 2)[2]}"] = array
        elif name == "lm_head.weight":
            if not model.config.tie_word_embeddings:
                text[name] = array
        else:
            tower[name.removeprefix("model.")] = array
    return text, tower


# --- text -----------------------------------------------------------------------------------------
def _header(writer: gguf.GGUFWriter, text: Any) -> None:
    writer.add_block_count(text.num_hidden_layers)
    writer.add_context_length(text.max_position_embeddings)
    writer.add_embedding_length(text.hidden_size)
    writer.add_feed_forward_length(text.intermediate_size)
    writer.add_head_count(text.num_attention_heads)
    writer.add_head_count_kv(text.num_key_value_heads)
    writer.add_layer_norm_rms_eps(text.rms_norm_eps)


def _turned(writer: gguf.GGUFWriter, text: Any) -> None:
    rope = text.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_sections([*rope["mrope_section"], 0])


def _heads(writer: gguf.GGUFWriter, size: int) -> None:
    writer.add_key_length(size)
    writer.add_value_length(size)


def _qwen3_vl(writer: gguf.GGUFWriter, config: Any) -> None:
    _turned(writer, config.text_config)
    _heads(writer, config.text_config.head_dim)
    writer.add_num_deepstack_layers(len(config.vision_config.deepstack_visual_indexes))


def _qwen2_5_vl(writer: gguf.GGUFWriter, config: Any) -> None:
    _turned(writer, config.text_config)


def _qwen3_5(writer: gguf.GGUFWriter, config: Any) -> None:
    text = config.text_config
    _turned(writer, text)
    _heads(writer, text.head_dim)
    writer.add_rope_dimension_count(8)
    writer.add_ssm_conv_kernel(text.linear_conv_kernel_dim)
    writer.add_ssm_state_size(text.linear_key_head_dim)
    writer.add_ssm_group_count(text.linear_num_key_heads)
    writer.add_ssm_time_step_rank(text.linear_num_value_heads)
    writer.add_ssm_inner_size(text.linear_num_value_heads * text.linear_value_head_dim)
    writer.add_full_attention_interval(2)


def _gemma3(writer: gguf.GGUFWriter, config: Any) -> None:
    text = config.text_config
    _heads(writer, text.head_dim)
    writer.add_rope_freq_base(1_000_000.0)
    writer.add_sliding_window(text.sliding_window)
    writer.add_uint32("gemma3.attention.sliding_window_pattern", 2)


def _qwen3(writer: gguf.GGUFWriter, config: Any) -> None:
    _heads(writer, config.text_config.head_dim)
    writer.add_rope_freq_base(config.text_config.rope_parameters["rope_theta"])


def _llama(writer: gguf.GGUFWriter, config: Any) -> None:
    text = config.text_config
    _heads(writer, text.head_dim)
    writer.add_rope_dimension_count(text.head_dim)
    writer.add_rope_freq_base(text.rope_parameters["rope_theta"])


def _gemma4(writer: gguf.GGUFWriter, config: Any) -> None:
    text, whole, local = config.text_config, 24, 16  # heads of layers without and with a window
    _heads(writer, whole)
    writer.add_key_length_swa(local)
    writer.add_value_length_swa(local)
    writer.add_rope_freq_base(1_000_000.0)
    writer.add_rope_freq_base_swa(10_000.0)
    writer.add_sliding_window(text.sliding_window)
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in text.layer_types])
    writer.add_uint32("gemma4.attention.shared_kv_layers", text.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(text.hidden_size_per_layer_input)
    writer.add_final_logit_softcapping(text.final_logit_softcapping)
    writer.add_pad_token_id(text.pad_token_id)
    divisors = np.full(whole // 2, 1e30, np.float32)
    divisors[: len(divisors) // 4] = 1
    writer.add_tensor("rope_freqs.weight", divisors)


def _delta(name: str, values: np.ndarray) -> tuple[str, np.ndarray]:
    """The name and values in the file of a tensor of Qwen3.5: of a delta net, or a norm plus
    one."""
    if ".linear_attn." not in name:
        return name, values + 1 if name.endswith("norm.weight") else values
    layer, _, rest = name.removeprefix("model.layers.").partition(".linear_attn.")
    return f"blk.{layer}.{LINEAR[rest]}", converted(rest, values)


def _plus_one(name: str, values: np.ndarray) -> tuple[str, np.ndarray]:
    return name, values + 1 if name.endswith("norm.weight") else values


def _permuted(name: str, values: np.ndarray) -> tuple[str, np.ndarray]:
    """Llama's rotated pairs lie next to each other."""
    heads = {"q_proj.weight": 4, "k_proj.weight": 2}
    return name, next(
        (interleave(values, n) for end, n in heads.items() if name.endswith(end)), values
    )


def _same(name: str, values: np.ndarray) -> tuple[str, np.ndarray]:
    return name, values


# --- towers ---------------------------------------------------------------------------------------
def _frames(name: str, values: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    if name == "visual.patch_embed.proj.weight":
        yield "v.patch_embd.weight", values[:, :, 0]
        yield "v.patch_embd.weight.1", values[:, :, 1]
        return
    yield name, values


def _qwen3_tower(config: Any, name: str, values: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    where = name.split(".")
    if where[1] == "deepstack_merger_list":
        layer = config.vision_config.deepstack_visual_indexes[int(where[2])]
        kind = {"norm": "norm", "linear_fc1": "fc1", "linear_fc2": "fc2"}[where[3]]
        yield f"v.deepstack.{layer}.{kind}.{where[4]}", values
    elif where[1] == "merger":
        kind = {"norm": "v.post_ln", "linear_fc1": "mm.0", "linear_fc2": "mm.2"}[where[2]]
        yield f"{kind}.{where[3]}", values
    else:
        yield from _frames(name, values)


def _qwen2_5_tower(config: Any, name: str, values: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    if ".qkv." in name:
        for part, rows in zip("qkv", np.split(values, 3), strict=True):
            yield name.replace("qkv", part), rows
        return
    yield from _frames(name, values)


def _gemma3_tower(config: Any, name: str, values: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    name = name.replace("_weight", ".weight")
    if name.startswith("vision_tower.") and "vision_model" not in name:
        name = name.replace("vision_tower.", "vision_tower.vision_model.", 1)
    yield name, values + 1 if "soft_emb_norm" in name else values


def _idefics3_tower(config: Any, name: str, values: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    yield f"model.{name}", values


def _pixtral_tower(config: Any, name: str, values: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    if name.endswith(("q_proj.weight", "k_proj.weight")):
        values = interleave(values, config.vision_config.num_attention_heads)
    if name == "vision_tower.ln_pre.weight":  # a row of the text model's table beside it
        yield "v.token_embd.img_break", np.ones(config.text_config.hidden_size, np.float32)
    yield name, values


_INTERN_PROJECTOR = {"layer_norm": "mlp1.0", "linear_1": "mlp1.1", "linear_2": "mlp1.3"}


def _internvl_tower(config: Any, name: str, values: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    where = name.split(".")
    if where[0] == "multi_modal_projector":
        yield f"{_INTERN_PROJECTOR[where[1]]}.{where[2]}", values
        return
    if where[-1].startswith("lambda_"):
        yield f"v.blk.{where[3]}.ls{where[-1][-1]}.weight", values
        return
    if where[-1] == "position_embeddings":
        name += ".weight"
    yield f"model.{name}", values[0] if values.ndim == 3 else values


def _gemma4_tower(config: Any, name: str, values: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    values = values[None] if not values.shape else values
    name = name.replace("vision_tower.encoder.layers.", _GEMMA4_LAYER)
    name = name.replace(".linear.weight", ".weight")
    if not name.startswith(_GEMMA4_LAYER):
        name = f"model.{name}"
    if name.endswith("position_embedding_table"):
        name += ".weight"
    if name.endswith("input_proj.weight"):
        size = round((values.shape[1] // 3) ** 0.5)
        values = values.reshape(len(values), size, size, 3).transpose(0, 3, 1, 2)
    yield name, values


Piece = Callable[[Any, str, np.ndarray], Iterator[tuple[str, np.ndarray]]]


@dataclass(frozen=True)
class Files:
    """How one family is written."""

    text: gguf.MODEL_ARCH
    header: Callable[[gguf.GGUFWriter, Any], None]
    kind: str
    tower: Piece
    change: Callable[[str, np.ndarray], tuple[str, np.ndarray]] = _same
    keys: Mapping[str, Any] = field(default_factory=dict)
    """Of the tower."""
    top: Mapping[str, Any] = field(default_factory=dict)


FILES = {
    "qwen3_vl": Files(
        gguf.MODEL_ARCH.QWEN3VL, _qwen3_vl, "qwen3vl_merger", _qwen3_tower,
        keys={"spatial_merge_size": 2, "is_deepstack_layers": [True, False, True]},
    ),
    "qwen3_5": Files(
        gguf.MODEL_ARCH.QWEN35, _qwen3_5, "qwen3vl_merger", _qwen3_tower, _delta,
        {"spatial_merge_size": 2, "is_deepstack_layers": [False] * 3},
    ),
    "qwen2_5_vl": Files(
        gguf.MODEL_ARCH.QWEN2VL, _qwen2_5_vl, "qwen2.5vl_merger", _qwen2_5_tower,
        keys={"n_wa_pattern": 2, "window_size": 16},
    ),
    "mistral3": Files(
        gguf.MODEL_ARCH.LLAMA, _llama, "pixtral", _pixtral_tower, _permuted,
        {"spatial_merge_size": 2}, {"clip.use_gelu": True},
    ),
    "qwen2_vl": Files(
        gguf.MODEL_ARCH.QWEN2VL, _qwen2_5_vl, "qwen2vl_merger", _qwen2_5_tower,
        keys={"embedding_length": 32, "feed_forward_length": 64},
    ),
    "gemma3": Files(
        gguf.MODEL_ARCH.GEMMA3, _gemma3, "gemma3", _gemma3_tower, _plus_one,
        {"projector.scale_factor": 2},
    ),
    "idefics3": Files(
        gguf.MODEL_ARCH.LLAMA, _llama, "idefics3", _idefics3_tower, _permuted,
        {"projector.scale_factor": 2},
    ),
    "internvl": Files(
        gguf.MODEL_ARCH.QWEN3, _qwen3, "internvl", _internvl_tower,
        keys={"projector.scale_factor": 2}, top={"clip.use_gelu": True},
    ),
    "gemma4": Files(
        gguf.MODEL_ARCH.GEMMA4, _gemma4, "gemma4v", _gemma4_tower,
        keys={"projector.scale_factor": 2},
    ),
}  # fmt: skip


def _mapped(names: Any, name: str) -> str:
    ends = (".weight", ".bias", ".input_min", ".input_max", ".output_min", ".output_max")
    found: str | None = names.get_name(name, try_suffixes=ends)
    return name if found is None else found


def write_text(path: Path, family: str, model: Any) -> Path:
    """The text model, without a vocabulary."""
    files, text = FILES[family], model.config.text_config
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[files.text])
    _header(writer, text)
    files.header(writer, model.config)
    names = gguf.get_tensor_name_map(files.text, text.num_hidden_layers)
    for name, values in parts_of(model)[0].items():
        new, stored = files.change(name, values)
        new = f"{new}.weight" if new.endswith("layer_scalar") else new
        if stored.ndim == 3 and "conv1d" in new:
            stored = stored[:, 0]
        writer.add_tensor(_mapped(names, new), np.ascontiguousarray(stored, np.float32))
    return _closed(writer, path)


def tower_tensors(family: str, model: Any) -> Tensors:
    """The tensors of a tower by their names in the file."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 8)
    return {
        _mapped(names, new): np.ascontiguousarray(stored)
        for name, values in parts_of(model)[1].items()
        for new, stored in FILES[family].tower(model.config, name, values)
    }


def write_tower(
    path: Path,
    family: str,
    model: Any,
    kind: str = "F32",
    *,
    without: str = "",
    **keys: Any,
) -> Path:
    """The tower, its matrices of a type; `keys` are metadata instead of the usual ones, and
    `without` is a tensor that is left out."""
    files, vision = FILES[family], model.config.vision_config
    depth = getattr(vision, "depth", None) or vision.num_hidden_layers
    heads = getattr(vision, "num_heads", None) or vision.num_attention_heads
    known = {
        "projection_dim": model.config.text_config.hidden_size,
        "image_size": 24,
        "patch_size": vision.patch_size,
        "embedding_length": vision.hidden_size,
        "feed_forward_length": getattr(vision, "intermediate_size", None),
        "block_count": depth,
        "attention.head_count": heads,
        "attention.layer_norm_epsilon": 1e-6,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        **files.keys,
    }
    projector = "clip.vision.projector_type" if family == "gemma4" else "clip.projector_type"
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_type("mmproj")
    stated = {f"clip.vision.{key}": value for key, value in known.items()}
    for key, value in (stated | {projector: files.kind} | {**files.top, **keys}).items():
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case _:
                writer.add_array(key, value)
    choose = of_type(TYPES[kind])
    for name, values in tower_tensors(family, model).items():
        if name != without:
            of = choose(name, values)
            writer.add_tensor(name, gguf.quantize(values, of), raw_dtype=of)
    return _closed(writer, path)


def _closed(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
