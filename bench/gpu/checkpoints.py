"""Models of real shapes with random weights, in the forms that checkpoints have."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from vllmx_core.model import Model
from vllmx_core.weights.part import DENSE, StoredPart, WeightPart
from vllmx_core.weights.tensor import RawTensor
from vllmx_models.families.qwen import qwen3
from vllmx_models.formats.gguf.blocks import TYPES_BY_NAME, weight_part
from vllmx_models.formats.gguf.quantize.mixes import Layers, type_of
from vllmx_models.quantization.float8 import Fp8

FORMS = ("bf16", "fp8", "fp8 blocks", "q4_k_m")
COMMON: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "torch_dtype": "bfloat16",
}
SHAPES: Mapping[str, dict[str, Any]] = {
    "0.6b": COMMON | {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "tie_word_embeddings": True,
    },
    "8b": COMMON | {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "tie_word_embeddings": False,
    },
    "tiny": COMMON | {  # to rehearse on the emulator
        "vocab_size": 300, "num_key_value_heads": 1, "head_dim": 64, "hidden_size": 256,
        "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": 512, "tie_word_embeddings": False,
    },
}  # fmt: skip
_RANDOM_BYTES = 1 << 25
_ROLES = {"v_proj": "attn_v", "down_proj": "ffn_down", "o_proj": "attn_output"}


def prefill_flop(config: Mapping[str, Any], length: int) -> int:
    """Operations of a prompt's prefill, causal attention counted by half; the head sees one row."""
    weights = sum(s.rows * s.cols for s in qwen3(dict(config)).weights() if s.kind == "linear")
    weights -= config["vocab_size"] * config["hidden_size"]
    heads = config["num_attention_heads"] * config["head_dim"]
    found: int = 2 * weights * length + 2 * config["num_hidden_layers"] * heads * length**2
    return found


def share(found: float, ceiling: float | None) -> float | None:
    """The share of a ceiling; None where it was not measured."""
    return found / ceiling if ceiling else None


class RandomSource:
    """A `WeightSource` whose tensors are all the beginning of one random buffer of their
    kind, so that making an 8B model takes no memory of its size.

    Args:
        form: one of `FORMS`. "fp8": the layers' matrices in e4m3 with a scale a row, "fp8 blocks":
            for each 128 x 128, both for dynamic activations; "q4_k_m": GGUF blocks by llama.cpp's
            rules; norms stay bf16.
    """

    def __init__(self, config: Mapping[str, Any], form: str) -> None:
        assert form in FORMS, form
        self._form = form
        heads = config["num_attention_heads"] // config["num_key_value_heads"]
        self._layers = Layers(config["num_hidden_layers"], heads, config["tie_word_embeddings"])
        self._shapes: dict[str, tuple[int, ...]] = {}
        for spec in qwen3(dict(config)).weights():
            for part in spec.parts:
                shape = (part.rows,) if spec.kind == "vector" else (part.rows, spec.cols)
                self._shapes[part.name] = shape
        self._random = np.random.default_rng(0).integers(0, 256, _RANDOM_BYTES, np.uint8)
        self._made: dict[str, npt.NDArray[np.uint8]] = {}

    def names(self) -> Collection[str]:
        return self._shapes

    def part(self, name: str) -> WeightPart:
        shape = self._shapes[name]
        if len(shape) == 1 or self._form == "bf16":
            return self._dense(name, shape)
        layer = ".layers." in name
        if self._form.startswith("fp8"):
            return self._fp8(name, shape) if layer else self._dense(name, shape)
        kind = TYPES_BY_NAME[type_of("q4_k_m", _gguf_name(name), shape, self._layers)]
        num_bytes = math.prod(shape) // kind.values * kind.num_bytes
        return weight_part(name, kind, shape, self._take(kind.name, num_bytes))

    def close(self) -> None:
        self._made.clear()

    def linear_bytes(self, model: Model) -> int:
        """Bytes of the checkpoint that a decode step must read: every matrix that is multiplied by,
        once."""
        names = {p.name for s in model.weights() if s.kind == "linear" for p in s.parts}
        return sum(
            raw.data.nbytes
            for name in sorted(names)
            for raw in self.part(name).stored().buffers.values()
        )

    def _dense(self, name: str, shape: tuple[int, ...]) -> WeightPart:
        data = self._take("bf16", 2 * math.prod(shape))
        return StoredPart(name, shape, DENSE, {"weight": RawTensor(name, "bf16", shape, data)})

    def _fp8(self, name: str, shape: tuple[int, ...]) -> WeightPart:
        rows, cols = shape
        blocks = self._form == "fp8 blocks"
        height, width = (128, 128) if blocks else (1, cols)
        options: dict[str, str | int] = {
            "dtype": "f8e4m3",
            "strategy": "block" if blocks else "channel",
            "block_rows": height,
            "block_cols": width,
            "activations": "dynamic",
            "activation_strategy": "group" if blocks else "token",
        }
        codes = RawTensor(name, "f8e4m3", shape, self._take("fp8", rows * cols))
        grid = -(-rows // height), -(-cols // width)
        scales = np.full(math.prod(grid), 0.01, np.float32).view(np.uint8)
        of_scales = grid if blocks else grid[:1]
        buffers = {"weight": codes, "scale": RawTensor(f"{name}.scale", "f32", of_scales, scales)}
        return StoredPart(name, shape, Fp8(8, None, options), buffers)

    def _take(self, kind: str, num_bytes: int) -> npt.NDArray[np.uint8]:
        """The first bytes of the random buffer of a kind, which grows as it must."""
        made = self._made.get(kind)
        if made is None or made.nbytes < num_bytes:
            made = self._made[kind] = np.resize(self._pattern(kind), num_bytes)
        return made[:num_bytes]

    def _pattern(self, kind: str) -> npt.NDArray[np.uint8]:
        """A run of values of about 0.01."""
        if kind == "bf16":  # magnitudes of 0.008 to 0.016, both signs
            words = self._random.view(np.uint16) & np.uint16(0x807F) | np.uint16(0x3C00)
            return words.view(np.uint8)
        if kind == "fp8":  # exponents of 2 ** -1 and 2 ** 0
            return self._random & np.uint8(0x8F) | np.uint8(0x30)
        size = TYPES_BY_NAME[kind].num_bytes
        blocks = self._random[: self._random.size // size * size].reshape(-1, size).copy()
        scale = np.array([3e-5], np.float16).view(np.uint8)
        for begin in {"Q4_K": (0, 2), "Q6_K": (size - 2,), "Q8_0": (0,)}[kind]:
            blocks[:, begin : begin + 2] = scale
        return blocks.reshape(-1)


def _gguf_name(name: str) -> str:
    """The name of a tensor in a GGUF, as far as the rules of a mix look."""
    if name == "model.embed_tokens.weight":
        return "token_embd.weight"
    if name == "lm_head.weight":
        return "output.weight"
    _, _, layer, *_, module, _ = name.split(".")
    return f"blk.{layer}.{_ROLES.get(module, module)}.weight"
