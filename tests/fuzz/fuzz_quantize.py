"""Fuzz target: any companions of a small model in `vllmx quantize`, whose file must then open.

An input is a JSON object: `type`, and the files of a folder by their names. A string is a file's
text, anything else is written as JSON.
"""

from __future__ import annotations

import json
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st
from vllmx_core.errors import VllmxError
from vllmx_core.plugins.checkpoint import build_model, open_checkpoint
from vllmx_core.weights.map import assemble
from vllmx_engine.text.gguf_tokenizer import gguf_tokenizer
from vllmx_models.formats.gguf.quantize.convert import quantize

from . import fuzz_tokenizer
from .folders import folder_of, registry
from .mutations import as_json, changed_json, odd_json

HIDDEN = 32
FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
TYPES = ("f16", "q8_0", "q4_k_m")
NAMES = ("q_proj", "k_proj", "v_proj", "o_proj")


def one_input(data: bytes) -> bool:
    """Whether a file was written. Only errors made for users are expected."""
    try:
        given = json.loads(data)
    except (ValueError, RecursionError):
        return False
    if not isinstance(given, dict):
        return False
    with folder_of({**_files(given), "model.safetensors": _weights()}) as folder:
        path = folder / "out.gguf"
        try:
            quantize(registry(), folder, path, str(given.get("type")), threads=1, pre=None)
        except VllmxError:
            assert not path.exists(), "half a file is left"
            return False
        _read_all(path)
    return True


def _files(given: dict[str, Any]) -> dict[str, bytes]:
    return {
        name: content.encode("utf-8", "replace") if isinstance(content, str) else as_json(content)
        for name, content in given.items()
        if name in FILES
    }


def _read_all(path: Path) -> None:
    """What we wrote we must be able to read; its tokenizer may be one that we refuse."""
    checkpoint = open_checkpoint(registry(), path)
    try:
        for spec in build_model(registry(), checkpoint).weights():
            assemble(spec, checkpoint.weights)
        with suppress(VllmxError):
            gguf_tokenizer(checkpoint.tokenizer).encode("a b")
    finally:
        checkpoint.weights.close()


def mutations() -> st.SearchStrategy[bytes]:
    """Files that say something else, or say it oddly."""
    folders = [json.loads(seed) for seed in seeds()]
    keys = [*FILES, "type", "bos_token", "eos_token", "added_tokens_decoder", "model", "vocab",
            "merges", "chat_template", "rope_scaling", "content", "special"]  # fmt: skip
    names = st.sampled_from(FILES[:4])
    odd = st.tuples(st.sampled_from(folders), names).flatmap(
        lambda pair: odd_json([as_json(pair[0][pair[1]])]).map(
            lambda text: as_json({**pair[0], pair[1]: text.decode("latin-1")})
        )
    )
    return changed_json(folders, keys).map(as_json) | odd


@cache
def seeds() -> list[bytes]:
    """Each type with a tokenizer that it can state."""
    companions = json.loads(fuzz_tokenizer.seeds()[1])
    vocab = len(companions["tokenizer.json"]["model"]["vocab"])
    found = []
    for kind in TYPES:
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": HIDDEN,
            "intermediate_size": HIDDEN,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "vocab_size": vocab,
            "max_position_embeddings": 64,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-5,
            "torch_dtype": "float16",
        }
        found.append(as_json({"type": kind, "config.json": config, **companions}))
    return found


@cache
def _weights() -> bytes:
    """Weights with as many rows of the embedding as the seeds' vocabulary has."""
    vocab = json.loads(seeds()[0])["config.json"]["vocab_size"]
    square = [f"self_attn.{name}" for name in NAMES] + ["mlp.gate_proj", "mlp.up_proj"]
    shapes: dict[str, list[int]] = {"model.embed_tokens.weight": [vocab, HIDDEN]}
    for name in (*square, "mlp.down_proj"):
        shapes[f"model.layers.0.{name}.weight"] = [HIDDEN, HIDDEN]
    for name in ("layers.0.input_layernorm", "layers.0.post_attention_layernorm", "norm"):
        shapes[f"model.{name}.weight"] = [HIDDEN]
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "F16", "shape": shape, "data_offsets": [begin, end]}
    text = as_json(header)
    values = np.random.default_rng(0).standard_normal(end // 2).astype(np.float16)
    return len(text).to_bytes(8, "little") + text + values.tobytes()
