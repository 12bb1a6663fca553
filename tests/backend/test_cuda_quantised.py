"""Quantised checkpoints on the CUDA backend without a GPU: they stay quantised in its memory, and
the model stays itself."""

from __future__ import annotations

import logging
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from vllmx_core.backend import Backend, LoadedInfo, LoadOptions
from vllmx_core.errors import BackendUnavailableError
from vllmx_core.plan import F32
from vllmx_core.testing.plans import Driver, Row, make_plan, sampling_rows
from vllmx_core.testing.synthetic import ArraySource
from vllmx_core.weights import DENSE, QuantLayout, RawTensor, WeightPart, WeightSource, made_part
from vllmx_cuda.backend import CudaBackend
from vllmx_cuda.device import Product
from vllmx_cuda.emulated_device import EmulatedDevice
from vllmx_cuda.emulator import Emulator, find_cuda_headers
from vllmx_cuda.kernel_specs import Variant
from vllmx_cuda.matrices import codes8, pieces
from vllmx_models.gguf.blocks import TYPES_BY_NAME, weight_part
from vllmx_models.gguf.quantize.encode import encode
from vllmx_models.quantization.eight_bits import (
    e4m3_codes,
    fp8_codes,
    fp8_part,
    int8_codes,
    int8_part,
)
from vllmx_models.quantization.matrices import decode_fp8
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


