"""The types that the kernels compute in, by the names of `vllmx_core.weights.part`."""

from __future__ import annotations

ITEM_BYTES = {"bf16": 2, "f16": 2, "f32": 4}


def automatic(checkpoint: str, capability: tuple[int, int]) -> str:
    """Resolves dtype auto: the checkpoint's dtype, but f16 instead of bf16 before 8.0 (Ampere),
    whose tensor cores lack bf16."""
    return "f16" if checkpoint == "bf16" and capability < (8, 0) else checkpoint
