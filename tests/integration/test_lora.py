"""Rows with LoRA adapters equal models with the adapter merged, by PEFT's formula; on the CPU a
row's bits do not depend on its mates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from click.testing import CliRunner
from vllmx import LLM, LoRARequest, SamplingParams
from vllmx.cli.quantize import quantize
from vllmx_core.errors import (
    AdapterError,
    ConfigError,
    InvalidRequestError,
    ModelNotFoundError,
    WeightFormatError,
)
from vllmx_core.plugins.checkpoint import open_adapter
from vllmx_core.plugins.registry import load_registry
from vllmx_engine.client.beams import BeamSearchParams
from vllmx_models.formats.merged import MergedSource
from vllmx_testing.model_suite import random_weights
from vllmx_testing.synthetic import ArraySource

from tests.lora_files import write_peft
from tests.usable_backends import backend_spec

from .test_latent_models import CONFIG as LATENT
from .test_latent_models import write

VOCAB = 4096
DENSE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": VOCAB,
    "hidden_size": 64, "intermediate_size": 72, "num_hidden_layers": 2, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6, "rope_theta": 1e4, "torch_dtype": "float32",
}  # fmt: skip
PHI: dict[str, Any] = DENSE | {
    "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "pad_token_id": 0,
    "original_max_position_embeddings": 512,
}  # fmt: skip
MOE: dict[str, Any] = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True,
}  # fmt: skip
HYBRID: dict[str, Any] = DENSE | {
    "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text",
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
}  # fmt: skip
ATTENTION = ("self_attn.q_", "self_attn.k_proj", "self_attn.v_proj", "o_proj", "kv_a_proj")
KINDS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "dense": (DENSE, ("proj.weight", "embed_tokens", "lm_head")),
    "fused": (PHI, ("qkv_proj", "gate_up_proj", "down_proj")),
    "moe": (MOE, (*ATTENTION, "mlp.gate.")),
    "latent": (LATENT, (*ATTENTION, "shared_experts")),
    "hybrid": (HYBRID, ("proj",)),
}
PROMPTS = [
    [int(token) for token in np.random.default_rng(seed).integers(10, VOCAB, count)]
    for seed, count in enumerate((21, 5, 38, 1))
]
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, prompt_logprobs=0)
Answer = tuple[list[int], list[float]]


def load(folder: Path, backend: str = "cpu", **config: Any) -> LLM:
    limits = {"num_kv_blocks": 64, "max_num_batched_tokens": 64} | config
    return LLM(str(folder), backend=backend, dtype="float32", **limits)


def answers(
    llm: LLM, prompts: list[list[int]], lora: Any = None, params: SamplingParams = PARAMS
) -> list[Answer]:
    """Ids, and the log-probabilities of each prompt's tokens."""
    outputs = llm.generate(
        [{"prompt_token_ids": each} for each in prompts], params, lora_request=lora
    )
    return [
        (
            list(output.outputs[0].token_ids),
            [
                next(iter(each.values())).logprob
                for each in (output.prompt_logprobs or [])[1:]
                if each
            ],
        )
        for output in outputs
    ]


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model, two adapters, and the models with each merged."""
    config, names = KINDS[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    source = random_weights(load_registry().model_for(config).load()(config))
    weights = {name: source.part(name).dequantize() for name in source.names()}
    write(folder / "base", weights, config)
    for name, more in (("a", {}), ("b", {"rank": 7, "use_rslora": True, "scale": 0.1})):
        merged = write_peft(folder / name, weights, seed=ord(name), names=names, **more)
        write(folder / f"merged-{name}", merged, config)
    return folder


def requests_of(folder: Path, names: str) -> list[LoRARequest | None]:
    return [None if name == "-" else LoRARequest(name, 1, str(folder / name)) for name in names]


@pytest.mark.parametrize("backend", ["numpy", "cpu", "torch", "metal"])
def test_adapters_equal_merged_models(kind: Path, backend: str) -> None:
    backend_spec(backend)
    expected = {}
    for name, folder in (("-", "base"), ("a", "merged-a"), ("b", "merged-b")):
        with load(kind / folder, backend) as llm:
            expected[name] = answers(llm, PROMPTS)
    with load(kind / "base", backend, enable_lora=True, max_loras=2) as llm:
        for names in ("a-ba", "bbbb", "----", "-abb"):
            got = answers(llm, PROMPTS, requests_of(kind, names))
            for name, number, (ids, logprobs) in zip(names, range(4), got, strict=True):
                wanted = expected[name][number]
                np.testing.assert_allclose(logprobs, wanted[1], rtol=0, atol=2e-4)
                assert ids == wanted[0], (names, number)
        assert expected["a"] != expected["b"] != expected["-"]


def test_a_row_does_not_depend_on_its_mates(kind: Path) -> None:
    """Chunks, prefix hits, preemption and a lack of slots change no bit either."""
    names = "a-ba"
    with load(kind / "base", enable_lora=True, enable_prefix_caching=False) as llm:
        every = requests_of(kind, names)
        alone = [answers(llm, [prompt], one)[0] for prompt, one in zip(PROMPTS, every, strict=True)]
        assert answers(llm, PROMPTS, every) == alone
    with load(kind / "base") as llm:
        (base,) = answers(llm, [PROMPTS[1]])
        assert base == alone[1]
    for config in ({"max_loras": 1}, {"max_num_batched_tokens": 16}, {"num_kv_blocks": 5}):
        with load(kind / "base", enable_lora=True, enforce_eager=len(config) > 1, **config) as llm:
            assert answers(llm, PROMPTS, every) == alone
            assert answers(llm, PROMPTS[::-1], every[::-1]) == alone[::-1]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("dense")
    source = random_weights(load_registry().model_for(DENSE).load()(DENSE))
    weights = {name: source.part(name).dequantize() for name in source.names()}
    write(folder / "base", weights, DENSE)
    return folder, weights


def test_cached_prefixes_are_of_one_adapter(dense: tuple[Path, dict[str, Any]]) -> None:
    folder, weights = dense
    write_peft(folder / "a", weights)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    with load(folder / "base", enable_lora=True) as llm:
        prompt = {"prompt_token_ids": PROMPTS[2]}
        lora = LoRARequest("a", 1, str(folder / "a"))
        found = [
            llm.generate(prompt, params, lora_request=one)[0].num_cached_tokens
            for one in (None, lora, None, lora)
        ]
    assert found == [0, 0, 32, 32]


def test_adapters_of_the_base(dense: tuple[Path, dict[str, Any]]) -> None:
    """llama.cpp's flags: the sum of several, each with its factor."""
    folder, weights = dense
    first = write_peft(folder / "first", weights, seed=1)
    second = write_peft(folder / "second", weights, rank=2, seed=2)
    both = {
        name: first[name] + np.float32(0.5) * (second[name] - weights[name]) for name in weights
    }
    write(folder / "both", both, DENSE)
    with load(folder / "both") as llm:
        expected = answers(llm, PROMPTS)
    scaled = (f"{folder / 'second'}:0.5",)
    with load(folder / "base", lora=(str(folder / "first"),), lora_scaled=scaled) as llm:
        for got, wanted in zip(answers(llm, PROMPTS), expected, strict=True):
            np.testing.assert_allclose(got[1], wanted[1], rtol=0, atol=2e-4)
            assert got[0] == wanted[0]


