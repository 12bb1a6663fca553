"""Fuzz target: any bytes as a GGUF file, opened, decoded and read to the end."""

from __future__ import annotations

import struct
import tempfile
from pathlib import Path

from hypothesis import strategies as st
from vllmx_core.errors import VllmxError
from vllmx_core.plugins.checkpoint import build_model, open_checkpoint
from vllmx_core.weights.map import assemble
from vllmx_engine.text.gguf_tokenizer import gguf_tokenizer

from .folders import memory_folder, registry
from .mutations import patched

HIDDEN, HEADS, LAYERS, VOCAB = 32, 4, 1, 24
U32, F32, STRING, ARRAY, I32 = 4, 6, 8, 9, 5
Q8_0, Q4_0 = 8, 2


def one_input(data: bytes) -> bool:
    """Whether `data` is a model. Only errors made for users are expected; anything else, and any
    hang or great allocation, is a finding."""
    with tempfile.NamedTemporaryFile(suffix=".gguf", dir=memory_folder()) as file:
        file.write(data)
        file.flush()
        try:
            _read_all(Path(file.name))
        except VllmxError:
            return False
    return True


def _read_all(path: Path) -> None:
    checkpoint = open_checkpoint(registry(), path)
    try:
        gguf_tokenizer(checkpoint.tokenizer).encode("a b")
        for name in checkpoint.weights.names():
            checkpoint.weights.part(name).dequantize()
        for spec in build_model(registry(), checkpoint).weights():
            assemble(spec, checkpoint.weights)
    finally:
        checkpoint.weights.close()


def mutations() -> st.SearchStrategy[bytes]:
    """Damaged headers, cut files, and no GGUF file at all."""
    (whole,) = seeds()
    header_bytes = whole.index(b"output_norm.weight") + 40
    anything = st.binary(max_size=400)
    return patched(whole, header_bytes) | anything | anything.map(lambda data: whole[:24] + data)


def seeds() -> list[bytes]:
    return [_model()]


def _model() -> bytes:
    """A tiny valid Llama of quantised weights with a SentencePiece vocabulary."""
    tokens = ["<unk>", "<s>", "</s>", *(f"t{index}" for index in range(3, VOCAB))]
    entries = [
        _entry("general.architecture", STRING, _string("llama")),
        *(_entry(f"llama.{key}", U32, struct.pack("<I", number)) for key, number in (
            ("block_count", LAYERS), ("context_length", 64), ("embedding_length", HIDDEN),
            ("feed_forward_length", HIDDEN), ("attention.head_count", HEADS),
        )),
        _entry("llama.attention.layer_norm_rms_epsilon", F32, struct.pack("<f", 1e-5)),
        _entry("tokenizer.ggml.model", STRING, _string("llama")),
        _entry("tokenizer.ggml.tokens", ARRAY, _array(STRING, [_string(t) for t in tokens])),
        _entry("tokenizer.ggml.scores", ARRAY,
               _array(F32, [struct.pack("<f", -i) for i in range(VOCAB)])),
        _entry("tokenizer.ggml.token_type", ARRAY,
               _array(I32, [struct.pack("<i", 3 if i < 3 else 1) for i in range(VOCAB)])),
    ]  # fmt: skip
    matrices = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    shapes = {"token_embd": VOCAB, **{f"blk.0.{name}": HIDDEN for name in matrices}}
    infos, data = [], b""
    for index, (name, rows) in enumerate(shapes.items()):
        kind, block = (Q8_0, 34) if index % 2 else (Q4_0, 18)
        infos.append(_tensor(f"{name}.weight", (HIDDEN, rows), kind, len(data)))
        data += b"\x11\x22" * (rows * block // 2)
        data += b"\0" * (-len(data) % 32)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        infos.append(_tensor(f"{name}.weight", (HIDDEN,), 0, len(data)))
        data += struct.pack("<f", 1.0) * HIDDEN
    head = b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(entries))
    head += b"".join(entries) + b"".join(infos)
    return head + b"\0" * (-len(head) % 32) + data


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _array(kind: int, items: list[bytes]) -> bytes:
    return struct.pack("<IQ", kind, len(items)) + b"".join(items)


def _entry(key: str, kind: int, value: bytes) -> bytes:
    return _string(key) + struct.pack("<I", kind) + value


def _tensor(name: str, dims: tuple[int, ...], kind: int, offset: int) -> bytes:
    shape = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return _string(name) + shape + struct.pack("<IQ", kind, offset)
