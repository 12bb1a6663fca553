"""LoRA adapters in the folders of PEFT: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from vllmx_core.adapters import Adapter, LowRank, module_key
from vllmx_core.errors import AdapterError, ModelNotFoundError, shown
from vllmx_core.plan import F32
from vllmx_core.plugins.registry import Registry
from vllmx_core.system.json_files import read_json_object

from vllmx_models.formats.safetensors_file import SafetensorsFile
from vllmx_models.quantization.patterns import Pattern

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_MERGE = "merge it into its base model with PEFT's merge_and_unload and serve the result"
_HALVES = {"lora_A": "a", "lora_B": "b", "lora_embedding_A": "a", "lora_embedding_B": "b"}
_OTHER_MATHS = ("use_dora", "use_qalora", "alora_invocation_tokens", "layer_replication",
                "arrow_config", "trainable_token_indices")  # fmt: skip
"""Settings that give a LoRA another formula."""
_CHANGED_BASE = ("pissa", "olora", "corda", "loftq")
"""Initialisations that change the base model's weights too."""


def open_adapter(path: Path, registry: Registry, config: Mapping[str, Any]) -> Adapter:
    """Reads an adapter whole, so that its files may change or go afterwards.

    Args:
        config: the base model's, unused: the names and forms are the base checkpoint's.

    Raises:
        AdapterError: it is of a kind that is not served, or damaged.
        ModelNotFoundError, WeightFormatError: a file is missing or damaged.
    """
    folder = path if path.is_dir() else path.parent
    settings = read_json_object(folder / CONFIG)
    if settings is None:
        raise AdapterError(f"{folder} has no {CONFIG}: give the folder of a PEFT adapter")
    _check(settings, folder)
    if not (folder / WEIGHTS).is_file():
        raise ModelNotFoundError(
            f"{folder} has no {WEIGHTS}: save the adapter with safe_serialization", param="lora"
        )
    file = SafetensorsFile(folder / WEIGHTS)
    try:
        halves: dict[str, dict[str, F32]] = {}
        for name in file.entries:
            if name.endswith(".base_layer.weight"):
                continue  # a copy of the base's table, which PEFT writes with its adapter
            module, half = _split(name, folder)
            halves.setdefault(module, {})[half] = file.tensor(name).to_f32()
    finally:
        file.close()
    halves = {_parameter(name, halves, settings): pair for name, pair in halves.items()}
    scales = _Scales(settings, folder)
    return Adapter(
        {module_key(name): low_rank(name, pair, scales, folder) for name, pair in halves.items()}
    )


def _parameter(module: str, modules: Collection[str], settings: Mapping[str, Any]) -> str:
    """The tensor of all experts that a change of experts is of: PEFT wraps the module of both, the
    first tensor inside."""
    inner = ".experts.base_layer"
    if module.endswith(inner):
        return f"{module.removesuffix(inner)}.experts.gate_up_proj"
    if not module.endswith(".experts"):
        return module
    both = f"{module}.base_layer" in modules
    is_first = not both and "gate_up_proj" in str(settings.get("target_parameters"))
    return f"{module}.{'gate_up_proj' if is_first else 'down_proj'}"


def low_rank(name: str, pair: Mapping[str, F32], scales: Any, source: Path) -> LowRank:
    """The change of a module, of its two halves. `scales(name, rank)` is the factor of B A. Raises
    AdapterError where one is missing, they do not fit together or are not finite."""
    if pair.keys() != {"a", "b"}:
        raise AdapterError(f"{source} has one half of the change of {name!r}: it is damaged")
    a, b = pair["a"], pair["b"]
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1] or not a.shape[0]:
        raise AdapterError(
            f"{source}: the change of {name!r} has the shapes {list(a.shape)} and {list(b.shape)},"
            " which do not fit together: it is damaged"
        )
    scale = np.float32(scales(name, a.shape[0]))
    b = b * scale
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise AdapterError(f"{source}: the change of {name!r} is not finite: it is damaged")
    return LowRank(np.ascontiguousarray(a, np.float32), np.ascontiguousarray(b, np.float32))


class _Scales:
    """The factor of each module: alpha / r, or alpha / sqrt(r) (rsLoRA, arXiv:2312.03732)."""

    def __init__(self, settings: Mapping[str, Any], folder: Path) -> None:
        self._alpha = _number(settings.get("lora_alpha", 8), "lora_alpha", folder)
        self._rooted = bool(settings.get("use_rslora"))
        self._rank = _number(settings.get("r", 8), "r", folder)
        self._alphas = _patterns(settings, "alpha_pattern", folder)
        self._ranks = _patterns(settings, "rank_pattern", folder)
        self._folder = folder

    def __call__(self, module: str, rank: int) -> float:
        alpha = next((value for one, value in self._alphas if one.match(module)), self._alpha)
        own = next((value for one, value in self._ranks if one.match(module)), self._rank)
        if own < 1 or rank % own:  # experts have several times as many
            raise AdapterError(
                f"{self._folder}: the change of {module!r} has rank {rank}, its config says {own:g}"
            )
        return alpha / (math.sqrt(own) if self._rooted else own)


def _patterns(settings: Mapping[str, Any], name: str, folder: Path) -> list[tuple[Pattern, float]]:
    """The numbers of modules by regular expressions, as PEFT matches them."""
    found = settings.get(name) or {}
    if not isinstance(found, Mapping):
        raise AdapterError(f"{folder}: {name} must be an object")
    return [
        (Pattern(rf"(.*\.)?({key})$", f"{folder / CONFIG}"), _number(value, key, folder))
        for key, value in found.items()
    ]


def _number(value: object, name: str, folder: Path) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise AdapterError(f"{folder}: {name} is {shown(value)}, not a number")
    return float(value)


def _split(name: str, folder: Path) -> tuple[str, str]:
    """The module and the half of a tensor: base_model.model.MODULE.lora_A[.NAME].weight."""
    parts = name.split(".")
    at = next((i for i, part in enumerate(parts) if part in _HALVES), None)
    if at is None or parts[-1] == "bias":
        raise AdapterError(
            f"{folder} has a tensor {shown(name)}: whole matrices (modules_to_save), biases and"
            f" magnitudes are not served with an adapter: {_MERGE}"
        )
    return ".".join(parts[:at]).removeprefix("base_model.model."), _HALVES[parts[at]]


def _check(settings: Mapping[str, Any], folder: Path) -> None:
    """Raises AdapterError for what is not a plain LoRA."""
    kind = settings.get("peft_type")
    if kind != "LORA":
        raise AdapterError(f"{folder} has peft_type {shown(kind)}, LORA alone is served: {_MERGE}")
    for name in _OTHER_MATHS:
        if settings.get(name):
            raise AdapterError(f"{folder} sets {name}, which is not served: {_MERGE}")
    start = settings.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGED_BASE):
        raise AdapterError(
            f"{folder} has init_lora_weights {shown(start)}, which changes the base model's weights"
            " too: convert it with PEFT's path_initial_model_for_weight_conversion"
        )
