"""The Metal kernel for prompt chunks on the CPU, through the shim: against plain attention in
float64, and wrong kernels are noticed. Metal itself never ran it here."""

from __future__ import annotations

import re
from typing import Any

import pytest
from vllmx_testing.attention_checks import attention_model
from vllmx_testing.harness import Harness, mixed_steps
from vllmx_testing.plans import Row

mx = pytest.importorskip("mlx.core", reason="vllmx-metal runs on MLX")
pytest.importorskip("vllmx_metal")

from vllmx_metal import kernel_choice, paged_prefill  # noqa: E402
from vllmx_metal.backend import MetalBackend  # noqa: E402

from .metal_cases import PAGE, Case  # noqa: E402
from .metal_shim import UseShim, shim_of, source_of  # noqa: E402

SOURCE = source_of("paged_prefill")
shim = shim_of(paged_prefill, "paged_prefill")


def error(case: Case) -> float:
    tiles = paged_prefill.PrefillTiles.of(
        case.table, case.lengths - case.queries, case.queries, PAGE
    )
    return case.error(paged_prefill.paged_prefill(case.q, case.spec, case.sinks, case.pages, tiles))


LENGTHS, QUERIES = [5, 50, 33, 70], [5, 19, 33, 2]
"""From the beginning, in the middle, to the edge of a tile, the last two."""
CASES: dict[str, dict[str, Any]] = {
    "grouped": {},
    "multi-head": {"heads": 3, "kv_heads": 3},
    "multi-query": {"heads": 5, "kv_heads": 1},
    "head size 24": {"size": 24},
    "window": {"window": 21},
    "window of one": {"window": 1},
    "chunk": {"window": 21, "chunked": True},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": True},
    "int8": {"kv": "int8"},
    "q4": {"kv": "q4", "size": 80},
    "q8,q4": {"kv": "q8,q4", "window": 40},
    "bfloat16": {"kv": "bf16", "dtype": "bf16"},
    "everything": {
        "heads": 6, "window": 40, "softcap": 3.0, "sinks": True, "kv": "fp8", "dtype": "f16",
    },
}  # fmt: skip


@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
def test_paged_prefill(shim: UseShim, options: dict[str, Any]) -> None:
    made = shim()
    found = error(Case(LENGTHS, QUERIES, **({"size": 32} | options)))
    print(f"{found:.1e}")  # pytest -rP shows it
    assert found < {"f16": 2e-3, "bf16": 1e-2}.get(options.get("dtype", ""), 2e-6)
    assert made.divergences == 0


def test_the_largest_head_size(shim: UseShim) -> None:
    shim()
    assert error(Case([40], [9], size=128)) < 2e-6


BARRIER = "metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);"
WRONG = {
    "queries without a barrier": (f"{BARRIER}\nmetal::simdgroup_matrix<float, 8, 8> queries",
                                  "metal::simdgroup_matrix<float, 8, 8> queries"),
    "keys over queries": (f"{BARRIER}\n\nfor (uint start", "for (uint start"),
    "keys without a barrier": (f"{BARRIER}\n\n  for (uint j = 0; j < KEYS / 8; j++) {{\n    metal::"
                               "simdgroup_matrix<float, 8, 8> product",
                               "for (uint j = 0; j < KEYS / 8; j++) {\n    metal::"
                               "simdgroup_matrix<float, 8, 8> product"),
    "scores without a barrier": ("metal::simdgroup_barrier(metal::mem_flags::mem_threadgroup);",
                                 ""),
    "values over keys": (f"{BARRIER}  // and nobody needs the keys", ""),
    "values without a barrier": (f"{BARRIER}\n\n  metal::simdgroup_matrix<float, 8, 8> diagonal",
                                 "metal::simdgroup_matrix<float, 8, 8> diagonal"),
    "keys over values": (f"{BARRIER}  // nobody needs the values", ""),
    "sums without a barrier": (f"{BARRIER}\nfor (uint index = worker; index < ROWS",
                               "for (uint index = worker; index < ROWS"),
    "another kv head": (") * K + kv_head;\n      value = page_number<V_NIBBLES, D>(v_pages",
                        ") * K + (kv_head + 1) % K;\n"
                        "      value = page_number<V_NIBBLES, D>(v_pages"),
    "keys not turned": ("ulong2(0, 0), true", "ulong2(0, 0), false"),
    "a later key": ("key <= position", "key <= position + 1"),
    "sums not rescaled": ("metal::simdgroup_multiply(sums[i], diagonal, sums[i]);", ""),
    "a token too far": ("first_position + vector / GROUP;\n    const uint key",
                        "first_position + vector / GROUP + 1;\n    const uint key"),
}  # fmt: skip


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG.keys())
def test_a_wrong_kernel_is_noticed(shim: UseShim, change: tuple[str, str]) -> None:
    assert SOURCE.count(change[0]) == 1
    made = shim(SOURCE.replace(*change))
    found = error(Case([50], [19], size=32))
    assert not found < 1e-3 or made.divergences


