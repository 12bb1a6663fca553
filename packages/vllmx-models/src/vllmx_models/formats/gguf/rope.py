"""RoPE of a GGUF file as keys of config.json.

Files do not name Llama 3's scaling, but have its divisors of the frequencies in the tensor
rope_freqs. If Llama 3's formula gives these divisors, the config names it, so that the table has
the same bits as the original model's; other divisors are used unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from vllmx_core.errors import UnsupportedModelError, WeightFormatError, shown
from vllmx_core.plan import F32

from vllmx_models.formats.gguf.hyperparameters import GGUFHeader

LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"
FREQS, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TENSORS = (FREQS, LONG, SHORT)
STILL = np.float32(1e30)
"""The divisor of a frequency that does not turn."""
MAX_FACTORS = 4096
_LLAMA3_LOW, _LLAMA3_HIGH = 1.0, 4.0
_LLAMA3_CONTEXTS = tuple(1 << power for power in range(11, 19))


def rope_config(header: GGUFHeader, head_size: int) -> dict[str, Any]:
    """rope_theta, rope_scaling, partial_rotary_factor. Raises WeightFormatError,
    UnsupportedModelError."""
    theta = header.number("rope.freq_base", 10000.0)
    rotary_dim = header.integer("rope.dimension_count", head_size, high=head_size)
    config: dict[str, Any] = {"rope_theta": theta}
    if rotary_dim != head_size:
        config["partial_rotary_factor"] = rotary_dim / head_size
    scaling = _scaling(header)
    if FREQS in header.tensors:
        if scaling:
            raise UnsupportedModelError(
                f"{header.path} has both {FREQS} and a {scaling['rope_type']} RoPE scaling, which"
                " are not known together"
            )
        scaling = _divisors(header, theta, rotary_dim)
    if scaling:
        config["rope_scaling"] = scaling
    return config


def with_query_scale(header: GGUFHeader, rope: Mapping[str, Any]) -> dict[str, Any]:
    """Adds the growth of queries to a RoPE's config, if the file has it."""
    if not header.has("attention.temperature_scale"):
        return dict(rope)
    scaling = rope.get("rope_scaling") or {"rope_type": "default"}
    context = header.integer("context_length")
    original = header.integer("rope.scaling.original_context_length", context)
    grown = {
        "llama_4_scaling_beta": header.number("attention.temperature_scale"),
        "original_max_position_embeddings": original,
    }
    return {**rope, "rope_scaling": {**scaling, **grown}}


SECTIONS = "rope.dimension_sections"


def with_sections(config: Mapping[str, Any], header: GGUFHeader) -> dict[str, Any]:
    """Adds the sections of frequencies that rotate by time, row and column, if the file has them.
    Raises WeightFormatError."""
    if not header.has(SECTIONS):
        return dict(config)
    found = header.integers(SECTIONS, 4, low=0)
    if found[3]:
        raise header.error(SECTIONS, "must be sections of time, row and column, and a 0")
    scaling = config.get("rope_scaling") or {"rope_type": "default"}
    return {**config, "rope_scaling": {**scaling, "mrope_section": found[:3]}}


def stated_sections(config: Mapping[str, Any], default: Sequence[int]) -> dict[str, Any]:
    """The metadata that `with_sections` reads, from a config.json with or without `text_config`."""
    text = config.get("text_config") or config
    given = text.get("rope_parameters") or text.get("rope_scaling") or {}
    return {SECTIONS: np.array([*(given.get("mrope_section") or default), 0], np.int32)}


