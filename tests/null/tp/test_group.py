"""How a group loads and ends, as rank 0 sees it. Processes that sleep stand in for the other ranks,
whose ends of the connections the tests have."""

from __future__ import annotations

import logging
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from vllmx_core.backend import LoadedInfo
from vllmx_core.config import EngineConfig
from vllmx_core.errors import CapacityError, RankLostError
from vllmx_core.plugins.registry import Registry
from vllmx_engine.core.found_model import FoundModel
from vllmx_engine.wire.ipc import ErrorRecord, KnownSpecs, Start, encode_frame
from vllmx_testing.synthetic import ArraySource
from vllmx_tp import rank_process
from vllmx_tp.communicator import Outgoing
from vllmx_tp.group import Group, cause_of
from vllmx_tp.link import Link
from vllmx_tp.liveness import PollTimer, StallTimer
from vllmx_tp.loading import WatchedSource
from vllmx_tp.messages import Call, RankAnswer, RankReady
from vllmx_tp.pipeline import PipelinedModel
from vllmx_tp.region import Region, Word

from tests.waiting import PATIENCE_S, wait_until

FOUND = FoundModel(EngineConfig(model="m"), Path("m"), Registry(), False)
FULL = CapacityError("the model needs 8 GiB, 4 GiB are free: choose a smaller one", param="dtype")
INFO = LoadedInfo(
    backend="cpu", device="a processor", dtype="bf16", kv_cache_dtype="bf16", block_size=8,
    num_kv_blocks=16, max_num_seqs=4, max_num_batched_tokens=64, max_logit_rows=8,
    weight_bytes=0, kv_cache_bytes=0, details={},
)  # fmt: skip
READY = RankReady.of(INFO)


@contextmanager
def group_of(
    others: int, monkeypatch: pytest.MonkeyPatch, stages: int = 1
) -> Iterator[tuple[Group, list[socket.socket]]]:
    """A group with so many other ranks, and their ends of the connections."""
    ends: list[socket.socket] = []

    def spawn(self: Group, rank: int, cores: Sequence[int]) -> None:
        ours, theirs = socket.socketpair()
        self._sockets.append(ours)
        self._processes.append(subprocess.Popen(["sleep", "3600"]))
        ends.append(theirs)

    monkeypatch.setattr(Group, "_spawn", spawn)
    region = Region.create(1 + others, stages)
    ranks = range(1, 1 + others)
    group = Group(FOUND, region, ranks, [()] * others, 1 + others)
    try:
        yield group, ends
    finally:
        group.kill()
        region.close()
        for one in ends:
            one.close()


def answer(end: socket.socket, error: CapacityError | None = None) -> None:
    found = RankAnswer(ready=READY) if error is None else RankAnswer(error=ErrorRecord.of(error))
    end.sendall(msgspec.json.encode(found) + b"\n")


# --- loading --------------------------------------------------------------------------------------
def test_ranks_are_loaded_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    with group_of(2, monkeypatch) as (group, ends):
        for end in reversed(ends):
            answer(end)
        assert group.loaded() == [READY, READY]
        assert group.failure is None


def test_who_cannot_load_ends_the_wait_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank before it loads for ever."""
    with group_of(2, monkeypatch) as (group, ends):
        answer(ends[1], FULL)
        with pytest.raises(CapacityError) as caught:
            group.loaded()
        assert (caught.value.message, caught.value.param) == (FULL.message, FULL.param)
        wait_until(lambda: all(one.poll() is not None for one in group._processes))


def test_who_cannot_load_ends_what_rank_0_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is the rank's own, also for those who are told no more than that there is an end:
    they wait for the other ranks while they load."""

    weights = ArraySource({"weight": np.ones((2, 2), np.float32)})
    with group_of(1, monkeypatch) as (group, ends):
        source = WatchedSource(weights, group.check)
        assert source.part("weight").shape == (2, 2)
        answer(ends[0], FULL)
        wait_until(lambda: bool(group.region.aborted[0]))
        assert isinstance(group.verdict(), CapacityError)
        with pytest.raises(CapacityError):
            source.part("weight")


