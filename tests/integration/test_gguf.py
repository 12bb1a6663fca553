"""Models out of GGUF files through the public interface."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from vllmx import LLM, AsyncLLM, EngineConfig, Message, SamplingParams
from vllmx_core.errors import ModelNotFoundError
from vllmx_core.plugins.registry import load_registry
from vllmx_core.plugins.specs import BackendSpec
from vllmx_demo.source import MODEL_FOLDER
from vllmx_engine.client.chat import load_tokenizer
from vllmx_engine.core.found_model import find_model

from tests import forked
from tests.usable_backends import backend_spec

from ..null.gguf.models import TYPES, convert_folder, of_type  # noqa: TID252 - no package to name

DEMO = json.loads((Path(__file__).parents[1] / "data/demo/reference_greedy.json").read_text())
STORIES = Path(__file__).parents[3] / "shared" / "models" / "stories260K"
GREEDY = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
QUESTION = [Message("user", "What is the capital of France?")]


@pytest.fixture(scope="module", autouse=True)
def _backend() -> None:
    backend_spec()


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The demo model in several types."""
    folder = tmp_path_factory.mktemp("demo")
    return {
        kind: convert_folder(MODEL_FOLDER, folder / f"{kind}.gguf", of_type(TYPES[kind]))
        for kind in ("F32", "F16", "BF16", "Q8_0")
    }


def open_llm(path: Path | str, **options: object) -> LLM:
    return LLM(str(path), max_num_seqs=16, kv_cache_memory_bytes=1 << 26, **options)  # type: ignore[arg-type]


def greedy(llm: LLM, prompts: Sequence[list[int]]) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], GREEDY)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_lossless_types_give_the_ids_of_the_original(demo: dict[str, Path], kind: str) -> None:
    cases = DEMO["cases"]
    with open_llm(demo[kind], dtype="float32") as llm:
        found = greedy(llm, [case["prompt_ids"] for case in cases])
    with open_llm("demo", dtype="float32") as llm:
        assert found == greedy(llm, [case["prompt_ids"] for case in cases])


def test_tokenizer_and_template_come_from_the_file(demo: dict[str, Path]) -> None:
    alone = demo["Q8_0"]
    assert [path.name for path in alone.parent.glob("*.json")] == []
    with open_llm(alone) as llm:
        answer = llm.chat(QUESTION, SamplingParams(temperature=0.0, max_tokens=24))[0]
    assert "Paris" in answer.outputs[0].text
    assert answer.outputs[0].finish_reason == "stop"


def test_every_backend_takes_blocks(demo: dict[str, Path]) -> None:
    """Those that do not multiply them get float32 values, and agree."""
    prompt = [DEMO["cases"][0]["prompt_ids"]]
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    answers = set()
    for spec in load_registry().all(BackendSpec):
        if spec.unavailable_reason() is not None:
            continue
        with open_llm(demo["Q8_0"], backend=spec.name, dtype="float32") as llm:
            output = llm.generate([{"prompt_token_ids": ids} for ids in prompt], params)[0]
            answers.add(tuple(output.outputs[0].token_ids))
    assert len(answers) == 1


async def test_the_core_process_knows_the_format(demo: dict[str, Path]) -> None:
    """The registry's specs, those of GGUF's architectures among them, reach the other process."""
    config = EngineConfig(
        model=str(demo["BF16"]), max_num_seqs=4, kv_cache_memory_bytes=1 << 26, dtype="float32"
    )
    case = DEMO["cases"][0]
    async with await AsyncLLM.start(config) as llm:
        stream = llm.generate({"prompt_token_ids": case["prompt_ids"]}, GREEDY)
        ids = [token async for output in stream for token in output.outputs[0].token_ids]
    assert len(ids) >= 64


def test_shards_a_folder_and_another_tokenizer(tmp_path: Path, demo: dict[str, Path]) -> None:
    shards = tmp_path / "shards"
    shards.mkdir()
    first = convert_folder(MODEL_FOLDER, shards / "demo.gguf", of_type(TYPES.Q8_0), split=20)
    assert first.name.startswith("demo-00001-of-0000")
    prompt = [DEMO["cases"][0]["prompt_ids"]]
    with open_llm(demo["Q8_0"]) as llm:
        expected = greedy(llm, prompt)
    for place in (first, shards):
        with open_llm(place) as llm:
            assert greedy(llm, prompt) == expected
    with open_llm(MODEL_FOLDER, tokenizer=str(demo["F16"])) as llm:
        assert "model_max_length" not in llm.tokenizer.config  # the file's own
    with open_llm(first, tokenizer=str(MODEL_FOLDER)) as llm:
        assert llm.tokenizer.config["model_max_length"] == 2048
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ModelNotFoundError, match=r"no tokenizer\.json"):
        open_llm(first, tokenizer=str(empty))


