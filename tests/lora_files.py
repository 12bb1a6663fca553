"""LoRA adapters as PEFT writes them, made without PEFT."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
from vllmx_core.plan import F32
from vllmx_core.plugins.checkpoint import open_checkpoint
from vllmx_core.plugins.registry import load_registry


def weights_of(folder: Path) -> dict[str, F32]:
    """All tensors of a checkpoint."""
    source = open_checkpoint(load_registry(), folder).weights
    try:
        return {name: source.part(name).dequantize() for name in source.names()}
    finally:
        source.close()


def write_peft(
    folder: Path,
    weights: dict[str, F32],
    rank: int = 4,
    seed: int = 0,
    scale: float = 0.2,
    names: Iterable[str] = (),
    **config: Any,
) -> dict[str, F32]:
    """Writes an adapter of random changes of the matrices whose names contain one of `names`, all
    of the layers' by default. Returns the weights of the merged model, by PEFT's formula."""
    random = np.random.default_rng(seed)
    settings = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank,
        "target_modules": "all-linear", "use_rslora": False,
    } | config  # fmt: skip
    wanted = tuple(names) or ("proj.weight",)
    merged, tensors = dict(weights), {}
    factor = settings["lora_alpha"] / (rank**0.5 if settings["use_rslora"] else rank)
    for name, weight in weights.items():
        if weight.ndim != 2 or not any(each in name for each in wanted):
            continue
        is_table = "embed_tokens" in name
        rows, cols = weight.shape[::-1] if is_table else weight.shape
        a = (random.standard_normal((rank, cols)) * cols**-0.5).astype(np.float32)
        b = (random.standard_normal((rows, rank)) * scale).astype(np.float32)
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        form = "lora_embedding_{}" if is_table else "lora_{}.weight"
        tensors[f"{stem}.{form.format('A')}"] = a
        tensors[f"{stem}.{form.format('B')}"] = b
        delta = np.float32(factor) * (b @ a)
        merged[name] = weight + (delta.T if is_table else delta)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    safetensors.numpy.save_file(tensors, folder / "adapter_model.safetensors")
    return merged