def test_a_name_with_another_path_is_read_again(dense: tuple[Path, dict[str, Any]]) -> None:
    folder, weights = dense
    for seed, name in enumerate(("one", "two")):
        write_peft(folder / name, weights, seed=seed)
    with load(folder / "base", enable_lora=True, max_cpu_loras=1, max_loras=1) as llm:
        one, two, other = (
            answers(llm, PROMPTS, LoRARequest(name, 1, str(folder / path)))
            for name, path in (("x", "one"), ("x", "two"), ("x", "one"))
        )
        assert one == other != two
        with pytest.raises(AdapterError, match="as many as --max-cpu-loras lets"):
            answers(llm, PROMPTS, LoRARequest("y", 2, str(folder / "two")))
        assert answers(llm, PROMPTS, LoRARequest("x", 1, str(folder / "one"))) == one


def test_two_paths_of_one_name_in_a_call(dense: tuple[Path, dict[str, Any]]) -> None:
    folder, weights = dense
    write_peft(folder / "two", weights, seed=1)
    both = [LoRARequest("x", 1, str(folder / path)) for path in ("one", "two")]
    write_peft(folder / "one", weights, seed=0)
    refused = pytest.raises(InvalidRequestError, match="two paths")
    with load(folder / "base", enable_lora=True) as llm, refused:
        answers(llm, PROMPTS[:2], both)


