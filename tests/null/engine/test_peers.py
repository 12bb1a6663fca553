"""Blocks from one core to another: a prompt that one has computed is a prefix hit of the other."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllmx_core.errors import ConfigError
from vllmx_engine.core import peers as peers_module
from vllmx_engine.core import tiered_prefixes as tiered_module
from vllmx_engine.core import tiers as tiers_module
from vllmx_engine.core.announcer import Announcer
from vllmx_engine.core.peers import Peers
from vllmx_engine.wire.ipc import (
    Blocks,
    FrameReader,
    PullBlocks,
    Ready,
    ToCore,
    encode_frame,
    to_core_decoder,
)
from vllmx_engine.wire.messages import CoreInfo
from vllmx_testing.fake import FakeRules

from tests.waiting import wait_until

from .harness import Harness
from .test_tiers import OTHERS, PROMPT, RULES, STATES, WINDOWS, cached, harness

_RULES = {"full": RULES, "windows": WINDOWS, "states": STATES}
KINDS = pytest.mark.parametrize("rules", _RULES.values(), ids=_RULES)


class Pair:
    """A core that computes prompts, and one that fetches their blocks.

    Attributes:
        asked: the names of each message.
        answers: those of each answer.
        change: what becomes of an answer on its way.
    """

    def __init__(
        self, rules: FakeRules, giver: dict[str, Any] | None = None, **config: Any
    ) -> None:
        self.giver = harness(rules, role="prefill", **giver or {})
        self.taker = harness(rules, role="decode", **config)
        self.asked: list[list[bytes]] = []
        self.answers: list[list[bytes]] = []
        self.change: Callable[[bytearray], bytes] = bytes
        self.of = "blocks"
        for core in (self.giver.core, self.taker.core):
            core.scheduler.cache.key = b"k" * 32
        self._gives = self._peers(self.giver, "blocks", self._connected)
        self._takes = self._peers(self.taker, "blocks", self._connected)

    def _peers(self, engine: Harness, of: str, connect: Any) -> Peers:
        tiers = engine.core.scheduler.tiers
        assert tiers is not None
        return Peers(engine.core.scheduler, tiers, of, connect)

    def _connected(self, source: str) -> socket.socket:
        assert source == "the giver"
        here, there = socket.socketpair()
        threading.Thread(target=self._answer, args=(there,), daemon=True).start()
        return here

    def _answer(self, connection: socket.socket) -> None:
        info = CoreInfo(
            model="m", path="", architecture="", max_model_len=64, vocab_size=48, backend="",
            device="", dtype="", kv_cache_dtype="", block_size=8, num_kv_blocks=0, max_num_seqs=1,
            max_num_batched_tokens=1, weight_bytes=0, kv_cache_bytes=0, load_seconds=0.0,
            role="prefill", blocks_of=self.of,
        )  # fmt: skip
        done = threading.Event()

        def emit(answer: Blocks) -> None:
            connection.sendall(self.change(encode_frame(answer)))
            self.answers.append(list(answer.blocks))
            if answer.is_last or self.change is not bytes:
                done.set()

        with connection:
            connection.sendall(encode_frame(Ready(info)))
            reader: FrameReader[ToCore] = FrameReader(to_core_decoder)
            while data := connection.recv(1 << 16):
                for message in reader.feed(data):
                    assert isinstance(message, PullBlocks)
                    self.asked.append(message.names)
                    self._gives.hand_on(message.names, message.request_id, emit)
                    done.wait()
                    if self.change is not bytes:
                        return

    def continued(self, prompt: list[int], source_id: str = "") -> int:
        """The tokens of a prompt that the taker need not compute."""
        name = self.taker.add(prompt, 8, source="the giver", source_id=source_id)
        self.taker.run()
        self.taker.check_outputs()
        return self.taker.first[name].num_cached_tokens

    @property
    def failures(self) -> int:
        return self.taker.core.stats().num_peer_failures


@KINDS
def test_what_one_core_computed_another_continues(rules: FakeRules) -> None:
    pair = Pair(rules)
    cached(pair.giver, PROMPT)
    assert pair.continued(PROMPT) == 48
    stats = pair.taker.core.stats()
    assert (stats.peer_tokens, stats.tier_tokens, pair.failures) == (48, 0, 0)
    before = len(pair.asked)
    assert pair.continued(PROMPT) == 48
    assert len(pair.asked) == before, "all is here"
    assert pair.continued([*PROMPT[:24], *OTHERS[0]]) == (24 if rules is RULES else 0)
    pair.taker.check_idle()
    pair.giver.check_idle()


def test_blocks_on_disk_leave_no_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefix whose begin was on disk comes from the other core as a whole."""
    monkeypatch.setattr(tiered_module, "_LEAST_S", 60.0)  # however busy the machine is
    pair = Pair(RULES, kv_disk=str(tmp_path))
    cached(pair.taker, PROMPT[:24])
    for other in OTHERS:
        cached(pair.taker, other)
    cached(pair.giver, PROMPT)
    assert pair.continued(PROMPT) == 48
    assert pair.taker.core.stats().peer_tokens == 48
    pair.taker.core.close()


def test_windows_and_states_are_asked_for_as_far_as_they_are_needed() -> None:
    pair = Pair(WINDOWS)
    cached(pair.giver, PROMPT)
    pair.continued(PROMPT)
    assert len(pair.asked[0]) == 6 + 2 + 4  # windows of 13 and 33 tokens in blocks of 8
    pair = Pair(STATES)
    cached(pair.giver, PROMPT[:25])
    cached(pair.giver, PROMPT)
    assert pair.continued(PROMPT) == 48
    states = pair.asked[-1][-6:]
    assert {name[-1] for name in states} == {255}
    assert pair.answers[-1][-1] == states[-1], "of two snapshots the last one"
    assert not set(states[:-1]) & set(pair.answers[-1])