def options(dtype: str, **changes: Any) -> LoadOptions:
    return LoadOptions(
        **changes, dtype=dtype, num_threads=1, max_model_len=96, max_num_seqs=8,
        max_num_batched_tokens=64, block_size=16, num_kv_blocks=24,
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
    """(tokens, vocabulary) by id, and what was loaded. Nothing runs but this one step."""
    loaded = backend.load(MODEL, source, options(dtype, enforce_eager=True))
    try:
        rows = sampling_rows(len(prompt), num_logprobs=MODEL.shape.vocab_size)
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
    # codes of 4 and 8 bits are repacked, with counters; those of Q4_K get factors as float16
    check_held(source, "bf16", caplog, more=0.12 if name == "Q4_K_M" else 0.02)
    check_near(source, 0.03)


def test_what_is_quantised_while_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--isq`: the same answers, uploaded in small pieces."""
    whole, pieces_of = Quantised(Q4_K_M), Quantised(made(Q4_K_M))
    want, info = log_probabilities(emulated(), whole, "bf16", [3, 1, 4])
    monkeypatch.setattr(pieces, "PIECE_BYTES", 1000)
    got, again = log_probabilities(emulated(), pieces_of, "bf16", [3, 1, 4])
    np.testing.assert_array_equal(got, want)
    assert again.weight_bytes == info.weight_bytes


def fp8_blocks(name: str, values: F32) -> WeightPart | None:
    """Scales of 128 x 128 as a checkpoint stores them."""
    if "embed" in name:
        return None
    rows, cols = values.shape
    grid = -(-rows // 128), -(-cols // 128)
    scale = np.random.default_rng(rows).random(grid).astype(np.float32) / 100 + 0.005
    whole = np.repeat(np.repeat(scale, 128, 0)[:rows], 128, 1)[:, :cols]
    codes = e4m3_codes(np.clip(values / whole, -448, 448))
    layout = QuantLayout("fp8", 8, None, {
        "strategy": "block", "block_rows": 128, "block_cols": 128, "dtype": "f8e4m3",
        "activations": "dynamic", "activation_strategy": "group",
    })  # fmt: skip
    buffers = {
        "weight": RawTensor(name, "f8e4m3", values.shape, codes.reshape(-1)),
        "scale": RawTensor(name, "f32", grid, scale.reshape(-1).view(np.uint8)),
    }
    return WeightPart(name, values.shape, layout, buffers, decode_fp8)


def fp8_rows(name: str, values: F32) -> WeightPart:
    codes, scales = fp8_codes(values)
    return fp8_part(name, values.shape, codes.reshape(-1), scales.reshape(-1))


def int8_rows(name: str, values: F32) -> WeightPart:
    codes, scales = int8_codes(values)
    return int8_part(name, values.shape, codes.reshape(-1).view(np.uint8), scales.reshape(-1))


def without_embedding(encode: Encode) -> Callable[[str, F32], WeightPart | None]:
    return lambda name, values: None if "embed" in name else encode(name, values)


EIGHT_BITS = {
    "fp8": without_embedding(fp8_rows), "int8": without_embedding(int8_rows),
    "fp8 blocks": fp8_blocks, "int8 while read": without_embedding(made(int8_rows)),
}  # fmt: skip


@pytest.mark.parametrize("name", EIGHT_BITS)
def test_eight_bits_stay_as_they_are(name: str, caplog: pytest.LogCaptureFixture) -> None:
    source = Quantised(EIGHT_BITS[name])
    check_held(source, "bf16", caplog, more=0.01)  # with counters
    check_near(
        source, 0.1 if name.startswith("fp8") else 0.03
    )  # activations of three bits and a leading one


@pytest.mark.parametrize("name", ["fp8", "fp8 blocks", "int8"])
def test_eight_bits_answer_as_on_the_cpu(name: str) -> None:
    """In float32 activations are not rounded: greedy ids."""
    source = Quantised(EIGHT_BITS[name])
    assert generate(emulated(), source, "f32", chunk=16) == generate(_cpu(), source.twin(), "f32")


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


def test_norms_write_codes_for_the_products_behind_them() -> None:
    """Two of a layer's four products; none where rows are few and stay as they are."""
    for tokens, coded in ((16, 2 * len(MODEL.shape.kv)), (3, 0)):
        device = CountingDevice(emulator=EMULATOR)
        source = Quantised(EIGHT_BITS["int8"])
        log_probabilities(CudaBackend(lambda device=device: device), source, "bf16", [9] * tokens)
        fused = device.entries["rms_norm_codes"] + device.entries["add_rms_norm_codes"]
        assert (fused, device.entries["quantize_rows"]) == (coded, coded)
        assert device.entries["i8"] == 2 * coded
        assert device.entries["codes8_gemv"] == (0 if coded else 4 * len(MODEL.shape.kv))


def static_fp8(scales: Mapping[str, float]) -> Callable[[str, F32], WeightPart | None]:
    """FP8 with a fixed scale of the activations, by the name of a module."""

    def encoded(name: str, values: F32) -> WeightPart | None:
        if "embed" in name:
            return None
        part, module = fp8_rows(name, values), name.split(".")[-2]
        scale = np.array([scales.get(module, scales["any"])], np.float32).view(np.uint8)
        layout = replace(part.layout, options={
            **part.layout.options, "activations": "static", "activation_strategy": "tensor",
        })  # fmt: skip
        raw = RawTensor(f"{name}.input_scale", "f32", (1,), scale)
        return replace(part, layout=layout, buffers={**part.buffers, "input_scale": raw})

    return encoded


@pytest.mark.parametrize(("scales", "limit"), [
    ({"any": 1 / 64}, (0, 0.1)),
    ({"any": 1 / 64, "k_proj": 1 / 50}, (0, 0.1)),  # one matrix, rows of x by two scales
    ({"any": 0.0}, (0, 0.1)),  # not calibrated: each row has its own
    ({"any": 1e-4}, (0.3, 10)),  # nearly all of x is clipped to 0.0448
])  # fmt: skip
def test_static_scales_of_fp8(scales: Mapping[str, float], limit: tuple[float, float]) -> None:
    source, prompt = Quantised(static_fp8(scales)), [7, 11, 13] * 13
    device = CountingDevice(emulator=EMULATOR)
    got, _ = log_probabilities(CudaBackend(lambda: device), source, "bf16", prompt)
    want, _ = log_probabilities(_cpu(), source.twin(), "f32", prompt)
    assert limit[0] < abs(got - want).mean() < limit[1]
    layers, split = len(MODEL.shape.kv), "k_proj" in scales
    assert device.entries["f8e4m3"] == (6 if split else 4) * layers
    norms = device.entries["rms_norm_codes"] + device.entries["add_rms_norm_codes"]
    assert norms == (1 if split else 2) * layers
    # o_proj and down_proj; q, k and v each, where they differ
    assert device.entries["quantize_rows"] == (5 if split else 2) * layers


class RefusingDevice(CountingDevice):
    """As a GPU whose cuBLASLt has no products of codes, or none of so many rows."""

    refused_rows = range(1 << 30)

    def can_multiply(self, product: Product) -> bool:
        codes = product.dtype in ("i8", "f8e4m3")
        return not (codes and product.m in self.refused_rows) and super().can_multiply(product)

    def multiply(self, product: Product, *rest: Any) -> None:
        assert self.can_multiply(product), product
        super().multiply(product, *rest)


@pytest.mark.parametrize(("name", "few"), [("fp8", "codes8_mma"), ("int8", "codes8_gemv")])
def test_codes_that_cublaslt_refuses(name: str, few: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations stay as they are then: few rows meet the codes, for many they are dequantised."""
    monkeypatch.setattr(codes8, "OWN_TOKENS", 32)
    source, layers = Quantised(EIGHT_BITS[name]), len(MODEL.shape.kv)
    for prompt, entry in (([9, 4] * 8, few), ([7, 11, 13] * 13, "codes8_dequantize")):
        device = RefusingDevice(emulator=EMULATOR)
        got, _ = log_probabilities(CudaBackend(lambda d=device: d), source, "bf16", prompt)
        want, _ = log_probabilities(_cpu(), source.twin(), "f32", prompt)
        assert abs(got - want).mean() < 0.02
        assert device.entries[entry] == 4 * layers
        assert not [e for e in device.entries if e.endswith("_codes") or e == "quantize_rows"]


def test_codes_that_cublaslt_refuses_for_some_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RefusingDevice, "refused_rows", range(39, 40))
    for tokens, refused in ((38, False), (39, True)):
        device = RefusingDevice(emulator=EMULATOR)
        source = Quantised(EIGHT_BITS["int8"])
        log_probabilities(CudaBackend(lambda d=device: d), source, "bf16", [9] * tokens)
        assert bool(device.entries["codes8_dequantize"]) == refused
        assert bool(device.entries["i8"]) != refused


@pytest.mark.parametrize("name", ["fp8", "fp8 blocks"])
@pytest.mark.parametrize(("arch", "dtype"), [("sm_86", "bf16"), ("sm_75", "f16")])
def test_fp8_on_a_gpu_that_has_none(name: str, arch: str, dtype: str) -> None:
    """Its tensor cores take the codes as numbers of 16 bits; activations are not rounded."""
    source = Quantised(EIGHT_BITS[name])
    for tokens in (1, 39):
        device, prompt = CountingDevice(emulator=EMULATOR, arch=arch), ([7, 11, 13] * 13)[:tokens]
        got, _ = log_probabilities(CudaBackend(lambda d=device: d), source, dtype, prompt)
        want, _ = log_probabilities(_cpu(), source.twin(), "f32", prompt)
        assert abs(got - want).mean() < 0.02
        # q, k and v are apart where their rows are not whole blocks
        products = 6 if name == "fp8 blocks" else 4
        assert device.entries["codes8_mma"] == products * len(MODEL.shape.kv)
        assert not device.entries["f8e4m3"]


@pytest.mark.parametrize(("arch", "product"), [("sm_90a", "f8e4m3"), ("sm_89", "codes8_blocks"),
                                               ("sm_120a", "codes8_blocks")])  # fmt: skip
def test_fp8_blocks_times_codes(
    arch: str, product: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By cuBLASLt on Hopper, whose rows are whole fours, by our kernel on Ada and small Blackwell;
    norms write the codes. Few rows stay as they are."""
    sizes = {"hidden_size": 512, "intermediate_size": 528, "num_attention_heads": 8}
    monkeypatch.setitem(globals(), "MODEL", qwen3({**QWEN3, **sizes}))
    monkeypatch.setattr(codes8, "OWN_TOKENS", 32)
    spec_cols = {p.name: s.cols for s in MODEL.weights() if s.kind != "vector" for p in s.parts}
    monkeypatch.setitem(globals(), "MATRICES", spec_cols)
    source = Quantised(fp8_blocks)
    for tokens in (32, 39):
        device, prompt = CountingDevice(emulator=EMULATOR, arch=arch), ([7, 11, 13] * 13)[:tokens]
        with caplog.at_level(logging.INFO, "vllmx"):
            got, _ = log_probabilities(CudaBackend(lambda d=device: d), source, "bf16", prompt)
        want, _ = log_probabilities(_cpu(), source.twin(), "f32", prompt)
        assert abs(got - want).mean() < (0.1 if tokens > 32 else 0.02)
        few = tokens <= 32
        layers = len(MODEL.shape.kv)  # of q, k, v, o, gate, up, down: not all are whole blocks
        assert device.entries["codes8_mma" if few else product] == 7 * layers
        assert not device.entries[product if few else "codes8_mma"]
        assert not device.entries["codes8_dequantize"]
        norms = device.entries["rms_norm_codes"] + device.entries["add_rms_norm_codes"]
        assert norms == (0 if few else 2 * layers)
        assert device.entries["quantize_rows"] == (0 if few else 2 * layers)


def test_fp8_in_bf16_without_tensor_cores() -> None:
    device = CountingDevice(emulator=EMULATOR, arch="sm_75")
    source = Quantised(EIGHT_BITS["fp8 blocks"])
    log_probabilities(CudaBackend(lambda: device), source, "bf16", [7, 11, 13])
    assert device.entries["codes8_gemv"] == 6 * len(MODEL.shape.kv)


def test_a_code_that_is_nan_is_not_hidden() -> None:
    """As numbers of 16 bits it would be 480."""

    def with_nan(name: str, values: F32) -> WeightPart | None:
        part = fp8_blocks(name, values)
        if part is not None and "layers.1.mlp.down_proj" in name:
            part.buffers["weight"].data[300] = 0xFF
        return part

    for tokens in (1, 39):
        device, prompt = CountingDevice(emulator=EMULATOR, arch="sm_86"), [7] * tokens
        backend = CudaBackend(lambda d=device: d)
        got, _ = log_probabilities(backend, Quantised(with_nan), "bf16", prompt)
        assert not np.isfinite(got).any()  # the sampler refuses such rows


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_K_M"])
@pytest.mark.parametrize("arch", ["sm_75", "sm_90a"])
def test_codes_of_gguf_meet_tensor_cores(name: str, arch: str) -> None:
    """Those of Turing too, which know f16 alone."""
    for tokens in (1, 39):
        device = CountingDevice(emulator=EMULATOR, arch=arch)
        source, prompt = Quantised(GGUF[name]), [7, 11, 13] * tokens
        backend = CudaBackend(lambda d=device: d)
        got, _ = log_probabilities(backend, source, "f16", prompt[:tokens])
        want, _ = log_probabilities(_cpu(), source.twin(), "f32", prompt[:tokens])
        assert abs(got - want).mean() < 0.01
        parts = 5 if name == "Q4_K_M" else 4  # of q, k and v the last in 6 bits
        assert device.entries["w4_linear"] == parts * len(MODEL.shape.kv)
        assert not device.entries["w4_dequantize"]


def test_a_tied_embedding_of_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """In whole tiles, rows are gathered from what the head multiplies."""
    monkeypatch.setitem(globals(), "MODEL", qwen3({**QWEN3, "vocab_size": 64}))
    source, device = Quantised(Q4_K_M), CountingDevice(emulator=EMULATOR)
    prompt = [7, 63, 0] * 13
    got, info = log_probabilities(CudaBackend(lambda: device), source, "bf16", prompt)
    want, _ = log_probabilities(_cpu(), source.twin(), "f32", prompt)
    assert abs(got - want).mean() < 0.03
    assert device.entries["w4_gather"] == 1
    assert not [entry for entry in device.entries if "gguf" in entry or "gemv" in entry]
    assert info.weight_bytes < 1.12 * source.stored_bytes(2)


def test_gguf_answers_as_on_the_cpu() -> None:
    """In float32 nothing is rounded: greedy ids, chunked, decoded from captured graphs."""
    source = Quantised(Q4_K_M)
    assert all(part.layout != DENSE for part in source.parts.values())
    got = generate(emulated(), source, "f32", chunk=16, overlap=True)
    assert got == generate(_cpu(), source.twin(), "f32")


def test_the_checking_build_finds_nothing() -> None:
    ids = generate(emulated(check=True, emulator=None), Quantised(Q4_K_M), "bf16", chunk=40)
    assert [len(row) for row in ids] == [8, 8, 8]
