"""The conformance suite on the CUDA backend without a GPU: every kernel on the emulator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from vllmx_core.backend import Backend, LoadOptions
from vllmx_core.model import Model
from vllmx_core.ops.experts import ExpertsSpec
from vllmx_core.ops.recorder import Ops
from vllmx_core.ops.route import RouteSpec
from vllmx_core.ops.values import Value
from vllmx_core.weights.tensor import DType
from vllmx_cuda.backend import CudaBackend
from vllmx_cuda.kernel_specs import Variant
from vllmx_cuda.program import expert_ops
from vllmx_models.families.qwen import qwen3
from vllmx_testing.attention_checks import FEATURES, attention_model
from vllmx_testing.backend_suite import BackendSuite
from vllmx_testing.cuda.emulated_device import EmulatedDevice
from vllmx_testing.cuda.emulator import Emulator
from vllmx_testing.harness import Harness, mixed_steps
from vllmx_testing.latent_checks import FEATURES as LATENTS
from vllmx_testing.op_case import Case, Weights
from vllmx_testing.op_checks import CASES, STEPS, case_model
from vllmx_testing.plans import Driver, Row
from vllmx_testing.sparse_checks import FEATURES as SPARSE
from vllmx_testing.synthetic import ArraySource, Builder

from .cuda_models import _can_emulate
from .test_token_by_token import TokenByTokenHarness, check_bits

__all__ = ["_can_emulate"]  # a fixture
EMULATOR = Emulator()


CODED = {name: FEATURES[name] for name in ("grouped 2", "head size 20", "window 23", "everything")}
"""Enough for codes here, where each feature is one more compilation; the kernels' own tests and a
GPU have them all."""
EXPERTS = (
    "route: softmax, 2 of 8",
    "route: sigmoid, 6 of 48, bias, factor",
    "route: sigmoid, 9 of 24, 3 of 8 groups, bias",
    "route: ties, sigmoid, 4 groups",
    "experts: 33 by 17, 3 of 5, silu, biased",
    "experts: 24 by 20, 2 of 4, relu2, no gate",
    "experts: 24 by 20, 2 of 4, silu, clamp 7.0, biased",
    "experts: 16 by 8, 1 of 40, silu",
    "experts: 24 by 20, 2 of 7 with 3 from 2 on, silu, biased",
)
"""Enough of these ops: each further shape is some more compilations."""
SKIPPED = {name for name in CASES if name.startswith(("route: ", "experts: "))} - set(EXPERTS)

COMPRESSED = (
    "compress", "compressed_attention", "grouped_linear", "hyper_streams", "hyper_read",
    "hyper_write",
)  # fmt: skip


class TestCudaEmulated(BackendSuite):
    kv_dtypes = ("f32", "int8", "fp8")  # as the model, or codes
    latent_context = 135  # each token of a prompt is an item of its own
    missing_ops = ("adapt", *COMPRESSED)
    missing_cases = (
        "gated_act: silu, width 33, limit 0.7",
        "pool: max, width 33",
        "segment_attention: a bias",
        "segment_attention: a bias and a window",
        "recurrence: ssd, a decay a channel",
        "recurrence: ssd, Mamba 1",
    )
    sparse_context = 330
    exact_batches = False  # cuBLASLt chooses its order of sums by the size of the product

    def make_backend(self) -> Backend:
        return CudaBackend(lambda: EmulatedDevice(emulator=EMULATOR), capture_s=0)

    @pytest.mark.parametrize("case", [name for name in CASES if name not in SKIPPED])
    def test_op(self, case: str) -> None:
        super().test_op(case)

    @pytest.mark.parametrize("features", ["halves", "odd sizes"])
    def test_latent_attention(self, features: str) -> None:
        super().test_latent_attention(LATENTS[features])

    @pytest.mark.parametrize("features", ["pairs", "odd sizes", "one token"])
    def test_sparse_attention(self, features: str) -> None:
        super().test_sparse_attention(SPARSE[features])

    @pytest.mark.parametrize("kv", ["int8", "fp8"])
    @pytest.mark.parametrize("features", CODED.values(), ids=CODED.keys())
    def test_attention_over_codes(self, kv: str, features: dict[str, Any]) -> None:
        super().test_attention_over_codes(kv, features)


class _TokenByToken(TokenByTokenHarness):
    def make_backend(self) -> Backend:
        return CudaBackend(lambda: EmulatedDevice(emulator=EMULATOR), capture_s=0)


def test_each_token_alone_gives_equal_bits() -> None:
    check_bits(_TokenByToken())


def test_all_chosen_cases_of_experts_are_there() -> None:
    assert set(EXPERTS) <= CASES.keys()


class TestExpertsOnTensorCores(Harness):
    """Experts in bf16, tiles of 8 and of 16, more tokens than go through the experts at once."""

    def make_backend(self) -> Backend:
        self.device = LaunchingDevice(emulator=EMULATOR)
        return CudaBackend(lambda: self.device, capture_s=0)

    def test_experts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(expert_ops, "CHUNK_TOKENS", 24)

        def build(builder: Builder) -> None:
            builder.linear("router", 3, 64)
            builder.stack("gate_up", 3, (32, 32), 64, (0, 1))
            builder.stack("down", 3, (64,), 32, (0,))

        def middle(ops: Ops, w: Weights, x: Value) -> Value:
            ids, weights = ops.route(
                ops.linear(x, w["router"]), RouteSpec(3)
            )  # all: no tie to round
            return ops.experts(x, ids, weights, w["gate_up"], w["down"], ExpertsSpec())

        model, source = case_model(Case.between("experts", 64, middle, build), "bf16")
        self.compare(model, source, STEPS, tolerance=0.1, dtype="bf16")
        assert "experts_mma" in self.device.launched
        assert "experts_gemv" not in self.device.launched


TILED: dict[str, dict[str, Any]] = {
    "rope": {"rotary_dim": 16, "num_kv_heads": 2},
    "both ways": {"causal": False, "num_kv_heads": 2},
    "window": {"window": 20, "num_kv_heads": 1},
    "everything": {
        "num_kv_heads": 2,
        "head_size": 64,
        "norms": True,
        "rotary_dim": 32,
        "softcap": 3.0,
        "sinks": True,
    },
    "heads of 512": {"num_kv_heads": 1, "head_size": 512, "scale": 512**-0.5},
}


class TestPromptsOnTensorCores(Harness):
    """Rows of several tokens in tiles beside rows of one, in bf16: coarse, but no garbage."""

    def make_backend(self) -> Backend:
        return CudaBackend(lambda: EmulatedDevice(emulator=EMULATOR), capture_s=0)

    @pytest.mark.parametrize("features", TILED.values(), ids=TILED.keys())
    def test_attention(self, features: dict[str, Any]) -> None:
        model, source = attention_model(**features)
        steps = mixed_steps()[:1] if not features.get("causal", True) else mixed_steps()
        steps[0] = [Row(list(range(19)), 0, [16, 17, 18], "all"), *steps[0]]
        self.compare(model, source, steps, tolerance=0.1, dtype="bf16")


WGMMA: dict[str, dict[str, Any]] = {
    "head size 64": {"num_kv_heads": 2, "head_size": 64, "norms": True, "rotary_dim": 32},
    "head size 128, window, sinks": {
        "num_kv_heads": 1,
        "head_size": 128,
        "window": 20,
        "softcap": 3.0,
        "sinks": True,
    },
    "head size 192, both ways": {
        "causal": False,
        "head_size": 192,
        "num_heads": 3,
        "num_kv_heads": 1,
    },
    "head size 20": {"head_size": 20},
}


class TestPromptsOnWgmma(Harness):
    """The same on a Hopper GPU whose user asked for its own kernel."""

    def make_backend(self) -> Backend:
        self.device = LaunchingDevice(emulator=EMULATOR, arch="sm_90a")
        return CudaBackend(lambda: self.device, capture_s=0, wgmma=True)

    @pytest.mark.parametrize("features", WGMMA.values(), ids=WGMMA.keys())
    def test_attention(self, features: dict[str, Any]) -> None:
        model, source = attention_model(**{"scale": features["head_size"] ** -0.5, **features})
        causal = features.get("causal", True)
        steps = mixed_steps() if causal else mixed_steps()[:1]  # rows come whole then
        steps[0] = [Row(list(range(19)), 0, [16, 17, 18], "all"), *steps[0]]
        dtype = "bf16" if causal else "f16"
        self.compare(model, source, steps, tolerance=0.1, dtype=dtype)
        launched = "paged_prefill_wgmma" in self.device.launched
        assert launched == (features["head_size"] >= 64)
        assert "paged_prefill" not in self.device.launched


class LaunchingDevice(EmulatedDevice):
    """Keeps the names of the kernels that were launched."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.launched: set[str] = set()

    def launch(self, variant: Variant, *rest: Any) -> None:
        self.launched.add(variant.kernel.entry)
        super().launch(variant, *rest)


QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
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


def tiny_qwen3(dtype: DType) -> tuple[Model, ArraySource]:
    model = qwen3(QWEN3)
    random = np.random.default_rng(11)
    arrays = {}
    for spec in model.weights():
        for part in spec.parts:
            shape = (part.rows, spec.cols) if spec.kind != "vector" else (part.rows,)
            scale = spec.cols**-0.5 if spec.kind == "linear" else 1.0
            arrays[part.name] = (random.standard_normal(shape) * scale).astype(np.float32)
    return model, ArraySource(arrays, dtype)


def generate(
    backend: Backend, dtype: DType, *, temperature: float = 0.0, **driver: Any
) -> list[list[int]]:
    model, source = tiny_qwen3(dtype)
    limits = {"max_model_len": 96, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    loaded = backend.load(model, source, LoadOptions(dtype=dtype, num_threads=1, **limits))
    try:
        return Driver(loaded, **driver).generate(PROMPTS, 12, temperature=temperature)
    finally:
        loaded.close()


def test_a_tiny_qwen3_answers_as_on_the_cpu() -> None:
    """Chunked prefill, captured decode, ids that are fed back on the device, which does nothing
    before somebody waits for it: what the host reads or overwrites too early is wrong."""
    cpu = pytest.importorskip("vllmx_cpu.backend").CpuBackend()
    device = EmulatedDevice(emulator=EMULATOR, deferred=True)
    backend = CudaBackend(lambda: device, capture_s=600)  # however busy the machine is
    got = generate(backend, "f32", chunk=16, overlap=True)
    assert got == generate(cpu, "f32")
    assert device.calls["capture"] == 4 * 4 + 4, "buckets 1, 2, 4, 8 at the start, and prompts"
    assert device.calls["graph"] >= 2 * 8
    assert device.calls["upload_rows"] == 0, "block tables as small as these go as patches"


def test_the_checking_build_finds_nothing() -> None:
    """Races, bad accesses, reads of what nobody wrote: none in a whole generation."""
    device = EmulatedDevice(check=True)
    ids = generate(CudaBackend(lambda: device, capture_s=0), "bf16", chunk=16, temperature=0.8)
    assert [len(row) for row in ids] == [12, 12, 12]