@pytest.mark.parametrize("name", ["paged_decode", "paged_prefill"])
def test_no_name_is_a_word_of_metal(name: str) -> None:
    """What is an identifier to g++ need not be one to Apple's compiler."""
    code = "\n".join(line.split("//")[0] for line in source_of(name).splitlines())
    words = set(re.findall(r"(?<!::)\b[a-z_]+\b", code))
    assert not words & {"thread", "device", "constant", "kernel", "half", "sampler", "texture",
                        "vertex", "fragment", "vec", "matrix", "access", "ray_data"}  # fmt: skip


class TestInTheBackend(Harness):
    """Chunks go through the kernel, decode rows beside them through MLX's attention."""

    exact_batches = False

    def make_backend(self) -> MetalBackend:
        return MetalBackend()

    @pytest.mark.parametrize(
        ("features", "used"),
        [
            ({"num_kv_heads": 2, "rotary_dim": 16}, True),
            ({"window": 23, "sinks": True}, True),
            ({"head_size": 20}, False),
            ({"causal": False}, False),
        ],
    )
    def test_steps(
        self,
        shim: UseShim,
        monkeypatch: pytest.MonkeyPatch,
        features: Any,
        used: bool,
    ) -> None:
        made = shim()
        monkeypatch.setenv(kernel_choice.PREFILL_SWITCH, "1")
        monkeypatch.setattr("vllmx_metal.step.TILE_TOKENS", 5)
        self.compare(*attention_model(**features), mixed_steps())
        assert (made.builds > 0) == used

    @pytest.mark.parametrize("images", [(0, 20), (7, 9)])
    def test_tiles_whose_tokens_see_each_other_both_ways_are_gathered(
        self, shim: UseShim, monkeypatch: pytest.MonkeyPatch, images: tuple[int, int]
    ) -> None:
        made = shim()
        monkeypatch.setenv(kernel_choice.PREFILL_SWITCH, "1")
        monkeypatch.setattr("vllmx_metal.step.TILE_TOKENS", 5)
        row = Row([*list(range(19)), 3], 0, [4, 1], "all", spans=[images])
        self.compare(*attention_model(spans=True, rotary_dim=16), [[row]])
        assert (made.builds > 0) == (images == (7, 9))


def test_it_is_off_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx.core.metal.is_available", lambda: True)
    monkeypatch.setattr(kernel_choice, "decode_difference", lambda dtype: 0.0)
    monkeypatch.setenv(kernel_choice.RECURRENCE_SWITCH, "0")
    for value, used in (("", False), ("0", False), ("1", True)):
        monkeypatch.setenv(kernel_choice.PREFILL_SWITCH, value)
        assert kernel_choice.choose_kernels(mx.float16) == kernel_choice.OwnKernels(True, used)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_case_of_the_benchmark(shim: UseShim, dtype: str) -> None:
    """bench/metal.py compares both ways before it measures them."""
    shim()
    assert kernel_choice.prefill_difference(getattr(mx, dtype)) < 0.02
    if dtype == "float32":
        shim(SOURCE.replace(*WRONG["a later key"]))
        assert kernel_choice.prefill_difference(mx.float32) > 0.02
