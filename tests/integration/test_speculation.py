"""Speculation on the demo model changes no answer and no log-probability, to the last bit."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from vllmx import LLM, SamplingParams, StructuredOutputsParams
from vllmx_core.backend import LoadOptions
from vllmx_core.errors import CapacityError, ConfigError
from vllmx_core.plugins.registry import load_registry
from vllmx_cpu.backend import CpuBackend
from vllmx_demo.source import MODEL_FOLDER
from vllmx_engine.core import load, load_drafter
from vllmx_engine.wire.messages import CoreStats
from vllmx_models.formats.gguf.quantize.convert import quantize

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}
TEXTS = (
    "Once upon a time there was a little dog. Once upon a time there was a little",
    "Tom and Lily went to the park. Tom and Lily",
    "One day, a",
    "The cat said hello. The cat said hello. The cat",
)
PARAMS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 1.5, "min_p": 0.05, "n": 2},
    {"temperature": 0.8, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"temperature": 0.6, "stop": ("dog", "."), "min_tokens": 9},
    {"temperature": 0.9, "logprobs": 3, "prompt_logprobs": 1},
    {"temperature": 0.5, "bad_words": ("the", " was a"), "logprobs": 0},
    {"temperature": 1.0, "structured_outputs": StructuredOutputsParams(json=SCHEMA)},
    {"temperature": 0.7, "logit_bias": {300: 2.0}, "presence_penalty": 0.4},
)


def answers(**config: Any) -> tuple[list[Any], CoreStats]:
    """Ids, reasons and log-probabilities of 40 requests, and the counters after them."""
    cases = [(text, params) for params in PARAMS for text in TEXTS]
    params = [
        SamplingParams(max_tokens=40, seed=number, **fields)
        for number, (_, fields) in enumerate(cases)
    ]
    with LLM("demo", num_kv_blocks=400, max_model_len=256, **config) as llm:
        outputs = llm.generate([text for text, _ in cases], params, use_tqdm=False)
        stats = llm._engine._core.stats()
    found = [
        (
            output.prompt_logprobs,
            choice.text,
            choice.token_ids,
            choice.finish_reason,
            choice.logprobs,
        )
        for output in outputs
        for choice in output.outputs
    ]
    return found, stats


@cache
def plain(backend: str, **config: Any) -> list[Any]:
    found, stats = answers(backend=backend, **config)
    assert stats.num_draft_tokens == 0
    return found


@pytest.mark.parametrize(
    ("speculate", "tokens", "least"),
    [
        ("ngram", "3", 0.1),
        ("suffix", "16", 0.02),
        ("twin", "1", 0.7),
        ("twin", "5", 0.5),
        ("twin", "auto", 0.5),
        ("model:demo", "4", 0.8),
        ("layers:4", "3", 0.2),
    ],
)
def test_answers_are_those_without_drafts(speculate: str, tokens: str, least: float) -> None:
    found, stats = answers(backend="cpu", speculate=speculate, speculate_tokens=tokens)
    assert found == plain("cpu")
    if tokens == "auto":  # drafts that pay, which depends on the machine
        return
    assert stats.num_draft_tokens > 50
    assert stats.num_accepted_tokens > least * stats.num_draft_tokens


def test_other_schedules() -> None:
    """Few blocks preempt rows, small steps cut prompts, and steps do not overlap."""
    small = {"max_num_batched_tokens": 24, "max_num_seqs": 5, "num_kv_blocks": 40}
    for more in ({}, {"async_scheduling": False}, {"enable_prefix_caching": False}):
        with LLM(
            "demo", max_model_len=256, backend="cpu", speculate="twin", **small, **more
        ) as llm:
            outputs = llm.generate(
                list(TEXTS) * 4,
                [SamplingParams(max_tokens=60, seed=n, temperature=0.9) for n in range(16)],
                use_tqdm=False,
            )
            found = [choice.token_ids for output in outputs for choice in output.outputs]
        assert found == long_answers()


@cache
def long_answers() -> list[Any]:
    with LLM("demo", max_model_len=256, backend="cpu") as llm:
        outputs = llm.generate(
            list(TEXTS) * 4,
            [SamplingParams(max_tokens=60, seed=n, temperature=0.9) for n in range(16)],
            use_tqdm=False,
        )
    return [choice.token_ids for output in outputs for choice in output.outputs]


@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_other_backends(backend: str) -> None:
    """Products depend on the batch there, so texts are compared and not bits."""
    if backend == "torch":
        pytest.importorskip("torch")
    cases = list(TEXTS)
    params = [SamplingParams(max_tokens=12, seed=n, temperature=0.8) for n in range(len(cases))]
    texts = []
    for speculate in ("off", "twin"):
        with LLM(
            "demo",
            backend=backend,
            dtype="float32",
            max_model_len=128,
            speculate=speculate,
            speculate_tokens="3",
            num_kv_blocks=64,
        ) as llm:
            outputs = llm.generate(cases, params, use_tqdm=False)
            texts.append([output.outputs[0].text for output in outputs])
            if speculate == "twin":
                assert llm._engine._core.stats().num_accepted_tokens > 0
    assert texts[0] == texts[1]


def test_draft_models_of_a_model_on_two_ranks() -> None:
    """They run whole, beside the first rank."""
    ranks = {"backend": "cpu", "num_threads": 1, "num_kv_blocks": 64, "max_model_len": 128}
    params = [SamplingParams(max_tokens=16, seed=n, temperature=0.3 * n) for n in range(4)]
    found = []
    for speculate in ("off", "twin", "model:demo"):
        drafting = {"speculate": speculate, "speculate_tokens": "3"}
        with LLM("demo", tensor_parallel_size=2, **ranks, **drafting) as llm:
            outputs = llm.generate(list(TEXTS), params, use_tqdm=False)
            found.append([output.outputs[0].token_ids for output in outputs])
            assert (llm.stats().num_accepted_tokens > 20) == (speculate != "off")
    assert found == [found[0]] * 3
    with pytest.raises(ConfigError, match="a model in stages has no draft model yet"):
        LLM("demo", pipeline_parallel_size=2, **ranks, speculate="twin")


@pytest.mark.parametrize(
    ("speculate", "tokens", "word"),
    [
        ("ngran", "auto", "ngram"),
        ("model:", "auto", "model:PATH"),
        ("layers:6", "auto", "from 1 to 5"),
        ("layers:x", "auto", "layers:N"),
        ("ngram", "17", "16"),
        ("ngram", "many", "auto"),
        ("ngram", "9" * 5000, "16"),
        ("model:/nowhere/at/all", "auto", "--speculate"),
    ],
)
def test_what_cannot_be_is_refused_at_start(speculate: str, tokens: str, word: str) -> None:
    with pytest.raises(ConfigError, match=word) as caught:
        LLM("demo", speculate=speculate, speculate_tokens=tokens)
    assert caught.value.param in ("speculate", "speculate_tokens")


def test_a_quantised_model_has_no_twin(tmp_path: Path) -> None:
    path = tmp_path / "q8.gguf"
    quantize(load_registry(), MODEL_FOLDER, path, "q8_0", threads=2)
    with pytest.raises(ConfigError, match="a twin is made of weights") as caught:
        LLM(str(path), speculate="twin")
    assert "--isq" not in caught.value.message


def test_a_start_that_fails_closes_the_draft_model(monkeypatch: pytest.MonkeyPatch) -> None:
    found, load_model = [], load_drafter.load_drafter

    def noting(*args: Any) -> Any:
        found.append(load_model(*args))
        return found[0]

    def failing(*_: Any) -> Any:
        raise RuntimeError("no memory")

    monkeypatch.setattr(load_drafter, "load_drafter", noting)
    monkeypatch.setattr(load, "core_info", failing)
    with pytest.raises(RuntimeError, match="no memory"):
        LLM("demo", backend="numpy", speculate="layers:2")
    assert found[0].model.in_flight.closed


def test_a_start_without_a_draft_model_imports_none() -> None:
    program = (
        "import sys, vllmx; vllmx.LLM('demo', backend='numpy', speculate='ngram').close()\n"
        "assert not [one for one in sys.modules if one.endswith(('draft_model', 'load_drafter'))]"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_damaged_draft_model_is_refused_at_start(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}garbage")
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(ConfigError, match="draft model cannot be loaded"):
        LLM("demo", speculate=f"model:{tmp_path}")


def test_a_draft_model_that_does_not_fit_is_refused_at_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loads, load_model = [], CpuBackend.load

    def scarce(backend: CpuBackend, model: Any, source: Any, options: LoadOptions) -> Any:
        loads.append(model)
        free = 1 << 20 if len(loads) > 1 else options.free_bytes
        return load_model(backend, model, source, replace(options, free_bytes=free))

    monkeypatch.setattr(CpuBackend, "load", scarce)
    with pytest.raises(CapacityError, match="leaves room for it") as caught:
        LLM("demo", backend="cpu", speculate="twin", max_model_len=64)
    assert caught.value.param == "speculate"
    assert len(loads) == 2