def _scaling(header: GGUFHeader) -> dict[str, Any] | None:
    """Reads `rope_scaling` from the metadata."""
    unnamed = "longrope" if LONG in header.tensors else "none"  # Phi-3's do not say so
    kind = header.text("rope.scaling.type", "linear" if _has_factor(header) else unnamed)
    if kind == "none":
        return None
    if kind == "linear":
        factor = _factor(header)
        return None if factor == 1.0 else {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return _yarn(header)
    if kind == "longrope":
        return _longrope(header)
    raise UnsupportedModelError(
        f"{header.path}: RoPE scaling {shown(kind)} is not known here; known: none, linear, yarn,"
        " longrope"
    )


def _has_factor(header: GGUFHeader) -> bool:
    return header.has("rope.scaling.factor") or header.has("rope.scale_linear")


def _factor(header: GGUFHeader) -> float:
    if header.has("rope.scaling.factor"):
        return header.number("rope.scaling.factor")
    return header.number("rope.scale_linear", 1.0)


def _yarn(header: GGUFHeader) -> dict[str, Any]:
    for key in ("yarn_ext_factor", "alpha"):
        if header.has(f"rope.scaling.{key}"):
            raise UnsupportedModelError(
                f"{header.path}: {header.architecture}.rope.scaling.{key} is not known here"
            )
    factor = _factor(header)
    scaling: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    for ours, theirs in (
        ("beta_fast", "yarn_beta_fast"),
        ("beta_slow", "yarn_beta_slow"),
        ("attention_factor", "yarn_attn_factor"),
    ):
        if header.has(f"rope.scaling.{theirs}"):
            scaling[ours] = header.number(f"rope.scaling.{theirs}")
    if header.has("rope.scaling.attn_factor"):  # on top of yarn's own
        own = 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0
        scaling["attention_factor"] = header.number("rope.scaling.attn_factor") * own
    if header.architecture == "mistral3":  # over an mscale of 1
        scaling |= {"mscale": 1.0, "mscale_all_dim": header.number(LOG_MULTIPLIER, 1.0)}
    elif header.has(LOG_MULTIPLIER):  # what heads of latent attention are multiplied by
        if not header.has("attention.kv_lora_rank"):
            raise UnsupportedModelError(
                f"{header.path}: {header.architecture}.{LOG_MULTIPLIER} is not known here"
            )
        mscale = round(header.number(LOG_MULTIPLIER) * 10, 6)  # the file has a tenth of it
        scaling |= {"mscale": mscale, "mscale_all_dim": mscale}
    context = header.integer("context_length")
    original = header.integer("rope.scaling.original_context_length", context)
    scaling["original_max_position_embeddings"] = original
    return scaling


def _longrope(header: GGUFHeader) -> dict[str, Any]:
    context = header.integer("context_length")
    original = header.integer("rope.scaling.original_context_length", context)
    scaling: dict[str, Any] = {
        "rope_type": "longrope",
        "short_factor": _floats(_read_divisors(header, SHORT)),
        "long_factor": _floats(_read_divisors(header, LONG)),
        "original_max_position_embeddings": original,
    }
    if header.has("rope.scaling.attn_factor"):
        scaling["attention_factor"] = header.number("rope.scaling.attn_factor")
    return scaling


def _divisors(header: GGUFHeader, theta: float, rotary_dim: int) -> dict[str, Any]:
    """The scaling that gives the divisors of rope_freqs."""
    divisors = _read_divisors(header, FREQS)
    if len(divisors) != rotary_dim // 2:
        raise WeightFormatError(
            f"{header.path}: {FREQS} has {len(divisors)} values, {rotary_dim // 2} are needed for"
            f" {rotary_dim} rotated dimensions"
        )
    factor = float(divisors.max())
    for context in _LLAMA3_CONTEXTS:
        expected = llama3_divisors(theta, rotary_dim, factor, context)
        if factor > 1 and np.allclose(divisors, expected, rtol=1e-5, atol=0):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": _LLAMA3_LOW,
                "high_freq_factor": _LLAMA3_HIGH,
                "original_max_position_embeddings": context,
            }
    values = _floats(divisors)
    return {
        "rope_type": "longrope",
        "short_factor": values,
        "long_factor": values,
        "attention_factor": 1.0,
        "original_max_position_embeddings": header.integer("context_length"),
    }


def llama3_divisors(
    theta: float,
    rotary_dim: int,
    factor: float,
    context: int,
    low: float = _LLAMA3_LOW,
    high: float = _LLAMA3_HIGH,
) -> F32:
    """(rotary_dim / 2,): 1 for short waves, `factor` for long ones, interpolated between."""
    waves = 2 * math.pi * theta ** (np.arange(0, rotary_dim, 2) / rotary_dim)
    with np.errstate(divide="ignore"):  # Llama 4 has nothing between the two
        smooth = np.clip((context / waves - low) / (high - low), 0, 1)
    return np.asarray(1 / ((1 - smooth) / factor + smooth), np.float32)


def _read_divisors(header: GGUFHeader, name: str) -> F32:
    info = header.tensors.get(name)
    if info is None or len(info.shape) != 1 or info.shape[0] > MAX_FACTORS:
        raise WeightFormatError(
            f"{header.path} needs a tensor {name} with one value for each RoPE frequency"
        )
    divisors = header.vector(name)
    if not (np.isfinite(divisors) & (divisors > 0)).all():
        raise WeightFormatError(f"{header.path}: {name} has values that cannot divide")
    return divisors


def _floats(values: F32) -> list[float]:
    return [float(value) for value in values]
