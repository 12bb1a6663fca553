"""Fuzz target: any bytes as model.safetensors, or JSON as its index, read to the last tensor."""

from __future__ import annotations

import json
import struct
from typing import Any

from hypothesis import strategies as st
from vllmx_core.errors import VllmxError
from vllmx_core.plugins.checkpoint import build_model, open_checkpoint
from vllmx_core.weights.map import assemble

from .folders import folder_of, registry
from .mutations import DEEP_TEXTS, as_json, changed_json, odd_json, patched

HIDDEN, VOCAB = 8, 6
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": HIDDEN,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "vocab_size": VOCAB,
}
CONFIG_TEXT = json.dumps(CONFIG).encode()
INDEX = "model.safetensors.index.json"
MATRICES = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
DTYPES = ("F64", "F32", "F16", "BF16", "I32", "U8", "BOOL", "F8_E4M3", "F8_E8M0", "F4", "F6_E2M3")


def one_input(data: bytes) -> bool:
    """Whether `data` is a model, as a file or as an index of two files. Only errors made for users
    are expected."""
    files = {"config.json": CONFIG_TEXT}
    if data.startswith(b"{"):
        names = ("a.safetensors", "b.safetensors")
        files |= {INDEX: data, **dict(zip(names, _halves(), strict=True))}
    else:
        files["model.safetensors"] = data
    with folder_of(files) as folder:
        try:
            checkpoint = open_checkpoint(registry(), folder)
            try:
                for name in checkpoint.weights.names():
                    checkpoint.weights.part(name).dequantize()
                for spec in build_model(registry(), checkpoint).weights():
                    assemble(spec, checkpoint.weights)
            finally:
                checkpoint.weights.close()
        except VllmxError:
            return False
    return True


def mutations() -> st.SearchStrategy[bytes]:
    """Bytes damaged anywhere, headers and indices that say something else, and any bytes."""
    whole, index = seeds()
    header = _header(_shapes())
    body = whole[8 + int.from_bytes(whole[:8], "little") :]
    keys = ["__metadata__", "dtype", "shape", "data_offsets", "model.norm.weight", *DTYPES]
    headers = changed_json([header], keys).map(lambda value: _with_header(as_json(value), body))
    indices = changed_json([json.loads(index)], ["weight_map", "a.safetensors", "../b.safetensors"])
    return st.one_of(
        patched(whole, len(whole)),
        headers,
        indices.map(as_json),
        odd_json([index]),
        odd_json([as_json(header)]).map(lambda text: _with_header(text, body)),
        DEEP_TEXTS,
        DEEP_TEXTS.map(lambda text: _with_header(text, b"")),
        st.binary(max_size=200),
    )


def seeds() -> list[bytes]:
    """A tiny Llama in one file, and the index of the same in two."""
    first, second = (dict.fromkeys(_shapes_of(half), f"{half}.safetensors") for half in "ab")
    index = {"metadata": {"total_size": 1}, "weight_map": first | second}
    return [_file(_shapes()), json.dumps(index).encode()]


def _shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        f"model.layers.0.{name}.weight": (HIDDEN, HIDDEN) for name in MATRICES
    }
    for name in ("layers.0.input_layernorm", "layers.0.post_attention_layernorm", "norm"):
        shapes[f"model.{name}.weight"] = (HIDDEN,)
    return shapes | {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "lm_head.weight": (VOCAB, HIDDEN),
    }


def _shapes_of(half: str) -> dict[str, tuple[int, ...]]:
    names = list(_shapes())
    return {name: _shapes()[name] for name in (names[:5] if half == "a" else names[5:])}


def _halves() -> list[bytes]:
    return [_file(_shapes_of(half)) for half in "ab"]


def _header(shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, shape in shapes.items():
        end = position + 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "F16", "shape": list(shape), "data_offsets": [position, end]}
        position = end
    return header


def _file(shapes: dict[str, tuple[int, ...]]) -> bytes:
    header = _header(shapes)
    num_bytes = max(entry["data_offsets"][1] for name, entry in header.items() if name[0] != "_")
    return _with_header(json.dumps(header).encode(), b"\x11\x22" * (num_bytes // 2))


def _with_header(header: bytes, body: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + body