def test_what_is_no_model_is_not_called_one_without_a_tokenizer(tmp_path: Path) -> None:
    """The server reads the tokenizer beside the weights, so its error may be the first."""
    (tmp_path / "a.gguf").touch()
    (tmp_path / "b.gguf").touch()
    (tmp_path / "notes.txt").touch()
    for place, message in ((tmp_path, "2 GGUF models"), (tmp_path / "notes.txt", "no weights")):
        with pytest.raises(ModelNotFoundError, match=message):
            load_tokenizer(find_model(EngineConfig(model=str(place))))


def test_a_folder_with_safetensors_and_gguf_is_the_former(
    tmp_path: Path, demo: dict[str, Path]
) -> None:
    folder = tmp_path / "both"
    shutil.copytree(MODEL_FOLDER, folder)
    shutil.copy(demo["F32"], folder / "other.gguf")
    with open_llm(folder) as llm:
        assert llm.info.dtype == "bf16"
    with open_llm(folder, load_format="gguf") as llm:
        assert llm.tokenizer.config["model_max_length"] == 2048
        assert llm.info.dtype == "f32"


def test_a_sentencepiece_llama(tmp_path: Path) -> None:
    """stories260K: interleaved rows, grouped queries, tied embeddings, tokens by score."""
    if not STORIES.is_dir():
        pytest.skip("stories260K lies outside the repository")
    path = convert_folder(STORIES, tmp_path / "stories.gguf", of_type(TYPES.F32))
    reference = json.loads((STORIES / "reference_greedy.json").read_text())
    with open_llm(path) as llm:
        for case in reference["token_cases"]:
            assert llm.tokenizer.encode(case["text"]) == case["ids"]
        params = SamplingParams(temperature=0.0, max_tokens=256, ignore_eos=True)
        output = llm.generate([{"prompt_token_ids": reference["prompt_ids"]}], params)[0]
    assert list(output.outputs[0].token_ids) == reference["greedy_ids"]


def test_the_command_line_takes_a_file(tmp_path: Path, demo: dict[str, Path]) -> None:
    arguments = ("--temperature", "0", "--max-tokens", "8", "--prompts", "Once upon a time")
    done = complete("--file", str(demo["BF16"]), *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Once upon a time, there was a")
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(demo["BF16"].read_bytes()[:20_000])
    done = complete(str(damaged), *arguments)
    assert done.returncode == 2
    assert "damaged.gguf" in done.stderr
    assert "Traceback" not in done.stderr


def complete(*arguments: str) -> subprocess.CompletedProcess[str]:
    return forked.run("complete", *arguments)


@pytest.mark.parametrize("eager", [False, True])
def test_types_may_differ_within_a_fused_matrix(tmp_path: Path, eager: bool) -> None:
    """q and k in one type, v in another, as the usual mixes have it, and all of them multiplied as
    they are: the greedy ids stay those of the dequantised model for a while."""

    def choose(name: str, values: np.ndarray) -> TYPES:
        if values.ndim == 1:
            return TYPES.F32
        return TYPES.Q8_0 if "attn_v" in name or "token_embd" in name else TYPES.Q4_0

    path = convert_folder(MODEL_FOLDER, tmp_path / "mixed.gguf", choose)
    prompts = [case["prompt_ids"] for case in DEMO["cases"]]
    with open_llm(path, enforce_eager=eager) as llm:
        found = greedy(llm, prompts)
        alone = [greedy(llm, [prompt])[0] for prompt in prompts]
        assert llm.info.weight_bytes < 1.2 * path.stat().st_size
    assert found == alone
    with open_llm(path, dtype="float32") as llm:
        exact = greedy(llm, prompts)
    same = [a[:4] == b[:4] for a, b in zip(found, exact, strict=True)]
    assert sum(same) >= len(same) - 1
