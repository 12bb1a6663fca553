"""Quantised checkpoints on the CUDA backend without a GPU: they stay quantised in its memory, and
the model stays itself."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from vllmx_core.backend import Backend, LoadedInfo, LoadOptions
from vllmx_core.errors import BackendUnavailableError
from vllmx_core.plan import F32
from vllmx_core.testing.plans import Driver, Row, make_plan, sampling_rows
from vllmx_core.testing.synthetic import ArraySource
from vllmx_core.weights import DENSE, WeightPart, WeightSource, made_part
from vllmx_cuda.backend import CudaBackend
from vllmx_cuda.emulated_device import EmulatedDevice
from vllmx_cuda.emulator import Emulator, find_cuda_headers
from vllmx_cuda.matrices import pieces
from vllmx_models.gguf.blocks import TYPES_BY_NAME, weight_part
from vllmx_models.gguf.quantize.encode import encode
from vllmx_models.qwen3 import qwen3

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 61, "hidden_size": 256,
    "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": True,
}  # fmt: skip
PROMPTS = [[5], [7, 11, 13] * 13, list(range(40, 60))]
EMULATOR = Emulator()
MODEL = qwen3(QWEN3)
MATRICES = {
    part.name: spec.cols for spec in MODEL.weights() if spec.kind != "vector" for part in spec.parts
}
Encode = Callable[[str, F32], WeightPart]


@pytest.fixture(scope="module", autouse=True)
def _can_emulate() -> None:
    try:
        find_cuda_headers()
    except BackendUnavailableError as error:
        pytest.skip(str(error))
    if shutil.which("g++") is None:
        pytest.skip("the emulator compiles kernels with g++, which is not installed")


class Quantised:
    """Random weights as `encode` writes them; it leaves alone what it returns None for."""

    def __init__(self, encode: Callable[[str, F32], WeightPart | None], seed: int = 11) -> None:
        random = np.random.default_rng(seed)
        arrays = {}
        for spec in MODEL.weights():
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
        """Of the whole map: codes and scales as they are, plain matrices as `item_bytes` a value,
        vectors and tables as float32."""
        sizes = 4 * sum(table.size for table in MODEL.constants(96).values())
        for name in self.names():
            part = self.part(name)
            if name in self.parts:
                sizes += sum(raw.data.nbytes for raw in part.buffers.values())
            else:
                sizes += part.dequantize().size * (item_bytes if name in MATRICES else 4)
        return sizes


def gguf_as(kinds: Mapping[str, str], usual: str) -> Encode:
    """Blocks of the type of the first key that a name holds; Q8_0 where rows are too short."""

    def encoded(name: str, values: F32) -> WeightPart:
        kind = next((kinds[word] for word in kinds if word in name), usual)
        if values.shape[1] % TYPES_BY_NAME[kind].values:
            kind = "Q8_0"
        data = encode(kind, values)
        return weight_part(name, TYPES_BY_NAME[kind], values.shape, data)

    return encoded


Q4_K_M = gguf_as({"v_proj": "Q6_K", "down_proj": "Q6_K", "embed": "Q6_K"}, "Q4_K")
GGUF = {"Q4_K_M": Q4_K_M, "Q8_0": gguf_as({}, "Q8_0"), "Q4_0": gguf_as({"embed": "Q5_1"}, "Q4_0"),
        "Q2_K": gguf_as({"v_proj": "Q3_K", "embed": "Q5_K"}, "Q2_K")}  # fmt: skip


def made(encode: Encode) -> Encode:
    """As `--isq` gives parts: rows exist when they are asked for."""

    def encoded(name: str, values: F32) -> WeightPart:
        layout = encode(name, values[:1]).layout
        coded = layout.kind == "int8"
        return made_part(
            name, values.shape, layout, lambda b, e: encode(name, values[b:e]), coded=coded
        )

    return encoded


def options(dtype: str) -> LoadOptions:
    return LoadOptions(
        dtype=dtype, num_threads=1, max_model_len=96, max_num_seqs=8, max_num_batched_tokens=64,
        block_size=16, num_kv_blocks=24,
    )  # fmt: skip


def emulated(**how: Any) -> CudaBackend:
    return CudaBackend(lambda: EmulatedDevice(**{"emulator": EMULATOR, **how}))


def generate(backend: Backend, source: WeightSource, dtype: str, **driver: Any) -> Any:
    loaded = backend.load(MODEL, source, options(dtype))
    try:
        return Driver(loaded, **driver).generate(PROMPTS, 8)
    finally:
        loaded.close()


def log_probabilities(
    backend: Backend, source: WeightSource, dtype: str, prompt: list[int]
) -> tuple[Any, LoadedInfo]:
    """(tokens, 61) by id, and what was loaded."""
    loaded = backend.load(MODEL, source, options(dtype))
    try:
        rows = sampling_rows(len(prompt), num_logprobs=61)
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


@pytest.mark.parametrize("name", GGUF)
def test_gguf_stays_as_it_is(name: str, caplog: pytest.LogCaptureFixture) -> None:
    source = Quantised(GGUF[name])
    # blocks of Q4_K are repacked with their factors as float16, both with counters
    more = {"Q4_K_M": 0.12, "Q4_0": 0.02}.get(name, 0.0)
    check_held(source, "bf16", caplog, more=more)
    check_near(source, 0.03)


def test_what_is_quantised_while_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--isq`: the same answers, uploaded in small pieces."""
    whole, pieces_of = Quantised(Q4_K_M), Quantised(made(Q4_K_M))
    want, info = log_probabilities(emulated(), whole, "bf16", [3, 1, 4])
    monkeypatch.setattr(pieces, "PIECE_BYTES", 1000)
    got, again = log_probabilities(emulated(), pieces_of, "bf16", [3, 1, 4])
    np.testing.assert_array_equal(got, want)
    assert again.weight_bytes == info.weight_bytes


def test_gguf_answers_as_on_the_cpu() -> None:
    """In float32 nothing is rounded: greedy ids, chunked, decoded from captured graphs."""
    source = Quantised(Q4_K_M)
    assert all(part.layout != DENSE for part in source.parts.values())
    got = generate(emulated(), source, "f32", chunk=16, overlap=True)
    assert got == generate(_cpu(), source.twin(), "f32")


def test_the_checking_build_finds_nothing() -> None:
    ids = generate(emulated(check=True, emulator=None), Quantised(Q4_K_M), "bf16", chunk=40)
    assert [len(row) for row in ids] == [8, 8, 8]
