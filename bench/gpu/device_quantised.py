"""Quantised weights on the GPU beside the reference in float64, run by run.sh.

`BackendSuite` has dense weights alone. Here each form that a matrix can have on the device
multiplies few rows, many rows, and gathers; the oracle has the values that the codes mean.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import numpy as np
import pytest
from device_suite import OnDevice
from vllmx_core.plan import F32
from vllmx_core.weights.part import WeightPart
from vllmx_models.families.qwen import qwen3
from vllmx_models.formats.gguf.blocks import TYPES_BY_NAME, weight_part
from vllmx_models.formats.gguf.quantize.encoders import encode
from vllmx_models.quantization.float8 import fp8_codes, fp8_part
from vllmx_models.quantization.int8 import int8_codes, int8_part
from vllmx_testing.plans import Row
from vllmx_testing.synthetic import ArraySource

MODEL = qwen3(
    {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 64,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    }
)
Encode = Callable[[str, F32], WeightPart]


class Quantised:
    """`vllmx_core.weights.part.WeightSource`: random matrices as `encoded` writes them."""

    def __init__(self, encoded: Encode) -> None:
        random, arrays, matrices = np.random.default_rng(5), {}, []
        for spec in MODEL.weights():
            for part in spec.parts:
                vector = spec.kind == "vector"
                shape = (part.rows,) if vector else (part.rows, spec.cols)
                scale = 1.0 if vector else spec.cols**-0.5
                arrays[part.name] = (random.standard_normal(shape) * scale).astype(np.float32)
                matrices += [] if vector else [part.name]
        self._plain = ArraySource(arrays)
        self._coded = {name: encoded(name, arrays[name]) for name in matrices}

    def names(self) -> Collection[str]:
        return self._plain.names()

    def part(self, name: str) -> WeightPart:
        return self._coded.get(name) or self._plain.part(name)

    def close(self) -> None: ...


def gguf(kinds: Mapping[str, str], usual: str) -> Encode:
    """Blocks of the type of the first key that a name holds."""

    def encoded(name: str, values: F32) -> WeightPart:
        kind = next((kinds[word] for word in kinds if word in name), usual)
        return weight_part(name, TYPES_BY_NAME[kind], values.shape, encode(kind, values))

    return encoded


def fp8(name: str, values: F32) -> WeightPart:
    codes, scales = fp8_codes(values)
    return fp8_part(name, values.shape, codes.reshape(-1), scales.reshape(-1))


def int8(name: str, values: F32) -> WeightPart:
    codes, scales = int8_codes(values)
    return int8_part(name, values.shape, codes.reshape(-1).view(np.uint8), scales.reshape(-1))


FORMS: Mapping[str, Encode] = {
    "Q4_K_M": gguf({"v_proj": "Q6_K", "down_proj": "Q6_K", "embed": "Q6_K"}, "Q4_K"),
    "Q8_0": gguf({"k_proj": "Q4_1", "up_proj": "Q4_0"}, "Q8_0"),
    "blocks": gguf({"q_proj": "Q2_K", "v_proj": "Q3_K", "embed": "Q5_K", "up": "Q5_0"}, "Q5_1"),
    "fp8": fp8,
    "int8": int8,
}


class TestQuantised(OnDevice):
    @pytest.mark.parametrize("dtype", ["bf16", "f16"])
    @pytest.mark.parametrize("form", FORMS)
    def test_weights(self, form: str, dtype: str) -> None:
        """140 rows are more than any kernel for few takes; then one, then five."""
        random = np.random.default_rng(6)
        texts = [random.integers(0, MODEL.shape.vocab_size, 75).tolist() for _ in range(2)]
        blocks = [[4, 9, 0, 2, 7], [11, 3, 5, 8, 1]]
        steps = [
            [Row(text[:70], 0, of, "all") for text, of in zip(texts, blocks, strict=True)],
            [Row(texts[0][70:71], 70, blocks[0])],
            [Row(texts[1][70:74], 70, blocks[1], "all"), Row(texts[0][71:72], 71, blocks[0])],
        ]
        # where both are codes, activations of FP8 have three bits of mantissa
        limit = {"fp8": 0.5}.get(form, 0.15)
        self.compare(MODEL, Quantised(FORMS[form]), steps, tolerance=limit, dtype=dtype)