def test_beams_of_an_adapter(dense: tuple[Path, dict[str, Any]]) -> None:
    """Those of the merged model, next to beams of the base; drafts change none."""
    folder, weights = dense
    merged = write_peft(folder / "a", weights)
    write(folder / "merged", merged, DENSE)
    prompts, params = [PROMPTS[1], PROMPTS[0]], BeamSearchParams(3, 8, ignore_eos=True)
    expected = []
    for number, name in enumerate(("merged", "base")):
        with load(folder / name) as llm:
            expected += llm.beam_search([prompts[number]], params)
    loras = [LoRARequest("a", 1, str(folder / "a")), None]
    drafting = {"speculate": "twin", "speculate_tokens": "2"}
    for config in ({}, {"max_num_seqs": 2, "enable_prefix_caching": False, **drafting}):
        with load(folder / "base", enable_lora=True, **config) as llm:
            found = llm.beam_search(prompts, params, loras)
        for got, wanted in zip(found, expected, strict=True):
            assert [beam.tokens for beam in got.sequences] == [
                beam.tokens for beam in wanted.sequences
            ]
            for beam, other in zip(got.sequences, wanted.sequences, strict=True):
                assert beam.cum_logprob == pytest.approx(other.cum_logprob, abs=1e-3)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"use_dora": True}, AdapterError, "use_dora"),
        ({"peft_type": "LOHA"}, AdapterError, "LOHA"),
        ({"init_lora_weights": "pissa"}, AdapterError, "pissa"),
        ({"lora_alpha": "NaN"}, AdapterError, "lora_alpha"),
        ({"rank": 17}, AdapterError, "rank 17, there is room for 16"),
        ({"rank": 16}, None, ""),
    ],
)
def test_adapters_that_are_refused(
    dense: tuple[Path, dict[str, Any]],
    tmp_path: Path,
    changes: dict[str, Any],
    error: Any,
    text: str,
) -> None:
    folder, weights = dense
    config = {key: value for key, value in changes.items() if key not in ("rank", "names")}
    rest = {key: value for key, value in changes.items() if key in ("rank", "names")}
    write_peft(tmp_path / "a", weights, **rest)
    settings = tmp_path / "a" / "adapter_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | config))
    with load(folder / "base", enable_lora=True) as llm:
        lora = LoRARequest("a", 1, str(tmp_path / "a"))
        if error is None:
            answers(llm, PROMPTS, lora)
        else:
            with pytest.raises(error, match=text):
                answers(llm, PROMPTS, lora)
        assert answers(llm, PROMPTS)


