"""`vllmx plan` against sums done by hand, from a config alone and a GGUF file's header."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from vllmx.cli.plan import plan
from vllmx.sizing import fixed_costs, measured
from vllmx.sizing.facts import facts_of
from vllmx.sizing.forecast import Wish, forecast
from vllmx_core.errors import UnsupportedModelError
from vllmx_core.plugins.registry import load_registry
from vllmx_models.formats.header_only import opened_header
from vllmx_models.trunks.decoder import Decoder

DENSE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
"""Llama 3 8B's."""
EXPERTS = {
    **DENSE,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "vocab_size": 151936,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
}
"""Qwen3-30B-A3B's."""


def run(*arguments: str) -> Result:
    return CliRunner().invoke(plan, list(arguments))


def planned(*arguments: str) -> dict[str, Any]:
    done = run(*arguments, "--json")
    assert done.exit_code == 0, (done.output, done.exception)
    found: dict[str, Any] = json.loads(done.output)
    return found


def written(folder: Path, config: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def form(found: dict[str, Any], name: str) -> dict[str, Any]:
    (one,) = (each for each in found["forms"] if each["form"] == name)
    return one


def test_a_config_of_any_name(tmp_path: Path) -> None:
    """Nothing beside it counts: other files there may be of other models."""
    expected = planned(written(tmp_path, DENSE), "--on", "h100")
    folder = tmp_path / "configs"
    folder.mkdir()
    path = folder / "meta--Llama.json"
    path.write_text(json.dumps(DENSE))
    (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    found = planned(str(path), "--on", "h100")
    assert found | {"model": ""} == expected | {"model": ""}
    path.write_text("{}")
    done = run(str(path), "--on", "h100")
    assert isinstance(done.exception, UnsupportedModelError)
    assert "is not a model's config" in str(done.exception)


def test_a_dense_model_by_hand(tmp_path: Path) -> None:
    found = planned(written(tmp_path, DENSE), "--on", "h100", "--context", "4096")
    assert found["parameters"] == pytest.approx(8.03e9, rel=0.001)
    table = 128256 * 4096
    assert found["parameters_used_by_a_token"] == found["parameters"] - table
    assert found["kv_bytes_per_token"] == 2 * 2 * 8 * 128 * 32
    assert not found["measured"]
    stored = form(found, "stored")
    assert stored["weight_bytes"] == 2 * found["parameters"]
    read = 2 * found["parameters_used_by_a_token"] + 4096 * found["kv_bytes_per_token"]
    seconds = read / (0.8 * 3.35e12) + 100e-6 + 32 * 10e-6
    assert stored["decode"]["1"] == pytest.approx(1 / seconds)
    assert stored["longest_context"] == 8192
    free = 0.9 * 80e9 - stored["weight_bytes"]
    assert stored["rows"] == pytest.approx(free / (4096 * found["kv_bytes_per_token"]), rel=0.02)
    assert form(found, "q8_0")["weight_bytes"] == found["parameters"] * 34 / 32
    assert form(found, "q4_k_m")["weight_bytes"] / found["parameters"] * 8 == pytest.approx(
        4.9, abs=0.1
    )
    assert found["choice"] == "stored"


def test_experts_are_read_where_they_are_chosen(tmp_path: Path) -> None:
    found = planned(written(tmp_path, EXPERTS), "--on", "h100", "--context", "1")
    assert found["parameters"] == pytest.approx(30.5e9, rel=0.01)
    expert = 3 * 2048 * 768
    unused = 48 * (128 - 8) * expert + 151936 * 2048
    assert found["parameters_used_by_a_token"] == found["parameters"] - unused
    used_by_eight = 128 * (1 - (1 - 8 / 128) ** 8)
    read = 2 * (found["parameters"] - 151936 * 2048 - 48 * (128 - used_by_eight) * expert)
    kv = 8 * found["kv_bytes_per_token"]
    seconds = (read + kv) / (0.8 * 3.35e12) + 100e-6 + 48 * 10e-6
    assert form(found, "stored")["decode"]["8"] == pytest.approx(8 / seconds, rel=1e-6)


def test_the_choice_is_the_most_precise_that_fits(tmp_path: Path) -> None:
    model = written(tmp_path, EXPERTS)
    assert planned(model, "--on", "rtx4090")["choice"] == "q4_k_m"
    assert planned(model, "--on", "2xrtx4090")["choice"] == "q8_0"
    many = planned(model, "--on", "rtx4090", "--rows", "200")
    assert many["choice"] is None
    text = run(model, "--on", "rtx4090").output
    assert re.search(r"^stored .* does not fit", text, re.MULTILINE)
    assert "--isq q4_k_m --max-model-len 4096" in text
    assert (
        "nothing leaves room for 200 of 4,096 tokens"
        in run(model, "--on", "rtx4090", "--rows", "200").output
    )


def test_windows_and_states_bound_the_cache(tmp_path: Path) -> None:
    windowed = DENSE | {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 1024,
        "max_position_embeddings": 32768,
    }
    found = planned(written(tmp_path, windowed), "--on", "l4", "--context", "32768")
    assert form(found, "stored")["rows"] > 5  # 0.5 with all tokens kept


TABLES = 2 * 128256 * 4096
"""Numbers of Llama's embedding and head."""
GROUP = {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32, "symmetric": True}}
ATTENTION = 32 * (2 * 4096 * 4096 + 2 * 1024 * 4096)


@pytest.mark.parametrize(
    ("config", "bits", "dense"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 4 + 20 / 128, 0),
        ({"quant_method": "awq", "bits": 4, "group_size": 64}, 4 + 20 / 64, 0),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8, 0),
        ({"quant_method": "fp8", "modules_to_not_convert": ["self_attn"]}, 8, ATTENTION),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4.5, 0),
        ({"quant_method": "mlx", "bits": 4, "group_size": 64}, 4.5, -TABLES),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized",
          "config_groups": {"0": GROUP}, "ignore": ["lm_head", "re:.*self_attn.*"]},
         4.5, ATTENTION),
    ],
)  # fmt: skip
def test_bits_of_quantised_weights_are_those_of_the_config(
    tmp_path: Path, config: dict[str, Any], bits: float, dense: int
) -> None:
    found = planned(written(tmp_path, DENSE | {"quantization_config": config}), "--on", "h100")
    plain = TABLES + dense
    wanted = (bits * (found["parameters"] - plain) + 16 * plain) / 8
    assert form(found, "stored")["weight_bytes"] == pytest.approx(wanted)


