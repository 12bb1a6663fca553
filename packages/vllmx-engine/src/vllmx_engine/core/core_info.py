"""The description of a loaded core, for those that talk to it and for the log."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import Any

import msgspec
from vllmx_core.backend import LoadedModel
from vllmx_core.errors import shown
from vllmx_core.plugins.checkpoint import Checkpoint
from vllmx_core.plugins.registry import architecture_names

from vllmx_engine.core.found_model import FoundModel
from vllmx_engine.core.generation_config import generation_config
from vllmx_engine.core.limits import Limits
from vllmx_engine.core.scheduler import Scheduler
from vllmx_engine.wire.messages import CoreInfo, PoolingInfo

logger = logging.getLogger("vllmx.load")


def scheduler_counts(scheduler: Scheduler) -> dict[str, Any]:
    """The fields of `CoreStats` that a scheduler knows. Sessions that are too old end here."""
    pool, states = scheduler.pool, scheduler.states
    found: dict[str, Any] = {
        "num_running": len(scheduler.running),
        "num_waiting": scheduler.num_waiting,
        "num_free_blocks": pool.num_available,
        "num_cached_blocks": pool.num_idle,
        "num_blocks": pool.num_blocks,
        "num_preemptions": scheduler.num_preemptions,
        "prefix_cache_queries": scheduler.num_queried_tokens,
        "prefix_cache_hits": scheduler.num_hit_tokens,
    }
    if scheduler.sessions is not None:
        found |= scheduler.sessions.counts()
    if states is not None:
        found |= {
            "num_state_slots": scheduler.limits.num_state_slots,
            "num_used_slots": states.num_used,
            "num_snapshots": states.pool.num_snapshots,
        }
    if scheduler.speculator is not None:
        found |= scheduler.speculator.counts()
    return found if scheduler.tiers is None else found | scheduler.tiers.counts()


def core_info(
    found: FoundModel,
    checkpoint: Checkpoint,
    free_bytes: int,
    loaded: LoadedModel,
    limits: Limits,
    seconds: float,
    pooling: PoolingInfo | None,
) -> CoreInfo:
    info = loaded.info
    names = [*architecture_names(checkpoint.config), str(checkpoint.config.get("model_type", ""))]
    return CoreInfo(
        max_logprobs=found.config.max_logprobs,
        free_bytes=free_bytes,
        model=found.config.name,
        path=str(found.path),
        architecture=names[0].encode("utf-8", "backslashreplace").decode(),
        max_model_len=limits.max_model_len,
        vocab_size=limits.vocab_size,
        backend=info.backend,
        device=info.device,
        dtype=info.dtype,
        kv_cache_dtype=info.kv_cache_dtype,
        block_size=info.block_size,
        num_kv_blocks=info.num_kv_blocks,
        num_state_slots=info.num_state_slots,
        state_slot_bytes=info.state_slot_bytes,
        max_num_seqs=limits.max_rows,
        max_num_batched_tokens=limits.token_budget,
        weight_bytes=info.weight_bytes,
        kv_cache_bytes=info.kv_cache_bytes,
        load_seconds=seconds,
        pooling=pooling,
        generation_config=_sendable(generation_config(found.config, checkpoint.generation_config)),
        details={key: str(value) for key, value in info.details.items()}
        | ({} if found.config.isq is None else {"quantised in situ": found.config.isq}),
    )


def _sendable(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values that a message can carry: JSON has integers and strings that messages do
    not."""
    found = {}
    for key, value in config.items():
        try:
            msgspec.msgpack.encode((key, value))
        except (TypeError, ValueError, OverflowError, RecursionError):
            logger.warning("generation_config.json: %s = %s is left out", shown(key), shown(value))
        else:
            found[key] = value
    return found


def log_info(info: CoreInfo) -> None:
    logger.info(
        "model=%s architecture=%s backend=%s device=%r dtype=%s load_s=%.2f weights=%s kv_cache=%s"
        " kv_tokens=%d kv_dtype=%s state_slots=%d max_model_len=%d max_num_seqs=%d peak_rss=%s"
        " isq=%s",
        info.model,
        info.architecture,
        info.backend,
        info.device,
        info.dtype,
        info.load_seconds,
        gibibytes(info.weight_bytes),
        gibibytes(info.kv_cache_bytes),
        info.num_kv_blocks * info.block_size,
        info.kv_cache_dtype,
        info.num_state_slots,
        info.max_model_len,
        info.max_num_seqs,
        _peak_memory(),
        info.details.get("quantised in situ", "none"),
    )


def _peak_memory() -> str:
    try:
        import resource
    except ImportError:  # Windows
        return "unknown"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return gibibytes(peak if sys.platform == "darwin" else peak * 1024)


def gibibytes(size_bytes: int) -> str:
    """Writes a size for people: "1.50GiB", or MiB below a tenth of that."""
    if size_bytes < 1 << 27:
        return f"{size_bytes / (1 << 20):.1f}MiB"
    return f"{size_bytes / (1 << 30):.2f}GiB"
