"""`--speculate heads`: layers of multi-token prediction draft, and change no answer."""

from __future__ import annotations

import itertools
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllmx import LLM, EngineConfig, SamplingParams
from vllmx_core.backend import LoadOptions
from vllmx_core.errors import ConfigError
from vllmx_core.plugins.registry import load_registry
from vllmx_cpu.backend import CpuBackend
from vllmx_demo.source import MODEL_FOLDER
from vllmx_engine.core.control import CoreControl
from vllmx_engine.core.found_model import find_model
from vllmx_engine.core.hidden_drafter import HiddenDrafter
from vllmx_engine.core.speculation import Speculator
from vllmx_engine.wire.ipc import Call
from vllmx_models.formats.gguf.quantize.convert import quantize

from tests.usable_backends import backend_spec

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402

from ..backend import test_expert_architectures as experts  # noqa: E402, TID252
from ..backend import test_recurrent_architectures as recurrent  # noqa: E402, TID252
from ..head_checkpoints import (  # noqa: E402, TID252
    DEEPSEEK,
    QWEN,
    HeadCheckpoint,
    random_model,
    save_with_head,
    with_few_likely_ids,
)
from . import draft_runs  # noqa: E402

FAMILIES = {
    "Qwen3.5": (recurrent.TestQwen35.config, QWEN),
    "GLM-4.5": (experts.TestGlm4Moe.config, DEEPSEEK),
}
CONFIG = draft_runs.CONFIG | {"num_state_slots": 80, "state_snapshot_tokens": 1}
PROMPTS = [
    {"prompt_token_ids": np.random.default_rng(size).integers(3, 4096, size).tolist()}
    for size in (37, 13, 50)
]


@pytest.fixture(scope="module", params=FAMILIES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: Any) -> tuple[str, HeadCheckpoint]:
    backend_spec("cpu")
    folder = tmp_path_factory.mktemp("heads")
    config, family = FAMILIES[request.param]
    config = dict(config) | {"vocab_size": 4096}
    oracle = save_with_head(folder, config, family, random_model, with_few_likely_ids)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(MODEL_FOLDER) / name, folder)
    return str(folder), oracle


def answers(folder: str, **config: Any) -> tuple[list[Any], Any]:
    return draft_runs.answers(folder, PROMPTS, **CONFIG | config)


@pytest.fixture(scope="module")
def plain(saved: tuple[str, HeadCheckpoint]) -> list[Any]:
    found, stats = answers(saved[0])
    assert stats.num_draft_tokens == 0
    return found


@pytest.mark.parametrize("tokens", ["1", "3", "16"])
def test_heads_change_no_answer(
    saved: tuple[str, HeadCheckpoint], plain: list[Any], tokens: str
) -> None:
    found, stats = answers(saved[0], speculate="heads", speculate_tokens=tokens)
    assert found == plain
    assert stats.num_draft_tokens > 100
    assert stats.num_accepted_tokens > 0


@pytest.mark.parametrize(
    "config",
    [*draft_runs.SCHEDULES, {"speculate_tokens": "auto"}],
)
def test_other_schedules(
    saved: tuple[str, HeadCheckpoint], plain: list[Any], config: dict[str, Any]
) -> None:
    found, stats = answers(saved[0], **{"speculate": "heads", "speculate_tokens": "2", **config})
    assert found == plain
    assert stats.num_preemptions > 0 or "num_kv_blocks" not in config


