"""What the ranks or the stages of a group can do together."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from vllmx_core.backend import LoadedInfo
from vllmx_core.errors import VllmxError

from vllmx_tp.messages import RankReady

logger = logging.getLogger("vllmx.tp")

_ALIKE_STAGES = ("backend", "dtype", "kv_cache_dtype", "block_size", "cache_windows")
_ALIKE_RANKS = (*_ALIKE_STAGES, "max_num_batched_tokens", "max_logit_rows", "num_feature_rows")


def agreed_ranks(mine: LoadedInfo, others: Sequence[RankReady]) -> LoadedInfo:
    """What all ranks can do, and take. Raises VllmxError where they do not fit together."""
    ranks = [RankReady.of(mine), *others]
    _compare_bits(ranks)
    return replace(
        _together(mine, ranks, "ranks", _ALIKE_RANKS, {"ranks": len(ranks)}),
        num_state_slots=min(one.num_state_slots for one in ranks),
    )


def agreed_stages(mine: LoadedInfo, others: Sequence[RankReady], num_stages: int) -> LoadedInfo:
    """What all stages, of as many ranks each, can do together, and take. Raises VllmxError where
    they do not fit."""
    stages = [RankReady.of(mine), *others]
    slots = [one.num_state_slots for one in stages if one.num_state_slots]
    details = {"stages": num_stages, "ranks": len(stages)}
    return replace(
        _together(mine, stages, "stages", _ALIKE_STAGES, details),
        max_num_batched_tokens=min(one.max_num_batched_tokens for one in stages),
        max_logit_rows=stages[-1].max_logit_rows,
        num_state_slots=min(slots, default=0),
        num_stages=num_stages,
    )


def _compare_bits(ranks: Sequence[RankReady]) -> None:
    """Warns where ranks may draw different ids, as each samples by itself."""
    for name, own in ranks[0].computes_with.items():
        values = [one.computes_with.get(name, own) for one in ranks]
        if len(set(values)) > 1:
            logger.warning(
                "ranks differ in %s (%s): they may round differently and draw different ids, and"
                " answers are wrong from there on: use the same on all hosts (instruction sets of"
                " the CPU backend: set VLLMX_CPU_ISA)",
                name,
                ", ".join(values),
            )


def _together(
    mine: LoadedInfo,
    everyone: Sequence[RankReady],
    who: str,
    alike: Sequence[str],
    details: dict[str, Any],
) -> LoadedInfo:
    for name in alike:
        values = [getattr(one, name) for one in everyone]
        if len(set(values)) > 1:
            raise VllmxError(
                f"{who} differ in {name}: {values}; set it by its flag, or report this"
            )
    return replace(
        mine,
        num_kv_blocks=min(one.num_kv_blocks for one in everyone),
        max_num_seqs=min(one.max_num_seqs for one in everyone),
        state_slot_bytes=sum(one.state_slot_bytes for one in everyone),
        weight_bytes=sum(one.weight_bytes for one in everyone),
        kv_cache_bytes=sum(one.kv_cache_bytes for one in everyone),
        details=mine.details | details,
    )
