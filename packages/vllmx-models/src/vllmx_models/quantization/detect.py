"""Finds a folder's quantisation: in config.json, or in a separate file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllmx_core.system.json_files import read_json_object

OWN_FILES = (("quantize_config.json", "gptq"), ("quant_config.json", "awq"))
"""Files that AutoGPTQ and AutoAWQ wrote before transformers knew them -> quant_method."""


def find_quantization(folder: Path | None, config: Mapping[str, Any]) -> Any:
    """`quantization_config` with a `quant_method`, None where nothing says that the weights are
    quantised; what is not an object comes back as it is. Without a folder only the config is
    read."""
    text_config = config.get("text_config")
    nested = text_config if isinstance(text_config, Mapping) else {}
    for holder in (config, nested):
        for key in ("quantization_config", "compression_config", "quantization"):
            if holder.get(key):
                return _of_experts(_with_method(holder[key]), holder)
    if folder is None:
        return None
    modelopt = read_json_object(folder / "hf_quant_config.json")
    if modelopt is not None and isinstance(modelopt.get("quantization"), Mapping):
        return {**modelopt["quantization"], "quant_method": "modelopt"}
    for name, method in OWN_FILES:
        own = read_json_object(folder / name)
        if own is not None:
            return {"quant_method": method, **own}
    return None


def _of_experts(found: Any, holder: Mapping[str, Any]) -> Any:
    """DeepSeek-V4 names the type of its experts outside `quantization_config`."""
    if not isinstance(found, Mapping) or not holder.get("expert_dtype"):
        return found
    return {"expert_dtype": holder["expert_dtype"], **found}


def _with_method(found: Any) -> Any:
    """ModelOpt, early compressed-tensors and MLX leave `quant_method` out."""
    if not isinstance(found, Mapping) or found.get("quant_method"):
        return found
    if "quant_algo" in found:
        return {**found, "quant_method": "modelopt"}
    if "config_groups" in found:
        return {**found, "quant_method": "compressed-tensors"}
    if "group_size" in found and "bits" in found:
        return {**found, "quant_method": "mlx"}
    return found
