"""Conversations whose blocks are evicted last (`session_id`).

When a request of a session ends, the blocks of all its tokens are pinned in place of those that the
session had before. Pinned blocks that no row owns go when no other block is left, the least
recently used first. What a client pins is bounded by its share of the cache, the number of its
sessions and their age: beyond these the oldest session becomes like any other prefix.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

from vllmx_core.config import EngineConfig
from vllmx_core.records import Record

from vllmx_engine.core.kv import BlockPool
from vllmx_engine.core.prefix_cache import Entry, PrefixCache
from vllmx_engine.wire.messages import CoreRequest


class _Session(Record, eq=False):
    blocks: list[int]
    entries: list[Entry]
    """The entry of each, which is another once the block was forgotten."""
    until_s: float


class Sessions:
    """See the module's docstring. `clock`: seconds, which never go back."""

    def __init__(
        self,
        config: EngineConfig,
        pool: BlockPool,
        cache: PrefixCache,
        clock: Callable[[], float],
    ) -> None:
        self._config, self._pool, self._cache, self._clock = config, pool, cache, clock
        self._most_blocks = int(config.session_share * pool.num_blocks)
        self._sessions: OrderedDict[tuple[str, str], _Session] = OrderedDict()
        """Sessions by client and id, those that ended first at the front."""
        self._held: Counter[str] = Counter()
        """Blocks that each client pins; one that several of its sessions pin counts for each."""
        self._number: Counter[str] = Counter()

    def keep(self, request: CoreRequest, blocks: list[int]) -> None:
        """Pins the cached ones of a request's blocks, which it still owns, as far as limits go."""
        client, session_id = request.client, request.session_id
        self.end(client, session_id)
        entries = {block: entry for block in blocks if (entry := self._cache.entry(block))}
        if not entries or len(entries) > self._most_blocks or not self._config.session_limit:
            return
        while (
            self._held[client] + len(entries) > self._most_blocks
            or self._number[client] >= self._config.session_limit
        ):
            self.end(*next(key for key in self._sessions if key[0] == client))
        session = _Session(
            list(entries), list(entries.values()), self._clock() + self._config.session_age_s
        )
        self._sessions[client, session_id] = session
        self._held[client] += len(session.blocks)
        self._number[client] += 1
        for block in session.blocks:
            self._pool.pin(block)

    def end(self, client: str, session_id: str) -> bool:
        """Makes a session's blocks like any others. False: there is no such session."""
        session = self._sessions.pop((client, session_id), None)
        if session is None:
            return False
        self._held[client] -= len(session.blocks)
        self._number[client] -= 1
        if not self._number[client]:
            del self._held[client], self._number[client]
        for block, entry in zip(reversed(session.blocks), reversed(session.entries), strict=True):
            if self._cache.entry(block) is entry:
                self._pool.unpin(block)
        return True

    def counts(self) -> dict[str, Any]:
        """Fields of `CoreStats`, once the sessions that are too old have ended."""
        now_s = self._clock()
        while self._sessions and next(iter(self._sessions.values())).until_s <= now_s:
            self.end(*next(iter(self._sessions)))
        return {"num_sessions": len(self._sessions), "num_pinned_blocks": self._pool.num_pinned}


def sessions_of(
    config: EngineConfig, pool: BlockPool, cache: PrefixCache, clock: Callable[[], float]
) -> Sessions | None:
    """None where nothing is pinned."""
    if config.session_share <= 0 or not config.enable_prefix_caching:
        return None
    return Sessions(config, pool, cache, clock)
