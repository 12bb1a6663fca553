"""Blocks and the prefix cache on their own."""

from __future__ import annotations

from array import array
from dataclasses import replace

import numpy as np
import pytest
from vllmx_engine.core.kv import BlockPool
from vllmx_engine.core.prefix_cache import CacheIdentity, PrefixCache

from .harness import QUIET, Harness

SIZE = 4


def tokens(*ids: int) -> bytes:
    return np.array(ids, np.int32).tobytes()


def file_chain(cache: PrefixCache, blocks: list[int], parts: list[bytes]) -> list[bytes]:
    parent, digests = cache.root(""), []
    for block, part in zip(blocks, parts, strict=True):
        digest = cache.digest(parent, part)
        assert cache.insert([block], digest, parent, part) == array("i", [block])
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
    pool.uncache(np.array(chain, np.int32))
    kept = [block in cache for block in (*chain, int(other[0]))]
    assert kept == [True, True, False, True]


def test_find_compares_tokens_and_parents() -> None:
    cache = PrefixCache(key=b"k" * 32)
    root = cache.root("")
    digest = cache.digest(root, tokens(1, 2))
    cache.insert([0], digest, root, tokens(1, 2))
    assert cache.find(digest, root, tokens(1, 2)) == array("i", [0])
    assert cache.find(digest, root, tokens(1, 3)) is None
    assert cache.find(digest, cache.root("salt"), tokens(1, 2)) is None
    assert cache.insert([1], digest, root, tokens(1, 3)) is None
    assert cache.insert([1], digest, root, tokens(1, 2)) == array("i", [0])
    assert 1 not in cache


def test_digests_depend_on_key_salt_parent_and_content() -> None:
    one, other = PrefixCache(key=b"a"), PrefixCache(key=b"b")
    roots = {one.root(""), one.root("s"), one.root("", "adapter"), other.root("")}
    assert len(roots) == 4
    contents = (tokens(1), tokens(2), tokens(1) + b"image")
    assert len({one.digest(root, part) for root in roots for part in contents}) == 12


def test_roots_cover_what_a_cache_holds() -> None:
    identities = [
        CacheIdentity(model="m", dtype="f32", block_size=16),
        CacheIdentity(model="n", dtype="f32", block_size=16),
        CacheIdentity(model="m", dtype="int8", block_size=16),
        CacheIdentity(model="m", dtype="f32", block_size=8),
    ]
    caches = [PrefixCache(identity, key=b"k") for identity in identities]
    assert len({cache.root("") for cache in caches}) == 4
    assert PrefixCache(identities[0], key=b"k").root("") == caches[0].root("")


def test_content_beside_the_tokens_sets_sequences_apart() -> None:
    harness = Harness(rules=QUIET)
    for name in ("one", "other"):
        harness.add([1] * 20, 2, name=name)
        harness.core._scheduler.live[name].content[1] = name.encode()
        harness.run()
    harness.add([1] * 20, 2, name="again")
    harness.core._scheduler.live["again"].content[1] = b"one"
    harness.run()
    cached = [harness.first[name].num_cached_tokens for name in ("one", "other", "again")]
    assert cached == [0, 8, 16]


def test_each_group_comes_and_goes_alone() -> None:
    cache = PrefixCache(windows=(None, 8))
    root, part = cache.root(""), tokens(1)
    digest = cache.digest(root, part)
    assert cache.insert([0, 1], digest, root, part) == array("i", [0, 1])
    cache.remove(0)
    assert cache.find(digest, root, part) == array("i", [-1, 1])
    assert cache.insert([2, 3], digest, root, part) == array("i", [2, 1])
    assert 3 not in cache
    cache.remove(2)
    cache.remove(1)
    assert cache.find(digest, root, part) is None
    assert not cache.is_known(digest)


def test_what_is_known_is_what_would_be_found() -> None:
    cache = PrefixCache(windows=(None, 8))
    root, content = cache.root(""), tokens(1, 2)
    digest = cache.digest(root, content)
    assert cache.known(root, content) is None
    cache.insert([3, -1], digest, root, content)
    cache.insert([-1, 4], digest, root, content)
    assert cache.insert([5, 6], digest, root, tokens(7, 8)) is None  # as if digests collided
    assert cache.known(root, tokens(7, 8)) is None
    assert cache.known(root, content) == (digest, cache.find(digest, root, content))
    assert cache.known(digest, content) is None
    cache.remove(3)
    assert cache.known(root, content) == (digest, array("i", [-1, 4]))
    cache.remove(4)
    assert cache.known(root, content) is None
    cache.insert([1, 2], digest, root, content)
    assert cache.known(root, content) == (digest, array("i", [1, 2]))


def test_a_block_that_two_rows_give_back_is_free_once() -> None:
    pool = BlockPool(3, PrefixCache())
    blocks = pool.allocate(2)
    pool.acquire(blocks)
    pool.release(np.concatenate([blocks, blocks]))
    pool.check(np.zeros(0, np.int32))


@pytest.mark.parametrize("missing", [0, 2, 3])
def test_a_hit_asks_of_a_window_its_last_blocks(missing: int) -> None:
    """Blocks of 8 and a window of 10: a prefix of four blocks is seen from block 2 on."""
    harness = Harness(rules=replace(QUIET, windows=(None, 10)))
    harness.add([1] * 40, 2)
    harness.run()
    scheduler = harness.core._scheduler
    harness.add([1] * 40, 2)
    (sequence,) = scheduler.live.values()
    hit = scheduler.prefixes.look(sequence)
    assert (hit.num_blocks, [blocks.size for blocks in hit.blocks]) == (4, [4, 2])
    scheduler.pool.forget_idle(scheduler.cache.block_of(sequence.digests[missing], 1))
    hit = scheduler.prefixes.look(sequence)
    assert hit.num_blocks == {0: 4, 2: 2, 3: 3}[missing]
    harness.run()
    harness.check_outputs()


def test_a_window_bounds_what_a_long_prompt_and_its_answer_hold() -> None:
    harness = Harness(
        rules=replace(QUIET, windows=(13,)), max_model_len=1000, model={"num_blocks": 7}
    )
    harness.add([3] * 500, 400)
    held = []
    while harness.core.has_work:
        harness.step()
        held.append(7 - harness.core.stats().num_free_blocks)
    assert max(held[-300:]) == 3
    assert harness.core.stats().num_preemptions == 0
    harness.check_outputs()
    harness.check_idle()
