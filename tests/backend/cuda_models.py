"""Tiny models with quantised weights for the CUDA backend's tests, and what is asked of each."""

from __future__ import annotations

import logging
import shutil
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from vllmx_core.backend import Backend, LoadedInfo, LoadOptions
from vllmx_core.errors import BackendUnavailableError
from vllmx_core.model import Model
from vllmx_core.plan import F32
from vllmx_core.weights.part import StoredPart, WeightPart, WeightSource
from vllmx_core.weights.tensor import RawTensor
from vllmx_cuda.backend import CudaBackend
from vllmx_cuda.device.device import Product
from vllmx_cuda.kernel_specs import Variant
from vllmx_models.families.qwen import qwen3
from vllmx_models.quantization.float8 import Fp8, e4m3_codes, fp8_codes, fp8_part
from vllmx_models.quantization.int8 import int8_codes, int8_part
from vllmx_testing.cuda.emulated_device import EmulatedDevice
from vllmx_testing.cuda.emulator import Emulator, find_cuda_headers
from vllmx_testing.parts import MadePart
from vllmx_testing.plans import Driver, Row, make_plan, sampling_rows
from vllmx_testing.synthetic import ArraySource

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 61,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
PROMPTS = [[5], [7, 11, 13] * 13, list(range(40, 60))]
EMULATOR = Emulator()
MODEL = qwen3(QWEN3)
MATRICES = frozenset(
    part.name for spec in MODEL.weights() if spec.kind != "vector" for part in spec.parts
)
Encode = Callable[[str, F32], WeightPart]


@pytest.fixture(scope="module", autouse=True)
def _can_emulate() -> None:
    """Skips the tests of every file that imports it where the emulator cannot run."""
    try:
        find_cuda_headers()
    except BackendUnavailableError as error:
        pytest.skip(str(error))
    if shutil.which("g++") is None:
        pytest.skip("the emulator compiles kernels with g++, which is not installed")


class Quantised:
    """Random weights of `model` as `encode` writes them; it leaves alone what it returns None for.
    Models of other sizes have the same names."""

    def __init__(
        self, encode: Callable[[str, F32], WeightPart | None], model: Model = MODEL
    ) -> None:
        random = np.random.default_rng(11)
        self.model, arrays = model, {}
        for spec in model.weights():
            for part in spec.parts:
                shape = (part.rows, spec.cols) if spec.kind != "vector" else (part.rows,)
                scale = spec.cols**-0.5 if spec.kind == "linear" else 1.0
                arrays[part.name] = (random.standard_normal(shape) * scale).astype(np.float32)
        self._plain = ArraySource(arrays, "f32")
        coded = {name: encode(name, arrays[name]) for name in MATRICES}
        self.parts = {name: part for name, part in coded.items() if part is not None}

    def names(self) -> Any:
        return self._plain.names()

    def part(self, name: str) -> WeightPart:
        return self.parts.get(name) or self._plain.part(name)

    def close(self) -> None: ...

    def twin(self) -> ArraySource:
        """The values that the codes mean."""
        return ArraySource({name: self.part(name).dequantize() for name in self.names()}, "f32")

    def stored_bytes(self, item_bytes: int) -> int:
        """The bytes of the whole map: codes and scales as they are, plain matrices as `item_bytes`
        a value, vectors and tables as float32."""
        sizes = 4 * sum(table.size for table in self.model.constants(96).values())
        for name in self.names():
            part = self.part(name)
            if name in self.parts:
                sizes += sum(raw.data.nbytes for raw in part.stored().buffers.values())
            else:
                sizes += part.dequantize().size * (item_bytes if name in MATRICES else 4)
        return sizes


def made(encode: Encode) -> Encode:
    """Encodes into parts as `--isq` gives them: rows exist when they are asked for."""

    def encoded(name: str, values: F32) -> WeightPart:
        layout = encode(name, values[:1]).layout
        return MadePart(name, values.shape, layout, lambda b, e: encode(name, values[b:e]))

    return encoded


def options(dtype: str, **changes: Any) -> LoadOptions:
    return LoadOptions(
        **changes,
        dtype=dtype,
        num_threads=1,
        max_model_len=96,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        block_size=16,
        num_kv_blocks=24,
    )


def emulated(**how: Any) -> CudaBackend:
    return CudaBackend(lambda: EmulatedDevice(**{"emulator": EMULATOR, **how}))


