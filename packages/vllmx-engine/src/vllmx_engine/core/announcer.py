"""Announces to routers what a replica has cached, and how long more work would take there."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from itertools import islice

from vllmx_engine.core.cost import StepLoad
from vllmx_engine.core.engine_core import EngineCore
from vllmx_engine.core.sequence import Sequence
from vllmx_engine.wire.ipc import Announced
from vllmx_engine.wire.messages import ReplicaLoad

INTERVAL_S = 0.05
_LOOKED_AT = 64
"""Waiting sequences whose cached blocks are counted; the others are taken to be like them."""
_END_WEIGHT = 0.3
"""The weight of the newest time between two ends."""
_MAX_STRETCH = 16.0


class Announcer:
    """Collects what is announced about a core; used by the core's thread alone.

    Args:
        key: of digests, set before any block is filed.
        clock: seconds, which never go back.
    """

    def __init__(
        self, core: EngineCore, key: bytes, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._core, self._clock = core, clock
        self._cache = core.scheduler.cache
        self._cache.key, self._cache.watcher = key, self
        self._changed: dict[bytes, bool] = {}
        """Digest -> whether it is cached now."""
        self._num_taken: Counter[str] = Counter()
        """Requests of each client, by its prefix."""
        self._num_added = self._num_ended = 0
        self._ended_s = clock()
        self._turn_s = 0.0
        self._due_s = 0.0

    # --- what happens -----------------------------------------------------------------------------
    def filed(self, digest: bytes) -> None:
        """See `Watcher`."""
        self._changed[digest] = True

    def evicted(self, digest: bytes) -> None:
        """See `Watcher`."""
        self._changed[digest] = False

    def took(self, prefix: str, num_sequences: int) -> None:
        """A client's request was taken in."""
        self._num_taken[prefix] += 1
        self._num_added += num_sequences

    def left(self, prefix: str) -> None:
        """A client is gone."""
        self._num_taken.pop(prefix, None)

    # --- what is announced ------------------------------------------------------------------------
    def is_due(self, *, is_busy: bool) -> bool:
        """True if the next announcement is due."""
        now_s = self._clock()
        if is_busy and now_s < self._due_s:
            return False
        self._due_s = now_s + INTERVAL_S
        return True

    def changes(self) -> tuple[bytes, bytes]:
        """The digests that were filed and evicted since the last call."""
        changed, self._changed = self._changed, {}
        filed = b"".join(digest for digest, is_cached in changed.items() if is_cached)
        return filed, b"".join(digest for digest, is_cached in changed.items() if not is_cached)

    def first(self, prefix: str) -> Announced:
        """The announcement to a client that has just come: all that is cached."""
        return Announced(b"".join(self._cache.digests), b"", self.load(prefix))

    def announced(self, prefix: str, changes: tuple[bytes, bytes], load: ReplicaLoad) -> Announced:
        """The announcement to a client: the load is that of all but for its own requests."""
        own = _with_taken(load, self._num_taken[prefix])
        return Announced(*changes, own)

    def load(self, prefix: str = "") -> ReplicaLoad:
        """The core's load now."""
        scheduler, table = self._core.scheduler, self._core.scheduler.table
        cost, limits, pool = scheduler.cost, scheduler.limits, scheduler.pool
        token_s, work_s = cost.token_seconds
        running = len(scheduler.running)
        self._note_ends()
        decodes = running - len(scheduler.prefills)
        context = sum(len(one.tokens) for one in islice(scheduler.running, _LOOKED_AT))
        context = context * decodes // max(1, min(running, _LOOKED_AT))
        queued_s = sum(
            cost.chunk_cost(len(one.tokens) - start, start)
            for one in scheduler.prefills
            for start in (table.computed.item(one.row),)
        )
        owned = pool.num_blocks - pool.num_available
        return ReplicaLoad(
            num_taken=self._num_taken[prefix],
            num_running=running,
            num_waiting=scheduler.num_waiting,
            queued_s=queued_s + self._waiting_s(),
            token_s=token_s,
            work_s=work_s,
            stretch=self._stretch(decodes, context, token_s),
            row_s=cost.decode_seconds(1, context // decodes) if decodes else 0.0,
            free_rows=limits.max_rows - running,
            free_blocks=pool.num_available // len(limits.windows),
            turn_s=max(self._turn_s, self._clock() - self._ended_s) if running else self._turn_s,
            turn_blocks=owned / len(limits.windows) / running if running else 0.0,
            pull_byte_s=0.0 if scheduler.tiers is None else scheduler.tiers.tiers.pull_byte_s,
        )

    def _note_ends(self) -> None:
        num_ended = self._num_added - len(self._core.request_ids)
        new, now_s = num_ended - self._num_ended, self._clock()
        if new > 0:
            each_s = (now_s - self._ended_s) / new
            weight = _END_WEIGHT if self._turn_s else 1.0
            self._turn_s += weight * (each_s - self._turn_s)
            self._num_ended, self._ended_s = num_ended, now_s

    def _waiting_s(self) -> float:
        """Seconds of prefill of sequences without a row. Those whose blocks come are not
        computed."""
        scheduler, seconds, count = self._core.scheduler, 0.0, 0
        if not scheduler.num_waiting:
            return 0.0
        tiers = scheduler.tiers
        waiting = (
            one
            for one in scheduler.live.values()
            if one.row < 0 and (tiers is None or not tiers.is_fetching(one))
        )
        for sequence in islice(waiting, _LOOKED_AT):
            cached = self._num_cached(sequence)
            seconds += scheduler.cost.chunk_cost(len(sequence.tokens) - cached, cached)
            count += 1
        return seconds * scheduler.num_waiting / max(1, count)

    def _num_cached(self, sequence: Sequence) -> int:
        """Tokens of a waiting sequence that it would find cached; those of its known digests."""
        digests, low = sequence.digests, 0
        high = len(digests)
        while low < high:
            middle = (low + high) // 2
            if self._cache.is_known(digests[middle]):
                low = middle + 1
            else:
                high = middle
        size = self._core.scheduler.limits.block_size
        return min(low * size, len(sequence.tokens) - 1)

    def _stretch(self, decodes: int, context: int, token_s: float) -> float:
        """The ratio of a prompt's time next to these decodes to its time alone."""
        scheduler = self._core.scheduler
        if not decodes or not token_s:
            return 1.0
        part_s = scheduler.cost.chunk_seconds(decodes, context)
        part_s = min(part_s, scheduler.limits.token_budget * token_s)
        decodes_s = scheduler.cost.predict(StepLoad(decodes, context))
        if not math.isfinite(decodes_s) or part_s <= 0.0:
            return _MAX_STRETCH
        return min((decodes_s + part_s) / part_s, _MAX_STRETCH)


def _with_taken(load: ReplicaLoad, num_taken: int) -> ReplicaLoad:
    fields = (getattr(load, name) for name in load.__struct_fields__[1:])
    return ReplicaLoad(num_taken, *fields)
