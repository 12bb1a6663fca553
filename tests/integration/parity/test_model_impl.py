"""Architectures that vllmx has no file for, by transformers' own code: the same logits and ids as
transformers alone gives, whatever else is in a step, and clear refusals of what cannot be so run.
"""

from __future__ import annotations

import json
import logging
import shutil
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllmx import LLM, SamplingParams
from vllmx_core.backend import LoadOptions
from vllmx_core.errors import (
    ConfigError,
    UnsupportedModelError,
    UnsupportedOpError,
    WeightFormatError,
)
from vllmx_core.plugins.checkpoint import open_checkpoint
from vllmx_core.plugins.model_choice import choose_model
from vllmx_core.plugins.specs import BackendSpec
from vllmx_demo.source import MODEL_FOLDER

from .conftest import BLOCK_SIZE, Runner, registry

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
if registry().find(BackendSpec, "torch") is None:
    pytest.skip("vllmx-torch is not installed", allow_module_level=True)

TOLERANCE = 2e-5
LENGTH, NEW = 45, 64
VOCAB = 61  # backends give at most 64 log-probabilities a row
WINDOW = 11  # shorter than the prompts, no multiple of a block
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2}
CASES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "gpt_neox": {},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "starcoder2": {"num_key_value_heads": 2, "sliding_window": WINDOW},
    "nemotron": GROUPED,
    "persimmon": {},
    "phi": {},
    "gpt_bigcode": {},  # one head of keys
    "olmo": {},
    "jais2": GROUPED,
    "minicpm3": {  # values shorter than keys
        "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4, "head_dim": 4, "v_head_dim": 6, "dim_model_base": 8,
    },
    "exaone4": {  # layers with a window and without
        **GROUPED, "num_hidden_layers": 4, "sliding_window": WINDOW, "sliding_window_pattern": 2,
    },
    "vaultgemma": {  # softcaps
        **GROUPED, "sliding_window": WINDOW, "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 2.0,
    },
    "granite_swa": {  # sinks
        **GROUPED, "num_hidden_layers": 4, "sliding_window": WINDOW,
    },
    "hunyuan_v1_dense": GROUPED,  # norms of heads behind the rotation
    "hunyuan_v1_moe": {**GROUPED, "num_experts": 4, "moe_topk": 2},
    "phimoe": {"num_key_value_heads": 2, "num_local_experts": 4},
    "dots1": {  # experts, which files name one by one
        **GROUPED, **EXPERTS, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1,
    },
}  # fmt: skip

SEEDS = {"persimmon": 1}
"""Of the weights, where those of 0 lead to near-ties."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint of random weights and the model that it was saved from."""

    folder: Path
    oracle: Any

    def log_softmax(self, tokens: list[int]) -> np.ndarray:
        with torch.inference_mode():
            logits = self.oracle(torch.tensor([tokens]), use_cache=False).logits[0]
        return torch.log_softmax(logits.float(), -1).numpy()

    def check_greedy(self, tokens: list[int], ids: list[int]) -> None:
        """Each id is the likeliest one behind those before it."""
        found = self.log_softmax([*tokens, *ids])[len(tokens) - 1 : -1]
        best = np.sort(found, axis=-1)
        near = (best[:, -1] - best[:, -2]).min()
        assert near > 1e-4, "a near-tie proves nothing: take another seed"
        assert found.argmax(-1).tolist() == ids


def save(kind: str, folder: Path, seed: int = 0, **config: Any) -> Saved:
    values = SMALL | CASES.get(kind, {}) | config
    return save_model(transformers.AutoConfig.for_model(kind, **values), folder, seed)


def save_model(config: Any, folder: Path, seed: int = 0) -> Saved:
    config._attn_implementation = "eager"
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config).eval().float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(parameter + 0.1 * noise if parameter.ndim == 1 else 0.3 * noise)
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL_FOLDER / name, folder / name)
    return Saved(folder, model)


