"""Checked access to quantization_config."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from vllmx_core.errors import UnsupportedModelError, shown_entry
from vllmx_core.weights.tensor import DType

from vllmx_models.config import ConfigReader
from vllmx_models.quantization.modules import ModulePatterns

FLOATS: tuple[DType, ...] = ("f16", "bf16", "f32")
"""Types in which scales may be stored."""
_NEEDED = object()
Value = TypeVar("Value")


class QuantReader(ConfigReader):
    """Every error is an UnsupportedModelError with the key, the value and what is known."""

    def __init__(self, config: Mapping[str, Any], source: str) -> None:
        super().__init__(config, source)
        self.source = f"quantization_config ({source})"

    def choice(self, key: str, known: Collection[Value], default: Any = _NEEDED) -> Value:
        """One of the known values; absent: the default, or an error where there is none."""
        value = self.config.get(key)
        if value is None:
            value = default
        if any(value == one and type(value) is type(one) for one in known):
            return value  # type: ignore[no-any-return]
        known_values = ", ".join(str(one) for one in known)
        raise self.error(key, f"is not read here; known: {known_values}")

    def group_size(self, key: str = "group_size") -> int | None:
        """Input features to a group; None (stored as -1 or null): all of them."""
        value = self.config.get(key)
        if value is None or (type(value) is int and value == -1):
            return None
        return self.integer(key, low=1)

    def mapping(self, key: str) -> Mapping[str, Any]:
        """An object; empty where absent."""
        value = self.config.get(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise self.error(key, "must be an object")
        return value

    def words(self, *keys: str) -> list[str]:
        """The strings of the first of the lists that is there."""
        for key in keys:
            value = self.config.get(key)
            if value is None:
                continue
            if not isinstance(value, list) or any(not isinstance(item, str) for item in value):
                raise self.error(key, "must be a list of strings")
            return value
        return []

    def modules(self, *keys: str) -> ModulePatterns:
        """The modules that the first of the lists means."""
        return ModulePatterns(self.words(*keys), self.source)

    def error(self, key: str, problem: str) -> UnsupportedModelError:
        value = shown_entry(self.config, key)
        return UnsupportedModelError(f"{self.source}: {key} = {value} {problem}")
