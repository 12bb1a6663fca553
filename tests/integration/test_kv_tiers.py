"""Blocks that left the device and came back, on real backends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllmx import LLM, SamplingParams
from vllmx_core.errors import ConfigError

from tests.usable_backends import backend_spec

PROMPT = "In a quiet harbour town the lighthouse keeper counted ships. " * 5
OTHERS = [f"{number} apples and {number} pears. " * 12 for number in range(4)]
PARAMS = SamplingParams(temperature=0.0, max_tokens=4, logprobs=3, ignore_eos=True)


def answer(llm: LLM, prompt: str) -> tuple[int, Any]:
    """The cached tokens of a prompt, and the log-probabilities of its answer."""
    (found,) = llm.generate([prompt], PARAMS)
    return found.num_cached_tokens, found.outputs[0].logprobs


@pytest.mark.parametrize(
    ("backend", "kv"),
    [("cpu", "auto"), ("cpu", "q8,q4"), ("torch", "auto"), ("metal", "auto"), ("metal", "q4")],
)
def test_evicted_blocks_come_back(backend: str, kv: str, tmp_path: Path) -> None:
    backend_spec(backend)
    tier = {"kv_disk": str(tmp_path)} if backend == "cpu" else {"kv_host_memory": 1 << 24}
    options: dict[str, Any] = {"kv_cache_dtype": kv, "num_kv_blocks": 16, "max_model_len": 200}
    with LLM("demo", backend=backend, **options, **tier) as llm:
        cached, first = answer(llm, PROMPT)
        assert cached == 0
        again, device_hit = answer(llm, PROMPT)
        assert again > 0
        for other in OTHERS:
            answer(llm, other)
        landed, tier_hit = answer(llm, PROMPT)
        assert landed == again
        assert tier_hit == device_hit
        if backend == "cpu":  # whose bits do not depend on what was cached
            assert tier_hit == first


def test_the_cpu_needs_no_host_tier() -> None:
    with pytest.raises(ConfigError, match="already: give it more blocks by --kv-cache-memory"):
        LLM("demo", backend="cpu", kv_host_memory=1 << 20)