@pytest.mark.parametrize("end", ["computed", "aborted"])
def test_blocks_come_while_others_are_computed(end: str) -> None:
    pair = Pair(RULES, giver={"max_num_batched_tokens": 16})
    computing = pair.giver.add(PROMPT, 1)
    name = pair.taker.add(PROMPT, 8, source="the giver", source_id=computing, source_s=60.0)
    pair.taker.add([1, 2, 3], 150)
    wait_until(lambda: bool(pair._gives._asked))
    counts = list[int]()
    while pair._gives._asked:
        if end == "aborted" and counts[-1:] == [32]:
            pair.giver.abort(computing)
        pair.giver.step()
        pair._gives.send_new()
        if pair._gives._asked:
            counts.append(48 - 8 * len(pair._gives._asked[0].names))
            wait_until(lambda: landed(pair.taker) == counts[-1])
    assert {16, 32} <= set(counts)
    assert name not in pair.taker.first
    pair.taker.run()
    pair.taker.check_outputs()
    assert pair.taker.first[name].num_cached_tokens == (48 if end == "computed" else counts[-1])
    assert pair.failures == 0
    pair.taker.check_idle()
    pair.giver.check_idle()


@pytest.mark.parametrize("rules", [WINDOWS, STATES], ids=["windows", "states"])
def test_windows_and_states_come_once_all_is_computed(rules: FakeRules) -> None:
    pair = Pair(rules, giver={"max_num_batched_tokens": 16})
    computing = pair.giver.add(PROMPT, 1)
    name = pair.taker.add(PROMPT, 8, source="the giver", source_id=computing, source_s=60.0)
    wait_until(lambda: bool(pair._gives._asked))
    while pair._gives._asked:
        pair.giver.step()
        pair._gives.send_new()
        pair.taker.step()
    pair.taker.run()
    pair.taker.check_outputs()
    assert pair.taker.first[name].num_cached_tokens == 48
    pair.taker.check_idle()


def landed(engine: Harness) -> int:
    """The tokens that have come from the other core so far."""
    engine.step()
    return engine.core.stats().peer_tokens


@KINDS
def test_blocks_travel_in_bounded_messages(
    rules: FakeRules, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers_module, "_MESSAGE_BYTES", 1)
    pair = Pair(rules)
    cached(pair.giver, PROMPT)
    assert pair.continued(PROMPT) == 48
    assert len(pair.answers) >= 6
    assert Announcer(pair.taker.core, b"k" * 32).load().pull_byte_s > 0
    monkeypatch.setattr(tiers_module, "_PULL_AGE_S", 0.0)
    assert Announcer(pair.taker.core, b"k" * 32).load().pull_byte_s == 0


def test_what_is_gone_is_computed() -> None:
    pair = Pair(RULES)
    cached(pair.giver, PROMPT[:24])
    assert pair.continued(PROMPT) == 24
    for other in OTHERS:
        cached(pair.giver, other)
    assert pair.continued(PROMPT[::-1]) == 0
    assert pair.failures == 0


def test_blocks_of_something_else_are_refused_by_name(caplog: pytest.LogCaptureFixture) -> None:
    pair = Pair(RULES)
    cached(pair.giver, PROMPT)
    pair.of = "another model in f16"
    assert pair.continued(PROMPT) == 0
    assert pair.failures == 1
    assert "keeps blocks of another model in f16, and this one of blocks: start" in caplog.text
    pair.of = ""
    assert pair.continued([5, *PROMPT]) == 0
    assert "nothing, since its --role is prefill" in caplog.text


@pytest.mark.parametrize("fault", ["damaged", "cut", "nonsense", "another key", "hangs"])
def test_a_bad_peer_costs_hits_alone(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(RULES)
    cached(pair.giver, PROMPT)
    changes: dict[str, Callable[[bytearray], bytes]] = {
        "damaged": lambda frame: bytes(frame[:-40] + bytes((frame[-40] ^ 1,)) + frame[-39:]),
        "cut": lambda frame: bytes(frame[:-7]),
        "nonsense": lambda frame: b"\xff" * 40,
    }
    if fault == "another key":
        cache, tiers = pair.giver.core.scheduler.cache, pair.taker.core.scheduler.tiers
        assert tiers is not None
        send = peers_module._send
        monkeypatch.setattr(
            peers_module, "_send", lambda copies, key, *rest: send(copies, b"o" * 32, *rest)
        )
        assert cache.key == b"k" * 32
    elif fault == "hangs":
        tiers = pair.taker.core.scheduler.tiers
        assert tiers is not None
        monkeypatch.setattr(peers_module, "LOOK_S", 0.01)
        monkeypatch.setattr(tiered_module, "_UNKNOWN_S", 0.05)
        monkeypatch.setattr(pair._gives, "hand_on", lambda *args: None)
    else:
        pair.change = changes[fault]
    assert pair.continued(PROMPT) == 0
    assert pair.failures == (fault != "hangs")
    if fault == "hangs":
        assert tiers.num_given_up == 1
        wait_until(lambda: not any(one.name == "vllmx-kv-pull" for one in threading.enumerate()))


def test_a_role_needs_the_prefix_cache() -> None:
    with pytest.raises(ConfigError, match="--prefill-replicas or --role: its blocks are those of"):
        harness(role="decode", enable_prefix_caching=False)
