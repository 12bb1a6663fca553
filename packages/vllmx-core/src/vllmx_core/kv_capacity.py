"""How many KV blocks a device gets: what was asked for, or what its memory leaves."""

from __future__ import annotations

from vllmx_core.backend import LoadOptions
from vllmx_core.errors import CapacityError
from vllmx_core.memory import format_bytes


def num_kv_blocks(
    options: LoadOptions,
    block_bytes: int,
    free: int,
    used: int,
    *,
    default_bytes: int | None = None,
) -> int:
    """Blocks by num_kv_blocks, else by kv_cache_memory_bytes, else what memory_fraction of `free`
    leaves beside `used`, up to all sequences at full length.

    Args:
        block_bytes: of one block in all layers.
        free: memory of the device before the weights are loaded.
        used: weights and activations.
        default_bytes: without a flag no more than this, unless one sequence needs more.

    Raises CapacityError when a sequence of max_model_len does not fit (with shrink_to_fit: when not
    even one block does).
    """
    needed = -(-options.max_model_len // options.block_size)
    if options.num_kv_blocks is not None:
        blocks = options.num_kv_blocks
        _check_memory(blocks * block_bytes, free - used, "num_kv_blocks")
    elif options.kv_cache_memory_bytes is not None:
        blocks = options.kv_cache_memory_bytes // block_bytes
        _check_memory(blocks * block_bytes, free - used, "kv_cache_memory_bytes")
    else:
        budget = max(0, int(free * options.memory_fraction) - used)
        if default_bytes is not None:
            budget = min(budget, max(default_bytes, needed * block_bytes))
        blocks = min(budget // block_bytes, needed * options.num_seqs)
    if blocks < (1 if options.shrink_to_fit else needed):
        raise _too_small(options, blocks, block_bytes, needed, free, used)
    return blocks


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
