"""Names of dtypes: short ones in this code, longer ones from users and checkpoints."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from vllmx_core.errors import ConfigError

_NAMES: Mapping[str, tuple[str, ...]] = {
    "bf16": ("bfloat16",),
    "f16": ("float16", "fp16", "half"),
    "f32": ("float32", "fp32", "float"),
}
"""The first of each is the long one."""
SHORT_NAMES: Mapping[str, str] = {name: short for short, own in _NAMES.items() for name in own}


def short_dtype(name: str) -> str:
    """bf16, f16 or f32 for any of their names; another name stays as it is."""
    return SHORT_NAMES.get(name, name)


def long_dtype(name: str) -> str:
    """bfloat16, float16 or float32, for users; another name stays as it is."""
    short = short_dtype(name)
    return _NAMES[short][0] if short in _NAMES else name


def choose_dtype(wanted: str, automatic: str, has: Collection[str], backend: str) -> str:
    """The dtype that `LoadOptions.dtype` asks for; `automatic` for auto. Raises ConfigError for one
    that is not among those that the backend `has`."""
    name = short_dtype(automatic if wanted == "auto" else wanted)
    if name not in has:
        raise ConfigError(
            f"the {backend} backend has no dtype {name!r}: choose {', '.join(has)}", param="dtype"
        )
    return name
