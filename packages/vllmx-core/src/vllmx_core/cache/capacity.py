"""Plans the KV cache of a load, for every backend: groups, block size, number of blocks (requested,
or as many as the device's memory holds), and slots for the states of recurrent layers."""

from __future__ import annotations

from collections.abc import Callable

from vllmx_core.backend import LoadOptions
from vllmx_core.cache.groups import (
    CacheLayout,
    blocks_of,
    cache_layout,
    fitting_step,
    longest_sequence,
)
from vllmx_core.cache.state_capacity import StateSlots, plan_slots
from vllmx_core.errors import CapacityError, ConfigError
from vllmx_core.kv_dtypes import CODED, LIMITS, TURNED_MULTIPLE, sides
from vllmx_core.model import LatentKV, ModelShape, OwnedKV, page_rows
from vllmx_core.records import Record
from vllmx_core.system.memory import FREE_MEMORY, format_bytes, remedy_for

PageBytes = Callable[[OwnedKV, int, str], tuple[int, int]]
"""(what is kept, tokens of a page, dtype) -> bytes of a page of keys and of one of values."""
MAX_BARE_BLOCKS = 1 << 19
"""Blocks of a model without attention, unless one sequence needs more. They take no memory on the
device, but about 40 bytes each in the engine core."""
_BITS = {"f64": 64, "f32": 32, "f16": 16, "bf16": 16, "int8": 8, "fp8": 8, "q4": 4}


class CachePlan(Record):
    """The cache that a backend allocates, computed from options and memory."""

    layout: CacheLayout
    dtype: str
    num_blocks: int
    block_size: int
    page_bytes: tuple[tuple[int, int], ...]
    """(keys, values) of one block in each place."""
    states: StateSlots
    """Slots for the states of recurrent layers, and the sequences that run together."""

    @property
    def block_bytes(self) -> int:
        return sum(k + v for k, v in self.page_bytes)

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes


