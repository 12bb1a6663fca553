"""A model that vllmx has no file for, served over HTTP and asked by `vllmx run-batch`: the ids are
those that transformers' own model finds likeliest."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from click.testing import CliRunner
from vllmx.cli.run_batch import run_batch
from vllmx_core.config import EngineConfig
from vllmx_core.plugins.registry import load_registry
from vllmx_core.plugins.specs import BackendSpec
from vllmx_demo.source import MODEL_FOLDER
from vllmx_engine.async_llm import AsyncLLM
from vllmx_server.config import ServerConfig
from vllmx_server.host.app import build_app

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
if load_registry().find(BackendSpec, "torch") is None:
    pytest.skip("vllmx-torch is not installed", allow_module_level=True)

CONFIG: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
PROMPTS = [
    [int(token) for token in np.random.default_rng(seed).integers(9, 4096, 20)] for seed in range(3)
]
FLAGS = ("--dtype", "float32", "--num-kv-blocks", "32", "--max-num-seqs", "2")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The folder of a StarCoder 1, and its model."""
    config = transformers.AutoConfig.for_model("gpt_bigcode", **CONFIG)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).eval().float()
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape)
    folder = tmp_path_factory.mktemp("bigcode") / "model"
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL_FOLDER / name, folder)
    return folder, model


def body(prompt: list[int]) -> dict[str, Any]:
    return {
        "model": "m",
        "prompt": prompt,
        "max_tokens": 16,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def check(model: Any, prompt: list[int], answer: dict[str, Any]) -> None:
    """Each id is the likeliest one behind those before it, or as good as that: near-ties may fall
    either way."""
    ids = answer["choices"][0]["token_ids"]
    assert len(ids) == 16
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].numpy()
    chosen = logits[np.arange(16), ids]
    assert (logits.max(-1) - chosen).max() < 1e-4 * np.abs(logits).max()


async def test_over_http(saved: tuple[Path, Any]) -> None:
    """The whole application, its engine in this process."""
    folder, model = saved
    config = EngineConfig(
        model=str(folder), served_model_name="m", dtype="float32", num_kv_blocks=32, max_num_seqs=2
    )
    async with await AsyncLLM.start(config, in_process=True) as llm:
        transport = httpx.ASGITransport(build_app(llm, ServerConfig()))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            for prompt in (PROMPTS[0], PROMPTS[0], PROMPTS[1]):  # the second one is cached
                response = await client.post("/v1/completions", json=body(prompt))
                assert response.status_code == 200, response.text
                check(model, prompt, response.json())


def test_by_run_batch(saved: tuple[Path, Any], tmp_path: Path) -> None:
    folder, model = saved
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body(prompt)}
        for number, prompt in enumerate(PROMPTS)
    ]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = ["--model", str(folder), "--served-model-name", "m", *FLAGS]
    done = CliRunner().invoke(run_batch, [str(source), str(out), *flags])
    assert done.exit_code == 0, done.output
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert [answer["custom_id"] for answer in answers] == ["0", "1", "2"]
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        check(model, prompt, answer["response"]["body"])