def generate(backend: Backend, source: WeightSource, dtype: str, **driver: Any) -> Any:
    loaded = backend.load(MODEL, source, options(dtype))
    try:
        return Driver(loaded, **driver).generate(PROMPTS, 8)
    finally:
        loaded.close()


def log_probabilities(
    backend: Backend, source: WeightSource, dtype: str, prompt: list[int], model: Model = MODEL
) -> tuple[Any, LoadedInfo]:
    """(tokens, vocabulary) by id, and what was loaded. Nothing runs but this one step."""
    loaded = backend.load(model, source, options(dtype, enforce_eager=True))
    try:
        rows = sampling_rows(len(prompt), num_logprobs=model.shape.vocab_size)
        plan = make_plan([Row(prompt, 0, range(4), "all")], 16)
        found = loaded.step(plan, rows).result().logprobs
        assert found is not None
        ids, values = np.array(found.top_ids), np.array(found.top)
        return np.take_along_axis(values, np.argsort(ids, axis=1), axis=1), loaded.info
    finally:
        loaded.close()


def check_held(
    source: Quantised, dtype: str, caplog: pytest.LogCaptureFixture, *, more: float = 0
) -> None:
    """The device holds what the file holds, `more` of it for factors that are unpacked, and nothing
    was dequantised at load."""
    with caplog.at_level(logging.INFO, "vllmx"):
        _, info = log_probabilities(emulated(), source, dtype, [1, 2])
    assert not [r for r in caplog.records if "dequantised" in r.getMessage()]
    stored = source.stored_bytes(2 if dtype != "f32" else 4)
    assert stored <= info.weight_bytes <= stored * (1 + more)


def check_near(source: Quantised, limit: float, **how: Any) -> None:
    """Few rows and many are near the float32 twin: activations are rounded, weights are not."""
    for prompt in ([3, 1, 4], [7, 11, 13] * 13):
        got, _ = log_probabilities(emulated(**how), source, "bf16", prompt)
        want, _ = log_probabilities(_cpu(), source.twin(), "f32", prompt)
        error = abs(got - want)
        assert 0 < error.mean() < limit, (len(prompt), error.mean())


def _cpu() -> Backend:
    backend: Backend = pytest.importorskip("vllmx_cpu.backend").CpuBackend()
    return backend


class CountingDevice(EmulatedDevice):
    """Which kernels and products ran."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self.entries: Counter[str] = Counter()

    def launch(self, variant: Variant, *rest: Any) -> None:
        self.entries[variant.kernel.entry] += 1
        super().launch(variant, *rest)

    def multiply(self, product: Product, *rest: Any) -> None:
        self.entries[product.dtype] += 1
        super().multiply(product, *rest)


def fp8_blocks(name: str, values: F32) -> WeightPart | None:
    """Scales of 128 x 128 as a checkpoint stores them."""
    if "embed" in name:
        return None
    rows, cols = values.shape
    grid = -(-rows // 128), -(-cols // 128)
    scale = np.random.default_rng(rows).random(grid).astype(np.float32) / 100 + 0.005
    whole = np.repeat(np.repeat(scale, 128, 0)[:rows], 128, 1)[:, :cols]
    codes = e4m3_codes(np.clip(values / whole, -448, 448))
    layout = Fp8(8, None, {
        "strategy": "block", "block_rows": 128, "block_cols": 128, "dtype": "f8e4m3",
        "activations": "dynamic", "activation_strategy": "group",
    })  # fmt: skip
    buffers = {
        "weight": RawTensor(name, "f8e4m3", values.shape, codes.reshape(-1)),
        "scale": RawTensor(name, "f32", grid, scale.reshape(-1).view(np.uint8)),
    }
    return StoredPart(name, values.shape, layout, buffers)


def fp8_rows(name: str, values: F32) -> WeightPart:
    codes, scales = fp8_codes(values)
    return fp8_part(name, values.shape, codes.reshape(-1), scales.reshape(-1))


def int8_rows(name: str, values: F32) -> WeightPart:
    codes, scales = int8_codes(values)
    return int8_part(name, values.shape, codes.reshape(-1).view(np.uint8), scales.reshape(-1))


def without_embedding(encode: Encode) -> Callable[[str, F32], WeightPart | None]:
    return lambda name, values: None if "embed" in name else encode(name, values)


EIGHT_BITS = {
    "fp8": without_embedding(fp8_rows),
    "int8": without_embedding(int8_rows),
    "fp8 blocks": fp8_blocks,
    "int8 while read": without_embedding(made(int8_rows)),
}