def test_what_is_missing(dense: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, weights = dense
    wide = {
        name: np.pad(weight, [(0, 0), (0, 8)])
        for name, weight in weights.items()
        if weight.ndim == 2
    }
    write_peft(tmp_path / "wide", wide)
    write_peft(tmp_path / "cut", weights)
    file = tmp_path / "cut" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with load(folder / "base", enable_lora=True) as llm:
        for path, error, text in (
            ("none", ModelNotFoundError, "does not exist"),
            ("wide", AdapterError, "does not fit the model"),
            ("cut", WeightFormatError, "truncated|bytes"),
        ):
            with pytest.raises(error, match=text):
                answers(llm, PROMPTS, LoRARequest(path, 1, str(tmp_path / path)))
    with load(folder / "base") as llm, pytest.raises(ConfigError, match="--enable-lora"):
        answers(llm, PROMPTS, LoRARequest("a", 1, str(tmp_path / "wide")))
    with pytest.raises(ConfigError, match="ranks take no LoRA adapters"):
        load(folder / "base", enable_lora=True, tensor_parallel_size=2)
    write_peft(tmp_path / "fits", weights)
    with pytest.raises(ConfigError, match="rank 4, --max-lora-rank is 2"):
        load(folder / "base", lora=(f"a={tmp_path / 'fits'}",), max_lora_rank=2)


LLAMA: dict[str, Any] = DENSE | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
GGUF_NAMES = {
    "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output",
    "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down",
}  # fmt: skip


def write_gguf(path: Path, peft: Path, alpha: float) -> None:
    """A PEFT adapter as llama.cpp's converter writes it for a "llama"."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", alpha)
    tensors = safetensors.numpy.load_file(peft / "adapter_model.safetensors")
    for name, values in tensors.items():
        parts = name.split(".")
        half = "lora_a" if any(each.endswith("_A") for each in parts) else "lora_b"
        if "embed_tokens" in parts:
            stem, values = "token_embd", values.T if half == "lora_a" else values
        elif "lm_head" in parts:
            stem = "output"
        else:
            stem = f"blk.{parts[4]}.{GGUF_NAMES[parts[6]]}"
        heads = {"attn_q": 4, "attn_k": 2}.get(stem.rpartition(".")[2])
        if heads and half == "lora_b":
            halves = values.reshape(heads, 2, values.shape[0] // heads // 2, -1)
            values = halves.swapaxes(1, 2).reshape(values.shape)
        writer.add_tensor(f"{stem}.weight.{half}", np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf_adapters(tmp_path: Path) -> None:
    source = random_weights(load_registry().model_for(LLAMA).load()(LLAMA))
    weights = {name: source.part(name).dequantize() for name in source.names()}
    write(tmp_path / "base", weights, LLAMA)
    write_peft(tmp_path / "a", weights, rank=4, names=KINDS["dense"][1])
    write_gguf(tmp_path / "a.gguf", tmp_path / "a", 8.0)
    with load(tmp_path / "base", enable_lora=True) as llm:
        expected = answers(llm, PROMPTS, LoRARequest("a", 1, str(tmp_path / "a")))
        assert answers(llm, PROMPTS, LoRARequest("g", 2, str(tmp_path / "a.gguf"))) == expected
        assert answers(llm, PROMPTS) != expected
        kinds = (tmp_path / "a.gguf").read_bytes().replace(b"adapter.type", b"adapter.tipe")
        (tmp_path / "bad.gguf").write_bytes(kinds)
        with pytest.raises(AdapterError, match="not a LoRA adapter"):
            answers(llm, PROMPTS, LoRARequest("b", 3, str(tmp_path / "bad.gguf")))


def test_quantize_merges_an_adapter(tmp_path: Path) -> None:
    """Expert by expert, and the matrices that cannot be adapted while the model runs."""
    source = random_weights(load_registry().model_for(MOE).load()(MOE))
    weights = {name: source.part(name).dequantize() for name in source.names()}
    write(tmp_path / "base", weights, MOE)
    merged = write_peft(tmp_path / "a", weights, names=("proj.weight", "lm_head"))
    write(tmp_path / "merged", merged, MOE)
    command = [str(tmp_path / "base"), str(tmp_path / "a.gguf"), "--type", "f32"]
    done = CliRunner().invoke(quantize, [*command, "--merge-lora", str(tmp_path / "a"), "-q"])
    assert done.exit_code == 0, done.output
    with load(tmp_path / "merged") as llm:
        expected = answers(llm, PROMPTS)
    with load(tmp_path / "a.gguf") as llm:
        for (ids, got), (wanted_ids, wanted) in zip(answers(llm, PROMPTS), expected, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5)
            assert ids == wanted_ids
    lora = LoRARequest("a", 1, str(tmp_path / "a"))
    refused = pytest.raises(AdapterError, match=r"experts.*--merge-lora")
    with load(tmp_path / "base", enable_lora=True) as llm, refused:
        answers(llm, PROMPTS, lora)


def test_experts_in_one_pair(tmp_path: Path) -> None:
    """PEFT's form for tensors of all experts: A (r X, K) and B (N, r X), e running fastest in B."""
    random, experts, rank = np.random.default_rng(3), 4, 2
    shapes = {"gate_up_proj": (48, 64), "down_proj": (64, 24)}
    tensors, deltas = {}, {}
    for (name, (rows, cols)), end in zip(shapes.items(), (".base_layer", ""), strict=True):
        a = random.standard_normal((rank * experts, cols)).astype(np.float32)
        b = random.standard_normal((rows, rank * experts)).astype(np.float32)
        stem = f"base_model.model.model.layers.0.mlp.experts{end}"
        tensors[f"{stem}.lora_A.weight"], tensors[f"{stem}.lora_B.weight"] = a, b
        deltas[name] = [
            2 * sum(np.outer(b[:, r * experts + e], a[e * rank + r]) for r in range(rank))
            for e in range(experts)
        ]
    (tmp_path / "a").mkdir()
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank}
    (tmp_path / "a" / "adapter_config.json").write_text(json.dumps(settings))
    safetensors.numpy.save_file(tensors, tmp_path / "a" / "adapter_model.safetensors")
    zeros = {
        f"model.layers.0.mlp.experts.{e}.{name}.weight": np.zeros(shape, np.float32)
        for e in range(experts)
        for name, shape in (("gate_proj", (24, 64)), ("up_proj", (24, 64)), ("down_proj", (64, 24)))
    }
    adapter = open_adapter(load_registry(), tmp_path / "a", {})
    apart = MergedSource(ArraySource(zeros), adapter)
    stacked = {
        f"model.layers.0.mlp.experts.{name}": np.zeros((experts, *shape), np.float32)
        for name, shape in shapes.items()
    }
    together = MergedSource(ArraySource(stacked), adapter)
    for e in range(experts):
        stem = f"model.layers.0.mlp.experts.{e}"
        parts = [apart.part(f"{stem}.{name}_proj.weight").dequantize() for name in ("gate", "up")]
        np.testing.assert_allclose(np.concatenate(parts), deltas["gate_up_proj"][e], atol=1e-5)
        down = apart.part(f"{stem}.down_proj.weight").dequantize()
        np.testing.assert_allclose(down, deltas["down_proj"][e], atol=1e-5)
    for name in shapes:
        got = together.part(f"model.layers.0.mlp.experts.{name}").dequantize()
        np.testing.assert_allclose(got, np.stack(deltas[name]), atol=1e-5)
