"""The types that the kernels compute in, by the names of `vllmx_core.weights`."""

from __future__ import annotations

from vllmx_core.errors import ConfigError

ITEM_BYTES = {"bf16": 2, "f16": 2, "f32": 4}
_ALIASES = {
    "bfloat16": "bf16", "float16": "f16", "half": "f16", "float32": "f32", "float": "f32",
}  # fmt: skip


def automatic(checkpoint: str, capability: tuple[int, int]) -> str:
    """What auto means: the checkpoint's dtype, but f16 instead of bf16 before 8.0 (Ampere), where
    tensor cores do not know bf16."""
    return "f16" if checkpoint == "bf16" and capability < (8, 0) else checkpoint


def resolve(wanted: str, automatic: str) -> str:
    """The dtype that `LoadOptions.dtype` asks for; `automatic` for auto. Raises ConfigError."""
    name = automatic if wanted == "auto" else wanted
    name = _ALIASES.get(name, name)
    if name not in ITEM_BYTES:
        raise ConfigError(
            f"the CUDA backend has no dtype {name!r}: choose {', '.join(ITEM_BYTES)}", param="dtype"
        )
    return name
