"""Families with experts in each format that they are published in, and in each type of `--isq`: the
log-probabilities are those of the values that the tensors mean, in float32."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from vllmx_core.errors import WeightFormatError
from vllmx_core.model import Model
from vllmx_core.plan import F32
from vllmx_core.plugins.checkpoint import Checkpoint, build_model, open_checkpoint, quantise_in_situ
from vllmx_core.plugins.specs import ModelSpec
from vllmx_core.weights.map import assemble
from vllmx_core.weights.part import WeightSource
from vllmx_cpu.backend import CpuBackend
from vllmx_testing.harness import all_logprobs, load_options
from vllmx_testing.model_suite import random_weights
from vllmx_testing.plans import Row, make_plan
from vllmx_testing.synthetic import ArraySource

from . import quantizers
from .expert_families import COUNT, FAMILIES, REGISTRY, original
from .quantizers import Quantised, ct_config

safetensors = pytest.importorskip("safetensors.numpy")
LIMITS = {"max_num_seqs": 1, "num_kv_blocks": 8, "num_threads": 1}
TOKENS = [int(token) for token in np.random.default_rng(3).integers(0, 61, 24)]
IGNORE = ["lm_head", "re:.*mlp.gate$", "re:.*block_sparse_moe.gate$", "re:.*router.*"]


@dataclass(frozen=True)
class Format:
    quantise: Any
    config: dict[str, Any]


def static_fp8(weight: F32) -> Quantised:
    tensors, values = quantizers.fp8(weight, block=weight.shape, name="weight_scale", whole=True)
    return tensors | {"input_scale": np.array(0.02, np.float32)}, values


FORMATS = {
    "gptq": Format(
        partial(quantizers.gptq, bits=4, group_size=32, shuffled=True, v2=False),
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": False},
    ),
    "awq": Format(
        partial(quantizers.awq, group_size=32),
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm",
         "modules_to_not_convert": ["gate"]},
    ),
    "fp8 tensor": Format(
        static_fp8, {"quant_method": "fp8", "activation_scheme": "static", "fmt": "e4m3"}
    ),
    "fp8 blocks": Format(
        partial(quantizers.fp8, block=(128, 128), name="weight_scale_inv"),
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
         "weight_block_size": [128, 128], "modules_to_not_convert": ["gate", "lm_head"]},
    ),
    "ct int4": Format(
        partial(quantizers.pack_quantized, bits=4, group_size=32),
        ct_config({"num_bits": 4, "group_size": 32, "strategy": "group", "symmetric": False})
        | {"ignore": IGNORE, "format": "pack-quantized"},
    ),
    "ct int8": Format(
        quantizers.int8,
        ct_config({"num_bits": 8, "strategy": "channel"}, {"num_bits": 8, "dynamic": True})
        | {"ignore": IGNORE, "format": "int-quantized"},
    ),
    "ct fp8": Format(
        partial(quantizers.fp8, block=(1, 4096), name="weight_scale"),
        ct_config({"num_bits": 8, "type": "float", "strategy": "channel"})
        | {"ignore": IGNORE, "format": "float-quantized"},
    ),
    "nvfp4": Format(
        quantizers.nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
    ),
}  # fmt: skip


def write(folder: Path, tensors: Mapping[str, Any], config: Mapping[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    arrays = {name: np.asarray(array, order="C") for name, array in tensors.items()}
    safetensors.save_file(arrays, folder / "model.safetensors")
    return folder


def published(folder: Path, family: str, form: Format) -> tuple[Path, dict[str, F32]]:
    """The checkpoint, and the original's tensors with the values that it means."""
    kind = FAMILIES[family]
    meant = {name: array.copy() for name, array in original(family).items()}
    tensors: dict[str, Any] = {}
    for name, view in kind.views(meant):
        if not kind.is_quantised(name, view):
            tensors[name] = view
            continue
        made, view[...] = form.quantise(np.ascontiguousarray(view))
        module = name.removesuffix(".weight")
        tensors |= {f"{module}.{suffix}": value for suffix, value in made.items()}
    return write(folder, tensors, kind.config | {"quantization_config": form.config}), meant


def logprobs(model: Model, source: WeightSource, dtype: str = "f32") -> F32:
    """(T, V), the text fed at once."""
    state = 1 if model.shape.states else None
    plan = make_plan([Row(TOKENS, 0, [2, 0, 1], "all", state)], 16)
    loaded = CpuBackend().load(model, source, load_options(dtype, LIMITS))
    try:
        return all_logprobs(loaded, plan, model.shape.vocab_size)
    finally:
        loaded.close()


def check_near(model: Model, source: WeightSource, wanted: F32) -> None:
    """Most rows are near where matrices are multiplied as they are stored, by activations of 8 or
    16 bits: a row that asks another expert for that is not."""
    found = logprobs(model, source, "bf16")
    errors = np.sqrt(np.square(found - wanted).mean(1)) / wanted.std()
    assert np.median(errors) < 0.1


def model_of(family: str) -> Model:
    config = FAMILIES[family].config
    model: Model = REGISTRY.model_for(config).load()(config)
    return model


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_is_the_values_that_it_means(tmp_path: Path, family: str, form: str) -> None:
    folder, meant = published(tmp_path, family, FORMATS[form])
    checkpoint = open_checkpoint(REGISTRY, folder)
    model = build_model(REGISTRY, checkpoint)
    wanted = logprobs(model_of(family), ArraySource(meant))
    found = logprobs(model, checkpoint.weights)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4)
    check_near(model, checkpoint.weights, wanted)
    checkpoint.weights.close()


