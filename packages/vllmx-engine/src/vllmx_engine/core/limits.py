"""The limits and the cost model of an engine core's steps."""

from __future__ import annotations

import dataclasses
import math

from vllmx_core.backend import LoadedInfo, LoadedModel
from vllmx_core.cache.groups import longest_sequence
from vllmx_core.config import EngineConfig
from vllmx_core.model import ModelShape

from vllmx_engine.core.cost import AUTO_S, StepCost


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """Resolved bounds of a step and of a sequence."""

    token_budget: int
    """Tokens of a step."""
    max_rows: int
    """Sequences that run at once; never more than the budget or the logit rows of a step, so that
    every running sequence can always be given one token."""
    max_logit_rows: int
    max_model_len: int
    num_blocks: int
    block_size: int
    vocab_size: int
    pools: bool = False
    """The model gives vectors or scores for each prompt, and no tokens."""
    token_vectors: bool = False
    """It gives a vector for each token."""
    whole_prompts: bool = False
    """A prompt is computed in one step, see `ModelShape.whole_prompts`."""
    windows: tuple[int | None, ...] = (None,)
    """The window of each cache group, as in `LoadedInfo.cache_windows`."""
    num_stages: int = 1
    """Above 1: so many steps are in flight, and a row that decodes in one of them at most."""
    num_in_flight: int = 2
    """Steps that are in flight at once at the most."""
    num_state_slots: int = 0
    """The slots for the states of recurrent layers; 0: the model has none."""
    keeps_states_after: bool = False
    """A row can verify a draft though the model has recurrent layers."""
    snapshot_tokens: int = 1
    """A snapshot of states that saves at least so many tokens may evict any other one."""
    reserved_rows: int = 0
    """Rows that only a priority better than the default, 0, may take while others run."""
    reserved_blocks: int = 0
    """The same of blocks; rows that run may grow into them."""
    max_tokens: int = dataclasses.field(init=False)
    """The most tokens of a sequence, prompt included: what the context and the whole KV cache can
    hold."""

    def __post_init__(self) -> None:
        longest = longest_sequence(
            self.windows, self.num_blocks, self.block_size, self.token_budget, self.max_model_len
        )
        object.__setattr__(self, "max_tokens", longest)


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
    max_rows = min(
        config.max_num_seqs or info.max_num_seqs,
        budget,
        info.max_logit_rows,
        info.num_state_slots or budget,
    )
    reserve = config.priority_reserve if config.scheduling_policy == "priority" else 0.0
    return Limits(
        token_budget=budget,
        max_rows=max_rows,
        reserved_rows=min(math.ceil(reserve * max_rows), max_rows - 1),
        reserved_blocks=int(reserve * info.num_kv_blocks),
        max_logit_rows=info.max_logit_rows,
        max_model_len=max_model_len,
        num_blocks=info.num_kv_blocks,
        block_size=info.block_size,
        vocab_size=vocab_size,
        windows=info.cache_windows,
        num_stages=info.num_stages if config.async_scheduling else 1,
        num_in_flight=most_in_flight(info, config),
        pools=pools,
        token_vectors=shape is not None and shape.output == "token_vectors",
        whole_prompts=whole_prompts,
        num_state_slots=info.num_state_slots,
        keeps_states_after=info.keeps_states_after,
        snapshot_tokens=config.state_snapshot_tokens or tokens_of_slot(info),
    )


def most_in_flight(info: LoadedInfo, config: EngineConfig) -> int:
    """Steps, counted when one was just launched: the next is prepared while one runs."""
    return max(2, info.num_stages) if config.async_scheduling else 1


def step_cost(config: EngineConfig, limits: Limits) -> StepCost:
    """The cost model of steps. It keeps no target without chunked prefill, where there is nothing
    to size."""
    target = config.target_itl if config.enable_chunked_prefill else "none"
    target_s = {"auto": AUTO_S, "none": None}
    return StepCost(
        target_s[target] if target in target_s else float(target) / 1e3,
        min_chunk=min(limits.token_budget, _MIN_CHUNK),
    )


_WITHOUT_PAGES = 1024
"""Tokens that a snapshot must save to be worth the place of any other, where a token has no pages
whose memory it could be compared with."""


def tokens_of_slot(info: LoadedInfo) -> int:
    """Tokens whose keys and values take as much memory as one slot."""
    tokens = info.num_kv_blocks * info.block_size
    if not info.kv_cache_bytes or not info.state_slot_bytes:
        return _WITHOUT_PAGES
    groups = len(info.cache_windows)  # a token is in a block of each
    return max(1, info.state_slot_bytes * tokens // (info.kv_cache_bytes * groups))
