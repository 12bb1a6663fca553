"""A replica's core: sequences that began elsewhere, and what it announces."""

from __future__ import annotations

from typing import Any

import pytest
from vllmx_engine.core.announcer import Announcer
from vllmx_engine.core.prefix_cache import CacheIdentity
from vllmx_engine.replicas.digests import PromptDigests, split_digests
from vllmx_engine.replicas.router import Router
from vllmx_engine.wire.messages import CoreInfo, ImageInput, pack_ids

from .harness import QUIET, VOCAB_SIZE, Harness

PROMPT = list(range(20))
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalties": {"params": {"frequency_penalty": 0.5, "temperature": 1.0}},
    "logprobs": {"params": {"logprobs": 2}},
    "bans": {"bad_words_ids": [[3, 4], [9]], "params": {"min_tokens": 6}},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("blocks", [64, 7])
def test_a_sequence_goes_on_behind_what_was_generated(way: str, blocks: int) -> None:
    """With few blocks it is preempted as well."""
    size = {"num_blocks": blocks}
    whole = Harness(rules=QUIET, model=size)
    for seed in range(2):
        whole.add(PROMPT, 24, seed=seed, **WAYS[way])
    whole.run()
    for cut in (1, 5, 23):
        rest = Harness(rules=QUIET, model=size)
        for seed in range(2):
            known = pack_ids(whole.ids[f"r{seed}"][:cut])
            rest.add(PROMPT, 24, seed=seed, generated=known, **WAYS[way])
        rest.run()
        for name in ("r0", "r1"):
            assert rest.ids[name] == whole.ids[name][cut:]
            assert rest.logprobs[name] == whole.logprobs[name][cut:]
            assert rest.last[name].finish_reason == whole.last[name].finish_reason
        stats = rest.core.stats()
        assert stats.prompt_tokens == 0  # the replica before has counted it
        assert stats.generation_tokens == 2 * (24 - cut)


def test_later_choices_wait_for_one_that_began_elsewhere() -> None:
    harness = Harness(rules=QUIET)
    harness.add(PROMPT, 9, name="a", generated=pack_ids([1, 2]))
    harness.add(PROMPT, 9, name="b", leader="a")
    harness.step()
    assert harness.core.stats().num_waiting == 1
    harness.run()
    assert harness.last["b"].finish_reason == "length"
    assert harness.first["b"].num_cached_tokens == 16


def info(harness: Harness) -> CoreInfo:
    loaded = harness.core.model_info
    return CoreInfo(
        model="demo", path="", architecture="", max_model_len=64, vocab_size=VOCAB_SIZE, backend="",
        device="", dtype=loaded.dtype, kv_cache_dtype=loaded.kv_cache_dtype,
        block_size=loaded.block_size, num_kv_blocks=0, max_num_seqs=1, max_num_batched_tokens=1,
        weight_bytes=0, kv_cache_bytes=0, load_seconds=0.0,
    )  # fmt: skip


def test_the_frontends_digests_are_the_cores() -> None:
    key = bytes(range(32))
    harness = Harness(rules=QUIET)
    announcer = Announcer(harness.core, key)
    digests = PromptDigests(key, "demo", info(harness), lambda name: "")
    harness.add(PROMPT, 4, cache_salt="s")
    given = digests.of(harness.requests["r0"])
    harness.run()
    filed, evicted = announcer.changes()
    assert split_digests(filed) == given[1:]
    assert not evicted
    cache = harness.core.scheduler.cache
    made: list[Any] = []
    digest = cache.digest
    cache.digest = lambda *content: made.append(content) or digest(*content)  # type: ignore[method-assign, func-returns-value]
    harness.add([5, *PROMPT], 2, name="other")
    harness.run()
    assert len(made) == 2
    packed = b"".join(digests.of(harness.requests["other"]))
    for salt, count in (("", 0), ("t", 2)):  # those of another root are not taken
        assert cache.root(salt) == CacheIdentity.of("demo", info(harness)).root(key, salt, "")
        made.clear()
        harness.add([5, *PROMPT], 2, name=f"other {salt}", digests=packed, cache_salt=salt)
        harness.run()
        assert len(made) == count
    image = ImageInput(3, 6, b"image", (1, 1, 1), b"", b"")
    request = harness.requests["r0"]
    fields = {name: getattr(request, name) for name in request.__struct_fields__}
    assert digests.of(type(request)(**fields | {"images": [image]}))[1] != given[1]


@pytest.mark.parametrize("windows", [(None,), (None, 16), (16,)])
def test_what_is_announced_is_what_can_be_hit(windows: tuple[int | None, ...]) -> None:
    """A router that hears of all changes knows what the cache has, whatever is evicted."""
    rules = type(QUIET)(vocab_size=VOCAB_SIZE, windows=windows)
    harness = Harness(rules=rules, model={"num_blocks": 14})
    announcer = Announcer(harness.core, bytes(32))
    router = Router(8)
    router.add(0)
    for number in range(12):
        harness.add([(number * step) % VOCAB_SIZE for step in range(1, 30)], 6)
        harness.run()
        filed, evicted = map(split_digests, announcer.changes())
        router.filed(0, filed)
        router.evicted(0, evicted)
        cache = harness.core.scheduler.cache
        group = windows.index(None) if None in windows else 0
        held = {one for one in cache.digests if cache.block_of(one, group) >= 0}
        assert router._held[0] == held
    assert split_digests(announcer.first("").filed)


def test_the_load_counts_what_was_taken() -> None:
    now = [0.0]
    harness = Harness(rules=QUIET, model={"num_blocks": 64}, config={"max_num_seqs": 2})
    announcer = Announcer(harness.core, bytes(32), lambda: now[0])
    idle = announcer.load()
    assert (idle.num_running, idle.queued_s, idle.stretch, idle.free_rows) == (0, 0.0, 1.0, 2)
    for number in range(4):
        harness.add(PROMPT, 6)
        announcer.took("1:" if number else "2:", 1)
    for _ in range(4):
        harness.step()
    busy = announcer.load("1:")
    assert (busy.num_taken, busy.num_running, busy.num_waiting) == (3, 2, 2)
    assert busy.free_rows == 0
    assert busy.turn_blocks == 2  # two of three are shared
    now[0] = 4.0
    harness.run()
    assert announcer.load("2:").turn_s == pytest.approx(1.0)  # four have ended in four seconds
    assert announcer.load("2:").num_taken == 1
    announcer.left("2:")
    assert announcer.load("2:").num_taken == 0
    assert announcer.is_due(is_busy=True)
    assert not announcer.is_due(is_busy=True)
    assert announcer.is_due(is_busy=False)