@pytest.fixture(scope="module", params=CASES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    kind = request.param
    return save(kind, tmp_path_factory.mktemp("saved") / kind, SEEDS.get(kind, 0))


@pytest.fixture(scope="module")
def bigcode(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return save("gpt_bigcode", tmp_path_factory.mktemp("bigcode") / "model")


def tokens(seed: int, count: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(1, VOCAB, count)]


def runner(folder: Path, impl: str = "transformers", **options: Any) -> Runner:
    checkpoint = open_checkpoint(registry(), folder)
    with closing(checkpoint.weights):
        chosen = choose_model(registry(), checkpoint, impl)
        assert impl == "vllmx" or chosen.backend == "torch"
        limits: dict[str, Any] = {
            "dtype": "f32",
            "kv_cache_dtype": "f32",
            "max_model_len": 96,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 128,
            "block_size": BLOCK_SIZE,
            "num_kv_blocks": 24,
            "num_threads": 1,
        } | options
        backend = registry().get(BackendSpec, "torch").load()()
        loaded = backend.load(chosen.model, checkpoint.weights, LoadOptions(**limits))
    return Runner(loaded, VOCAB)


def test_logits_of_chunks(saved: Saved) -> None:
    prompt = tokens(1, LENGTH)
    expected = saved.log_softmax(prompt)
    running = runner(saved.folder)
    with closing(running.loaded):
        for chunk in (LENGTH, 7, 1):
            error = np.abs(running.log_softmax(prompt, chunk) - expected).max()
            assert error <= TOLERANCE * np.abs(expected).max(), chunk


PROMPTS = [tokens(seed, length) for seed, length in ((2, 5), (3, 40), (4, 23), (3, 40))]


def generate(llm: LLM, count: int = NEW) -> tuple[list[list[int]], list[int]]:
    """The greedy ids after each of the prompts, and how many of its tokens were cached."""
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params)
    cached = [output.num_cached_tokens for output in outputs]
    return [list(output.outputs[0].token_ids) for output in outputs], cached


def open_llm(saved: Saved, **options: Any) -> LLM:
    """Opens a model with prompts in chunks of at most 32 tokens."""
    limits = {
        "max_num_batched_tokens": 32,
        "num_threads": 1,
        "model_impl": "transformers",
        **options,
    }
    return LLM(str(saved.folder), dtype="float32", **limits)


def test_mates_and_prefix_hits(saved: Saved) -> None:
    with open_llm(saved, num_kv_blocks=256) as llm:
        found, _ = generate(llm)
        for prompt, ids in zip(PROMPTS, found, strict=True):
            assert len(ids) == NEW
            saved.check_greedy(prompt, ids)
        assert generate(llm, 8) == ([ids[:8] for ids in found], [0, 32, 16, 32])


def test_preemption(saved: Saved) -> None:
    few = 20 if saved.oracle.config.model_type == "granite_swa" else 13  # a row has four tables
    with open_llm(saved, num_kv_blocks=few, max_num_seqs=4, enable_prefix_caching=False) as llm:
        found, _ = generate(llm)
        windows = llm._engine._core.limits.windows
        assert llm._engine._core.stats().num_preemptions > 0 or None not in windows
    for prompt, ids in zip(PROMPTS, found, strict=True):
        assert len(ids) == NEW
        saved.check_greedy(prompt, ids)


def test_an_own_architecture_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved = save("llama", tmp_path / "llama", num_key_value_heads=2, tie_word_embeddings=True)
    prompt = tokens(5, LENGTH)
    with caplog.at_level(logging.WARNING, "vllmx.models"):
        running = runner(saved.folder, "transformers")
    assert "transformers runs this model on backend torch: several times slower" in caplog.text
    expected = saved.log_softmax(prompt)
    with closing(running.loaded):
        assert running.loaded.info.details["model"] == "LlamaForCausalLM of transformers"
        found = running.log_softmax(prompt, 16)
    assert np.abs(found - expected).max() <= TOLERANCE * np.abs(expected).max()


@pytest.mark.parametrize(("dtype", "tolerance"), [("bf16", 0.05), ("f16", 0.01)])
def test_sixteen_bits(bigcode: Saved, dtype: str, tolerance: float) -> None:
    prompt = tokens(6, LENGTH)
    expected = bigcode.log_softmax(prompt)
    running = runner(bigcode.folder, dtype=dtype, kv_cache_dtype="auto")
    with closing(running.loaded):
        assert running.loaded.info.dtype == running.loaded.info.kv_cache_dtype == dtype
        found = running.log_softmax(prompt, 16)
    assert np.abs(found - expected).max() <= tolerance * np.abs(expected).max()


def test_positions_end_where_mates_would_change_them(tmp_path: Path) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 40,
    }
    short = {"rope_parameters": rope, "original_max_position_embeddings": 40}
    saved = save("phi3", tmp_path / "phi3", num_key_value_heads=2, **short)
    checkpoint = open_checkpoint(registry(), saved.folder)
    with closing(checkpoint.weights):
        model = choose_model(registry(), checkpoint, "transformers").model
    assert model.shape.max_model_len == 40


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"model_type": "bloom"}, "BloomForCausalLM .* has no max_position_embeddings"),
        ({"model_type": "gpt2", "architectures": ["GPT2Model"]}, "GPT2LMHeadModel"),
        ({"model_type": "gpt2", "n_layer": "x"}, "config.json of model type 'gpt2'"),
        ({"model_type": "gpt_neoxx"}, "no decoder for model type 'gpt_neoxx'; its nearest is"),
        ({"architectures": ["Nothing"]}, "no decoder for 'Nothing'"),
        ({}, "no decoder for a config without architectures"),
    ],
)
def test_refused_by_name(config: dict[str, Any], why: str) -> None:
    from vllmx_torch.foreign.model import TransformersModel

    with pytest.raises(UnsupportedModelError, match=why):
        TransformersModel(config)