def plain_page_bytes(kv: OwnedKV, block_size: int, dtype: str) -> tuple[int, int]:
    """Numbers without padding, and a float32 scale for each vector of codes."""
    vectors = page_rows(kv, block_size) * kv.num_kv_heads

    def page(size: int, side: str) -> int:
        return vectors * (size * _BITS[side] // 8 + 4 * (side in LIMITS)) if size else 0

    keys, values = sides(dtype)
    return page(kv.head_size, keys), page(kv.value_size, values)


def check_codes(shape: ModelShape, dtype: str) -> None:
    """Raises ConfigError for codes where layers keep latents: all heads read them, as keys and as
    values, and one scale for a row would serve neither. The same for q4 of other sizes of heads
    than it has."""
    if dtype in CODED and any(isinstance(spec, LatentKV) for spec in shape.caches):
        raise ConfigError(
            f"kv_cache_dtype {dtype} is not for a model of latent attention, whose rows are kept in"
            " 16 or 32 bits: choose auto, bf16, f16 or f32",
            param="kv_cache_dtype",
        )
    for kv in shape.kv_specs if "q4" in sides(dtype) else ():
        if kv.head_size % TURNED_MULTIPLE:
            raise ConfigError(
                f"kv_cache_dtype {dtype} is for heads of a multiple of {TURNED_MULTIPLE} numbers,"
                f" this model's have {kv.head_size}: choose int8 or fp8",
                param="kv_cache_dtype",
            )


class BlockSizes(Record):
    """The block sizes that a backend has."""

    backend: str
    multiple: int = 1
    power_of_two: bool = False

    def check(self, size: int) -> None:
        """Raises ConfigError for another one."""
        wanted = f"a multiple of {self.multiple}"
        fits = size >= 1 and size % self.multiple == 0
        if self.power_of_two:
            wanted = "a power of two"
            fits = fits and size & (size - 1) == 0
        if not fits:
            raise ConfigError(
                f"block_size {size} cannot be used by the {self.backend} backend: choose {wanted}"
                if size >= 1
                else f"block_size must be at least 1, got {size}",
                param="block_size",
            )


def plan_cache(
    shape: ModelShape,
    options: LoadOptions,
    dtype: str,
    sizes: BlockSizes,
    free: int,
    used: int,
    *,
    default_bytes: int | None = None,
    page_bytes: PageBytes = plain_page_bytes,
) -> CachePlan:
    """The groups of the model's layers over as many blocks as `num_kv_blocks` finds.

    Raises ConfigError for a block size that the backend does not have and as `check_codes` does,
    CapacityError as `num_kv_blocks` does.
    """
    sizes.check(options.block_size)
    check_codes(shape, dtype)
    layout = layout_of(shape, options)
    pages = tuple(page_bytes(kv, options.block_size, dtype) for kv in layout.places)
    one = max(1, sum(k + v for k, v in pages))
    states = plan_states(shape, options, layout, one, free, used, default_bytes=default_bytes)
    blocks = num_kv_blocks(
        options, layout, one, free, used, default_bytes=default_bytes, states=states
    )
    return CachePlan(layout, dtype, blocks, options.block_size, pages, states)


def layout_of(shape: ModelShape, options: LoadOptions) -> CacheLayout:
    """The groups, or one group for all layers. If pages differ in size, blocks of groups are partly
    empty; then the layout that needs less memory for a sequence of max_model_len is used."""
    if shape.groups is not None:
        return cache_layout(shape, grouped=True)
    whole = cache_layout(shape, grouped=False)
    grouped = cache_layout(shape, grouped=options.group_caches)
    if len({(kv.num_kv_heads, kv.head_size, kv.value_size, kv.ratio) for kv in grouped.places}) < 2:
        return grouped

    def most(layout: CacheLayout) -> float:
        token = sum(
            kv.num_kv_heads * (kv.head_size + kv.value_size) / kv.ratio for kv in layout.places
        )
        return token * _blocks_of_one(options, layout)

    return whole if most(whole) < most(grouped) else grouped


def plan_states(
    shape: ModelShape,
    options: LoadOptions,
    layout: CacheLayout,
    block_bytes: int,
    free: int,
    used: int,
    *,
    default_bytes: int | None = None,
) -> StateSlots:
    """The slots for the states of the model's recurrent layers; the parameters are those of
    `num_kv_blocks`. Raises CapacityError as `plan_slots` does."""
    one, blocks = shape.state_slot_bytes, _blocks_of_one(options, layout)
    if options.num_kv_blocks is not None:
        blocks = options.num_kv_blocks
    elif options.shrink_to_fit:
        blocks = len(layout.groups)
    least = blocks * block_bytes
    budget = _budget(options, free, used)
    if default_bytes is not None and options.kv_cache_memory_bytes is None:
        needed = least + (options.max_num_seqs or 1) * one + 2 * one
        budget = min(budget, max(default_bytes, needed))
    return plan_slots(one, options, budget, least)


def num_kv_blocks(
    options: LoadOptions,
    layout: CacheLayout,
    block_bytes: int,
    free: int,
    used: int,
    *,
    default_bytes: int | None = None,
    states: StateSlots | None = None,
) -> int:
    """The number of blocks: num_kv_blocks, else as many as fit in kv_cache_memory_bytes, else in
    memory_fraction of `free` minus `used`, at most enough for all sequences at full length. Blocks
    of a model without attention take no memory: there are as many as sequences may use, up to
    `MAX_BARE_BLOCKS`.

    Args:
        block_bytes: of one block in all places.
        free: memory of the device before the weights are loaded.
        used: weights and activations.
        default_bytes: the limit without a flag, unless one sequence needs more.
        states: slots that share the memory with the blocks.

    Raises CapacityError if a sequence of max_model_len does not fit (with shrink_to_fit: if not
    even one block for each group fits).
    """
    needed = _blocks_of_one(options, layout)
    taken, seqs = (states.num_bytes, states.num_seqs) if states else (0, options.num_seqs)
    if options.num_kv_blocks is not None:
        blocks = options.num_kv_blocks
        if options.pages is None:
            _check_memory(blocks * block_bytes, free - used - taken, "num_kv_blocks")
    elif not layout.places:
        blocks = max(needed, min(needed * seqs, MAX_BARE_BLOCKS))
        _check_memory(taken, free - used, "kv_cache_memory_bytes")
    elif options.kv_cache_memory_bytes is not None:
        blocks = max(0, options.kv_cache_memory_bytes - taken) // block_bytes
        _check_memory(blocks * block_bytes + taken, free - used, "kv_cache_memory_bytes")
    else:
        budget = _budget(options, free, used)
        if default_bytes is not None:
            budget = min(budget, max(default_bytes, needed * block_bytes + taken))
        blocks = min(max(0, budget - taken) // block_bytes, needed * seqs)
    if blocks < (len(layout.groups) if options.shrink_to_fit else needed):
        raise _too_small(options, layout, blocks, block_bytes, needed, free, used + taken)
    return blocks


def _blocks_of_one(options: LoadOptions, layout: CacheLayout) -> int:
    """Blocks that a sequence of max_model_len holds."""
    return blocks_of(
        layout.windows, options.max_model_len, options.block_size, options.max_num_batched_tokens
    )


def _budget(options: LoadOptions, free: int, used: int) -> int:
    """Memory of the cache: blocks and slots together."""
    if options.kv_cache_memory_bytes is not None:
        return options.kv_cache_memory_bytes
    return max(0, int(free * options.memory_fraction) - used)


def _check_memory(wanted: int, left: int, param: str) -> None:
    if wanted > left:
        flag = "--" + param.replace("_", "-")
        raise CapacityError(
            f"{param} asks for {format_bytes(wanted)} of KV cache, {format_bytes(max(0, left))} are"
            f" free next to the weights: lower {flag}",
            param=param,
        )


def _too_small(
    options: LoadOptions,
    layout: CacheLayout,
    blocks: int,
    block_bytes: int,
    needed: int,
    free: int,
    used: int,
) -> CapacityError:
    have, want = blocks * block_bytes, needed * block_bytes
    if options.num_kv_blocks is not None:
        remedy = f"raise --num-kv-blocks to {needed}"
    elif options.kv_cache_memory_bytes is not None:
        remedy = f"raise --kv-cache-memory-bytes to {want}"
    else:
        more = remedy_for(free)
        remedy = f"raise --memory-fraction (or --memory-bytes, where that is given) or {more}"
        if used + want > free:
            remedy = "use a machine with more memory" if more == FREE_MEMORY else more
    fits = longest_sequence(
        layout.windows,
        blocks,
        options.block_size,
        options.max_num_batched_tokens,
        options.max_model_len,
    )
    lower = [f"--max-model-len to {fits}"] if fits else []
    step, automatic = options.max_num_batched_tokens, options.kv_cache_memory_bytes is None
    smaller = fitting_step(layout.windows, blocks, options.block_size, step, options.max_model_len)
    if smaller:
        lower.append(f"--max-num-batched-tokens to {smaller}")
    elif automatic and options.num_kv_blocks is None:
        lower.append(f"--max-num-batched-tokens ({step}, for which activations have room)")
    lowered = "".join(f"lower {each} or " for each in lower)
    return CapacityError(
        f"one sequence of max_model_len {options.max_model_len} needs {format_bytes(want)} of KV"
        f" cache ({needed} blocks), there is room for {format_bytes(have)} ({blocks} blocks;"
        f" {format_bytes(free)} of memory are free, weights and activations take"
        f" {format_bytes(used)}): {lowered}{remedy}",
        param="max_model_len",
    )
