"""Quantised checkpoints by `--model-impl transformers`: the logits of transformers' own model over
the values that the checkpoint means, and those of vllmx's own model."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from tests.integration import quantizers
from tests.integration.quantised_models import CASES, write_pair

from .conftest import Runner
from .test_model_impl import Saved, runner, save, tokens

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("case", CASES)
def test_logits_of_the_dequantised_model(case: str, tmp_path: Path) -> None:
    quantised, twin = write_pair(tmp_path, CASES[case])
    oracle = transformers.AutoModelForCausalLM.from_pretrained(twin, dtype=torch.float32).eval()
    prompt = [int(token) for token in np.random.default_rng(1).integers(9, 4000, 20)]
    with torch.inference_mode():
        expected = torch.log_softmax(oracle(torch.tensor([prompt])).logits[0], -1).numpy()
    for impl in ("transformers", "vllmx"):
        running = Runner(runner(quantised, impl).loaded, expected.shape[-1])
        with closing(running.loaded):
            found = running.log_softmax(prompt, 7)
        error = np.nanmax(np.abs(found - expected))
        assert error <= 1e-4 * np.abs(expected).max(), impl


def test_mxfp4_experts(tmp_path: Path) -> None:
    """gpt-oss stores MXFP4 by output features, and plain experts by input features."""
    from safetensors.torch import load_file, save_file

    saved = save(
        "gpt_oss", tmp_path / "model", num_key_value_heads=2, head_dim=8, num_local_experts=4,
        num_experts_per_tok=2, sliding_window=11,
    )  # fmt: skip
    tensors, file = saved.oracle.state_dict(), saved.folder / "model.safetensors"
    stored = load_file(file)
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
        plain = stored.pop(name).mT.contiguous().numpy()  # (experts, out, in)
        count, rows, cols = plain.shape
        coded, meant = quantizers.mxfp4(plain.reshape(-1, cols))
        blocks, scales = (coded[key].view(np.uint8) for key in ("weight", "scale"))
        blocks, scales = (x.reshape(count, rows, cols // 32, -1) for x in (blocks, scales))
        stored[f"{name}_blocks"] = torch.from_numpy(blocks)
        stored[f"{name}_scales"] = torch.from_numpy(scales[..., 0])
        tensors[name].copy_(torch.from_numpy(meant.reshape(plain.shape)).mT)
    save_file({name: each.contiguous() for name, each in stored.items()}, file, {"format": "pt"})
    config = json.loads((saved.folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (saved.folder / "config.json").write_text(json.dumps(config))
    prompt = tokens(1, 30)
    expected = saved.log_softmax(prompt)
    for impl in ("transformers", "vllmx"):
        running = runner(saved.folder, impl)
        with closing(running.loaded):
            found = running.log_softmax(prompt, 7)
        assert np.abs(found - expected).max() <= 1e-4 * np.abs(expected).max(), impl


def test_experts_of_fp8_blocks(tmp_path: Path) -> None:
    """Files name experts one by one, and transformers' loader stacks them."""
    import safetensors.numpy

    saved = save("dots1", tmp_path / "model", n_shared_experts=1)
    file = saved.folder / "model.safetensors"
    stored, meant = safetensors.numpy.load_file(file), {}
    for name in [name for name in stored if ".experts." in name]:
        coded, meant[name] = quantizers.fp8(
            stored.pop(name), block=(16, 16), name="weight_scale_inv"
        )
        module = name.removesuffix(".weight")
        stored |= {f"{module}.{key}": each for key, each in coded.items()}
    assert len(meant) == 4 * 3  # one layer of experts
    twin = shutil.copytree(saved.folder, tmp_path / "twin")
    safetensors.numpy.save_file(
        safetensors.numpy.load_file(file) | meant, twin / file.name, {"format": "pt"}
    )
    oracle = transformers.AutoModelForCausalLM.from_pretrained(twin, dtype=torch.float32).eval()
    safetensors.numpy.save_file(stored, file, {"format": "pt"})
    config = json.loads((saved.folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    (saved.folder / "config.json").write_text(json.dumps(config))
    prompt = tokens(1, 30)
    expected = Saved(twin, oracle).log_softmax(prompt)
    for impl in ("transformers", "vllmx"):
        running = runner(saved.folder, impl)
        with closing(running.loaded):
            found = running.log_softmax(prompt, 7)
        assert np.abs(found - expected).max() <= 1e-4 * np.abs(expected).max(), impl