def in_situ(family: str, name: str) -> WeightSource:
    config, source = FAMILIES[family].config, ArraySource(original(family))
    checkpoint = Checkpoint(Path("model"), config, source)
    return quantise_in_situ(REGISTRY, checkpoint, model_of(family), name).weights


@pytest.mark.parametrize("name", ["q4_k_m", "q8_0", "int8", "fp8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_in_situ_is_the_values_that_blocks_mean(family: str, name: str) -> None:
    source = in_situ(family, name)
    meant = {one: source.part(one).dequantize() for one in source.names()}
    before = original(family) | dict(FAMILIES[family].views(original(family)))
    stacks = [one for one in meant if re.search(r"experts.*[jt]$|_linear", one)]
    assert len(stacks) >= 2
    for one in stacks:
        assert (meant[one] != before[one]).any(), one
    wanted = logprobs(model_of(family), ArraySource(meant))
    check_near(model_of(family), source, wanted)


def test_in_situ_of_stacks_whose_shapes_say_how_they_lie() -> None:
    """Qwen3-VL's are published with their input features first."""
    text = FAMILIES["qwen3-moe"].config | {"num_hidden_layers": 1}
    config = {"architectures": ["Qwen3VLMoeForConditionalGeneration"], "text_config": text}
    model: Model = REGISTRY.model_for(config).load()(config)
    each = random_weights(model)
    arrays = {name: each.part(name).dequantize() for name in each.names()}
    module = "model.layers.0.mlp.experts"
    experts = [
        [
            arrays.pop(f"{module}.{expert}.{name}.weight").T
            for name in ("gate_proj", "up_proj", "down_proj")
        ]
        for expert in range(COUNT)
    ]
    arrays[f"{module}.gate_up_proj"] = np.stack([np.hstack(one[:2]) for one in experts])
    arrays[f"{module}.down_proj"] = np.stack([one[2] for one in experts])
    stacked, apart = (
        quantise_in_situ(REGISTRY, Checkpoint(Path("model"), config, source), model, "q4_k_m")
        for source in (ArraySource(arrays), each)
    )
    for spec in model.weights():
        values, wanted = (assemble(spec, one.weights)[0] for one in (stacked, apart))
        np.testing.assert_array_equal(values, wanted, err_msg=spec.name)


def test_the_record_has_these_families() -> None:
    specs = [spec for spec in REGISTRY.all(ModelSpec) if "experts" in spec.checked]
    names = {name for spec in specs for name in spec.architectures}
    assert names == {family.config["architectures"][0] for family in FAMILIES.values()}


def stacked_fp8(stored: dict[str, Any]) -> dict[str, F32]:
    """Puts float8 experts of all layers in place of those of a Granite, with a scale for each row,
    and returns the values that they mean."""
    meant = dict(original("granite-moe"))
    for name in (one for one in stored.keys() & meant.keys() if "_linear" in one):
        module, count = name.removesuffix(".weight"), len(meant[name])
        flat = meant[name].reshape(-1, meant[name].shape[2])
        made, values = quantizers.fp8(flat, block=(1, 4096), name="weight_scale")
        stored[name] = made["weight"].reshape(meant[name].shape)
        stored[f"{module}.weight_scale"] = made["weight_scale"].reshape(count, -1, 1)
        meant[name] = values.reshape(meant[name].shape)
    return meant


def test_float8_stacks_have_a_scale_for_each_row(tmp_path: Path) -> None:
    stored: dict[str, Any] = dict(original("granite-moe"))
    meant = stacked_fp8(stored)
    config = FAMILIES["granite-moe"].config | {"quantization_config": FORMATS["ct fp8"].config}
    checkpoint = open_checkpoint(REGISTRY, write(tmp_path, stored, config))
    model = build_model(REGISTRY, checkpoint)
    found = logprobs(model, checkpoint.weights)
    wanted = logprobs(model_of("granite-moe"), ArraySource(meant))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4)
    name = "model.layers.1.block_sparse_moe.input_linear.weight"
    np.testing.assert_array_equal(checkpoint.weights.part(name).dequantize(1, 3), meant[name][1:])
    checkpoint.weights.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_scale": np.ones((3, 1), np.float32)}, r"input_linear\.weight_scale' has shape"),
        ({"weight_scale": None}, r"input_linear\.weight' is stored as f8e4m3, but"),
    ],
)
def test_damaged_float8_stacks(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    stored: dict[str, Any] = dict(original("granite-moe"))
    stacked_fp8(stored)
    module = "model.layers.0.block_sparse_moe.input_linear"
    stored |= {f"{module}.{key}": value for key, value in change.items()}
    stored = {name: value for name, value in stored.items() if value is not None}
    config = FAMILIES["granite-moe"].config | {"quantization_config": FORMATS["ct fp8"].config}
    check_refused(tmp_path, stored, config, message)


def test_float8_stacks_without_a_module_are_refused(tmp_path: Path) -> None:
    """Transformers keeps such stacks in memory."""
    stored: dict[str, Any] = dict(original("gemma4-moe"))
    name = "model.layers.0.experts.down_proj"
    stored[name] = stored[name].astype(ml_dtypes.float8_e4m3fn)
    stored[f"{name}_scale_inv"] = np.ones((3, 2, 1), np.float32)
    config = FAMILIES["gemma4-moe"].config | {"quantization_config": FORMATS["fp8 blocks"].config}
    check_refused(tmp_path, stored, config, r"experts\.down_proj' is stored as f8e4m3, but")


def check_refused(folder: Path, stored: dict[str, Any], config: Any, message: str) -> None:
    checkpoint = open_checkpoint(REGISTRY, write(folder, stored, config))
    with pytest.raises(WeightFormatError, match=message):
        logprobs(build_model(REGISTRY, checkpoint), checkpoint.weights)
    checkpoint.weights.close()
