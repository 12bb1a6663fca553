"""Hybrids of recurrent layers and attention written to GGUF files: tensor by tensor what the
converter of llama.cpp writes of the same checkpoint, and the same model when it is read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from vllmx_core.errors import UnsupportedModelError
from vllmx_core.plugins.checkpoint import build_model, open_checkpoint
from vllmx_core.plugins.registry import Registry, load_registry
from vllmx_models.formats.gguf.file import GGUFFile
from vllmx_models.formats.gguf.quantize.convert import quantize

from . import hybrid_families as hybrids
from . import test_recurrent as qwen
from .hybrid_writers import written
from .test_written_families import saved, tensors_of

Arrays = dict[str, np.ndarray]
_SAVED: dict[str, Any] = {"vocab_size": 4096, "torch_dtype": "float32"}
_SILENT = (".rope.freq_base", ".expert_shared_feed_forward_length")
"""Keys that the converter writes of what a model does not have, too."""
_TURNS = {"rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]}}
_OF_EXPERTS = {"architectures": ["Qwen3_5MoeForCausalLM"]}
QWEN = ("qwen35", "qwen35moe")
READ_ONLY = (
    "jamba", "mamba", "mamba2", "falcon-mamba", "falcon-h1", "falcon-h1, no norm", "kimi-linear",
)  # fmt: skip
CASES: dict[str, Mapping[str, Any]] = {
    **{
        name: family.config | _SAVED
        for name, family in hybrids.FAMILIES.items()
        if name not in ("qwen3next of old", "qwen3next, predicting", *READ_ONLY)
    },
    "qwen35": qwen.CONFIG | _TURNS | _SAVED | {"architectures": ["Qwen3_5ForCausalLM"]},
    "qwen35moe": qwen.CONFIG
    | qwen.MOE
    | _TURNS
    | _SAVED
    | {"architectures": ["Qwen3_5MoeForCausalLM"]},
}


@pytest.fixture(scope="module")
def registry() -> Registry:
    return load_registry()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    top = tmp_path_factory.mktemp("hybrids")
    return {name: saved(top / name, config, tensors_of(config)) for name, config in CASES.items()}


def as_the_converter(registry: Registry, name: str, folder: Path, path: Path) -> None:
    """What llama.cpp makes of a checkpoint."""
    checkpoint, config = open_checkpoint(registry, folder), dict(CASES[name])
    if name in QWEN:
        qwen.written(path, name, config, checkpoint.weights)
    else:
        arrays = {one: checkpoint.weights.part(one).dequantize() for one in _names(checkpoint)}
        family = hybrids.FAMILIES[name]
        written(path, family, arrays, GGMLQuantizationType.F32)
    checkpoint.weights.close()


def _names(checkpoint: Any) -> list[str]:
    return sorted(checkpoint.weights.names())


def contents(path: Path) -> tuple[dict[str, Any], Arrays]:
    """Metadata, and tensors, which all are F32."""
    file = GGUFFile(path)
    try:
        return dict(file.metadata), {
            name: file.data(name).view("f4").reshape(info.shape).copy()
            for name, info in file.tensors.items()
        }
    finally:
        file.close()


def logits(registry: Registry, path: Path) -> np.ndarray:
    checkpoint = open_checkpoint(registry, path)
    try:
        return qwen.logits(build_model(registry, checkpoint), checkpoint.weights)
    finally:
        checkpoint.weights.close()


@pytest.mark.parametrize("name", CASES)
def test_a_file_is_what_the_converter_writes(
    registry: Registry, name: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    theirs, ours = tmp_path / "theirs.gguf", tmp_path / "ours.gguf"
    as_the_converter(registry, name, folders[name], theirs)
    quantize(registry, folders[name], ours, "f32", threads=1)
    (wanted_keys, wanted), (keys, found) = contents(theirs), contents(ours)
    assert found.keys() == {_read_by_llama(name, key) for key in wanted}
    for key, values in wanted.items():
        np.testing.assert_array_equal(found[_read_by_llama(name, key)], values, err_msg=key)
    for key, value in wanted_keys.items():
        if key.endswith(_SILENT) and key not in keys:
            continue
        one, other = np.asarray(keys[key]), np.asarray(value)
        many = one.reshape(-1) if one.ndim else np.full(other.size, one)
        assert np.array_equal(many, np.broadcast_to(other, many.shape)), key


def _read_by_llama(name: str, key: str) -> str:
    """The gguf package has a name for LFM2's last norm that llama.cpp does not read."""
    known = {"output_norm.weight": "token_embd_norm.weight"} if name.startswith("lfm2") else {}
    return known.get(key, key)