def test_layers_of_mixed_precision_have_their_own_bits(tmp_path: Path) -> None:
    """An entry for a module is for all within it."""
    layers = {f"model.layers.{n}.mlp": {"quant_algo": "FP8"} for n in range(32)}
    mixed = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": layers,
    }
    found = planned(written(tmp_path, DENSE | {"quantization_config": mixed}), "--on", "h100")
    halved = 32 * 3 * 4096 * 14336
    wanted = 2 * (found["parameters"] - halved) + halved
    assert form(found, "stored")["weight_bytes"] == wanted


def test_a_method_without_known_bits_is_refused(tmp_path: Path) -> None:
    quantised = DENSE | {"quantization_config": {"quant_method": "hqq"}}
    done = run(written(tmp_path, quantised), "--on", "h100")
    assert isinstance(done.exception, UnsupportedModelError)
    assert "bits" in str(done.exception)


def test_the_weight_map_of_many_experts_is_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has a line for each expert; the step is recorded once more, for the choice."""
    calls = []
    made = Decoder.weights
    monkeypatch.setattr(Decoder, "weights", lambda self: calls.append(1) or made(self))
    planned(written(tmp_path, EXPERTS), "--on", "h100")
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--on", "h10"], "did you mean 'h100'"),
        (["--on", "2000xh100"], "several devices are written as 8xh100"),
        (["--on", "l4", "--context", "8193"], "--context 8193 is more than the 8192 tokens"),
    ],
)
def test_wrong_flags(tmp_path: Path, arguments: list[str], said: str) -> None:
    done = run(written(tmp_path, DENSE), *arguments)
    assert said in str(done.exception)


@pytest.mark.parametrize("arguments", [(), ("demo",)])
def test_the_demo_model_by_its_name_and_by_none(arguments: tuple[str, ...]) -> None:
    found = planned(*arguments, "--on", "rtx4090")
    assert (found["model"], found["architecture"]) == ("demo", "Qwen3ForCausalLM")


def test_wrong_models(tmp_path: Path) -> None:
    assert "was not found" in str(run("no/such/model/at all").exception)
    assert "no installed plugin" in str(
        run(written(tmp_path, DENSE | {"architectures": ["Nobody"], "model_type": "no"})).exception
    )


def test_this_machine_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The probes are so small that they say nothing of the machine, but that it was asked."""
    pytest.importorskip("vllmx_cpu")
    monkeypatch.setattr(measured, "PROBE_BYTES", 1)
    monkeypatch.setattr(measured, "HIDDEN", 256)
    monkeypatch.setattr(fixed_costs, "ROUNDS", 1)
    monkeypatch.setattr(fixed_costs, "OUTPUT", 3)
    small = DENSE | {"num_hidden_layers": 2, "hidden_size": 1024, "intermediate_size": 1024}
    found = planned(written(tmp_path, small), "--backend", "cpu")
    assert found["measured"]
    assert found["memory_bytes"] > 0
    assert all(rate > 0 for each in found["forms"] for rate in each["decode"].values())


