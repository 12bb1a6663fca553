"""Names of dtypes: short ones in this code, longer ones from users and checkpoints."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from vllmx_core.errors import ConfigError

SHORT_NAMES: Mapping[str, str] = {
    "bfloat16": "bf16", "float16": "f16", "fp16": "f16", "half": "f16", "float32": "f32",
    "fp32": "f32", "float": "f32",
}  # fmt: skip


def short_dtype(name: str) -> str:
    """bf16, f16 or f32 for any of their names; another name stays as it is."""
    return SHORT_NAMES.get(name, name)


def choose_dtype(wanted: str, automatic: str, has: Collection[str], backend: str) -> str:
    """The dtype that `LoadOptions.dtype` asks for; `automatic` for auto. Raises ConfigError for one
    that is not among those that the backend `has`."""
    name = short_dtype(automatic if wanted == "auto" else wanted)
    if name not in has:
        raise ConfigError(
            f"the {backend} backend has no dtype {name!r}: choose {', '.join(has)}", param="dtype"
        )
    return name