@pytest.mark.parametrize("name", CASES)
def test_a_file_is_the_model(
    registry: Registry, name: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    wanted = logits(registry, folders[name])
    first, second = tmp_path / "first.gguf", tmp_path / "second.gguf"
    quantize(registry, folders[name], first, "f32", threads=1)
    np.testing.assert_allclose(
        logits(registry, first), wanted, rtol=0, atol=1e-5 * np.abs(wanted).max()
    )
    quantize(registry, folders[name], first, "q8_0", threads=1)
    near = logits(registry, first)
    assert 0 < np.median(np.abs(near - wanted)) < 0.02 * np.abs(wanted).max()
    quantize(registry, first, second, "f32", threads=1)  # out of a file, as it lies there
    np.testing.assert_allclose(
        logits(registry, second), near, rtol=0, atol=1e-5 * np.abs(near).max()
    )


def test_what_a_file_cannot_state_is_refused(registry: Registry, tmp_path: Path) -> None:
    granite, qwen35 = CASES["granitehybrid, dense, rope"], CASES["qwen35"]
    changes: dict[str, Mapping[str, Any]] = {
        "JambaForCausalLM cannot be written": hybrids.FAMILIES["jamba"].config | _SAVED,
        r"without a layer of Mamba-2": granite | {"layer_types": ["attention"] * 4},
        r"without a layer of delta nets": qwen35 | {"layer_types": ["full_attention"] * 4},
        r"cannot state layers\[0\]\.mixer\.dt_min = 0\.5": granite
        | {"time_step_limit": [0.5, 2.0]},
        r"cannot state layers\[3\]\.mixer": qwen35
        | {"layer_types": ["linear_attention", "full_attention", *["linear_attention"] * 2]},
    }
    for number, (message, config) in enumerate(changes.items()):
        folder = saved(tmp_path / str(number), config, tensors_of(config))
        with pytest.raises(UnsupportedModelError, match=message):
            quantize(registry, folder, tmp_path / "m.gguf", "f32", threads=1)


def test_a_published_checkpoint_of_text_and_images(
    registry: Registry, folders: dict[str, Path], tmp_path: Path
) -> None:
    """The text is a module of its own, experts are stacked, layers of prediction and a tower stand
    beside."""
    config, tensors = dict(CASES["qwen35moe"]), tensors_of(CASES["qwen35moe"])
    published: Arrays = {"mtp.fc.weight": np.ones((2, 2), np.float32)}
    published["model.visual.patch_embed.proj.weight"] = np.ones((2, 2), np.float32)
    stacks: dict[str, list[np.ndarray]] = {}
    for name, values in tensors.items():
        before, has, rest = name.replace("model.", "model.language_model.", 1).partition(
            ".experts."
        )
        if not has:
            published[before if name != "lm_head.weight" else name] = values
        else:
            stacks.setdefault(f"{before}.{rest.split('.')[1]}", []).append(values)
    for name in [one for one in stacks if one.endswith("gate_proj")]:
        module = name.removesuffix(".gate_proj")
        gate, up, down = (
            np.stack(stacks[f"{module}.{one}_proj"]) for one in ("gate", "up", "down")
        )
        published[f"{module}.experts.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        published[f"{module}.experts.down_proj"] = down
    whole = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "text_config": config}
    folder = saved(tmp_path / "m", whole, published)
    for source, path in ((folder, "one.gguf"), (folders["qwen35moe"], "other.gguf")):
        quantize(registry, source, tmp_path / path, "f32", threads=1)
    (keys, found), (others, wanted) = (
        contents(tmp_path / f"{one}.gguf") for one in ("one", "other")
    )
    assert found.keys() == wanted.keys()
    for key, values in wanted.items():
        np.testing.assert_array_equal(found[key], values, err_msg=key)
    assert keys["general.architecture"] == others["general.architecture"] == "qwen35moe"
