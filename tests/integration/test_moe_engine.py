"""Experts under the scheduler: what it does to a request changes no id, and a router that comes to
NaN fails its request alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllmx import LLM, SamplingParams

from tests.usable_backends import backend_spec

from .test_quantised_experts import CONFIG, write

BROKEN = 4000
"""A token whose embedding is NaN."""
PARAMS = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPTS = [
    [int(token) for token in np.random.default_rng(seed).integers(10, 3000, length)]
    for seed, length in enumerate((5, 40, 1, 61, 33, 18))
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("engine") / "model", CONFIG, nan_token=BROKEN)


@pytest.fixture(scope="module", params=["cpu", "torch"])
def backend(request: pytest.FixtureRequest) -> str:
    backend_spec(request.param)
    return str(request.param)


def load(folder: Path, backend: str, **config: Any) -> LLM:
    limits = {"num_kv_blocks": 64, "max_num_batched_tokens": 64, "block_size": 16} | config
    return LLM(str(folder), backend=backend, dtype="float32", **limits)  # type: ignore[arg-type]


def ids(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], PARAMS)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def alone(folder: Path, backend: str) -> Iterator[list[list[int]]]:
    """What each prompt gives on its own."""
    with load(folder, backend, max_num_seqs=1, enable_prefix_caching=False) as llm:
        yield [ids(llm, [prompt])[0] for prompt in PROMPTS]


def test_four_ranks_with_an_expert_each(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are processes, and the interface is the public one."""
    with load(folder, "cpu", max_num_seqs=1, enable_prefix_caching=False, num_threads=1) as llm:
        expected = [ids(llm, [prompt])[0] for prompt in PROMPTS]
    monkeypatch.setenv("VLLMX_TP_COMPARE", "1")
    more = {"tensor_parallel_size": 4, "expert_parallel": True, "num_threads": 4}
    with load(folder, "cpu", **more) as llm:
        assert ids(llm, PROMPTS) == expected


def test_batch_mates_and_prefix_hits(folder: Path, backend: str, alone: list[list[int]]) -> None:
    with load(folder, backend) as llm:
        assert ids(llm, PROMPTS) == alone
        again = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], PARAMS)
        assert [list(output.outputs[0].token_ids) for output in again] == alone
        assert [output.num_cached_tokens for output in again] == [0, 32, 0, 48, 32, 16]


def test_preemption(folder: Path, backend: str, alone: list[list[int]]) -> None:
    with load(folder, backend, num_kv_blocks=12, enable_prefix_caching=False) as llm:
        assert ids(llm, PROMPTS) == alone
        assert llm._engine._core.stats().num_preemptions > 0


def test_a_router_of_nan_fails_its_request_alone(
    folder: Path, backend: str, alone: list[list[int]]
) -> None:
    with load(folder, backend) as llm:
        prompts = [*PROMPTS[:3], [7, 8, BROKEN, 9], *PROMPTS[3:]]
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], PARAMS)
        found = [list(output.outputs[0].token_ids) for output in outputs]
        assert outputs[3].outputs[0].finish_reason == "error"
        assert "not finite" in (outputs[3].error or "")
        assert found[:3] + found[4:] == alone