def test_what_is_beside_the_products_is_divided_by_layers() -> None:
    beside = [(3e-4 + 2 * 1e-4, 3e-4 + 6 * 1e-4), (1e-3, 0.9e-3), (1e-3, 9e-3), (0.5, 0.5)]
    found = fixed_costs.divided(beside, [2, 6])
    assert found.layer == pytest.approx([1e-4, 0.0, 2e-3, 0.0])
    assert found.step == pytest.approx([3e-4, 0.9e-3, 0.0, 0.5])
    assert found.seconds(10, 1) == pytest.approx(3e-4 + 10e-4)


def test_a_small_model_takes_what_was_measured_beside_its_products() -> None:
    """Where nothing but the fixed costs of a step counts, they are the whole forecast."""

    class Rates:
        def seconds_per_value(self, kind: str, bits: float, rows: float) -> float:
            return 0.0

        def seconds_per_byte(self) -> float:
            return 0.0

        def fixed_seconds(self, layers: int, rows: float) -> float:
            return layers * 1e-3 + rows * 1e-4

    registry = load_registry()
    with opened_header(registry, "demo", None) as header:
        facts = facts_of(header, registry)
    assert facts.num_layers == 6
    found = forecast(facts, facts.forms[0], Rates(), 1e9, Wish(64, 1, 0.9))
    assert found.decode[8] == pytest.approx(8 / 6.8e-3)
    assert found.prefill == pytest.approx(512 / 57.2e-3)


def test_times_between_those_that_were_measured() -> None:
    times = (1.0, 2.0, 5.0, 53.0)
    assert measured.interpolated(0.5, times) == 1.0
    assert measured.interpolated(8, times) == 2.0
    assert measured.interpolated(20, times) == 3.5
    assert measured.interpolated(1024, times) == 106.0


def test_weights_for_the_measurement_are_of_the_type_that_is_measured() -> None:
    registry = load_registry()
    model = measured._probe(registry, 1)
    block = measured.TYPES_BY_NAME["Q4_K"]
    source = measured.RandomWeights(registry, model, block)
    spec = next(spec for spec in model.weights() if spec.kind == "linear")
    part = source.part(spec.parts[0].name)
    assert part.layout == block.layout
    values = part.dequantize()
    assert values.shape == (spec.parts[0].rows, spec.cols)
    assert 0.01 < float(np.std(values)) < 0.03
