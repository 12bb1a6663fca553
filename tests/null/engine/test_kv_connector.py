"""KV blocks in a shared store: shared by servers, lost, wrong, and never waited for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllmx_core.errors import PluginError
from vllmx_core.plugins.registry import load_registry
from vllmx_engine.core.load_tiers import connector_of
from vllmx_engine.core.remote_store import RemoteStore
from vllmx_testing.fake import FakeRules

from tests.waiting import wait_until

from .harness import Harness
from .kv_stores import FakeStore
from .test_tiers import OTHERS, PROMPT, RULES, STATES, WINDOWS, cached, harness, settled


@pytest.fixture
def store() -> Iterator[FakeStore]:
    store = FakeStore()
    yield store
    store.released.set()


def server(store: FakeStore, rules: FakeRules = RULES, **config: Any) -> Harness:
    """An engine with the store, whose calls may take a moment."""
    engine = harness(rules, connect=store.connect, kv_connector="fake", **config)
    remote = remote_of(engine)
    if remote is not None:
        remote._call_s = 0.3
    return engine


def remote_of(engine: Harness) -> RemoteStore | None:
    tiers = engine.core._scheduler.tiers
    assert tiers is not None
    return tiers.tiers.remote


@pytest.mark.parametrize("rules", [RULES, WINDOWS, STATES], ids=["full", "windows", "states"])
@pytest.mark.parametrize("other_tier", ["none", "memory", "disk"])
def test_servers_share_blocks(
    rules: FakeRules, other_tier: str, store: FakeStore, tmp_path: Path
) -> None:
    config: dict[str, Any] = {}
    if other_tier == "memory":
        config = {"kv_host_memory": 3000}
    for number, expected in enumerate((0, 48, 48)):
        if other_tier == "disk":
            config = {"kv_disk": str(tmp_path / str(number))}
        engine = server(store, rules, **config)
        assert cached(engine, PROMPT) == expected
        for other in OTHERS:
            cached(engine, other)
        settled(engine)
        assert cached(engine, PROMPT) == 48
        engine.check_outputs()
        engine.check_idle()
        engine.core.close()
    assert store.calls[-1] == "close"


def test_what_is_longer_elsewhere_is_fetched(store: FakeStore) -> None:
    one, two = server(store), server(store)
    assert [cached(one, PROMPT[:20]), cached(two, PROMPT)] == [0, 0]
    two.core.close()
    assert cached(one, PROMPT) == 48
    one.check_outputs()
    one.core.close()


def test_namespaces_and_salts_hold(store: FakeStore) -> None:
    server_of_one = server(store, model="one")
    cached(server_of_one, PROMPT)
    server_of_one.core.close()
    assert cached(server(store, model="two"), PROMPT) == 0
    again = server(store, model="one")
    again.add(PROMPT, 4, name="salted", cache_salt="s")
    again.run()
    assert again.first["salted"].num_cached_tokens == 0
    assert cached(again, PROMPT) == 48


def test_a_folder_of_another_secret_finds_nothing_and_stays(
    store: FakeStore, tmp_path: Path
) -> None:
    for other, expected in ((None, 0), (store, 0), (store, 48), (None, 48)):
        config: dict[str, Any] = {"kv_disk": str(tmp_path)}
        engine = harness(**config) if other is None else server(other, **config)
        assert cached(engine, PROMPT) == expected
        engine.core.close()


@pytest.mark.parametrize("fault", ["lose", "damage", "swap", "short", "text", "raise", "panic"])
@pytest.mark.parametrize("rules", [RULES, STATES], ids=["full", "states"])
def test_a_bad_store_costs_hits_alone(fault: str, rules: FakeRules, store: FakeStore) -> None:
    engine = server(store, rules)
    cached(engine, PROMPT)
    engine.core.close()
    store.fault = fault
    engine = server(store, rules)
    assert cached(engine, PROMPT) == 0
    remote = remote_of(engine)
    assert remote is not None
    assert (remote.num_failures > 0) == (fault in ("short", "raise", "panic"))
    assert (remote.num_damaged > 0) == (fault in ("damage", "swap", "text"))
    before = len(store.calls)
    cached(engine, PROMPT[::-1])
    assert (len(store.calls) == before) == (remote.num_failures > 0), "it rests after a failure"
    engine.check_outputs()
    store.fault = ""
    engine.core.close()


@pytest.mark.parametrize("method", ["has", "get", "put"])
def test_a_hanging_store_rests(method: str, store: FakeStore) -> None:
    """No step waits for it, and it is used again once it answers and the pause is over."""
    now = [0.0]
    engine = server(store)
    cached(engine, PROMPT)
    engine.core.close()
    engine = server(store)
    remote = remote_of(engine)
    assert remote is not None
    remote._clock, remote._call_s = lambda: now[0], 0.01
    store.fault, store.only = "hang", method
    name = engine.add(PROMPT if method != "put" else OTHERS[0], 4)
    engine.run()
    assert engine.first[name].num_cached_tokens == 0
    for other in OTHERS:
        cached(engine, other)
    settled(engine)
    assert not remote.is_usable
    assert engine.core.stats().num_store_failures == 1
    now[0] = 31.0
    assert not remote.is_usable, "the call still hangs"
    before = len(store.calls)
    cached(engine, PROMPT[:9])
    assert len(store.calls) == before
    store.fault = ""
    store.released.set()
    wait_until(lambda: remote.is_usable)
    assert cached(engine, [1, *PROMPT]) == 0
    assert store.calls[before:], "it is asked again"
    engine.check_outputs()
    engine.core.close()


def test_requests_come_first_while_idle_blocks_are_written(store: FakeStore) -> None:
    engine = server(store)
    remote = remote_of(engine)
    assert remote is not None
    remote._call_s = 60.0
    cached(engine, PROMPT)
    store.fault, store.only = "hang", "put"
    assert engine.core.write_idle()
    assert engine.core.write_idle(), "it is still written"
    assert cached(engine, PROMPT[::-1]) == 0
    assert store.num_blocks == 0
    store.released.set()
    while engine.core.write_idle():
        pass
    assert store.num_blocks == 2 * 6
    engine.core.close()


@pytest.mark.parametrize("fault", ["raise", "panic", "hang"])
def test_a_store_that_is_not_there_at_the_start_is_left_out(
    fault: str, store: FakeStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(RemoteStore.__init__, "__defaults__", (0.01, lambda: 0.0))
    store.fault, store.only = fault, "secret"
    engine = server(store)
    assert "going on without it" in caplog.text
    assert [cached(engine, PROMPT) for _ in range(2)] == [0, 48]
    engine.core.close()


def test_a_reset_deletes_the_blocks_of_this_model_alone(store: FakeStore) -> None:
    for model in ("one", "two"):
        engine = server(store, model=model)
        cached(engine, PROMPT)
        engine.core.close()
    blocks = store.num_blocks
    engine = server(store, model="one")
    assert engine.core.reset_prefix_cache()
    remote = remote_of(engine)
    assert remote is not None
    wait_until(lambda: remote.is_usable)
    assert store.num_blocks == blocks / 2
    assert cached(engine, PROMPT) == 0
    engine.core.close()


def test_a_name_that_no_plugin_has_is_refused() -> None:
    with pytest.raises(PluginError, match="no KV connector named 'reddis'; did you mean 'redis'"):
        connector_of("reddis:localhost", load_registry())
