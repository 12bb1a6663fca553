"""Keys and values as 8-bit codes with a scale for each vector, on tensors."""

from __future__ import annotations

import torch
from torch import Tensor
from vllmx_core.kv_dtypes import KV_DTYPES, at_limit

from vllmx_torch.arrays import TORCH

CODES = {"int8": torch.int8, "fp8": torch.uint8}
"""The types of stored codes; e4m3 as bytes, because few operations take torch's own type."""


def quantise(x: Tensor, dtype: str) -> tuple[Tensor, Tensor]:
    """(..., D) float32 -> codes (..., D), scales (...)."""
    scaled, scale = at_limit(x, dtype, TORCH)
    codes = (
        scaled.round().to(torch.int8)
        if dtype == "int8"
        else scaled.to(torch.float8_e4m3fn).view(torch.uint8)
    )
    return codes, scale


def values(codes: Tensor) -> Tensor:
    """Codes as torch's own type of their values, int8 or e4m3."""
    return codes if codes.dtype == torch.int8 else codes.view(torch.float8_e4m3fn)


def dtypes_of(device: torch.device) -> tuple[str, ...]:
    """The KV dtypes that a device has; e4m3 is missing on some."""
    try:
        torch.zeros(1, device=device).to(torch.float8_e4m3fn).float()
    except (RuntimeError, TypeError):
        return tuple(name for name in KV_DTYPES if name != "fp8")
    return KV_DTYPES
