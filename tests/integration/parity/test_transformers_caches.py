"""Modules of transformers over caches of their own, one in each state slot: recurrent layers,
convolutions, chunked masks, ALiBi, layers that share keys, and modules without any cache. Their
answers do not depend on chunks, mates, prefix hits or preemption."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from vllmx import SamplingParams
from vllmx_core.errors import CapacityError, ConfigError, UnsupportedModelError

from .test_model_impl import PROMPTS, Saved, generate, open_llm, runner, save_model, tokens
from .test_transformers_classes import tiny

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

KINDS = ["jamba", "mamba", "lfm2", "qwen3_next", "llama4_text", "bloom", "gemma3n_text"]
STATELESS = "openai-gpt"  # each step reads all tokens again
IN_MODULE = "recurrent_gemma"  # keeps the states of one sequence in its modules
SHARED = [*PROMPTS, [*PROMPTS[1], 7, 8, 9]]


@pytest.fixture(scope="module", params=[*KINDS, STATELESS, IN_MODULE])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return save_model(tiny(request.param), tmp_path_factory.mktemp("cached") / "model")


def test_mates_and_prefix_hits(saved: Saved) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in SHARED]
    with open_llm(saved, num_kv_blocks=256, max_num_seqs=3) as llm:
        first, again = (llm.generate(prompts, params) for _ in range(2))
        assert sum(output.num_cached_tokens for output in again) > 0
    for prompt, one, other in zip(SHARED, first, again, strict=True):
        ids = list(one.outputs[0].token_ids)
        saved.check_greedy(prompt, ids)
        assert list(other.outputs[0].token_ids) == ids


def test_preemption(saved: Saved) -> None:
    with open_llm(saved, num_kv_blocks=9, max_num_seqs=4, enable_prefix_caching=False) as llm:
        found, _ = generate(llm, 40)
        assert llm._engine._core.stats().num_preemptions > 0
    for prompt, ids in zip(PROMPTS, found, strict=True):
        saved.check_greedy(prompt, ids)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_sixteen_bits(tmp_path: Path, dtype: str) -> None:
    saved = save_model(tiny("jamba"), tmp_path / "model")
    with closing(runner(saved.folder, dtype=dtype, kv_cache_dtype="auto").loaded) as loaded:
        assert loaded.info.dtype == dtype
        assert loaded.info.num_state_slots > 0
        assert loaded.info.details["model"] == "JambaForCausalLM of transformers"


def test_slots_count_the_tokens_of_a_sequence(tmp_path: Path) -> None:
    saved = save_model(tiny("bloom"), tmp_path / "model")
    each = {}
    for length in (32, 96):
        with closing(runner(saved.folder, max_model_len=length).loaded) as loaded:
            each[length] = loaded.info.state_slot_bytes
    # Four layers with four heads of eight numbers, keys and values, in four bytes each. The survey
    # counts its own three tokens, too.
    assert each == {length: 4 * 2 * 4 * 8 * (length + 3) * 4 for length in each}


def test_slots_that_do_not_fit(tmp_path: Path) -> None:
    saved = save_model(tiny("bloom"), tmp_path / "model")
    with pytest.raises(CapacityError, match="max_model_len 96 tokens: lower --max-model-len"):
        runner(saved.folder, kv_cache_memory_bytes=200_000, num_kv_blocks=None)


def test_tiers_are_refused(tmp_path: Path) -> None:
    saved = save_model(tiny("mamba"), tmp_path / "model")
    with pytest.raises(ConfigError, match="caches of transformers, which cannot be copied out"):
        open_llm(saved, num_kv_blocks=64, kv_disk=str(tmp_path / "kv"))


def test_an_encoder_is_refused(tmp_path: Path) -> None:
    config = tiny("bert")
    config.is_decoder = False
    saved = save_model(config, tmp_path / "model")
    with pytest.raises(UnsupportedModelError, match="looks forward as well as back"):
        open_llm(saved, num_kv_blocks=64)


def test_drafts_are_verified(tmp_path: Path) -> None:
    saved = save_model(tiny("bloom"), tmp_path / "model")
    repeated = tokens(3, 6) * 4
    params = SamplingParams(temperature=0.0, max_tokens=70, ignore_eos=True)
    limits = {"num_kv_blocks": 64, "max_num_seqs": 2, "num_state_slots": 24}
    with open_llm(saved, speculate="ngram", **limits) as llm:
        output = llm.generate([{"prompt_token_ids": repeated}], params)[0]
        assert llm._engine._core.stats().num_draft_tokens > 0
    saved.check_greedy(repeated, list(output.outputs[0].token_ids))
