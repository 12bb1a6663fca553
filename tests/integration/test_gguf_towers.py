"""Towers in GGUF files of their own, before text models in others: the logits are those of the
whole model by transformers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from vllmx_core.backend import LoadOptions
from vllmx_core.config import EngineConfig
from vllmx_core.errors import (
    ConfigError,
    ModelNotFoundError,
    UnsupportedModelError,
    WeightFormatError,
)
from vllmx_core.plugins.checkpoint import Checkpoint, open_checkpoint, with_tower
from vllmx_core.plugins.registry import load_registry
from vllmx_core.plugins.specs import BackendSpec
from vllmx_core.reference.backend import ReferenceBackend
from vllmx_engine.core.found_model import find_model
from vllmx_engine.llm import LLM
from vllmx_testing.plans import sampling_rows

from ..null.gguf.models import TYPES, of_type, write_model  # noqa: TID252 - no package to name
from ..null.images.pictures import data_url, picture, stored  # noqa: TID252
from .image_files import FILES, write_text, write_tower
from .image_models import FAMILIES, PROCESSOR, VARIANTS, Family, save
from .test_image_engine import GREEDY
from .test_image_models import plans, prompt
from .test_rank_hosts import make_key, rank_host

REGISTRY = load_registry()
SIZES = [(4, 6, 0), (8, 2, 1)]


@pytest.fixture(scope="module", params=FILES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def oracle(name: str) -> Any:
    return FAMILIES[name].make()


@pytest.fixture(scope="module")
def text(name: str, oracle: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "model-Q8_0.gguf", name, oracle)


def opened(text: Path, tower: Path | None) -> Checkpoint:
    checkpoint = open_checkpoint(REGISTRY, text)
    try:
        return with_tower(REGISTRY, checkpoint, tower)
    except BaseException:
        checkpoint.weights.close()
        raise


def ids_of(family: Family, images: list[Any]) -> list[int]:
    return [*prompt(images, family.merge, family.breaks)[0], 11, 12]


def logits(checkpoint: Checkpoint, family: Family, images: list[Any], backend: str) -> np.ndarray:
    """The logits that vllmx computes of a prompt with the images."""
    model = REGISTRY.model_for(checkpoint.config).load()(checkpoint.config)
    options = LoadOptions(dtype="f32", kv_cache_dtype="f32", max_model_len=128, num_kv_blocks=16)
    spec = REGISTRY.find(BackendSpec, backend)
    assert spec is not None
    loaded = spec.load()().load(model, checkpoint.weights, options)
    try:
        tower, (plan,) = plans(model, ids_of(family, images), images, [64])
        loaded.encode(tower)
        rows = sampling_rows(plan.num_logit_rows)
        rows.whole = np.arange(plan.num_logit_rows, dtype=np.int32)
        rows.num_logprobs[:] = 0
        rows.max_logprobs = 0
        found: np.ndarray = loaded.step(plan, rows).result().logits
        return found
    finally:
        loaded.close()
        checkpoint.weights.close()


def check(family: Family, oracle: Any, checkpoint: Checkpoint, backend: str = "numpy") -> None:
    images = [family.image(*size) for size in SIZES]
    wanted = family.logits(oracle, ids_of(family, images), images)
    found = logits(checkpoint, family, images, backend)
    assert np.abs(found - wanted).max() / np.abs(wanted).max() < 2e-5


def rounded(oracle: Any, kind: str) -> Any:
    """The model with the tower's matrices as a type of the file has them."""
    choose = of_type(TYPES[kind])
    for key, weight in oracle.named_parameters():
        if "visual" not in key:
            continue
        values = weight.detach().numpy()
        flat = values.transpose(2, 0, 1, 3, 4) if values.ndim == 5 else values  # two frames
        of = choose(key, flat)
        back = gguf.dequantize(gguf.quantize(flat, of), of).reshape(flat.shape)
        back = back.transpose(1, 2, 0, 3, 4) if values.ndim == 5 else back
        weight.data = torch.from_numpy(np.ascontiguousarray(back))
    return oracle


def test_both_files_are_the_model(name: str, oracle: Any, text: Path) -> None:
    """The tower beside the model is found, whatever else lies there."""
    tower = write_tower(text.parent / "mmproj-F32.gguf", name, oracle)
    shutil.copy(tower, text.parent / "mmproj-F16.gguf")
    check(FAMILIES[name], oracle, opened(text, None))
    (text.parent / "mmproj-F16.gguf").unlink()
    tower.unlink()
    assert "vision_config" not in opened(text, None).config


