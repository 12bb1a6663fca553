"""How well the demo model predicts stories that it has not seen, in fewer bits."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from vllmx import LLM
from vllmx_core.plugins.registry import load_registry
from vllmx_core.plugins.specs import BackendSpec

BENCH = Path(__file__).resolve().parents[2] / "bench"
WIDTH = 256
LIMITS = {"max_num_seqs": 8, "max_model_len": WIDTH + 1, "kv_cache_memory_bytes": 1 << 25}


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    """bench/perplexity.py, which is a script and no installed module."""
    if load_registry().get(BackendSpec, "cpu").unavailable_reason():
        pytest.skip("the CPU backend cannot run here")
    sys.path.insert(0, str(BENCH))
    import perplexity

    yield perplexity
    for name in ("perplexity", "stories"):
        sys.modules.pop(name, None)
    sys.path[:] = [path for path in sys.path if path not in (str(BENCH), str(perplexity.TRAINING))]


@pytest.fixture(scope="module")
def plain(bench: ModuleType) -> float:
    found: float = bench.measure("demo", "bf16", bench.stories(10), WIDTH, **LIMITS).perplexity
    assert 1.3 < found < 2.5  # its own kind of text
    return found


@pytest.mark.parametrize(
    ("isq", "percent"), [("q8_0", 0.5), ("q4_k_m", 1.5), ("int8", 0.5), ("fp8", 1.5)]
)
def test_bounds(bench: ModuleType, plain: float, isq: str, percent: float) -> None:
    figure = bench.measure("demo", isq, bench.stories(10), WIDTH, **LIMITS)
    assert figure.tokens > 1000
    assert figure.perplexity == pytest.approx(plain, rel=percent / 100)
    assert figure.perplexity != plain


@pytest.mark.parametrize(("cache", "percent"), [("int8", 0.05), ("q8,q4", 0.3), ("q4", 0.5)])
def test_bounds_of_caches(bench: ModuleType, plain: float, cache: str, percent: float) -> None:
    options = LIMITS | {"kv_cache_dtype": cache}
    figure = bench.measure("demo", "bf16", bench.stories(10), WIDTH, **options)
    assert figure.cache == cache
    assert figure.perplexity == pytest.approx(plain, rel=percent / 100)
    assert figure.perplexity != plain


def test_two_bits_are_worse_than_four(bench: ModuleType, plain: float) -> None:
    text = bench.stories(10)
    four, two = (
        bench.measure("demo", isq, text, WIDTH, **LIMITS).perplexity for isq in ("q4_k_m", "q2_k")
    )
    assert two > max(four, plain) * 1.003


def test_noise_cannot_be_predicted(bench: ModuleType) -> None:
    ids = np.random.default_rng(0).integers(10, 4000, 200).tolist()
    with LLM("demo", **LIMITS) as llm:  # type: ignore[arg-type]
        found, count = bench.perplexity(llm, [ids])
        assert count == 199
        assert found > 1000
        # a window ends where --width says, and at every end of text
        text = "One two three four. " * 20 + bench.END + "Five."
        lengths = [len(window) for window in bench.windows(llm, text, 16)]
        assert set(lengths[:-2]) == {16}
        assert lengths[-1] == len(llm.tokenizer.encode("Five."))
