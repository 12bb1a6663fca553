"""The Metal kernels on the CPU, through a shim that g++ compiles: against plain attention in
float64, and wrong kernels are noticed. Metal itself never ran them here."""

from __future__ import annotations

from typing import Any

import pytest
from vllmx_core.errors import ConfigError
from vllmx_testing.attention_checks import attention_model
from vllmx_testing.harness import Harness, mixed_steps

mx = pytest.importorskip("mlx.core", reason="vllmx-metal runs on MLX")
pytest.importorskip("vllmx_metal")

from vllmx_metal import kernel_choice, paged  # noqa: E402
from vllmx_metal.backend import MetalBackend  # noqa: E402

from .metal_cases import PAGE, Case  # noqa: E402
from .metal_shim import UseShim, shim_of, source_of  # noqa: E402

SOURCE = source_of("paged_decode")
shim = shim_of(paged, "paged_decode")


def decode_error(case: Case) -> float:
    last = case.lengths - 1
    rows = paged.decode_rows(case.table, case.first_key(last), last, PAGE)
    return case.error(paged.paged_decode(case.q, case.spec, case.sinks, case.pages, rows))


CASES: dict[str, dict[str, Any]] = {
    "grouped": {},
    "multi-head": {"heads": 3, "kv_heads": 3},
    "multi-query": {"heads": 8, "kv_heads": 1},
    "more heads than a threadgroup takes": {"heads": 12, "kv_heads": 1, "size": 256},
    "head size 80": {"size": 80},
    "head size 20": {"size": 20},
    "window": {"window": 37},
    "window of one": {"window": 1},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": True},
    "int8": {"kv": "int8"},
    "fp8": {"kv": "fp8"},
    "q4": {"kv": "q4", "size": 80},
    "q8,q4": {"kv": "q8,q4", "window": 37, "sinks": True},
    "float16": {"kv": "f16", "dtype": "f16"},
    "bfloat16": {"kv": "bf16", "dtype": "bf16"},
    "everything": {
        "heads": 6,
        "window": 100,
        "softcap": 3.0,
        "sinks": True,
        "kv": "fp8",
        "dtype": "bf16",
    },
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
def test_paged_decode(shim: UseShim, options: dict[str, Any]) -> None:
    made = shim()
    error = decode_error(Case([1, 17, 5, 130], **options))
    print(f"{error:.1e}")  # pytest -rP shows it
    assert error < {"f16": 1e-3, "bf16": 1e-2}.get(options.get("dtype", ""), 2e-6)
    assert made.divergences == 0


@pytest.mark.parametrize("options", [{}, {"sinks": True}, {"window": 530}])
def test_long_contexts_are_cut_into_parts(shim: UseShim, options: dict[str, Any]) -> None:
    """Rows that end in the first, second and third part, beside each other."""
    shim()
    lengths = [1, paged.PART, paged.PART + 1, 2 * paged.PART + 40]
    assert decode_error(Case(lengths, **options)) < 2e-6


WRONG = {
    "no barrier": ("metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);", ""),
    "another kv head": (") * K + kv_head;", ") * K + (kv_head + 1) % K;"),
    "a position too few": ("position < end;", "position + 1 < end;"),
    "a block too far": ("position / PAGE]", "(position + 1) / PAGE]"),
    "scale forgotten": ("* factors[0] : 0", ": 0"),
    "one simdgroup's share": ("whole_sum += all_sums[at * D + d] * share;", "whole_sum = 1;"),
    "barrier in one simdgroup": (
        "float highest =",
        "if (simd == 0) metal::threadgroup_barrier("
        "metal::mem_flags::mem_threadgroup);\n  float highest =",
    ),
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG.keys())
def test_a_wrong_kernel_is_noticed(shim: UseShim, change: tuple[str, str]) -> None:
    assert SOURCE.count(change[0]) == 1
    made = shim(SOURCE.replace(*change))
    error = decode_error(Case([1, 17, 5, 130]))
    assert not error < 1e-3 or made.divergences


class TestInTheBackend(Harness):
    """Decode rows go through the kernel, prefill beside them through MLX's attention."""

    exact_batches = False

    def make_backend(self) -> MetalBackend:
        return MetalBackend()

    @pytest.mark.parametrize(
        "features", [{"num_kv_heads": 2, "rotary_dim": 16}, {"window": 23, "sinks": True}]
    )
    def test_steps(self, shim: UseShim, monkeypatch: pytest.MonkeyPatch, features: Any) -> None:
        made = shim()
        monkeypatch.setenv(kernel_choice.DECODE_SWITCH, "1")
        self.compare(*attention_model(**features), mixed_steps())
        assert made.builds >= 1, "the kernel was not called"


def chosen(dtype: Any) -> bool:
    return kernel_choice.choose_kernels(dtype).decode


class TestProbe:
    @pytest.fixture(autouse=True)
    def _metal(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("mlx.core.metal.is_available", lambda: True)
        monkeypatch.delenv(kernel_choice.DECODE_SWITCH, raising=False)

    @pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
    def test_a_right_kernel_is_used(self, shim: UseShim, dtype: str) -> None:
        shim()
        assert chosen(getattr(mx, dtype))

    def test_a_wrong_one_is_not(self, shim: UseShim, caplog: pytest.LogCaptureFixture) -> None:
        shim(SOURCE.replace(*WRONG["a block too far"]))
        assert not chosen(mx.float16)
        assert "off by" in caplog.text

    def test_one_that_does_not_compile_is_not(self, caplog: pytest.LogCaptureFixture) -> None:
        """What MLX says on a machine without Metal."""
        paged.kernel.cache_clear()
        assert not chosen(mx.float16)
        assert "does not run" in caplog.text

    @pytest.mark.parametrize(("value", "used"), [("1", True), ("0", False)])
    def test_the_switch_decides(
        self, monkeypatch: pytest.MonkeyPatch, value: str, used: bool
    ) -> None:
        monkeypatch.setenv(kernel_choice.DECODE_SWITCH, value)
        assert chosen(mx.float16) == used

    def test_another_value_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(kernel_choice.DECODE_SWITCH, "yes")
        with pytest.raises(ConfigError, match=f"{kernel_choice.DECODE_SWITCH}=yes"):
            chosen(mx.float16)
