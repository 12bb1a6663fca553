"""`vllmx quantize` on real models, and what the files are worth afterwards."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import gguf
import numpy as np
import pytest
from vllmx import LLM, SamplingParams
from vllmx_core.errors import ConfigError, UnsupportedModelError
from vllmx_core.plugins.registry import load_registry
from vllmx_demo.source import MODEL_FOLDER
from vllmx_models.formats.gguf.file import GGUFFile
from vllmx_models.formats.gguf.quantize.convert import Summary, quantize

from tests import forked
from tests.usable_backends import backend_spec

STORIES = Path(__file__).parents[3] / "shared" / "models" / "stories260K"
NAMES = ("Tim", "Anna", "Ben", "Mia", "Tom", "Lily", "Max", "Sue", "Sam", "Zoe")
MIXES = ("q8_0", "q6_k", "q5_k_m", "q4_k_m", "q3_k_m", "q2_k", "q4_0")


def convert(source: Path, path: Path, mix: str) -> Summary:
    return quantize(load_registry(), source, path, mix, threads=2)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Summary]:
    folder = tmp_path_factory.mktemp("quantized")
    return {
        mix: convert(MODEL_FOLDER, folder / f"{mix}.gguf", mix) for mix in (*MIXES, "f32", "bf16")
    }


@pytest.fixture
def backend() -> None:
    backend_spec()


def test_fewer_bits_are_smaller_and_less_exact(files: dict[str, Summary]) -> None:
    sizes = [files[mix].num_bytes for mix in MIXES[:-1]]
    assert sizes == sorted(sizes, reverse=True)
    assert all(files[mix].path.stat().st_size == files[mix].num_bytes for mix in MIXES)
    base = {"q8_0": "Q8_0", "q6_k": "Q6_K", "q5_k_m": "Q5_K", "q4_k_m": "Q4_K", "q2_k": "Q2_K"}
    errors = [files[mix].types[kind].relative_error for mix, kind in base.items()]
    assert errors == sorted(errors)
    assert errors[0] < 0.01
    assert errors[-1] < 0.4


def test_the_gguf_package_reads_every_file(files: dict[str, Summary]) -> None:
    for mix, summary in files.items():
        reader = gguf.GGUFReader(summary.path)
        ours = GGUFFile(summary.path)
        assert {tensor.name for tensor in reader.tensors} == ours.tensors.keys(), mix
        for tensor in reader.tensors:
            np.testing.assert_array_equal(
                tensor.data.reshape(-1).view(np.uint8), ours.data(tensor.name)
            )
        ours.close()


def greedy(llm: LLM, text: str = "Once upon a time") -> str:
    params = SamplingParams(temperature=0.0, max_tokens=24)
    return llm.generate([text], params)[0].outputs[0].text


def open_llm(path: Path | str, **options: object) -> LLM:
    return LLM(str(path), max_num_seqs=4, kv_cache_memory_bytes=1 << 26, **options)  # type: ignore[arg-type]


@pytest.mark.usefixtures("backend")
def test_lossless_files_write_the_same_text(files: dict[str, Summary]) -> None:
    with open_llm("demo", dtype="float32") as llm:
        expected = greedy(llm)
    for mix in ("f32", "bf16"):
        with open_llm(files[mix].path, dtype="float32") as llm:
            assert greedy(llm) == expected


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("mix", MIXES[:4])
def test_quantised_files_tell_a_story(files: dict[str, Summary], mix: str) -> None:
    with open_llm(files[mix].path) as llm:
        assert greedy(llm).startswith(", there was a")


def test_a_gguf_file_is_quantised_further(files: dict[str, Summary], tmp_path: Path) -> None:
    """A file in float32 gives what the folder gives, tokenizer included."""
    again = convert(files["f32"].path, tmp_path / "again.gguf", "q4_k_m")
    first, second = GGUFFile(files["q4_k_m"].path), GGUFFile(again.path)
    for name in first.tensors:
        np.testing.assert_array_equal(first.data(name), second.data(name))
    assert list(first.metadata["tokenizer.ggml.tokens"]) == list(
        second.metadata["tokenizer.ggml.tokens"]
    )
    assert first.metadata.keys() == second.metadata.keys()


@pytest.mark.usefixtures("backend")
def test_an_interleaved_sentencepiece_llama(tmp_path: Path) -> None:
    if not STORIES.is_dir():
        pytest.skip("stories260K lies outside the repository")
    reference = json.loads((STORIES / "reference_greedy.json").read_text())
    path = convert(STORIES, tmp_path / "stories.gguf", "f32").path
    with open_llm(path) as llm:
        for case in reference["token_cases"]:
            assert llm.tokenizer.encode(case["text"]) == case["ids"]
        params = SamplingParams(temperature=0.0, max_tokens=256, ignore_eos=True)
        output = llm.generate([{"prompt_token_ids": reference["prompt_ids"]}], params)[0]
    assert list(output.outputs[0].token_ids) == reference["greedy_ids"]


def test_what_a_file_cannot_state_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "odd"
    shutil.copytree(MODEL_FOLDER, folder)
    config = json.loads((folder / "config.json").read_text())
    config["rope_scaling"] = {"rope_type": "dynamic", "factor": 2.0}
    (folder / "config.json").write_text(json.dumps(config))
    path = tmp_path / "odd.gguf"
    with pytest.raises(UnsupportedModelError, match="dynamic"):
        convert(folder, path, "q8_0")
    with pytest.raises(ConfigError, match="not known"):
        convert(MODEL_FOLDER, path, "q9_9")
    with pytest.raises(ConfigError, match=r"\.gguf"):
        convert(MODEL_FOLDER, tmp_path / "model.bin", "q8_0")
    assert [entry.name for entry in tmp_path.iterdir()] == ["odd"]


def test_no_file_of_the_source_is_overwritten(files: dict[str, Summary], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for number in (1, 2):
        (folder / f"m-0000{number}-of-00002.gguf").write_bytes(b"GGUF" * number)
    copy = shutil.copy(files["q4_0"].path, tmp_path / "copy.gguf")
    second = folder / "m-00002-of-00002.gguf"
    link = tmp_path / "link.gguf"
    link.hardlink_to(second)
    for source, path in (
        (folder, second),
        (folder / "m-00001-of-00002.gguf", second),
        (folder, link),
        (copy, copy),
    ):
        with pytest.raises(ConfigError, match="belongs to the source"):
            convert(source, path, "q8_0")
    assert second.read_bytes() == b"GGUF" * 2


def test_the_command(tmp_path: Path) -> None:
    path = tmp_path / "demo.gguf"
    done = forked.run("quantize", "demo", str(path), "--type", "Q8_0", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["bytes"] == path.stat().st_size
    assert 8.4 < found["bits_per_weight"] < 8.6
    assert found["types"]["Q8_0"]["relative_error"] < 0.01
    assert "blk.5.ffn_up.weight" in done.stderr
    refused = forked.run("quantize", "demo", str(path), "--type", "tiny", "--overwrite")
    assert refused.returncode == 2
    assert "q4_k_m" in refused.stderr
    assert path.stat().st_size == found["bytes"], "nothing is replaced before all is checked"


@pytest.mark.usefixtures("backend")
def test_llama_cpp_runs_the_file(files: dict[str, Summary], tmp_path: Path) -> None:
    """VLLMX_LLAMA_CPP names the folder of llama-perplexity: `nox -s llama` builds it."""
    binary = Path(os.environ.get("VLLMX_LLAMA_CPP", "")) / "llama-perplexity"
    if not binary.is_file():
        pytest.skip("no llama.cpp: name the folder of its programs by VLLMX_LLAMA_CPP")
    text = tmp_path / "text"
    with open_llm("demo") as llm:  # its own stories: of others three windows say little
        begins = [f"Once upon a time, there was a girl named {name}." for name in NAMES]
        outputs = llm.generate(begins, SamplingParams(max_tokens=160, seed=5))
    text.write_text("\n\n".join(f"{o.prompt}{o.outputs[0].text}" for o in outputs))
    found = {}
    for mix in ("bf16", *MIXES):
        command = [str(binary), "-m", str(files[mix].path), "-f", str(text), "-c", "128", "-t", "1"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        estimate = re.search(r"Final estimate: PPL = ([0-9.]+)", done.stdout + done.stderr)
        assert estimate is not None, mix
        found[mix] = float(estimate[1])
    assert 1 < found["bf16"] < 5
    for mix in MIXES:
        assert found[mix] == pytest.approx(found["bf16"], rel=0.06 if mix == "q2_k" else 0.02)
