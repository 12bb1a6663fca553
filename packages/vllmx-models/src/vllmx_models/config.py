"""Typed, checked access to a Hugging Face config.json."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, cast

from vllmx_core.dtypes import SHORT_NAMES
from vllmx_core.errors import UnsupportedModelError, shown_entry
from vllmx_core.model import Activation

_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
}
_DTYPES = {**SHORT_NAMES, "float64": "f32"}
_ABSENT = object()
LARGEST_FLOAT = sys.float_info.max

# Keys of related architectures that change the result, with the values that do not. A config that
# sets one of them to anything else is refused rather than served wrongly. `pretraining_tp` is not
# here: it names a way to compute the same sums. An architecture that honours a key lists it in
# `ConfigReader.refuse_quirks`.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "alibi": (False,),
    "attention_bias": (False,),
    "attention_multiplier": (),
    "attention_sink": (False,),
    "attn_logit_softcapping": (0, 0.0),
    "attn_temperature_tuning": (False, 0),
    "block_configs": (),
    "clip_qkv": (),
    "embedding_multiplier": (1, 1.0),
    "final_logit_softcapping": (0, 0.0),
    "is_causal": (True,),
    "layer_types": (),
    "logit_scale": (1, 1.0),
    "logits_scaling": (1, 1.0),
    "mlp_bias": (False,),
    "no_rope_layers": (),
    "num_experts": (0, 1),
    "num_local_experts": (0, 1),
    "partial_rotary_factor": (1, 1.0),
    "position_embedding_type": ("rope", "rotary"),
    "qk_layernorm": (False,),
    "qk_norm": (False,),
    "query_pre_attn_scalar": (),
    "residual_multiplier": (1, 1.0),
    "rope_interleaved": (False,),
    "scale_depth": (),
    "scale_emb": (1, 1.0),
    "sliding_window": (),
    "use_alibi": (False,),
    "use_bidirectional_attention": (False,),
    "use_mup": (False,),
    "use_qk_norm": (False,),
    "use_sliding_window": (False,),
}


class ConfigReader:
    """Reads values of one config.json; every error is an UnsupportedModelError with the key, the
    value and what is allowed. A key that is null counts as absent."""

    def __init__(self, config: Mapping[str, Any], architecture: str) -> None:
        self.config = config
        self.architecture = architecture

    def has(self, key: str) -> bool:
        return self.config.get(key) is not None

    def integer(
        self, key: str, default: Any = _ABSENT, *, low: int = 1, high: int = 1 << 24
    ) -> int:
        value = self._value(key, default)
        if type(value) is not int or not low <= value <= high:
            raise self.error(key, f"must be an integer between {low} and {high}")
        return value

    def number(self, key: str, default: Any = _ABSENT) -> float:
        """A finite number above zero."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(key, "must be a number above 0")
        if not 0 < value <= LARGEST_FLOAT:  # also an integer beyond float's range
            raise self.error(key, "must be a finite number above 0")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if type(value) is not bool:
            raise self.error(key, "must be true or false")
        return value

    def integers(self, key: str, length: int) -> list[int]:
        """The first `length` entries of a list of integers."""
        value = self._value(key, _ABSENT)
        if not isinstance(value, list) or any(type(item) is not int for item in value):
            raise self.error(key, "must be a list of integers")
        if len(value) < length:
            raise self.error(key, f"must have an entry for each of the {length} layers")
        return value[:length]

    def part(self, key: str) -> ConfigReader:
        """Reads a nested object; an absent key counts as an empty object."""
        value = self._value(key, {})
        if not isinstance(value, Mapping):
            raise self.error(key, "must be an object")
        return ConfigReader(value, self.architecture)

    def optional(self, key: str, default: float) -> float | None:
        """A number above zero; `default` where the key is absent, None where it is null or 0."""
        if self.config.get(key, default) in (None, 0):
            return None
        return self.number(key, default)

    def activation(
        self, key: str = "hidden_act", default: str = "silu", also: tuple[str, ...] = ()
    ) -> Activation:
        """The name of an op's activation; names in `also` are returned as they are."""
        value = self._value(key, default)
        if value in also:
            return cast(Activation, value)
        if not isinstance(value, str) or value not in _ACTIVATIONS:
            raise self.error(key, f"is not known here; known: {', '.join(_ACTIVATIONS)}")
        return _ACTIVATIONS[value]

    def dtype(self) -> str:
        """bf16, f16 or f32, from `dtype` (new) or `torch_dtype` (old); f32 where neither is set,
        as in transformers."""
        key = "dtype" if self.has("dtype") else "torch_dtype"
        value = self._value(key, "float32")
        name = str(value).removeprefix("torch.")
        if name not in _DTYPES:
            raise self.error(key, f"is not known here; known: {', '.join(_DTYPES)}")
        return _DTYPES[name]

    def refuse_quirks(self, *honoured: str) -> None:
        """Raises UnsupportedModelError if a key of `_NEUTRAL`, other than those `honoured`, changes
        the result."""
        for key, neutral in _NEUTRAL.items():
            value = self.config.get(key)
            if key in honoured or value is None or value in neutral:
                continue
            if key == "layer_types" and _all_full(value):
                continue
            raise self.error(key, "changes the model in a way that this architecture does not have")

    def error(self, key: str, problem: str) -> UnsupportedModelError:
        """`config.json: KEY = VALUE PROBLEM`, to be raised."""
        value = shown_entry(self.config, key)
        return UnsupportedModelError(
            f"config.json of a {self.architecture}: {key} = {value} {problem}"
        )

    def _value(self, key: str, default: Any) -> Any:
        value = self.config.get(key)
        if value is not None:
            return value
        if default is _ABSENT:
            raise self.error(key, "is needed")
        return default


def _all_full(layer_types: Any) -> bool:
    return isinstance(layer_types, list) and all(kind == "full_attention" for kind in layer_types)