def test_no_code_of_the_folder(bigcode: Saved, tmp_path: Path) -> None:
    folder = shutil.copytree(bigcode.folder, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "evil.Evil", "AutoConfig": "evil.Evil"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text("raise SystemExit('code of a model folder ran')")
    with closing(runner(folder).loaded) as loaded:
        assert loaded.info.details["model"] == "GPTBigCodeForCausalLM of transformers"


@pytest.mark.parametrize("flaw", ["missing", "left over", "of another shape"])
def test_tensors_that_do_not_fit(bigcode: Saved, tmp_path: Path, flaw: str) -> None:
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(bigcode.folder, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    name = "transformer.h.1.mlp.c_fc.bias"
    if flaw == "missing":
        del tensors[name]
    elif flaw == "left over":
        name = "transformer.h.1.mlp.c_gate.bias"
        tensors[name] = torch.zeros(4)
    else:
        tensors[name] = torch.zeros(63)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightFormatError, match=name.replace(".", r"\.")):
        runner(folder)


def test_other_backends_refuse(bigcode: Saved) -> None:
    checkpoint = open_checkpoint(registry(), bigcode.folder)
    with closing(checkpoint.weights):
        model = choose_model(registry(), checkpoint).model
        for name in ("cpu", "numpy"):
            spec = registry().find(BackendSpec, name)
            if spec is None or spec.unavailable_reason() is not None:
                continue
            with pytest.raises(UnsupportedOpError, match="--backend torch"):
                spec.load()().load(model, checkpoint.weights, LoadOptions(max_model_len=32))


@pytest.mark.parametrize(
    ("config", "error", "why"),
    [
        ({"backend": "cpu"}, UnsupportedModelError, "leave --backend cpu out"),
        (
            {"backend": "cpu", "model_impl": "transformers"},
            ConfigError,
            "--model-impl transformers runs on backend 'torch' alone",
        ),
        ({"isq": "q8_0"}, ConfigError, "--isq quantises for vllmx's own models"),
        ({"model_impl": "vllmx"}, UnsupportedModelError, "no installed plugin serves"),
        ({"model_impl": "transfomers"}, ConfigError, "did you mean 'transformers'"),
    ],
)
def test_flags_that_do_not_go_together(
    bigcode: Saved, config: dict[str, Any], error: type[Exception], why: str
) -> None:
    with pytest.raises(error, match=why):
        LLM(str(bigcode.folder), **config)


class Mixing(torch.nn.Module):
    """A module whose attention is harmless and that disturbs tokens elsewhere."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.table = kind, torch.nn.Parameter(torch.randn(VOCAB, VOCAB))

    def forward(self, input_ids: Any, position_ids: Any, **_: Any) -> Any:
        x = self.table[input_ids]  # (1, T, V)
        if self.kind == "convolution":
            x = x + 0.5 * torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]
        if self.kind == "mean":
            x = x + 0.5 * x.mean(1, keepdim=True)
        if self.kind == "positions":
            position_ids = torch.arange(position_ids.shape[1])[None]
        x = x + torch.sin(position_ids[..., None].float())
        return transformers.modeling_outputs.CausalLMOutput(logits=x)


@pytest.mark.parametrize("kind", ["none", "convolution", "mean", "positions"])
def test_tokens_that_meet_outside_of_attention(kind: str) -> None:
    from vllmx_torch.foreign.running import RunningModule

    torch.manual_seed(0)
    running = RunningModule(Mixing(kind), [])

    def check() -> None:
        running.check_rows(VOCAB, 96, torch.float32, torch.device("cpu"))

    if kind == "none":
        check()
        return
    with pytest.raises(UnsupportedModelError, match="mixes tokens outside"):
        check()
