"""Tiers below the device: what was evicted is found again, in this process and the next."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from vllmx_core.errors import ConfigError
from vllmx_engine.core.tiers import Tiers
from vllmx_testing.fake import FakeRules

from .harness import EOS, VOCAB_SIZE, Harness

STATES = FakeRules(VOCAB_SIZE, eos_id=EOS, eos_rate=1 << 30, has_states=True)
RULES = FakeRules(VOCAB_SIZE, eos_id=EOS, eos_rate=1 << 30)
WINDOWS = FakeRules(VOCAB_SIZE, eos_id=EOS, eos_rate=1 << 30, windows=(None, 13, 33))
PROMPT = [token % 40 for token in range(8 * 6 + 3)]
OTHERS = [[10 + number] * 60 for number in range(4)]


def harness(rules: FakeRules = RULES, connect: Any = None, **config: Any) -> Harness:
    sizes = {"num_blocks": 24 if len(rules.windows) == 1 else 40}
    config = {"max_num_seqs": 2} | config
    return Harness(sizes, config, rules, max_model_len=200, connect=connect)


def settled(engine: Harness) -> None:
    """All copies are in their tier."""
    tiers = engine.core._scheduler.tiers
    assert tiers is not None
    tiers.tiers.wait()


def cached(engine: Harness, prompt: list[int]) -> int:
    """The tokens of a prompt that need not be computed."""
    name = engine.add(prompt, 4)
    engine.run()
    return engine.first[name].num_cached_tokens


@pytest.mark.parametrize("rules", [RULES, WINDOWS, STATES], ids=["full", "windows", "states"])
@pytest.mark.parametrize("tier", ["memory", "disk", "both"])
def test_evicted_blocks_are_found_again(rules: FakeRules, tier: str, tmp_path: Path) -> None:
    config = {
        "memory": {"kv_host_memory": 1 << 20},
        "disk": {"kv_disk": str(tmp_path)},
        "both": {"kv_disk": str(tmp_path), "kv_host_memory": 3000},
    }[tier]
    engine = harness(rules, **config)
    assert cached(engine, PROMPT) == 0
    for other in OTHERS:
        assert cached(engine, other) == 0
    settled(engine)
    assert cached(engine, PROMPT) == 48
    engine.check_outputs()
    engine.check_idle()
    engine.core.close()


@pytest.mark.parametrize("rules", [RULES, WINDOWS, STATES], ids=["full", "windows", "states"])
def test_the_next_process_finds_them(rules: FakeRules, tmp_path: Path) -> None:
    for expected in (0, 48, 48):
        engine = harness(rules, kv_disk=str(tmp_path))
        assert cached(engine, PROMPT) == expected
        engine.check_outputs()
        engine.core.close()


def test_memory_alone_is_lost_with_the_process(tmp_path: Path) -> None:
    for _ in range(2):
        engine = harness(kv_host_memory=1 << 20)
        assert cached(engine, PROMPT) == 0
        engine.core.close()


def test_another_model_finds_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its segments stay until their room is needed."""
    for model, expected in (("one", 0), ("two", 0), ("one", 48)):
        engine = harness(kv_disk=str(tmp_path), model=model)
        assert cached(engine, PROMPT) == expected
        engine.core.close()
    assert "1 are of another model or version" in caplog.text


def test_salts_hold_across_tiers(tmp_path: Path) -> None:
    def cached_by(engine: Harness, salt: str) -> int:
        name = engine.add(PROMPT, 4, cache_salt=salt)
        engine.run()
        return engine.first[name].num_cached_tokens

    engine = harness(kv_disk=str(tmp_path))
    assert cached_by(engine, "a") == 0
    engine.core.close()
    engine = harness(kv_disk=str(tmp_path))
    assert [cached_by(engine, salt) for salt in ("b", "", "a")] == [0, 0, 48]
    engine.core.close()


def test_a_lost_key_loses_all(tmp_path: Path) -> None:
    engine = harness(kv_disk=str(tmp_path))
    cached(engine, PROMPT)
    engine.core.close()
    (tmp_path / "key").write_bytes(b"short")
    engine = harness(kv_disk=str(tmp_path))
    assert cached(engine, PROMPT) == 0
    engine.core.close()


def test_a_reset_forgets_all_tiers(tmp_path: Path) -> None:
    engine = harness(kv_disk=str(tmp_path), kv_host_memory=900)
    cached(engine, PROMPT)
    for other in OTHERS:
        cached(engine, other)
    assert engine.core.reset_prefix_cache()
    assert cached(engine, PROMPT) == 0
    engine.core.close()


def test_a_hanging_store_is_given_up() -> None:
    """The sequence that waits for it is computed, and others are not held up."""
    now = [0.0]
    engine = harness(kv_host_memory=1 << 20)
    tiers = engine.core._scheduler.tiers
    assert tiers is not None
    tiers.tiers, tiers._clock = Tiers(HangingStore(), 1 << 20), lambda: now[0]
    waits, runs = engine.add(PROMPT, 4), engine.add([1, 2, 3], 4)
    for _ in range(10):
        engine.step()
    assert runs in engine.last
    assert waits not in engine.first
    now[0] = 11.0
    engine.run()
    assert engine.first[waits].num_cached_tokens == 0
    assert tiers.num_given_up == 1
    engine.check_outputs()
    HangingStore.released.set()
    engine.core.close()


class HangingStore:
    """A store that claims to have all blocks and answers when it is told to."""

    key = bytes(32)
    num_blocks = num_bytes = 0
    released = threading.Event()

    def __contains__(self, name: bytes) -> bool:
        return True

    def read(self, name: bytes) -> bytes | None:
        self.released.wait(10)
        return None

    def forget(self, name: bytes) -> None: ...

    def write(self, name: bytes, data: bytes) -> bool:
        return False

    def clear(self) -> None: ...

    def close(self) -> None: ...


def test_bad_flags_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--kv-disk: its blocks are those of the prefix"):
        harness(kv_disk=str(tmp_path), enable_prefix_caching=False)
    open_folder = tmp_path / "open"
    open_folder.mkdir()
    open_folder.chmod(0o777)
    with pytest.raises(ConfigError, match=r"others may write there .mode 0777.: chmod 700"):
        harness(kv_disk=str(open_folder))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        harness(kv_disk=str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="as --speculate twin has here: choose ngram"):
        harness(kv_disk=str(tmp_path), speculate="twin")
    with pytest.raises(ConfigError, match="kv-disk-size must be between"):
        harness(kv_disk_size=0)