def test_another_host_that_cannot_load_ends_the_wait_for_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 1, on this host, loads for ever."""
    host = SimpleNamespace(error=FULL, look=lambda *_: None, close=lambda: None)
    with group_of(1, monkeypatch) as (group, _):
        group._hosts.append(host)  # type: ignore[arg-type]
        with pytest.raises(CapacityError):
            group.loaded()


def test_who_says_nothing_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with group_of(1, monkeypatch) as (group, ends):
        group._processes[0].kill()
        ends[0].close()
        with pytest.raises(RankLostError, match="rank 1 was killed by SIGKILL"):
            group.loaded()


def load_by(load: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> socket.socket:
    """Rank 0's end of the connection to a rank's process, here a thread, that loads so."""
    region, (ours, theirs) = Region.create(2), socket.socketpair()
    start = Start(
        config=FOUND.config,
        path="m",
        specs=KnownSpecs.of(FOUND.registry),
        progress=False,
        log_level=logging.getLogger("vllmx").level,
    )
    ours.sendall(encode_frame(start))
    ours.settimeout(PATIENCE_S)

    def run() -> None:
        with theirs, suppress(RankLostError):
            rank_process.serve(region, 1, theirs, (), 2, None)
        region.close()

    monkeypatch.setattr(rank_process, "open_model", load)
    threading.Thread(target=run, daemon=True).start()
    return ours


def test_a_rank_that_cannot_load_ends_when_rank_0_has_read_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load(*_: object) -> None:
        raise FULL

    with load_by(load, monkeypatch) as ours:
        assert b"4 GiB are free" in ours.recv(1 << 16)
        ours.settimeout(0.1)
        with pytest.raises(TimeoutError):
            ours.recv(1)  # it does not hang up
        ours.settimeout(PATIENCE_S)
        ours.shutdown(socket.SHUT_WR)
        assert ours.recv(1) == b""


def test_a_rank_that_sees_the_end_while_it_loads_tells_no_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The cause is that of another one."""

    def load(*_: object) -> None:
        raise RankLostError("the other ranks have ended")

    with load_by(load, monkeypatch) as ours:
        assert ours.recv(1 << 16) == b""


# --- the end --------------------------------------------------------------------------------------
def test_who_waits_for_killed_ranks_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Native code of this process may wait for what they would have sent, and nothing else ends
    that."""
    with group_of(1, monkeypatch) as (group, _):
        assert not group.region.aborted[0]
        group.kill()
        assert group.region.aborted[0]


def test_a_rank_that_lives_and_lets_others_wait_ends_the_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("vllmx_tp.liveness.WAIT_S", 0.3)
    with group_of(1, monkeypatch) as (group, _):
        group.region.word(0, Word.ARRIVED)[0] = 1
        assert group._ended.wait(PATIENCE_S)
        assert group.failure is not None
        assert "rank 1 lives, but others have waited" in group.failure.message


def test_links_end_with_their_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """On rank 0's host, where one waits for what is sent and one for what comes."""
    region, listener = Region.create(2), socket.create_server(("127.0.0.1", 0))
    connection = socket.create_connection(listener.getsockname())
    other, _ = listener.accept()
    before = set(threading.enumerate())

    class Host:
        def __init__(self) -> None:
            self._link = Link(region, connection, [0], [1], lambda *_: None)

        error = None

        def look(self, passed_s: float, hang_s: float) -> None: ...

        def say(self, call: Call, wait_s: float = 0.0) -> None: ...

        def close(self) -> None:
            self._link.close()

    group = Group(FOUND, region, range(1, 1), [], 1, lambda group: [Host()])  # type: ignore[list-item]
    links = {one for one in threading.enumerate() if one.name == "vllmx-link"} - before
    assert len(links) == 2
    group.close()
    for one in links:
        one.join(PATIENCE_S)
        assert not one.is_alive()
    region.close()
    other.close()
    listener.close()


def test_what_fails_is_named_by_its_class_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Causes go to clients and to `/health`; the log has what the error says."""
    assert cause_of(2, FULL) == f"rank 2 failed: {FULL.message}"
    told = r"^rank 0 failed with an internal error \(FileNotFoundError\); see its log above$"
    with group_of(1, monkeypatch) as (group, _):
        with pytest.raises(RankLostError, match=told), group.guarded():
            raise FileNotFoundError("/home/me/secret")
        assert group.failure is not None
        assert "secret" not in group.failure.message
    assert "FileNotFoundError: /home/me/secret" in caplog.text


@pytest.mark.parametrize(
    "sent", [lambda way: way.send(np.zeros(3, np.uint8)), lambda way: way.send_message(b"x")]
)
def test_a_result_that_cannot_be_read_ends_the_group(
    sent: Callable[[Outgoing], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests do not wait for it until their step counts as hung."""
    with group_of(1, monkeypatch, stages=2) as (group, _):
        model: Any = PipelinedModel(None, group, None)  # type: ignore[arg-type]
        sent(Outgoing(group.region, 1))
        with pytest.raises(RankLostError, match=r"^rank 0 failed with an internal error \("):
            model.read(0.0)
        model._thread.join(PATIENCE_S)
        assert not model._thread.is_alive()


# --- standing still -------------------------------------------------------------------------------
def test_a_machine_that_stood_still_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 10.25, 10.5, 70.0, 70.25])
    clock = SimpleNamespace(monotonic=lambda: next(times))
    monkeypatch.setattr("vllmx_tp.liveness.time", clock)
    timer = PollTimer(0.25)
    assert [timer.passed_s() for _ in range(4)] == [0.25, 0.25, 0.5, 0.25]


def test_what_moves_again_has_not_stood_still() -> None:
    stall = StallTimer()
    found = [stall.look(count, 0.5) for count in (0, 0, 1, 1, 1, 2, 2)]
    assert found == [0.5, 1.0, 0.0, 0.5, 1.0, 0.0, 0.5]
    assert stall.look(2, 0.5, moves=True) == 0.0
    assert stall.look(2, 0.5) == 0.5