@pytest.mark.parametrize(
    "more",
    [
        {"max_num_batched_tokens": 128},
        {"max_num_batched_tokens": 16},
        {"num_kv_blocks": 8, "max_model_len": 96, "max_num_batched_tokens": 24},
        {"pauses": 1},
    ],
)
def test_drafts_are_those_of_the_formula(
    saved: tuple[str, HeadCheckpoint], monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    """Behind chunks of prompts, kept and rejected drafts, next to other rows, behind rows that lost
    their blocks, and behind steps that overlapped because nothing was drafted."""
    folder, oracle = saved
    drafts, config = draft_runs.recorded_drafts(monkeypatch), CONFIG | more
    if config.pop("pauses", 0):
        _pause_drafting(monkeypatch)
    config |= {"enable_prefix_caching": False, "speculate": "heads", "speculate_tokens": "3"}
    with LLM(folder, **config) as llm:
        prompts = [{"prompt_token_ids": prompt["prompt_token_ids"][:20]} for prompt in PROMPTS]
        greedy = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
        llm.generate(prompts, greedy, use_tqdm=False)
        assert llm.stats().num_preemptions > 0 or "num_kv_blocks" not in more
    assert len(drafts) > 6
    for tokens, ids in drafts:
        assert ids == oracle.draft(tokens, len(ids))


def _pause_drafting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets seven of eleven steps overlap."""
    calls, found = itertools.count(), Speculator.drafts

    def sometimes(speculator: Speculator, *given: Any) -> Any:
        if next(calls) % 11 < 7:
            speculator.wants_tokens = False
            return None
        return found(speculator, *given)

    monkeypatch.setattr(Speculator, "drafts", sometimes)


def test_prefixes_that_are_found_draft_as_well(
    saved: tuple[str, HeadCheckpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last found token has the keys of another next id, which is one position of many."""
    folder, oracle = saved
    greedy = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    found, prompt = draft_runs.recorded_drafts(monkeypatch), PROMPTS[2]["prompt_token_ids"]
    with LLM(folder, **CONFIG, speculate="heads", speculate_tokens="2") as llm:
        for ids in (prompt[:40], prompt):
            (output,) = llm.generate([{"prompt_token_ids": ids}], greedy, use_tqdm=False)
        assert output.num_cached_tokens == 32
    later = [one for one in found if len(one[0]) > len(prompt)]
    assert [ids for _, ids in later] == [oracle.draft(tokens, len(ids)) for tokens, ids in later]


def test_memory_is_left_for_heads(
    saved: tuple[str, HeadCheckpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their weights, and a share of the KV cache: that of one layer with attention of its kind."""
    options: list[LoadOptions] = []
    load = CpuBackend.load

    def noted(backend: CpuBackend, model: Any, source: Any, given: LoadOptions) -> Any:
        options.append(given)
        return load(backend, model, source, replace(given, kv_cache_memory_bytes=1 << 22))

    monkeypatch.setattr(CpuBackend, "load", noted)
    config = {key: value for key, value in CONFIG.items() if key != "num_kv_blocks"}
    with LLM(saved[0], **config, speculate="heads", memory_fraction=0.5) as llm:
        ops = llm._engine._core._model._steps.ops  # type: ignore[attr-defined]
    layers = sum(op.name == "attention" for op in ops)
    most = 0.5 * layers / (layers + 1)
    assert most - 0.01 < options[0].memory_fraction < most
    assert options[1].num_kv_blocks is not None


def test_auto_takes_heads_where_there_are_some(saved: tuple[str, HeadCheckpoint]) -> None:
    with LLM(saved[0], **CONFIG, speculate="auto") as llm:
        core = llm._engine._core
        assert isinstance(core._draft_model, HiddenDrafter)
        found = find_model(EngineConfig(model=saved[0], **CONFIG, speculate="auto"))
        called, _ = CoreControl(core, found).answer(Call(1, "update_weights", saved[0]))
        assert called.error is not None
        assert "drafts by a model cannot be replaced" in called.error.message


def test_heads_of_a_quantised_file_draft(saved: tuple[str, HeadCheckpoint], tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    quantize(load_registry(), Path(saved[0]), path, "q8_0", threads=1)
    plain, _ = answers(str(path))
    found, stats = answers(str(path), speculate="heads", speculate_tokens="2")
    assert found == plain
    assert stats.num_accepted_tokens > 0


def test_damaged_and_missing_heads(saved: tuple[str, HeadCheckpoint], tmp_path: Path) -> None:
    folder, oracle = saved
    shutil.copytree(folder, tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    module = oracle.family.module.format(oracle.config["num_hidden_layers"])
    own = [name for name in tensors if name.startswith((f"{module}.", "mtp."))]
    broken = f"{module}.{oracle.family.projection}.weight"
    save_file({name: one for name, one in tensors.items() if name != broken}, file)
    for kind in ("heads", "auto"):
        with pytest.raises(ConfigError, match=r"eh_proj|fc\.weight") as caught:
            LLM(str(tmp_path / "model"), **CONFIG, speculate=kind)
        assert caught.value.param == "speculate"
    save_file({name: one for name, one in tensors.items() if name not in own}, file)
    with pytest.raises(ConfigError, match="has no tensors of heads"):
        LLM(str(tmp_path / "model"), **CONFIG, speculate="heads")
    with LLM(str(tmp_path / "model"), **CONFIG, speculate="auto") as llm:
        assert llm._engine._core._draft_model is None


def test_what_has_no_heads_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="no layers of multi-token prediction") as caught:
        LLM("demo", speculate="heads")
    assert caught.value.param == "speculate"
    with pytest.raises(ConfigError, match="several ranks"):
        LLM("demo", speculate="heads", tensor_parallel_size=2)