def test_the_hub_is_asked_for_towers_of_models_that_have_one(
    text: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []
    monkeypatch.setattr("vllmx_models.formats.gguf.mmproj.hub_tower", asked.append)
    opened(text, None).weights.close()
    assert bool(asked) is (name not in ("idefics3", "internvl", "mistral3"))


TYPED = [
    ("qwen3_vl", "F16", "cpu"),
    ("qwen3_vl", "Q8_0", "numpy"),
    ("qwen2_5_vl", "BF16", "numpy"),
    ("qwen2_5_vl", "Q8_0", "torch"),
]


@pytest.mark.parametrize(("name", "kind", "backend"), TYPED, indirect=["name"])
def test_types(name: str, text: Path, kind: str, backend: str, tmp_path: Path) -> None:
    """Values that a type rounds are those of the file."""
    oracle = FAMILIES[name].make()
    tower = write_tower(tmp_path / "tower.gguf", name, oracle, kind)
    check(FAMILIES[name], rounded(oracle, kind), opened(text, tower), backend)


# --- what does not fit ----------------------------------------------------------------------------
@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Any]:
    """Qwen3-VL's text and tower in folders of their own, and the model."""
    oracle, folder = FAMILIES["qwen3_vl"].make(), tmp_path_factory.mktemp("pair")
    (folder / "text").mkdir()
    text = write_text(folder / "text" / "model.gguf", "qwen3_vl", oracle)
    return text, write_tower(folder / "tower.gguf", "qwen3_vl", oracle), oracle


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "width": (
        {"clip.vision.projection_dim": 64},
        ConfigError,
        "makes features of 64 numbers.*takes 48.*published",
    ),
    "unknown type": (
        {"clip.projector_type": "ldpv2"},
        UnsupportedModelError,
        "'ldpv2'.*known: qwen3vl_merger",
    ),
    "another family's": (
        {"clip.projector_type": "gemma3"},
        ConfigError,
        "'gemma3'.*takes 'qwen3vl_merger'",
    ),
    "other layers": (
        {"clip.vision.is_deepstack_layers": [True, False, False]},
        ConfigError,
        "for 1 layers.*takes them in 2",
    ),
    "no depth": ({"clip.vision.block_count": 0}, WeightFormatError, "block_count"),
    "a lie": ({"clip.vision.block_count": 2}, WeightFormatError, "is_deepstack_layers"),
    "colours": ({"clip.vision.image_mean": [1.0]}, WeightFormatError, "three numbers"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_towers_that_do_not_fit(pair: tuple[Path, Path, Any], wrong: str, tmp_path: Path) -> None:
    text, _, oracle = pair
    keys, kind, message = WRONG[wrong]
    tower = write_tower(tmp_path / "tower.gguf", "qwen3_vl", oracle, **keys)
    with pytest.raises(kind, match=message):
        opened(text, tower)


def test_a_tower_beside_the_model_that_does_not_fit_leaves_the_text(
    pair: tuple[Path, Path, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = Path(shutil.copy(pair[0], tmp_path))
    write_tower(tmp_path / "mmproj.gguf", "qwen3_vl", pair[2], **{"clip.vision.projection_dim": 64})
    checkpoint = opened(text, None)
    checkpoint.weights.close()
    assert "vision_config" not in checkpoint.config
    assert "64 numbers" in caplog.text


def test_towers_of_several_models_beside_the_model_are_a_choice(
    pair: tuple[Path, Path, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = Path(shutil.copy(pair[0], tmp_path))
    for name in ("mmproj-one-F16.gguf", "mmproj-two-F16.gguf"):
        shutil.copy(pair[1], tmp_path / name)
    opened(text, None).weights.close()
    assert "name one of them by --mmproj" in caplog.text


@pytest.mark.parametrize(
    "missing", ["v.blk.1.attn_qkv.weight", "v.patch_embd.weight.1", "mm.2.bias"]
)
def test_a_missing_tensor_is_named(
    pair: tuple[Path, Path, Any], missing: str, tmp_path: Path
) -> None:
    tower = write_tower(tmp_path / "tower.gguf", "qwen3_vl", pair[2], without=missing)
    checkpoint = opened(pair[0], tower)
    model = REGISTRY.model_for(checkpoint.config).load()(checkpoint.config)
    with pytest.raises(WeightFormatError, match=rf"{missing}.*download it again"):
        ReferenceBackend().load(model, checkpoint.weights, LoadOptions(max_model_len=16))
    checkpoint.weights.close()


def test_bounds_of_clipped_layers(tmp_path: Path) -> None:
    """Each is read, and one that is missing is named."""
    family = VARIANTS["gemma4, clipped"]
    oracle = family.make()
    text = write_text(tmp_path / "model.gguf", "gemma4", oracle)
    tower = write_tower(tmp_path / "tower.gguf", "gemma4", oracle)
    check(family, oracle, opened(text, tower), "cpu")
    lost = "v.blk.1.ffn_up.output_min"
    tower = write_tower(tmp_path / "lacking.gguf", "gemma4", oracle, without=lost)
    with pytest.raises(WeightFormatError, match=rf"{lost}.*download it again"):
        check(family, oracle, opened(text, tower))


def test_other_files_are_no_towers(pair: tuple[Path, Path, Any], tmp_path: Path) -> None:
    text, tower, oracle = pair
    with pytest.raises(ConfigError, match=r"'qwen3vl'.*begins with mmproj"):
        opened(text, text)
    with pytest.raises(ModelNotFoundError, match=r"is not a file"):
        opened(text, tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"general.type 'mmproj'"):
        open_checkpoint(REGISTRY, tower)
    folder = save(oracle, tmp_path)
    with pytest.raises(ConfigError, match=r"in it where it has one; leave --mmproj out"):
        opened(folder, tower)
    with pytest.raises(ModelNotFoundError, match=r"mmproj 'nowhere' was not found"):
        find_model(EngineConfig(model=str(text), mmproj="nowhere"))
    assert (
        find_model(EngineConfig(model=str(text), mmproj="nowhere", limit_images=0)).mmproj is None
    )


def test_a_model_of_text_alone_takes_no_tower(pair: tuple[Path, Path, Any], tmp_path: Path) -> None:
    config = {
        "architectures": ["SmolLM3ForCausalLM"],
        "vocab_size": 97,
        "num_hidden_layers": 1,
        "hidden_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 72,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
    }
    tensors = {"token_embd.weight": np.ones((97, 48), np.float32)}
    text = write_model(tmp_path / "text.gguf", config, tensors, of_type(TYPES["F32"]))
    with pytest.raises(ConfigError, match=r"SmolLM3ForCausalLM.*text alone.*leave --mmproj out"):
        opened(text, pair[1])


# --- the public interface -------------------------------------------------------------------------
def test_a_chat_is_answered_as_by_the_whole_model(
    pair: tuple[Path, Path, Any], tmp_path: Path
) -> None:
    text, _, oracle = pair
    size = PROCESSOR["size"]
    assert isinstance(size, dict)
    tower = write_tower(
        tmp_path / "tower.gguf",
        "qwen3_vl",
        oracle,
        **{
            "clip.vision.image_min_pixels": size["shortest_edge"],
            "clip.vision.image_max_pixels": size["longest_edge"],
        },
    )
    folder = save(oracle, tmp_path / "folder")
    image = {"type": "image_url", "image_url": {"url": data_url(stored(picture(40, 24, seed=1)))}}
    chat = [{"role": "user", "content": [{"type": "text", "text": "w5"}, image]}]
    given: dict[str, Any] = {
        "dtype": "float32",
        "kv_cache_dtype": "f32",
        "num_kv_blocks": 32,
        "backend": "cpu",
        "max_model_len": 200,
        "tokenizer": str(folder),
    }
    answers = []
    for model, options in ((folder, {}), (text, {"mmproj": str(tower)})):
        with LLM(str(model), **given, **options) as llm:
            output = llm.chat(chat, GREEDY, use_tqdm=False)[0]
            answers.append((output.prompt_token_ids, output.outputs[0].token_ids))
    assert answers[0] == answers[1]


def test_another_host_has_the_tower_elsewhere(pair: tuple[Path, Path, Any], tmp_path: Path) -> None:
    """Several ranks read text alone, each with the checkpoint that both files are."""
    text, tower, oracle = pair
    key = make_key(tmp_path / "key", b"k")
    (tmp_path / "there").mkdir()
    there = [shutil.copy(file, tmp_path / "there") for file in (text, tower)]
    folder = save(oracle, tmp_path / "folder")
    given: dict[str, Any] = {
        "dtype": "float32",
        "num_kv_blocks": 32,
        "backend": "cpu",
        "max_model_len": 200,
        "num_threads": 1,
        "tokenizer": str(folder),
        "mmproj": str(tower),
    }
    found = []
    with LLM(str(text), **given) as llm:
        found.append(llm.generate(["w5 w6 w7"], GREEDY, use_tqdm=False)[0].outputs[0].token_ids)
    with rank_host(key, str(there[0]), more=("--mmproj", str(there[1]))) as (place, _):
        hosts = {"tensor_parallel_size": 2, "rank_hosts": place, "rank_key_file": str(key)}
        with LLM(str(text), **given, **hosts) as llm:
            found.append(llm.generate(["w5 w6 w7"], GREEDY, use_tqdm=False)[0].outputs[0].token_ids)
    assert found[0] == found[1]
