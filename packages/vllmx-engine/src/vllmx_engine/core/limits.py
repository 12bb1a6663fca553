"""The limits and the cost model of an engine core's steps."""

from __future__ import annotations

from vllmx_core.backend import LoadedInfo, LoadedModel
from vllmx_core.config import EngineConfig
from vllmx_core.model import ModelShape

from vllmx_engine.core.cost import StepCost
from vllmx_engine.core.row_states import tokens_of_slot
from vllmx_engine.core.sequence import Limits

_MIN_CHUNK = 16
"""Prompt tokens that a step computes however far it misses its target."""


def step_limits(
    model: LoadedModel,
    config: EngineConfig,
    max_model_len: int,
    vocab_size: int,
    shape: ModelShape | None,
) -> Limits:
    """The bounds of steps and sequences: what the user asked for, within what the backend has room
    for."""
    info = model.info
    pools = shape is not None and shape.output != "tokens"
    whole_prompts = shape is not None and shape.whole_prompts
    budget = info.max_num_batched_tokens
    if config.max_num_batched_tokens is not None and not whole_prompts:
        budget = min(config.max_num_batched_tokens, budget)
    return Limits(
        token_budget=budget,
        max_rows=min(
            config.max_num_seqs or info.max_num_seqs,
            budget,
            info.max_logit_rows,
            info.num_state_slots or budget,
        ),
        max_logit_rows=info.max_logit_rows,
        max_model_len=max_model_len,
        num_blocks=info.num_kv_blocks,
        block_size=info.block_size,
        vocab_size=vocab_size,
        windows=info.cache_windows,
        num_stages=info.num_stages if config.async_scheduling else 1,
        num_in_flight=most_in_flight(info, config),
        pools=pools,
        whole_prompts=whole_prompts,
        num_state_slots=info.num_state_slots,
        snapshot_tokens=config.state_snapshot_tokens or tokens_of_slot(info),
    )


def most_in_flight(info: LoadedInfo, config: EngineConfig) -> int:
    """Steps, counted when one was just launched: the next is prepared while one runs."""
    return max(2, info.num_stages) if config.async_scheduling else 1


def step_cost(config: EngineConfig, limits: Limits) -> StepCost:
    """The cost model of steps. It keeps no target without chunked prefill, where there is nothing
    to size."""
    target_ms = config.target_step_ms if config.enable_chunked_prefill else None
    return StepCost(
        None if target_ms is None else target_ms / 1000,
        min_chunk=min(limits.token_budget, _MIN_CHUNK),
    )
