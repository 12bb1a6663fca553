"""Rotary position embedding: config.json -> float32 tables, for every scaling of the field.

A scaling changes the inverse frequencies and may multiply cos and sin by an attention factor. The
two scalings that depend on the length of a sequence (dynamic, longrope) are taken for a sequence of
`max_model_len` tokens: keys stay in the cache as they were rotated, so one table must serve every
length. Arithmetic is float32 where the trained implementation used float32.

Sources: RoFormer (arXiv 2104.09864), YaRN (2309.00071), LongRoPE (2402.13753), Llama 3.1's release.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from vllmx_core.errors import UnsupportedModelError, listing, shown
from vllmx_core.plan import F32
from vllmx_core.records import Record, field

from vllmx_models.config import LARGEST_FLOAT

_ALIASES = {"su": "longrope"}  # the name of the first Phi-3 configs
_OPTIONS = frozenset(
    (
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "truncate",
        "mscale",
        "mscale_all_dim",
        "short_factor",
        "long_factor",
        "low_freq_factor",
        "high_freq_factor",
    )
)
_OTHER_KEYS = frozenset(("rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned"))
MAX_CONTEXT = 1 << 31
_CHUNK = 4096
_STILL = "still"
LAYER_TYPES = ("full_attention", "sliding_attention")


class Rope(Record):
    """Everything that makes one table."""

    kind: str
    theta: float
    rotary_dim: int
    max_positions: int
    """config.json's max_position_embeddings."""
    options: Mapping[str, Any] = field(default_factory=dict)

    def table(self, positions: int, max_model_len: int | None = None) -> F32:
        """(positions, rotary_dim): cos of the rotary_dim / 2 angles, then sin, both times the
        attention factor. `max_model_len` (default `positions`) decides the scaling."""
        inverse, factor = self.frequencies(max_model_len or positions)
        half = len(inverse)
        table = np.empty((positions, 2 * half), np.float32)
        for first in range(0, positions, _CHUNK):  # float64 of all at once is six times the table
            rows = table[first : first + _CHUNK]
            steps = np.arange(first, first + len(rows), dtype=np.float32)[:, None]
            angles = (steps * inverse).astype(np.float64)  # the float32 product is what was trained
            rows[:, :half], rows[:, half:] = np.cos(angles), np.sin(angles)
        table *= np.float32(factor)
        return table

    def frequencies(self, max_model_len: int) -> tuple[F32, float]:
        """Inverse frequencies (rotary_dim / 2,) and the attention factor. Raises
        UnsupportedModelError for options that lead to no finite numbers."""
        if self.kind == _STILL:
            return np.zeros(self.rotary_dim // 2, np.float32), 1.0
        try:
            with np.errstate(all="ignore"):
                inverse, factor = SCALINGS[self.kind](self, max_model_len)
        except ArithmeticError:
            inverse, factor = np.full(1, np.nan, np.float32), 1.0
        turned = inverse[inverse != 0] if self.kind == "proportional" else inverse
        if not (np.isfinite(turned) & (turned > 0)).all() or not math.isfinite(factor):
            raise UnsupportedModelError(
                f"config.json: RoPE scaling {self.kind!r} with rope_theta {self.theta:g} and"
                f" {shown(dict(self.options))} gives no finite frequencies: check the values"
            )
        return inverse, factor

    @property
    def context_len(self) -> int:
        """Tokens that the checkpoint claims, the scaling included."""
        if self.kind in (_STILL, "default", "llama3", "longrope", "proportional"):
            return self.max_positions
        start = _original(self) if self.kind == "yarn" else self.max_positions
        return max(self.max_positions, int(min(start * _factor(self), MAX_CONTEXT)))

    def number(self, key: str, default: float | None = None) -> float:
        """An option that must be a finite number above 0; no default: it must be there."""
        value = self.options.get(key)
        if value is None and default is not None:
            return default
        ok = isinstance(value, int | float) and not isinstance(value, bool)
        if not ok or not 0 < value <= LARGEST_FLOAT:  # type: ignore[operator]
            raise UnsupportedModelError(
                f"config.json: RoPE scaling {self.kind!r} needs {key} as a number above 0, got"
                f" {shown(value)}"
            )
        return float(value)  # type: ignore[arg-type]


def still(rotary_dim: int, max_positions: int) -> Rope:
    """A table without rotation, for attention without position embedding."""
    return Rope(_STILL, 1.0, rotary_dim, max_positions)


def _inverse(rope: Rope, theta: float | None = None) -> F32:
    exponent = np.arange(0, rope.rotary_dim, 2, dtype=np.float32) / np.float32(rope.rotary_dim)
    inverse: F32 = np.float32(1.0) / np.power(np.float32(theta or rope.theta), exponent)
    return inverse


def _factor(rope: Rope) -> float:
    """`factor`; yarn and longrope fall back to the ratio of the two context lengths."""
    if rope.options.get("factor") is None and rope.kind in ("yarn", "longrope"):
        return rope.max_positions / _original(rope)
    return rope.number("factor")


def _original(rope: Rope) -> float:
    """The context length before the scaling."""
    return rope.number("original_max_position_embeddings", rope.max_positions)


def _default(rope: Rope, max_model_len: int) -> tuple[F32, float]:
    return _inverse(rope), 1.0


def _linear(rope: Rope, max_model_len: int) -> tuple[F32, float]:
    return _inverse(rope) / np.float32(_factor(rope)), 1.0


def _dynamic(rope: Rope, max_model_len: int) -> tuple[F32, float]:
    """NTK-aware: the base grows with the length beyond the trained one."""
    factor, dim = _factor(rope), rope.rotary_dim
    if dim <= 2:
        raise UnsupportedModelError(
            f"config.json: RoPE scaling 'dynamic' needs more than 2 rotary dimensions, got {dim}"
        )
    length = max(max_model_len, rope.max_positions)
    growth = factor * length / rope.max_positions - (factor - 1)
    return _inverse(rope, rope.theta * growth ** (dim / (dim - 2))), 1.0


def _llama3(rope: Rope, max_model_len: int) -> tuple[F32, float]:
    """Long waves are slowed by `factor`, short ones kept, those between interpolated; Llama 4 has
    none between."""
    inverse = _inverse(rope)
    factor = np.float32(_factor(rope))
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high < low:
        raise UnsupportedModelError(
            f"config.json: RoPE scaling 'llama3' needs high_freq_factor ({high}) of at least"
            f" low_freq_factor ({low})"
        )
    length = _original(rope)
    wave = np.float32(2 * math.pi) / inverse
    smooth = (np.float32(length) / wave - np.float32(low)) / np.float32(high - low)
    between = (1 - smooth) * inverse / factor + smooth * inverse
    scaled = np.where(wave > length / low, inverse / factor, between)
    return np.where(wave < length / high, inverse, scaled).astype(np.float32), 1.0


def _yarn(rope: Rope, max_model_len: int) -> tuple[F32, float]:
    """NTK by parts: a ramp over the dimensions between kept and slowed waves, and a warmer
    softmax through the attention factor."""
    dim, factor = rope.rotary_dim, _factor(rope)
    original = _original(rope)

    def dimension(rotations: float) -> float:
        span = math.log(original / (rotations * 2 * math.pi))
        return dim * span / (2 * math.log(rope.theta))

    low, high = dimension(rope.number("beta_fast", 32.0)), dimension(rope.number("beta_slow", 1.0))
    if rope.options.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # a ramp of no width would divide by zero
    steps = np.arange(dim // 2, dtype=np.float32)
    ramp = np.clip((steps - np.float32(low)) / np.float32(high - low), 0, 1)
    inverse = _inverse(rope)
    mixed = inverse / np.float32(factor) * ramp + inverse * (1 - ramp)
    return mixed.astype(np.float32), _yarn_attention_factor(rope, factor)


def _yarn_attention_factor(rope: Rope, factor: float) -> float:
    def warmth(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if rope.options.get("attention_factor") is not None:
        return rope.number("attention_factor")
    if rope.options.get("mscale") and rope.options.get("mscale_all_dim"):
        return warmth(rope.number("mscale")) / warmth(rope.number("mscale_all_dim"))
    return warmth(1.0)


def _longrope(rope: Rope, max_model_len: int) -> tuple[F32, float]:
    """Searched factors, one for each frequency: a short set and a long one."""
    original = _original(rope)
    sets = {which: _longrope_factors(rope, which) for which in ("short", "long")}
    factors = sets["long" if max_model_len > original else "short"]
    factor = _factor(rope)
    if rope.options.get("attention_factor") is not None:
        attention_factor = rope.number("attention_factor")
    elif factor <= 1:
        attention_factor = 1.0
    else:
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original))
    return _inverse(rope) / factors, attention_factor


def _longrope_factors(rope: Rope, which: str) -> F32:
    values = rope.options.get(f"{which}_factor")
    count = rope.rotary_dim // 2
    numbers = isinstance(values, list) and all(type(v) in (int, float) and v > 0 for v in values)
    if not numbers or len(values) != count:  # type: ignore[arg-type]
        raise UnsupportedModelError(
            f"config.json: RoPE scaling 'longrope' needs {which}_factor as a list of {count}"
            f" numbers above 0, got {shown(values)}"
        )
    return np.array(values, np.float32)


def _proportional(rope: Rope, max_model_len: int) -> tuple[F32, float]:
    """The frequencies of a whole head; the slower ones are zero."""
    inverse = _inverse(rope) / np.float32(rope.number("factor", 1.0))
    turned = int(rope.number("partial_rotary_factor", 1.0) * rope.rotary_dim // 2)
    inverse[turned:] = 0
    return inverse, 1.0


SCALINGS: Mapping[str, Callable[[Rope, int], tuple[F32, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
}


def read_rope(
    config: Mapping[str, Any],
    head_size: int,
    *,
    layer_type: str = "full_attention",
    max_positions: int,
    default_theta: float = 10000.0,
) -> Rope | None:
    """Reads both styles of config.json: `rope_theta` + `rope_scaling` (kind under "type" or
    "rope_type"), and `rope_parameters`, flat or one dictionary for each layer type. None: layers
    of this type rotate nothing.

    Raises:
        UnsupportedModelError: unknown kind or key, missing or impossible value.
    """
    parameters = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if isinstance(parameters, dict) and any(key in LAYER_TYPES for key in parameters):
        parameters = parameters.get(layer_type, {})
        if parameters is None:
            return None
    if not isinstance(parameters, dict):
        raise UnsupportedModelError(
            f"config.json: the RoPE parameters must be an object, got {shown(parameters)}"
        )
    kind = _kind(parameters)
    options = {key: parameters[key] for key in _OPTIONS if parameters.get(key) is not None}
    outside = config.get("original_max_position_embeddings")  # Phi-3 keeps it there
    if outside is not None:
        options["original_max_position_embeddings"] = outside
    base = Rope(kind, 1.0, 2, max_positions, {**config, **_set(parameters)})
    partial = base.number("partial_rotary_factor", 1.0)
    if kind == "proportional":  # pairs span the whole head; the first ones rotate
        options["partial_rotary_factor"], partial = partial, 1.0
    rotary_dim = int(head_size * min(partial, 2.0) + 1e-6)  # 88 * (30 / 88) is below 30
    if rotary_dim < 2 or rotary_dim % 2 or rotary_dim > head_size:
        raise UnsupportedModelError(
            f"config.json: RoPE would rotate {rotary_dim} of {head_size} head dimensions; it must"
            " be an even number of at least 2"
        )
    theta = base.number("rope_theta", default_theta)
    rope = Rope(kind, theta, rotary_dim, max_positions, options)
    rope.frequencies(max_positions)  # a missing or wrong option shows here, not at load
    return rope


def _set(parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in parameters.items() if value is not None}


def _kind(parameters: Mapping[str, Any]) -> str:
    named = str(parameters.get("rope_type") or parameters.get("type") or "default")
    kind = _ALIASES.get(named, named)
    if kind not in SCALINGS:
        raise UnsupportedModelError(
            f"config.json: RoPE scaling {shown(named)} is not known here; known:"
            f" {', '.join(SCALINGS)}"
        )
    unknown = sorted(parameters.keys() - _OPTIONS - _OTHER_KEYS)
    if unknown:
        raise UnsupportedModelError(
            f"config.json: RoPE scaling {kind!r} has keys that are not known here:"
            f" {listing(unknown)}"
        )
    return kind
