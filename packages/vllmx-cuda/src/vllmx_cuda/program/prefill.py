"""Which kernel takes a layer's prompts, and in tiles of which size."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from vllmx_core.errors import ConfigError
from vllmx_core.ops.attention import AttentionSpec

from vllmx_cuda.device.arch import number
from vllmx_cuda.kernel_specs import has_tensor_cores
from vllmx_cuda.kernel_specs.attention import (
    mma_group,
    prefill_keys,
    prefill_tile_tokens,
    prefills_by_wgmma,
    wgmma_tile_tokens,
)

WGMMA_SWITCH = "VLLMX_CUDA_WGMMA"
"""1: prompts through paged_prefill_wgmma where it can take them, 0 or unset: never, for no GPU has
run it yet, and a product that waits for ever would take the whole device with it."""


@dataclass(frozen=True, slots=True)
class PrefillKernel:
    """The kernel for the prompts of a layer."""

    entry: str
    options: Mapping[str, int]
    """The compile options but for VX_DTYPE."""
    tile_tokens: int
    """Query tokens of a tile, at most."""
    spans: bool = True
    """Whether it takes the last position that each token sees."""


def wants_wgmma() -> bool:
    """What `WGMMA_SWITCH` says. Raises ConfigError for anything but 0 and 1."""
    value = os.environ.get(WGMMA_SWITCH, "")
    if value not in ("", "0", "1"):
        raise ConfigError(
            f"{WGMMA_SWITCH}={value}: set it to 1 or 0, or leave it out", param=WGMMA_SWITCH
        )
    return value == "1"


def prefill_kernel(
    spec: AttentionSpec, dtype: str, kv: int, arch: str, *, wgmma: bool
) -> PrefillKernel | None:
    """None where none multiplies this layer on tensor cores: its prompts go token by token.

    Args:
        kv: value of VX_KV.
        wgmma: whether paged_prefill_wgmma may be chosen.
    """
    group, size = mma_group(spec.num_heads // spec.num_kv_heads), spec.head_size
    head = {"VX_HEAD": size, "VX_GROUP": group}
    if wgmma and not spec.spans and prefills_by_wgmma(dtype, size, kv, number(arch)):
        tokens = wgmma_tile_tokens(group)
        return PrefillKernel("paged_prefill_wgmma", head, tokens, spans=False)
    keys = prefill_keys(size, number(arch))
    if size % 16 or not keys or not has_tensor_cores(dtype, number(arch)):
        return None
    options = {**head, "VX_KV": kv, "VX_KEYS": keys}
    return PrefillKernel("paged_prefill", options, prefill_tile_tokens(group, size))
