"""The options for a backend's load, and the context length that they allow."""

from __future__ import annotations

import logging

from vllmx_core.backend import LoadedInfo, LoadOptions
from vllmx_core.cache.groups import blocks_of, cache_layout, fitting_step, longest_sequence
from vllmx_core.config import EngineConfig
from vllmx_core.dtypes import short_dtype
from vllmx_core.errors import CapacityError, ConfigError
from vllmx_core.model import Model
from vllmx_core.system.memory import format_bytes, free_bytes

from vllmx_engine.core.core_info import gibibytes

logger = logging.getLogger("vllmx.load")

AUTOMATIC_CONTEXT = 1 << 20
"""A longer context must be asked for: its tables alone take hundreds of megabytes."""
DEFAULT_BATCHED_TOKENS = 2048
STAGED_BATCHED_TOKENS = 256
"""The tokens of a step of a model in stages, which compute chunks of a prompt at once when there
are several."""
TABLE_SHARE = 8
"""One part in so many of the free memory may go to tables that grow with the context."""


def load_options(
    config: EngineConfig, model: Model, *, text_limit: int | None = None, progress: bool
) -> LoadOptions:
    """The backend's part of a configuration, with what the model decides filled in: a model of
    texts reads `text_limit` tokens of each unless more are asked for.

    Raises ConfigError for a max_model_len beyond what the model was made for, or beyond what an
    explicit number of KV blocks holds, and CapacityError where its tables do not fit into memory.
    """
    longest = model.shape.max_model_len
    if config.max_model_len is not None and config.max_model_len > longest:
        raise ConfigError(
            f"--max-model-len {config.max_model_len} is more than the {longest} tokens that the"
            f" model was made for: lower it to {longest} or leave it out",
            param="max_model_len",
        )
    max_model_len = config.max_model_len or min(longest, text_limit or longest, AUTOMATIC_CONTEXT)
    max_model_len = _with_tables_that_fit(config, model, max_model_len)
    usual = DEFAULT_BATCHED_TOKENS if config.pipeline_parallel_size == 1 else STAGED_BATCHED_TOKENS
    step_tokens = config.max_num_batched_tokens or usual
    if model.shape.whole_prompts:
        step_tokens = max(step_tokens, max_model_len)
    if config.num_kv_blocks is not None:
        windows = cache_layout(model.shape, grouped=not model.shape.whole_prompts).windows
        sizes = (config.num_kv_blocks, config.block_size, step_tokens, max_model_len)
        held = longest_sequence(windows, *sizes)
        if config.max_model_len is None:
            max_model_len = min(max_model_len, held)
        elif held < max_model_len:
            smaller = fitting_step(windows, *sizes)
            needed = blocks_of(windows, max_model_len, config.block_size, step_tokens)
            raise ConfigError(
                f"--num-kv-blocks {config.num_kv_blocks} of {config.block_size} tokens hold {held}"
                f" tokens, fewer than --max-model-len {max_model_len}: lower --max-model-len to"
                f" {held} or raise --num-kv-blocks to {needed}{_or_smaller_steps(smaller)}",
                param="num_kv_blocks",
            )
    return LoadOptions(
        dtype=short_dtype(config.dtype),
        kv_cache_dtype=config.kv_cache_dtype,
        max_model_len=max_model_len,
        shrink_to_fit=config.max_model_len is None,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=step_tokens,
        block_size=config.block_size,
        num_kv_blocks=config.num_kv_blocks,
        kv_cache_memory_bytes=config.kv_cache_memory_bytes,
        num_state_slots=config.num_state_slots,
        # A whole prompt needs all of its blocks at once; groups with a window come by in pieces.
        group_caches=not model.shape.whole_prompts,
        memory_fraction=config.memory_fraction,
        num_threads=config.num_threads,
        encoder_cache_bytes=config.encoder_cache_memory,
        enforce_eager=config.enforce_eager,
        progress=progress,
    )


def _or_smaller_steps(step_tokens: int) -> str:
    """The remedy of smaller steps, with which windows hold fewer pages; 0: it would not help."""
    return f" or lower --max-num-batched-tokens to {step_tokens}" if step_tokens else ""


def _with_tables_that_fit(config: EngineConfig, model: Model, max_model_len: int) -> int:
    """The length, or less if it was not requested: whatever a config claims, rotary tables must
    leave room. They are made before the KV cache, which needs much more, says how much fits."""
    position_bytes = sum(table.nbytes for table in model.constants(1).values())
    free = free_bytes()
    fitting = max(1, free // TABLE_SHARE // max(1, position_bytes))
    if config.max_model_len is None:
        max_model_len = min(max_model_len, fitting)
        if max_model_len < model.shape.max_model_len:
            logger.warning(
                "max_model_len reduced from the model's %d to %d: use --max-model-len for more",
                model.shape.max_model_len,
                max_model_len,
            )
    elif max_model_len > fitting:
        raise CapacityError(
            f"the position tables of --max-model-len {max_model_len} take"
            f" {format_bytes(max_model_len * position_bytes)}, of {format_bytes(free)} of free"
            f" memory they may take one part in {TABLE_SHARE}: lower it to {fitting}",
            param="max_model_len",
        )
    return max_model_len


def fitting_length(config: EngineConfig, options: LoadOptions, info: LoadedInfo) -> int:
    """The context length that the KV cache holds; one log line where it is less than the model's
    own and the user asked for none."""
    step_tokens = info.max_num_batched_tokens
    if config.max_num_batched_tokens is not None:  # the backend may have room for larger steps
        step_tokens = min(step_tokens, options.max_num_batched_tokens)
    held = longest_sequence(
        info.cache_windows,
        info.num_kv_blocks,
        info.block_size,
        step_tokens,
        options.max_model_len,
    )
    if held < options.max_model_len:
        sizes = (info.num_kv_blocks, info.block_size, step_tokens, options.max_model_len)
        logger.warning(
            "max_model_len reduced from %d to %d: the KV cache has %d blocks of %d tokens in %s;"
            " raise --memory-fraction (now %.2f) or --num-kv-blocks%s for longer contexts",
            options.max_model_len,
            held,
            info.num_kv_blocks,
            info.block_size,
            gibibytes(info.kv_cache_bytes),
            config.memory_fraction,
            _or_smaller_steps(fitting_step(info.cache_windows, *sizes)),
        )
    return held
