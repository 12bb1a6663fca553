"""The counters and the description of several cores as those of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import add

import msgspec

from vllmx_engine.wire.messages import CoreInfo, CoreStats

_SUMS = (
    "max_num_seqs",
    "num_kv_blocks",
    "num_state_slots",
    "weight_bytes",
    "kv_cache_bytes",
)


def merged_info(infos: Sequence[CoreInfo]) -> CoreInfo:
    """One core with the room of all, and the shortest context of them."""
    sums = {name: sum(getattr(info, name) for info in infos) for name in _SUMS}
    shortest = min(info.max_model_len for info in infos)
    return msgspec.structs.replace(
        infos[0],
        **sums,
        max_model_len=shortest,
        id_prefix="",
        details=infos[0].details | {"replicas": str(len(infos))},
    )


def merged_stats(by_replica: Mapping[str, CoreStats]) -> CoreStats:
    """The sums of all counters, with those of each replica."""
    found: dict[str, object] = {}
    all_stats = list(by_replica.values())
    for name in CoreStats.__struct_fields__:
        values = [getattr(stats, name) for stats in all_stats]
        if name == "adapters":
            lists = [each for each in values if each is not None]
            found[name] = max(lists, key=len, default=None)
        elif name == "num_stored_blocks":
            kept = [value for value in values if value >= 0]
            found[name] = sum(kept) if kept else -1
        elif name == "replicas":
            found[name] = dict(by_replica)
        elif isinstance(values[0], tuple):
            total = values[0]
            for value in values[1:]:
                total = tuple(map(add, total, value))
            found[name] = total
        else:
            found[name] = sum(values)
    return CoreStats(**found)  # type: ignore[arg-type]
