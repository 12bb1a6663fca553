"""How many KV blocks there are, and their pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllmx_core.backend import LoadOptions
from vllmx_core.errors import CapacityError, ConfigError
from vllmx_core.model import KVSpec

from vllmx_cpu.memory import GIB, Bytes, allocate, format_bytes
from vllmx_cpu.native import library
from vllmx_cpu.structs import VX_DTYPES

BLOCK_MULTIPLE = 16
DEFAULT_BYTES = 4 * GIB
"""Without a flag the cache is no larger than this, unless one sequence needs more."""


@dataclass(frozen=True, slots=True)
class LayerPages:
    """KV pages of one attention layer."""

    k: Bytes
    v: Bytes


@dataclass(frozen=True, slots=True)
class KVPlan:
    """The cache that `options` and memory come to."""

    num_blocks: int
    block_size: int
    dtype: str
    layer_bytes: tuple[tuple[int, int], ...]
    """(k, v) bytes of one block in each layer."""

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * sum(k + v for k, v in self.layer_bytes)

    def allocate(self) -> tuple[LayerPages, ...]:
        return tuple(
            LayerPages(allocate(k * self.num_blocks), allocate(v * self.num_blocks))
            for k, v in self.layer_bytes
        )


def kv_dtype(options: LoadOptions, dtype: str) -> str:
    """auto: bf16 beside 16-bit weights, f32 beside f32 weights. Raises ConfigError."""
    names = {"bfloat16": "bf16", "float16": "f16", "half": "f16", "float32": "f32", "float": "f32"}
    wanted = names.get(options.kv_cache_dtype, options.kv_cache_dtype)
    if wanted == "auto":
        return "f32" if dtype == "f32" else "bf16"
    if wanted not in VX_DTYPES:
        raise ConfigError(
            f"kv_cache_dtype {options.kv_cache_dtype!r} is not known to the CPU backend: choose"
            f" auto, {', '.join(VX_DTYPES)}",
            param="kv_cache_dtype",
        )
    return wanted


def plan_kv(
    layers: Sequence[KVSpec], options: LoadOptions, dtype: str, free: int, used: int
) -> KVPlan:
    """Blocks by num_kv_blocks, else by kv_cache_memory_bytes, else what memory_fraction of `free`
    leaves beside `used` (weights and activations), up to DEFAULT_BYTES or all sequences at full
    length. Raises CapacityError when a sequence of max_model_len does not fit (with shrink_to_fit:
    when not even one block does)."""
    size = options.block_size
    if size <= 0 or size % BLOCK_MULTIPLE:
        raise ConfigError(
            f"block_size {size} cannot be used by the CPU backend: choose a multiple of"
            f" {BLOCK_MULTIPLE}",
            param="block_size",
        )
    layer_bytes = tuple(_block_bytes(kv, size, dtype) for kv in layers)
    block_bytes = max(1, sum(k + v for k, v in layer_bytes))
    needed = -(-options.max_model_len // size)
    budget = int(free * options.memory_fraction) - used
    if options.num_kv_blocks is not None:
        blocks = options.num_kv_blocks
        _check_memory(blocks * block_bytes, free - used, "num_kv_blocks")
    elif options.kv_cache_memory_bytes is not None:
        blocks = options.kv_cache_memory_bytes // block_bytes
        _check_memory(blocks * block_bytes, free - used, "kv_cache_memory_bytes")
    else:
        most = max(DEFAULT_BYTES, needed * block_bytes)
        blocks = min(max(0, budget), most) // block_bytes
        blocks = min(blocks, needed * options.max_num_seqs)
    if blocks < (1 if options.shrink_to_fit else needed):
        raise _too_small(options, blocks, block_bytes, needed, free, used)
    return KVPlan(blocks, size, dtype, layer_bytes)


def _block_bytes(kv: KVSpec, block_size: int, dtype: str) -> tuple[int, int]:
    arguments = (kv.num_kv_heads, kv.head_size, block_size, VX_DTYPES[dtype])
    return int(library().vx_k_page_bytes(*arguments)), int(library().vx_v_page_bytes(*arguments))


def _check_memory(wanted: int, left: int, param: str) -> None:
    if wanted > left:
        flag = "--" + param.replace("_", "-")
        raise CapacityError(
            f"{param} asks for {format_bytes(wanted)} of KV cache, {format_bytes(max(0, left))} are"
            f" free beside the weights: lower {flag}",
            param=param,
        )


def _too_small(
    options: LoadOptions, blocks: int, block_bytes: int, needed: int, free: int, used: int
) -> CapacityError:
    have, want = blocks * block_bytes, needed * block_bytes
    if options.num_kv_blocks is not None:
        remedy = f"raise --num-kv-blocks to {needed}"
    elif options.kv_cache_memory_bytes is not None:
        remedy = f"raise --kv-cache-memory-bytes to {want}"
    else:
        remedy = "raise --memory-fraction or free memory"
        if used + want > free:
            remedy = "use a machine with more memory"
    fits = blocks * options.block_size
    lower = f"lower --max-model-len to {fits} or " if fits else ""
    return CapacityError(
        f"one sequence of max_model_len {options.max_model_len} needs {format_bytes(want)} of KV"
        f" cache ({needed} blocks), there is room for {format_bytes(have)} ({blocks} blocks;"
        f" {format_bytes(free)} of memory are free, weights and activations take"
        f" {format_bytes(used)}): {lower}{remedy}",
        param="max_model_len",
    )
