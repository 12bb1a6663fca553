"""The bits of a quantised checkpoint's numbers by its config alone, for plans without weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vllmx_core.weights.map import choices
from vllmx_core.weights.spec import WeightSpec

from vllmx_models.quantization.options import QuantReader

PLAIN = 16.0
"""Bits of what is not quantised."""
_SCALE_BITS = {"mlx": 32, "nvfp4": 8, "mxfp4": 8, "symmetric": 16}
"""Bits that a group adds, scales and zero points together; 16 and a number's in others."""
_ALGORITHMS = {"FP8": 8.0, "FP8_PER_CHANNEL_PER_TOKEN": 8.0, "NVFP4": 4.5, "W4A16_NVFP4": 4.5}
_METHODS = {"fp8": 8.0, "fbgemm_fp8": 8.0, "mxfp4": 4.25}


def stored_bits(config: Mapping[str, Any]) -> Callable[[WeightSpec], float]:
    """The bits of each weight's numbers, scales included, as `quantization_config` says. Raises
    UnsupportedModelError for a method without known bits."""
    method = str(config.get("quant_method"))
    read = QuantReader(config, method)
    excluded = read.modules("modules_to_not_convert", "exclude_modules", "ignore")
    by_module = _by_module(read)

    def bits(spec: WeightSpec) -> float:
        if method != "mlx" and (spec.role == "router" or spec.kind == "embedding"):
            return PLAIN
        if config.get("expert_dtype") == "fp4" and spec.role == "experts":
            return _METHODS["mxfp4"]
        if method == "mxfp4" and spec.role != "experts":
            return PLAIN
        names = [part.name.removesuffix(".weight") for part in choices(spec.parts[0])]
        if any(map(excluded.match, names)):
            return PLAIN
        return next((found for name in names if (found := by_module(name)) is not None), PLAIN)

    return bits


def _by_module(read: QuantReader) -> Callable[[str], float | None]:
    """Bits by a module's name; None: not quantised."""
    layers, groups = read.mapping("quantized_layers"), read.mapping("config_groups")
    if layers:
        known = {name: _algorithm(QuantReader(one, "modelopt")) for name, one in layers.items()}
        return lambda name: next((known[at] for at in _outwards(name) if at in known), None)
    if read.has("quant_algo") and read.config["quant_algo"] != "MIXED_PRECISION":
        every = _algorithm(read)
    elif groups:
        return _by_groups(read, groups)
    elif read.architecture in _METHODS:
        every = _METHODS[read.architecture]
    else:
        every = _grouped(read, read.integer("bits", high=16), read.architecture)
    return lambda name: None if name.endswith("lm_head") and read.architecture != "mlx" else every


def _by_groups(read: QuantReader, groups: Mapping[str, Any]) -> Callable[[str], float | None]:
    named: dict[str, float] = {}
    linear: float | None = None
    for name, options in groups.items():
        group = QuantReader(options, f"{read.architecture} {name}")
        weights = QuantReader(group.mapping("weights"), f"{group.architecture} weights")
        kind = str(group.config.get("format") or read.config.get("format") or "").partition("-")[0]
        if weights.config.get("type") == "float" and weights.config.get("num_bits") == 4:
            kind = kind if kind == "mxfp4" else "nvfp4"
        elif weights.flag("symmetric", True):
            kind = "symmetric"
        bits = _grouped(weights, weights.integer("num_bits", high=16), kind)
        targets = group.words("targets") or ["Linear"]
        named |= dict.fromkeys(targets, bits)
        linear = bits if "Linear" in targets or targets[0].startswith("re:") else linear
    return lambda name: next((named[at] for at in _outwards(name) if at in named), linear)


def _grouped(read: QuantReader, bits: int, kind: str) -> float:
    """The bits of a number and its share of the scales."""
    group = read.group_size()
    return float(bits) if group is None else bits + _SCALE_BITS.get(kind, 16 + bits) / group


def _algorithm(read: QuantReader) -> float:
    return _ALGORITHMS[read.choice("quant_algo", _ALGORITHMS)]


def _outwards(name: str) -> list[str]:
    """A module, then those around it."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
