"""Blocks and the prefix cache on their own."""

from __future__ import annotations

import numpy as np
import pytest
from vllmx_engine.kv import BlockPool
from vllmx_engine.prefix_cache import PrefixCache

SIZE = 4


def tokens(*ids: int) -> bytes:
    return np.array(ids, np.int32).tobytes()


def file_chain(cache: PrefixCache, blocks: list[int], parts: list[bytes]) -> list[bytes]:
    parent, digests = cache.root(""), []
    for block, part in zip(blocks, parts, strict=True):
        digest = cache.digest(parent, part)
        assert cache.insert([block], digest, parent, part) == [block]
        digests.append(digest)
        parent = digest
    return digests


def test_allocate_and_release() -> None:
    pool = BlockPool(6, PrefixCache())
    first, second = pool.allocate(4), pool.allocate(2)
    assert sorted([*first.tolist(), *second.tolist()]) == list(range(6))
    assert pool.num_available == 0
    with pytest.raises(AssertionError):
        pool.allocate(1)
    pool.release(first)
    assert pool.num_available == 4
    pool.check(second)
    assert pool.allocate(0).size == 0


def test_shared_blocks_live_until_the_last_owner_goes() -> None:
    cache = PrefixCache()
    pool = BlockPool(3, cache)
    blocks = pool.allocate(2)
    file_chain(cache, blocks.tolist(), [tokens(1), tokens(2)])
    pool.acquire(blocks)
    pool.release(blocks)
    assert (pool.num_available, pool.num_idle) == (1, 0)
    pool.release(blocks)
    assert (pool.num_available, pool.num_idle) == (3, 2)
    assert pool.num_idle_of(blocks) == 2
    pool.check(np.zeros(0, np.int32))


def test_the_oldest_leaf_is_evicted_first() -> None:
    cache = PrefixCache()
    pool = BlockPool(5, cache)
    old, new = pool.allocate(3), pool.allocate(2)
    file_chain(cache, old.tolist(), [tokens(1), tokens(2), tokens(3)])
    file_chain(cache, new.tolist(), [tokens(4), tokens(5)])
    pool.release(old)
    pool.release(new)
    evicted = [int(pool.allocate(1)[0]) for _ in range(5)]
    assert evicted == [*reversed(old.tolist()), *reversed(new.tolist())]
    assert len(cache) == 0


def test_a_hit_moves_a_prefix_to_the_back() -> None:
    cache = PrefixCache()
    pool = BlockPool(4, cache)
    first, second = pool.allocate(2), pool.allocate(2)
    file_chain(cache, first.tolist(), [tokens(1), tokens(2)])
    file_chain(cache, second.tolist(), [tokens(3), tokens(4)])
    pool.release(first)
    pool.release(second)
    pool.acquire(first)
    pool.release(first)
    assert pool.allocate(2).tolist() == [second[1], second[0]]


def test_distrust_keeps_what_others_own_or_continue() -> None:
    cache = PrefixCache()
    pool = BlockPool(5, cache)
    shared, mine, other = pool.allocate(1), pool.allocate(2), pool.allocate(1)
    chain = [*shared.tolist(), *mine.tolist()]
    digests = file_chain(cache, chain, [tokens(1), tokens(2), tokens(3)])
    part = tokens(9)
    cache.insert(other.tolist(), cache.digest(digests[1], part), digests[1], part)
    pool.acquire(shared)
    pool.distrust(np.array(chain, np.int32))
    kept = [block in cache for block in (*chain, int(other[0]))]
    assert kept == [True, True, False, True]


def test_find_compares_tokens_and_parents() -> None:
    cache = PrefixCache(key=b"k" * 32)
    root = cache.root("")
    digest = cache.digest(root, tokens(1, 2))
    cache.insert([0], digest, root, tokens(1, 2))
    assert cache.find(digest, root, tokens(1, 2)) == [0]
    assert cache.find(digest, root, tokens(1, 3)) is None
    assert cache.find(digest, cache.root("salt"), tokens(1, 2)) is None
    assert cache.insert([1], digest, root, tokens(1, 3)) is None
    assert cache.insert([1], digest, root, tokens(1, 2)) == [0]
    assert 1 not in cache


def test_digests_depend_on_key_salt_parent_and_tokens() -> None:
    one, other = PrefixCache(key=b"a"), PrefixCache(key=b"b")
    roots = {one.root(""), one.root("s"), other.root("")}
    assert len(roots) == 3
    assert len({one.digest(root, part) for root in roots for part in (tokens(1), tokens(2))}) == 6
