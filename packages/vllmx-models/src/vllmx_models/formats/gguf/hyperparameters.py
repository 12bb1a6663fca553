"""Typed, checked access to the metadata that describe a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from vllmx_core.errors import UnsupportedModelError, WeightFormatError, shown, shown_entry
from vllmx_core.plan import F32
from vllmx_core.records import Record

from vllmx_models.formats.gguf.file import TensorInfo
from vllmx_models.formats.gguf.metadata import Value

_ABSENT = object()
_LARGEST = float(np.finfo(np.float32).max)

# Keys that change the result, with the values that do not: a file that sets one of them to anything
# else is refused, unless the architecture honours the key.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "altup.num_inputs": (),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.indexer.top_k": (),
    "attention.key_length_mla": (),
    "attention.kv_lora_rank": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.output_scale": (1,),
    "attention.q_lora_rank": (0,),
    "attention.scale": (),
    "attention.shared_kv_layers": (0,),
    "attention.sliding_window": (0,),
    "attention.sliding_window_pattern": (0, 1),
    "attention.temperature_length": (0,),
    "attention.temperature_scale": (0,),
    "attention.value_scale": (0, 1),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_count": (0,),
    "final_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "nextn_predict_layers": (0,),
    "residual_scale": (0, 1),
    "rope.dimension_sections": (),
    "rope.freq_base_swa": (),
    "router_logit_softcapping": (0,),
    "swin_norm": (False,),
    "use_parallel_residual": (False,),
}


class GGUFHeader(Record):
    """Metadata and tensors of a file, for the architecture that reads it. Keys are relative to
    "ARCHITECTURE.".

    Missing or impossible values raise WeightFormatError; known values that ask for an unsupported
    variant of the model raise UnsupportedModelError.
    """

    path: Path
    architecture: str
    metadata: Mapping[str, Value]
    tensors: Mapping[str, TensorInfo]
    """The tensors of all shards, by the names in the file."""
    vector: Callable[[str], F32]
    """A small tensor of `tensors` as float32."""

    def has(self, key: str) -> bool:
        return f"{self.architecture}.{key}" in self.metadata

    def integer(
        self, key: str, default: Any = _ABSENT, *, low: int = 1, high: int = 1 << 31
    ) -> int:
        """An integer, or an array with the same one for each layer."""
        value = self._value(key, default)
        if isinstance(value, np.ndarray) and value.dtype.kind in "iu" and value.size:
            if (value != value[0]).any():
                raise UnsupportedModelError(
                    f"{self.path}: {self.architecture}.{key} differs from layer to layer, which"
                    " this architecture does not have here"
                )
            value = int(value[0])
        if type(value) is not int or not low <= value <= high:
            raise self.error(key, f"must be an integer between {low} and {high}")
        return value

    def number(self, key: str, default: Any = _ABSENT) -> float:
        """A finite number above 0: the shortest decimal of a float32, 1e-06 rather than
        9.999999974752427e-07."""
        value = self._value(key, default)
        if type(value) not in (int, float) or not 0 < value <= _LARGEST:
            raise self.error(key, f"must be a number above 0 and at most {_LARGEST:g}")
        return float(str(np.float32(value)))

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if type(value) is not bool:
            raise self.error(key, "must be true or false")
        return value

    def integers(self, key: str, length: int, *, low: int = 1) -> list[int]:
        """An integer for each layer, none below `low`, from an array or one value for all."""
        value = self._value(key, _ABSENT)
        if not isinstance(value, np.ndarray):
            return [self.integer(key, low=low)] * length
        if value.dtype.kind not in "iu" or len(value) != length or (value < low).any():
            raise self.error(key, f"must be {length} integers of at least {low}")
        return [int(one) for one in value]

    def flags(self, key: str, length: int) -> list[bool]:
        """A boolean for each layer, from an array."""
        value = self._value(key, _ABSENT)
        if not isinstance(value, np.ndarray | tuple | list) or len(value) != length:
            raise self.error(key, f"must be {length} truth values")
        return [bool(one) for one in value]

    def text(self, key: str, default: str) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self.error(key, "must be text")
        return value

    def refuse_quirks(self, *honoured: str) -> None:
        """Raises UnsupportedModelError for a set key of `_NEUTRAL` that changes the result."""
        for key, neutral in _NEUTRAL.items():
            value = self.metadata.get(f"{self.architecture}.{key}")
            if key in honoured or value is None:
                continue
            if isinstance(value, np.ndarray | tuple) or value not in neutral:
                raise UnsupportedModelError(
                    f"{self.path}: {self.architecture}.{key} = {shown(value)} changes the model"
                    " in a way that this architecture does not have here"
                )

    def error(self, key: str, problem: str) -> WeightFormatError:
        """`PATH: ARCHITECTURE.KEY = VALUE PROBLEM`, to be raised."""
        name = f"{self.architecture}.{key}"
        value = shown_entry(self.metadata, name)
        return WeightFormatError(f"{self.path}: {name} = {value} {problem}")

    def _value(self, key: str, default: Any) -> Any:
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if value is _ABSENT:
            raise self.error(key, "is needed")
        return value
