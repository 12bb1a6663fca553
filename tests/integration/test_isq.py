"""`--isq` from the command line to the answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllmx import LLM, SamplingParams
from vllmx_core.errors import ConfigError
from vllmx_core.plugins.registry import load_registry
from vllmx_core.plugins.specs import BackendSpec
from vllmx_demo.source import MODEL_FOLDER
from vllmx_models.formats.gguf.quantize.convert import quantize

from tests import forked

REGISTRY = load_registry()
PROMPT = "The capital of France is"


def backends() -> list[Any]:
    found = []
    for spec in REGISTRY.all(BackendSpec):
        reason = spec.unavailable_reason()
        marks = [pytest.mark.skip(reason=f"backend {spec.name}: {reason}")] if reason else []
        found.append(pytest.param(spec.name, marks=marks))
    return found


def answer(model: str, backend: str, **options: Any) -> tuple[list[int], list[float], int]:
    """Ids, their log-probabilities, and what the weights take."""
    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=0)
    limits = {"max_num_seqs": 2, "max_num_batched_tokens": 64, "num_kv_blocks": 16}
    with LLM(model, backend=backend, **limits, **options) as llm:  # type: ignore[arg-type]
        (output,) = llm.generate([PROMPT], params)
        first = output.outputs[0]
        assert first.logprobs is not None
        chosen = [
            entry[token].logprob
            for entry, token in zip(first.logprobs, first.token_ids, strict=True)
        ]
        assert llm.info.details.get("quantised in situ") == options.get("isq")
        return list(first.token_ids), chosen, llm.info.weight_bytes


@pytest.mark.parametrize("backend", backends())
def test_the_answer_is_that_of_a_quantised_file(backend: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    quantize(REGISTRY, MODEL_FOLDER, path, "q4_k_m", threads=2)
    found = answer("demo", backend, isq="q4_k")
    assert found == answer(str(path), backend)
    original = answer("demo", backend)
    assert found[1] != original[1]
    assert backend != "cpu" or found[2] < original[2] / 2


@pytest.mark.parametrize("isq", ["int8", "fp8"])
@pytest.mark.parametrize("backend", backends())
def test_eight_bits_hardly_change_an_answer(backend: str, isq: str) -> None:
    ids, logprobs, weight_bytes = answer("demo", backend, isq=isq)
    expected_ids, expected, original_bytes = answer("demo", backend)
    assert ids[0] == expected_ids[0]
    assert logprobs[0] == pytest.approx(expected[0], abs=0.2)
    assert logprobs != expected
    table_bytes = 4096 * 256 * 2  # embedding and head stay bf16
    if backend == "cpu":  # which keeps one byte a weight, and a scale for 128
        assert weight_bytes - table_bytes < 0.56 * (original_bytes - table_bytes)


def test_flag_variable_and_file(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("isq: q8_0\n")
    for flags, variable in (
        (["--isq", "Q8_0"], "q2_k"),  # the flag wins
        ([], "q8_0"),
        (["--config", str(config)], None),
    ):
        environment = {} if variable is None else {"VLLMX_ISQ": variable}
        arguments = ["complete", "-p", "Once", "--max-tokens", "1", "--log-level", "info", *flags]
        done = forked.run(*arguments, environment=environment)
        assert done.returncode == 0, done.stderr
        assert "isq=q8_0" in done.stderr.lower()


def test_what_is_no_type_is_refused_before_loading() -> None:
    with pytest.raises(ConfigError, match=r"--isq 'q4' is not known.*known: fp8, int8"):
        LLM("no/such-model", isq="q4")
